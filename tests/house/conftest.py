"""Read a million nodes of syntax without collecting garbage, which would look at all of them again and again."""

import gc

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_garbage_collection():
    gc.disable()
    yield
    gc.freeze()  # what is there stays unlooked at
    gc.enable()
