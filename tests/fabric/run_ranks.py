"""Run a scene, a function of one rank's fabric, on every rank of either transport, and see what each rank got."""

import multiprocessing
import socket
from contextlib import closing
from pathlib import Path

import torch

from counterpoint.errors import CounterpointError
from counterpoint.fabric import Address, LocalWorld, connect

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.process.rank_functions", "torch._dynamo"]
)  # the first optimizer imports the second


def result_or_error(scene, fabric):
    """What the scene returns, or the error it ends with, as text."""
    try:
        return scene(fabric)
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"


def on_local(scene, num_ranks, timeout_s=10.0):
    with LocalWorld(num_ranks, timeout_s) as world:
        return world.run(lambda fabric: result_or_error(scene, fabric))


def on_gloo(scene, num_ranks, timeout_s=10.0, present=None):
    return on_processes("gloo", scene, num_ranks, timeout_s, present)


def on_shm(scene, num_ranks, timeout_s=10.0, present=None):
    return on_processes("shm", scene, num_ranks, timeout_s, present)


def on_hosts(hosts, scene, num_ranks, timeout_s=10.0, present=None):
    """Play it in processes that meet as if they were on several hosts, one name for each rank; more ranks wrap."""
    names = [f"h{hosts[rank % len(hosts)]}" for rank in range(num_ranks)]
    return on_processes("auto", scene, num_ranks, timeout_s, present, names)


def on_processes(transport, scene, num_ranks, timeout_s, present, hosts=None):
    """Play it in processes; None for a rank that ended without an answer, or was not present."""
    come = range(num_ranks) if present is None else present
    hosts = [None] * num_ranks if hosts is None else hosts
    parts = {rank: (scene, (rank, num_ranks, timeout_s, transport, hosts[rank])) for rank in come}
    found = run_processes(rank_main, parts, timeout_s)
    return [found.get(rank) for rank in range(num_ranks)]


def run_processes(part, parts, timeout_s):
    """Return by rank what ``part(pipe, *parts[rank], listener, port)`` has sent from a process of each rank's own.

    The listener is, on rank 0, a socket that listens at the port where the ranks meet.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        players = {}
        for rank, more in parts.items():
            ours, theirs = CONTEXT.Pipe()
            player = CONTEXT.Process(target=part, args=(theirs, *more, None if rank else listener, port))
            player.start()
            theirs.close()
            players[rank] = (player, ours)
        return {rank: receive_answer(*player, timeout_s) for rank, player in players.items()}


def receive_answer(player, pipe, timeout_s):
    try:
        answer = pipe.recv() if pipe.poll(timeout_s + 20) else "silence"
    except EOFError:
        answer = None
    player.join(10)
    player.kill()
    player.join(10)
    return answer


def rank_main(pipe, scene, who, listener, port):
    """Be one rank in a process of its own."""
    torch.set_num_threads(1)
    rank, num_ranks, timeout_s, transport, host = who
    address = Address("127.0.0.1", port, None if listener is None else listener.detach())

    def entered(_):
        fabric = connect(rank, num_ranks, address, job="test", timeout_s=timeout_s, transport=transport, host=host)
        try:
            return scene(fabric)
        finally:
            fabric.close()

    pipe.send(result_or_error(entered, None))


def resources():
    """Threads and open files of this process."""
    return [len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd")]
