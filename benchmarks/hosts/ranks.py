"""One rank: all contenders alternately; each rank prints its results as JSON.

``ranks.py sums MB ROUNDS`` on 2 hosts of 2 ranks, ``ranks.py link MB ROUNDS`` on hosts of one rank each.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch

from counterpoint.fabric import Address, connect
from counterpoint.fabric.collectives import execute, rank_schedule
from counterpoint.fabric.collectives.algorithms import halving_doubling, hierarchical, ring
from counterpoint.fabric.collectives.gloo_channel import GlooChannel
from counterpoint.rpc.job_key import read_key

MB = 1 << 20
EAGER_BYTES = 3 * MB // 2
PORT, PIECE = 29600, 1 << 20


def sent_bytes():
    """Return the bytes sent by this host's interface."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            return int(figures.split()[8])
    raise RuntimeError("this host has no eth0; run this script in benchmarks.lab")


def all_reduce_by_schedule(channel, schedule, group):
    row = rank_schedule(schedule, group, channel.rank)

    def add_up(tensor):
        execute(channel, row, "sum", [tensor], eager_bytes=EAGER_BYTES)
        channel.flush()

    return add_up


def all_reduce_by_fabric(fabric):
    everybody = tuple(range(fabric.num_ranks))
    return lambda tensor: fabric.all_reduce("sum", tensor, everybody).wait()


def make_contenders(kind, auto, gloo):
    """Return the compared all-reduces by name."""
    everybody = tuple(range(gloo.num_ranks))
    channel = GlooChannel(gloo.rank, everybody, gloo.connection("schedules", everybody), gloo.timeout_s)
    if kind == "sums":  # ranks 0, 1 on one host, 2, 3 on the other
        return {
            "connect": all_reduce_by_fabric(auto),
            "hierarchical": all_reduce_by_schedule(channel, hierarchical((0, 0, 1, 1), ring), everybody),
            "ring in host order": all_reduce_by_schedule(channel, ring(4), everybody),
            "ring interleaved": all_reduce_by_schedule(channel, ring(4), (0, 2, 1, 3)),
            "gloo": all_reduce_by_fabric(gloo),
        }
    return {
        "ring": all_reduce_by_schedule(channel, ring(len(everybody)), everybody),
        "halving-doubling": all_reduce_by_schedule(channel, halving_doubling(len(everybody)), everybody),
        "gloo": all_reduce_by_fabric(gloo),
    }


def time_tcp_transfer(fabric, num_bytes):
    """Return the seconds of a transfer from rank 0 to rank 1, on another host, by one TCP connection."""
    if fabric.rank > 1:
        return None
    data, address = bytearray(PIECE), os.environ["MASTER_ADDR"]
    if fabric.rank == 0:
        with socket.create_server((socket.gethostbyname(address), PORT)) as listener:
            fabric.send(1, "listening", [])
            with listener.accept()[0] as peer:
                began = time.perf_counter()
                for _ in range(num_bytes // PIECE):
                    peer.sendall(data)
                peer.recv(1)
                return time.perf_counter() - began
    fabric.recv(0, "listening")
    with socket.create_connection((address, PORT)) as peer:
        left = num_bytes
        while left:
            left -= peer.recv_into(data)
        peer.sendall(b"!")
    return None


def main(kind, megabytes, rounds):
    """Run one rank."""
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = read_key(Path(os.environ["COUNTERPOINT_KEY_FILE"]))
    auto = connect(rank, count, Address(host, port), key=key, job="auto")
    gloo = connect(rank, count, Address(host, port + 1), key=key, job="gloo", transport="gloo")
    everybody, num_elements = tuple(range(count)), megabytes * MB // 4
    found = {"plain transfer": []}
    compared = make_contenders(kind, auto, gloo)
    tensor = auto.empty(num_elements, torch.float32)
    for turn in range(rounds + 1):  # the first round warms up
        if kind == "link":
            seconds = time_tcp_transfer(gloo, megabytes * MB)
            found["plain transfer"] += [seconds] if turn else []
        for name, add_up in compared.items():
            tensor.fill_(rank + 1)
            auto.barrier(everybody)
            sent = sent_bytes()
            auto.barrier(everybody)  # start after all ranks have read their counters
            began = time.perf_counter()
            add_up(tensor)
            seconds = time.perf_counter() - began
            auto.barrier(everybody)
            assert float(tensor[0]) == float(tensor[-1]) == count * (count + 1) / 2, f"{name} returned a wrong sum"
            if turn:
                found.setdefault(name, []).append((seconds, sent_bytes() - sent))
    print(json.dumps(found))
    auto.close()
    gloo.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
