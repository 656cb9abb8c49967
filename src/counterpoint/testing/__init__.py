"""The tools we test with, shipped to those who write strategies: fakes that behave, so nothing is mocked."""
