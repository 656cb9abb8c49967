"""While training, the C library keeps what steps free; before and afterwards it does not."""

import subprocess
import sys

import pytest

from counterpoint.runtime.heap import APART, GIVING_BACK, KEEPING, PARAMETERS, Heap, heap
from counterpoint.training.keeping import Keeping
from tests.runtime.teams import feed, team

ASKED = {PARAMETERS[name]: value for name, value in KEEPING.items()}
UNDONE = {PARAMETERS[name]: value for name, value in GIVING_BACK.items()}
GLIBC = pytest.mark.skipif(heap() is None, reason="the C library is not glibc")

FAULTS = """
import ctypes, resource, sys
from counterpoint.training.keeping import Keeping

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def faults(num_bytes=48 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(num_bytes)))
    ctypes.memset(block, 1, num_bytes)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keeping = Keeping(wanted=sys.argv[1] == "wanted")
keeping.begin()
during = min(faults() for _ in range(4))
keeping.end()
print(during, min(faults() for _ in range(4)))
"""


def num_keepers():
    found = heap()
    assert found is not None, "this is glibc"
    return found.num_keepers


def told():
    values: dict[int, int] = {}
    return values, Heap(values.__setitem__, lambda: None)


def test_what_is_set_is_undone_when_the_last_run_has_ended():
    values, one = told()
    one.keep()
    one.keep()
    one.give_back()
    assert values == ASKED
    one.give_back()
    assert values == UNDONE


def test_what_stays_as_long_as_a_run_is_made_apart_and_then_all_is_as_before():
    values, one = told()
    one.keep()
    with one.apart():
        assert {name: values[PARAMETERS[name]] for name in APART} == APART
    assert {**values, **ASKED} == values
    one.give_back()
    with one.apart():
        pass
    assert values == UNDONE


@GLIBC
@pytest.mark.process
@pytest.mark.parametrize("wish", ["wanted", "unwanted"])
def test_memory_that_is_kept_has_its_pages_already(wish):
    done = subprocess.run([sys.executable, "-c", FAULTS, wish], capture_output=True, text=True, check=True)
    during, after = map(int, done.stdout.split())
    assert (during < 1000) == (wish == "wanted")
    assert after > 1000


@GLIBC
def test_memory_is_kept_from_the_second_step_until_the_model_is_given_back():
    before = num_keepers()
    with team("data(2)") as one:
        assert num_keepers() == before
        one.step(0, feed(one.num_micros))
        assert num_keepers() == before + 1
        one.give_back()
        assert num_keepers() == before


@GLIBC
def test_a_run_that_does_not_want_it_changes_nothing():
    before = num_keepers()
    with team("data(2)", keep_freed=False) as one:
        one.step(0, feed(one.num_micros))
        assert num_keepers() == before


@GLIBC
def test_who_has_set_up_the_allocator_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    before = num_keepers()
    Keeping(wanted=True).begin()
    assert num_keepers() == before
