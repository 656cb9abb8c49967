"""The tools we test with, shipped to those who write strategies: laws, fakes and planted damage need no mocks."""
