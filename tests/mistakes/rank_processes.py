"""Run scripts (functions without arguments that train as a user would) on ranks in processes, and collect answers."""

import os
import socket
import time
import warnings
from contextlib import closing
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.launchers.environment import RankEnvironment, rank_variables
from tests.fabric.run_ranks import receive_answer
from tests.forkserver import CONTEXT


@cache
def run_on_ranks(scripts, num_ranks, deadline_s=10.0):
    """Return for each rank its answer to each script, by name; None if it ended without one.

    An answer is a text or a value, the seconds it took, and the warnings. After a script that ends
    for ranks in different ways there may be no other.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        processes = []
        for rank in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            who = (rank, num_ranks, deadline_s)
            process = CONTEXT.Process(target=run_rank, args=(theirs, scripts, who, None if rank else listener, port))
            process.start()
            theirs.close()
            processes.append((process, ours))
        return [receive_answer(*process, deadline_s) for process in processes]


def run_rank(pipe, scripts, rank_args, listener, port):
    """Be one rank in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, num_ranks, deadline_s = rank_args
    listen_fd = None if listener is None else listener.detach()
    result = RankEnvironment(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, "test", deadline_s, listen_fd)
    os.environ.update(rank_variables(result))
    with cp.parallelize(nn.Linear(1, 1), partial(optim.SGD, lr=0.0), F.mse_loss, strategy=f"data({num_ranks})") as step:
        step(torch.zeros(num_ranks, 1), torch.zeros(num_ranks, 1))  # all have started and connected
    pipe.send({script.__name__: run_script(script) for script in scripts})


def run_script(script):
    """What the script returns, or the error it ends with, as text; its seconds; what it warned of."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = script()
        except Exception as error:  # noqa: BLE001 - sent to the test
            answer = f"{type(error).__name__}: {error}"
    return answer, time.perf_counter() - began, [str(one.message) for one in caught]
