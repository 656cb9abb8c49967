"""While training, the C library retains memory that steps free; before and afterwards it returns it."""

import subprocess
import sys

import pytest

from counterpoint.runtime.malloc import (
    MALLOPT_PARAMETERS,
    MMAP_SEPARATELY,
    RETAIN_FREED,
    RETURN_AT_ONCE,
    RETURN_FREED,
    MallocHeap,
    heap_of_process,
)
from counterpoint.training.ranks.process_memory import RetainedMemory
from tests.runtime.local_ranks import build_local_ranks, make_batch

RETAINED = {MALLOPT_PARAMETERS[name]: value for name, value in RETAIN_FREED.items()}
RETURNED = {MALLOPT_PARAMETERS[name]: value for name, value in RETURN_FREED.items()}
GLIBC = pytest.mark.skipif(heap_of_process() is None, reason="the C library is not glibc")

FAULTS = """
import ctypes, resource, sys
from counterpoint.training.ranks.process_memory import RetainedMemory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def faults(num_bytes=48 << 20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(num_bytes)))
    ctypes.memset(block, 1, num_bytes)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

retained = RetainedMemory(enabled=sys.argv[1] == "enabled")
retained.start()
during = min(faults() for _ in range(4))
retained.stop()
print(during, min(faults() for _ in range(4)))
"""


def num_holders():
    heap = heap_of_process()
    assert heap is not None, "this is glibc"
    return heap.num_holders


def recording_heap():
    values: dict[int, int] = {}
    return values, MallocHeap(values.__setitem__, lambda: None)


def test_settings_are_restored_when_the_last_run_has_ended():
    values, heap = recording_heap()
    heap.retain()
    heap.retain()
    heap.restore()
    assert values == RETAINED
    heap.restore()
    assert values == RETURNED


def test_long_lived_memory_is_mapped_separately_and_settings_are_restored():
    values, heap = recording_heap()
    heap.retain()
    with heap.mmap_separately():
        assert {name: values[MALLOPT_PARAMETERS[name]] for name in MMAP_SEPARATELY} == MMAP_SEPARATELY
    assert {**values, **RETAINED} == values
    heap.restore()
    with heap.mmap_separately():
        pass
    assert values == RETURNED


@pytest.mark.long
@GLIBC
@pytest.mark.process
@pytest.mark.parametrize("mode", ["enabled", "disabled"])
def test_retained_memory_causes_no_page_faults(mode):
    completed = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    during, after = map(int, completed.stdout.split())
    assert (during < 1000) == (mode == "enabled")
    assert after > 1000


@GLIBC
def test_memory_is_retained_from_the_second_step_until_weights_are_exported():
    before = num_holders()
    with build_local_ranks("data(2)") as local_ranks:
        assert num_holders() == before
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        assert num_holders() == before + 1
        local_ranks.export_weights()
        assert num_holders() == before


@GLIBC
def test_a_run_without_the_option_returns_large_blocks_at_once_until_it_is_closed():
    before, heap = num_holders(), heap_of_process()
    assert heap is not None, "this is glibc"
    with build_local_ranks("data(2)", retain_freed_memory=False) as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        assert (num_holders(), heap.num_returning) == (before, 1)
    local_ranks.close()
    assert heap.num_returning == 0


def test_large_blocks_are_mapped_separately_where_no_run_retains_memory():
    values, heap = recording_heap()
    heap.return_at_once()
    with heap.mmap_separately():
        pass
    assert {name: values[MALLOPT_PARAMETERS[name]] for name in RETURN_AT_ONCE} == RETURN_AT_ONCE
    heap.retain()
    heap.restore()
    assert values[MALLOPT_PARAMETERS["M_MMAP_THRESHOLD"]] == RETURN_AT_ONCE["M_MMAP_THRESHOLD"]
    heap.end_return()
    assert values == RETURNED


@GLIBC
def test_an_allocator_that_the_user_has_configured_is_not_changed(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    before = num_holders()
    RetainedMemory(enabled=True).start()
    assert num_holders() == before
