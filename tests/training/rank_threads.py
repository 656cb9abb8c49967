"""Ranks with a process's connection each that are threads of one process: as under a launcher, without its start."""

import atexit
import itertools
import socket
import threading
from typing import Any

from counterpoint.launchers.environment import RankEnvironment
from counterpoint.training import parallelize
from counterpoint.training.distributed_world import connected_fabrics

JOBS = itertools.count()  # a port may be that of an earlier job, which has failed


def run_in_threads(script, num_ranks, monkeypatch, timeout_s=30.0):
    """Return what ``script(rank)`` returns, or the error it ends with, as text, for each rank.

    Only ``parallelize`` takes its rank from the thread. Models must not be traced: torch traces in one thread alone.
    """
    own, answers, environments = threading.local(), list[Any]([None] * num_ranks), []
    monkeypatch.setattr(parallelize, "detect", lambda: own.environment)
    store = socket.create_server(("127.0.0.1", 0))
    port, store_fd = store.getsockname()[1], store.detach()
    job = f"threads {next(JOBS)}"

    def work(rank):
        fd = None if rank else store_fd
        own.environment = RankEnvironment(
            rank, num_ranks, rank, num_ranks, "127.0.0.1", port, job, timeout_s, fd, transport="gloo",
            is_placed=True,
        )  # fmt: skip
        environments.append(own.environment)
        try:
            answers[rank] = script(rank)
        except Exception as error:  # noqa: BLE001 - sent to the test
            answers[rank] = f"{type(error).__name__}: {error}"

    in_parallel(threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks))
    fabrics = [fabric for environment in environments for fabric in connected_fabrics(environment)]
    for fabric in fabrics:
        atexit.unregister(fabric.close)  # it would poll its sockets until the end of all tests
    in_parallel(threading.Thread(target=fabric.close) for fabric in fabrics)
    return answers


def in_parallel(threads):
    started = [*threads]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
