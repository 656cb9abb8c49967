"""One rank: every size with every contender alternately; rank 0 prints its results as JSON."""

import importlib.util
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

from counterpoint.fabric.rendezvous import Address, connect
from counterpoint.launchers.environment import detect

KB, MB = 1 << 10, 1 << 20
SMALL_GRADIENTS, SMALL_BYTES = 400, 4 * KB


def num_repeats(num_bytes):
    return max(3, min(300, 32 * MB // num_bytes))


def median_call_s(call, times):
    """Return the median seconds of a call."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def deepspeed_all_reduce(rank, ranks):
    """Return DeepSpeed's shared-memory all-reduce, or None if it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ["LOCAL_SIZE"] = str(ranks)  # required to use shared memory
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    if rank:
        dist.barrier()  # wait for rank 0 to build it
    module = ShareMemCommBuilder().load(verbose=False)
    if not rank:
        dist.barrier()
    module.initialize(ranks, rank)
    return torch.ops.deepspeed.inference_all_reduce_


def main(port, rounds, sizes):
    """Run one rank."""
    torch.set_num_threads(1)
    mine = detect()
    rank, ranks = mine.rank, mine.world_size
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=ranks)
    address = Address(mine.master_addr, mine.master_port, mine.store_fd)
    fabric = connect(rank, ranks, address, job=mine.job, transport="shm")
    everybody = tuple(range(ranks))
    peer = deepspeed_all_reduce(rank, ranks)
    found = {}
    for num_bytes in sizes:
        shared = fabric.empty(num_bytes // 4, torch.float32).zero_()
        private = torch.zeros(num_bytes // 4)
        contenders = {
            "shared": lambda tensor=shared: fabric.all_reduce("grad", tensor, everybody).wait(),
            "copied": lambda tensor=private: fabric.all_reduce("grad", tensor, everybody).wait(),
            "gloo": lambda tensor=private: dist.all_reduce(tensor),
        }
        if peer is not None:
            contenders["deepspeed"] = lambda tensor=private: peer(tensor)
        found[num_bytes] = time_contenders(
            contenders, num_repeats(num_bytes), rounds, lambda: fabric.barrier(everybody)
        )
    small = [torch.zeros(SMALL_BYTES // 4) for _ in range(SMALL_GRADIENTS)]
    pool = fabric.empty(SMALL_GRADIENTS * SMALL_BYTES // 4, torch.float32).zero_().chunk(SMALL_GRADIENTS)
    contenders = {
        "shared": lambda: wait_all([fabric.all_reduce(f"grad{i}", each, everybody) for i, each in enumerate(pool)]),
        "copied": lambda: wait_all([fabric.all_reduce(f"grad{i}", each, everybody) for i, each in enumerate(small)]),
        "gloo": lambda: wait_all([dist.all_reduce(each, async_op=True) for each in small]),
    }
    found["small"] = time_contenders(contenders, 3, rounds, lambda: fabric.barrier(everybody))
    if rank == 0:
        print(json.dumps({str(key): value for key, value in found.items()}))
    fabric.barrier(everybody)
    fabric.close()
    dist.destroy_process_group()


def wait_all(works):
    for work in works:
        work.wait()


def time_contenders(contenders, times, rounds, settle):
    """Return the median seconds of each contender per round, after a warm-up round."""
    seconds = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, call in contenders.items():
            settle()
            measured = median_call_s(call, times if index else 3)
            if index:
                seconds[name].append(measured)
    return seconds


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), list(map(int, sys.argv[3:])))
