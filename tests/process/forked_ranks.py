"""Ranks as a launcher starts them, but forked off one process that has imported torch: importing it takes seconds."""

import os
import sys
import tempfile
from pathlib import Path

import torch

from counterpoint.launchers import detect, import_path
from counterpoint.launchers.environment import RankEnvironment, rank_variables
from counterpoint.launchers.function import read_value, write_value
from counterpoint.launchers.function_main import call
from counterpoint.training.distributed_world import connected_fabrics
from tests.fabric.run_ranks import result_or_error, run_processes

DEADLINE_S = 60.0


def run_forked(fn, *, ranks, args=(), threads_per_rank=1):
    """Return what ``launch`` returns; for a rank that failed, its error as text.

    The function, its arguments and its results travel as they do there.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_value(folder, "args", list(args))
        write_value(folder, "call", {"target": import_path(fn), "path": list(sys.path)})
        errors = run_processes(
            run_rank, {rank: (name, (rank, ranks, threads_per_rank)) for rank in range(ranks)}, DEADLINE_S
        )
        return [read_value(folder, f"result-{rank}") if error == "" else error for rank, error in errors.items()]


def run_rank(pipe, folder, rank_args, listener, port):
    """The function that ``folder`` names has run, and its result is there, or an error has been sent."""
    rank, num_ranks, num_threads = rank_args
    torch.set_num_threads(num_threads)
    listen_fd = None if listener is None else listener.detach()
    result = RankEnvironment(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, "test", DEADLINE_S, listen_fd)
    os.environ.update(rank_variables(result))
    pipe.send(result_or_error(call, Path(folder)) or "")
    for fabric in connected_fabrics(detect()):  # such a process does not do what is left for its exit
        fabric.close()
