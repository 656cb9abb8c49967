"""Run scenes, functions without arguments that use ``hvd``, on ranks in processes, and see what each rank got."""

import os
from functools import cache

import torch

import counterpoint.compat.horovod.torch as hvd
from counterpoint.compat.horovod.process_sets import reset_process_sets
from counterpoint.compat.horovod.world import PROCESS, HorovodWorld, RankTopology
from counterpoint.errors import CounterpointError
from counterpoint.fabric import Address, connect
from counterpoint.fabric.shared_store import SharedStore
from counterpoint.launchers.environment import RankEnvironment, rank_variables
from counterpoint.rpc.job_key import JobKey
from tests.fabric.run_ranks import run_processes

SMALL_BUCKET_BYTES = 600
KEY = JobKey(bytes(32))


def on_ranks(scenarios, num_ranks, transport="auto", deadline_s=20.0):
    """Return for each rank what its scenes returned, by name; None where it ended without a word."""
    parts = {rank: (scenarios, (rank, num_ranks, transport, deadline_s)) for rank in range(num_ranks)}
    return list(run_processes(run_rank, parts, deadline_s).values())


@cache
def once_on_ranks(scenarios, num_ranks, transport):
    """Return what :func:`run_on_ranks` does, for tests that look at different parts of it."""
    return on_ranks(scenarios, num_ranks, transport)


def run_rank(pipe, scenarios, identity, listener, port):
    """Be one rank in a process of its own."""
    torch.set_num_threads(1)
    rank, num_ranks, transport, deadline_s = identity
    listen_fd = None if listener is None else listener.detach()
    if transport == "auto":
        result = RankEnvironment(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, "test", deadline_s, listen_fd)
        os.environ.update(rank_variables(result), HOROVOD_FUSION_THRESHOLD=str(SMALL_BUCKET_BYTES))
        hvd.init()
    else:
        fabric = connect(
            rank, num_ranks, Address("127.0.0.1", port, listen_fd), timeout_s=deadline_s, transport=transport
        )
        kept = SharedStore.serve("127.0.0.1", KEY) if rank == 0 else None
        store_port, *_ = fabric.gather_values("kv_store", kept.port if kept else 0, tuple(range(num_ranks)))
        assert isinstance(store_port, int)
        kv_store = kept or SharedStore.connect("127.0.0.1", store_port, KEY, deadline_s)
        places = RankTopology(tuple(range(num_ranks)), (num_ranks,) * num_ranks, rank)
        PROCESS.world = HorovodWorld(fabric, places, SMALL_BUCKET_BYTES, lambda: kv_store)
        reset_process_sets(PROCESS.world, ())
    pipe.send({scenario.__name__: run_scenario(scenario) for scenario in scenarios})


def run_scenario(scenario):
    """Return the result of the scenario, or its error as text."""
    try:
        return to_plain(scenario())
    except (CounterpointError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


def to_plain(value):
    """Return the value with tensors as lists, for a pipe would share their memory."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value
