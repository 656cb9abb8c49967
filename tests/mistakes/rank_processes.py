"""Play scenes, functions without arguments that train as a user would, on ranks in processes, and hear each rank."""

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
from tests.fabric.run_ranks import CONTEXT, receive_answer


@cache
def run_on_ranks(scenes, num_ranks, deadline_s=10.0):
    """Return for each rank what it told in each scene, by name; None where it ended without a word.

    What it told is a text or a value, how many seconds it took, and the warnings it gave. After a scene that ends
    for ranks in different ways there may be no other.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        players = []
        for rank in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            who = (rank, num_ranks, deadline_s)
            player = CONTEXT.Process(target=run_rank, args=(theirs, scenes, who, None if rank else listener, port))
            player.start()
            theirs.close()
            players.append((player, ours))
        return [receive_answer(*player, deadline_s) for player in players]


def run_rank(pipe, scenes, rank_args, listener, port):
    """Be one rank in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, num_ranks, deadline_s = rank_args
    listen_fd = None if listener is None else listener.detach()
    found = RankEnvironment(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, "test", deadline_s, listen_fd)
    os.environ.update(rank_variables(found))
    with cp.parallelize(nn.Linear(1, 1), partial(optim.SGD, lr=0.0), F.mse_loss, strategy=f"data({num_ranks})") as step:
        step(torch.zeros(num_ranks, 1), torch.zeros(num_ranks, 1))  # all have started, and met
    pipe.send({scene.__name__: run_script(scene) for scene in scenes})


def run_script(script):
    """What the scene returns, or the error it ends with, as text; its seconds; what it warned of."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = script()
        except Exception as error:  # noqa: BLE001 - told to the test
            answer = f"{type(error).__name__}: {error}"
    return answer, time.perf_counter() - began, [str(one.message) for one in caught]
