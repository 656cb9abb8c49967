"""Test tools for strategy authors: fakes with real behaviour instead of mocks."""
