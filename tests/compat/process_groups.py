"""Run a scenario, a function of rank and number of ranks, in real torch process groups, and return each rank's result."""

import os
import time
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist

from counterpoint.compat.torch_backend import register
from counterpoint.fabric.c10d import TCPStore
from counterpoint.fabric.torch_backend.process_group import create_process_group
from tests.fabric.run_ranks import result_or_error, run_processes

THREAD_EXIT_S = 5.0
OVER_GLOO = "over_gloo"  # ours, as it is where the ranks are not on one host


def on_ranks(scenario, num_ranks, backend="counterpoint", deadline_s=20.0):
    """Return what each rank's scenario returned, or its error; None if it ended without a result."""
    parts = {rank: (scenario, (rank, num_ranks, backend, deadline_s)) for rank in range(num_ranks)}
    return list(run_processes(run_rank, parts, deadline_s).values())


@cache
def once_on_ranks(scenario, num_ranks, backend):
    """Return the cached result of :func:`on_ranks`, for tests that check different parts of it."""
    return on_ranks(scenario, num_ranks, backend)


def run_rank(pipe, scenario, identity, listener, port):
    """Be one rank in a process of its own."""
    torch.set_num_threads(1)
    rank, num_ranks, backend, deadline_s = identity
    register()
    dist.Backend.register_backend(OVER_GLOO, partial(create_process_group, transport="gloo"), devices=["cpu"])
    timeout = timedelta(seconds=deadline_s)
    listen_fd = None if listener is None else listener.detach()
    store = TCPStore("127.0.0.1", port, None, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listen_fd)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    answer = result_or_error(partial(run_scenario, num_ranks=num_ranks, scenario=scenario), rank)
    pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_scenario(rank, *, num_ranks, scenario):
    """Return the result of the scenario, with torch errors as text."""
    try:
        return scenario(rank, num_ranks)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def count_resources(num_threads=0):
    """Threads, open files and mappings of shared memory of this process, without a collection of garbage.

    Args:
        num_threads: more than these are given time to end: the kernel has a thread for a moment after it was joined.
    """
    end = time.monotonic() + THREAD_EXIT_S
    while (threads := count_proc_entries("task")) > num_threads > 0 and time.monotonic() < end:
        os.sched_yield()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return threads, count_proc_entries("fd"), maps.count("memfd:counterpoint")


def count_proc_entries(folder):
    """Return how many of something ``/proc`` shows for this process."""
    return len(list(Path("/proc/self", folder).iterdir()))
