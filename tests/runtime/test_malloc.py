"""While training, the C library keeps what steps free; before and afterwards it does not."""

import subprocess
import sys

import pytest

from counterpoint.runtime.malloc import (
    MALLOPT_PARAMETERS,
    MMAP_SEPARATELY,
    RETAIN_FREED,
    RETURN_FREED,
    MallocHeap,
    process_heap,
)
from counterpoint.training.process_memory import RetainedMemory
from tests.runtime.local_ranks import build_team, make_batch

ASKED = {MALLOPT_PARAMETERS[name]: value for name, value in RETAIN_FREED.items()}
UNDONE = {MALLOPT_PARAMETERS[name]: value for name, value in RETURN_FREED.items()}
GLIBC = pytest.mark.skipif(process_heap() is None, reason="the C library is not glibc")

FAULTS = """
import ctypes, resource, sys
from counterpoint.training.process_memory import Keeping

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
    found = process_heap()
    assert found is not None, "this is glibc"
    return found.num_holders


def told():
    values: dict[int, int] = {}
    return values, MallocHeap(values.__setitem__, lambda: None)


def test_what_is_set_is_undone_when_the_last_run_has_ended():
    values, one = told()
    one.retain()
    one.retain()
    one.restore()
    assert values == ASKED
    one.restore()
    assert values == UNDONE


def test_what_stays_as_long_as_a_run_is_made_apart_and_then_all_is_as_before():
    values, one = told()
    one.retain()
    with one.mmap_separately():
        assert {name: values[MALLOPT_PARAMETERS[name]] for name in MMAP_SEPARATELY} == MMAP_SEPARATELY
    assert {**values, **ASKED} == values
    one.restore()
    with one.mmap_separately():
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
    with build_team("data(2)") as one:
        assert num_keepers() == before
        one.step(0, make_batch(one.global_num_microbatches))
        assert num_keepers() == before + 1
        one.export_weights()
        assert num_keepers() == before


@GLIBC
def test_a_run_that_does_not_want_it_changes_nothing():
    before = num_keepers()
    with build_team("data(2)", retain_freed_memory=False) as one:
        one.step(0, make_batch(one.global_num_microbatches))
        assert num_keepers() == before


@GLIBC
def test_who_has_set_up_the_allocator_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    before = num_keepers()
    RetainedMemory(enabled=True).start()
    assert num_keepers() == before
