"""Read a million nodes of syntax without collecting garbage, which would look at all of them again and again."""

import gc

import pytest


@pytest.fixture(scope="package", autouse=True)
def no_garbage_collection():
    gc.collect()  # steps that tests before these left open would be frozen below, with the threads of their ranks
    gc.disable()
    yield
    gc.freeze()  # what is there stays unlooked at
    gc.enable()
