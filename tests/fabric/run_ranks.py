"""Run a function of one rank's fabric on every rank of a transport, and collect the results."""

import socket
from contextlib import closing
from pathlib import Path

import torch

from counterpoint.errors import CounterpointError
from counterpoint.fabric import Address, LocalWorld, connect
from tests.forkserver import CONTEXT


def result_or_error(scenario, fabric):
    """What the scenario returns, or the error it ends with, as text."""
    try:
        return scenario(fabric)
    except CounterpointError as error:
        return f"{type(error).__name__}: {error}"


def on_local(scenario, num_ranks, timeout_s=10.0):
    with LocalWorld(num_ranks, timeout_s) as world:
        return world.run(lambda fabric: result_or_error(scenario, fabric))


def on_gloo(scenario, num_ranks, timeout_s=10.0, present=None):
    return on_processes("gloo", scenario, num_ranks, timeout_s, present)


def on_shm(scenario, num_ranks, timeout_s=10.0, present=None):
    return on_processes("shm", scenario, num_ranks, timeout_s, present)


def on_process_groups(scenario, num_ranks, timeout_s=10.0, present=None):
    return on_processes("process_group", scenario, num_ranks, timeout_s, present)


def on_hosts(hosts, scenario, num_ranks, timeout_s=10.0, present=None):
    """Run it in processes that behave as on several hosts, one host name per rank, repeated if there are more ranks."""
    names = [f"h{hosts[rank % len(hosts)]}" for rank in range(num_ranks)]
    return on_processes("auto", scenario, num_ranks, timeout_s, present, names)


def on_processes(transport, scenario, num_ranks, timeout_s, present, hosts=None):
    """Run it in processes; None for a rank that ended without an answer, or was not present."""
    started = range(num_ranks) if present is None else present
    hosts = [None] * num_ranks if hosts is None else hosts
    arguments_by_rank = {rank: (scenario, (rank, num_ranks, timeout_s, transport, hosts[rank])) for rank in started}
    answers = run_processes(rank_main, arguments_by_rank, timeout_s)
    return [answers.get(rank) for rank in range(num_ranks)]


def run_processes(function, arguments_by_rank, timeout_s):
    """Run ``function(pipe, *arguments_by_rank[rank], listener, port)`` in a process per rank; return what each sends.

    The listener is, on rank 0, a socket that listens on the rendezvous port.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        processes = {}
        for rank, more in arguments_by_rank.items():
            our_end, rank_end = CONTEXT.Pipe()
            process = CONTEXT.Process(target=function, args=(rank_end, *more, None if rank else listener, port))
            process.start()
            rank_end.close()
            processes[rank] = (process, our_end)
        return {rank: receive_answer(*process, timeout_s) for rank, process in processes.items()}


def receive_answer(process, pipe, timeout_s):
    try:
        answer = pipe.recv() if pipe.poll(timeout_s + 20) else "silence"
    except EOFError:
        answer = None
    process.join(10)
    process.kill()
    process.join(10)
    return answer


def rank_main(pipe, scenario, identity, listener, port):
    """Run one rank in a process of its own."""
    torch.set_num_threads(1)
    rank, num_ranks, timeout_s, transport, host = identity
    address = Address("127.0.0.1", port, None if listener is None else listener.detach())

    def run(_):
        fabric = connect(rank, num_ranks, address, job="test", timeout_s=timeout_s, transport=transport, host=host)
        try:
            return scenario(fabric)
        finally:
            fabric.close()

    pipe.send(result_or_error(run, None))


def resources():
    """Threads and open files of this process."""
    return [len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd")]
