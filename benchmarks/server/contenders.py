"""Contenders on this host: each run starts its own processes and stops them at the end."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import server_workloads
from timed_run import run_contenders

from counterpoint.errors import LaunchError
from counterpoint.launchers.server_processes import start_servers
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig

HERE = Path(__file__).parent
PREFETCH_DEPTH = 2
"""Number of a worker's pushes that are not waited for, with prefetching."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ProcessGroup:
    """Processes of one run, watched, and killed at the end of the block."""

    def __init__(self):
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        self.running = []

    def start(self, script, *words, **environ):
        output = (self.folder / f"output.{len(self.running)}").open("w+")
        command = [sys.executable, "-m", "counterpoint.launchers", str(HERE / script), *map(str, words)]
        process = subprocess.Popen(
            command, env={**os.environ, **THREADS, **environ}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        self.running.append((process, output))

    def check(self):
        for process, output in self.running:
            if process.poll():
                raise LaunchError(f"{process.args[3:]} ended with {process.returncode}:\n{output_tail(output)}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, output in self.running:
            process.kill()
            process.wait()
            output.close()
        self._stack.close()


def output_tail(output):
    output.seek(0)
    return "".join(output.readlines()[-25:])


def free_ports(count):
    """Return currently unused ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def worker_names():
    return [f"worker-{worker}" for worker in range(server_workloads.RANKS)]


def run_counterpoint(name, processes, *words):
    """Workers and a server connected by UNIX sockets; nothing is written to a disk."""
    with start_servers(JobConfig("bench", Asp(), num_servers=1, is_logged=False)) as servers:
        for worker in range(server_workloads.RANKS):
            processes.start("counterpoint_worker.py", name, worker, servers.contact_path, "-", processes.folder, *words)
        return run_contenders(processes.folder, worker_names(), processes.check)


def run_counterpoint_prefetching(name, processes):
    """The same, but a minibatch does not wait for its worker's last pushes."""
    return run_counterpoint(name, processes, PREFETCH_DEPTH)


def run_strategy(name, processes):
    """The same as a strategy on fixed ranks."""
    (port,) = free_ports(1)
    for rank in range(server_workloads.RANKS + 1):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(server_workloads.RANKS + 1)}
        variables |= {"LOCAL_WORLD_SIZE": variables["WORLD_SIZE"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        strategy = f"server({server_workloads.RANKS}, servers=1, consistency=asp)"
        processes.start("strategy_rank.py", strategy, name, processes.folder, **variables)
    return run_contenders(processes.folder, worker_names(), processes.check)


def run_torch_rpc(name, processes, *words):
    """torch.distributed.rpc, as in its tutorials."""
    port = free_ports(1)[0]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
    }
    for role in ("ps", "master", *(f"trainer{worker}" for worker in range(server_workloads.RANKS))):
        processes.start("torch_rpc.py", role, name, server_workloads.RANKS, processes.folder, *words, **variables)
    return run_contenders(processes.folder, worker_names(), processes.check)


def run_torch_rpc_retaining(name, processes):
    """The same, retaining freed memory as ours does."""
    return run_torch_rpc(name, processes, "keeping")


def run_tensorflow(name, processes):
    """TensorFlow's ParameterServerStrategy."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(server_workloads.RANKS + 2)]
    cluster = {
        "worker": ports[: server_workloads.RANKS],
        "ps": ports[server_workloads.RANKS : -1],
        "chief": ports[-1:],
    }
    for role, places in cluster.items():
        for index in range(len(places)):
            processes.start("tensorflow_ps.py", role, index, name, processes.folder, json.dumps(cluster))
    return run_contenders(processes.folder, ["chief"], processes.check)


CONTENDERS = {
    "ours": run_counterpoint,
    "ours, ahead": run_counterpoint_prefetching,
    "ours, a program": run_strategy,
    "torch rpc": run_torch_rpc,
    "torch rpc, memory kept": run_torch_rpc_retaining,
    "tensorflow": run_tensorflow,
}


def is_installed(side):
    return side != "tensorflow" or find_spec("tensorflow") is not None


def run_once(side, name):
    """Run a contender once.

    Returns:
        Samples per second of all workers; CPU milliseconds per worker step of all processes; and of the worker only, if
        the worker measured.
    """
    with ProcessGroup() as found:
        results, processors = CONTENDERS[side](name, found)
    steps_per_s = sum(one["steps"] / one["elapsed"] for one in results.values())
    own = [1e3 * one["processor_s"] / one["steps"] for one in results.values() if "processor_s" in one]
    return {
        "samples_per_s": steps_per_s * server_workloads.batch_size(name),
        "processor_ms": 1e3 * processors / steps_per_s,
        "worker_ms": sum(own) / len(own) if own else None,
    }
