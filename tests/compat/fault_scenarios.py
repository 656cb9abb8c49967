"""What goes wrong between ranks of torch programs, and how they end."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.compat.process_groups import count_proc_entries, count_resources


def other_shape(rank, _):
    dist.all_reduce(torch.ones(4 + rank))


def other_operation(rank, _):
    tensor = torch.ones(4)
    if rank:
        return dist.all_reduce(tensor)
    return dist.broadcast(tensor, 0)


def other_reduction(rank, _):
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def other_shape_of_a_future(rank, _):
    """As the buckets of DDP on models that differ."""
    return dist.all_reduce(torch.ones(20 - rank), async_op=True).get_future().wait()


def other_message(rank, _):
    if rank:
        return dist.recv(torch.empty(5), 0)
    return dist.send(torch.ones(2, 2), 1)


def other_sizes(rank, _):
    given = [2, 1]
    dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2] if rank else [2, 1], given)


def late(rank, _):
    """Rank 1 does not come within the deadline of the wait."""
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        began = time.monotonic()
        try:
            work.wait(timedelta(seconds=0.5))
        finally:
            assert time.monotonic() - began < 5
    else:
        dist.recv(torch.empty(1), 0)
    return


def gone(rank, _):
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(2))


def aborts(rank, _):
    if rank == 1:
        dist.distributed_c10d._get_default_group().abort()
        return None
    return dist.all_reduce(torch.ones(2))


def comes_and_goes(rank, size):
    """Return what the process has before and after many groups, with work of each kind in them."""
    store, result = dist.distributed_c10d._get_default_store(), []
    dist.destroy_process_group()
    num_threads = count_proc_entries("task")
    for _ in range(4):
        timeout = timedelta(seconds=20)
        dist.init_process_group("counterpoint", store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(100_000), group=group)
        dist.all_gather([torch.empty(100_000) for _ in range(size)], torch.ones(100_000))
        received = dist.irecv(torch.empty(10), 1 - rank)
        dist.send(torch.ones(10), 1 - rank)
        assert received is not None
        received.wait()
        dist.all_reduce(torch.ones(3), async_op=True)
        dist.destroy_process_group()
        result.append(count_resources(num_threads))
    return result


def leaves_with_a_receive(rank, _):
    """A receive without a send does not keep its thread."""
    dist.irecv(torch.empty(3), 1 - rank)
    dist.barrier()
    began = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - began < 5, count_resources()[2]
