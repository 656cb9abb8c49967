"""Run scenarios on ranks in processes that have the variables of DeepSpeed's launcher."""

import os
from functools import cache

import torch

from counterpoint.errors import CounterpointError
from counterpoint.launchers.environment import RankEnvironment, rank_variables
from tests.fabric.run_ranks import run_processes

TIMEOUT_S = 60.0


def on_ranks(scenario, num_ranks=2):
    """Return what a function returns on each rank; None where it ended without a word."""
    parts = {rank: (scenario, (rank, num_ranks)) for rank in range(num_ranks)}
    return list(run_processes(run_rank, parts, TIMEOUT_S).values())


@cache
def once_on_ranks(scenario, num_ranks=2):
    """Return what :func:`on_ranks` does, for tests that look at different parts of it."""
    return on_ranks(scenario, num_ranks)


def run_rank(pipe, scenario, identity, listener, port):
    """Be one rank in a process of its own."""
    torch.set_num_threads(1)
    rank, num_ranks = identity
    listen_fd = None if listener is None else listener.detach()
    environment = RankEnvironment(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, "test", TIMEOUT_S, listen_fd)
    variables = rank_variables(environment)
    del variables["LOCAL_WORLD_SIZE"]
    os.environ.update(variables)
    try:
        pipe.send(scenario())
    except (CounterpointError, AssertionError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
