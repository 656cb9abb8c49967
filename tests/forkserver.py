"""The process from which the ranks of tests are forked: it has imported once what each of them needs."""

import multiprocessing
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")


def start_forkserver():
    """Start it, unless it runs; there is one in a process, whoever starts it first chooses what it imports."""
    CONTEXT.set_forkserver_preload(
        [
            "tests.process.rank_functions",
            "tests.ps.process.chaos_workloads",
            "counterpoint.compat.horovod.torch",
            "counterpoint.data.worker",
            "torch._dynamo",  # which the first optimizer imports
            "pytest",
        ]
    )
    forkserver.ensure_running()
