"""Every operation of torch.distributed, on every dtype that matters: what each returns is compared with gloo's."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

# the names of torch 2.13, else those of 2.11
gather_whole = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_whole = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
functional_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def numbers(rank, *shape, dtype=torch.float32):
    """Return what rank ``rank`` has: other numbers on every rank, small ones."""
    count = torch.Size(shape).numel()
    result = torch.arange(count) * 7 % 13 + 3 * rank - 2
    return (result > 3 if dtype == torch.bool else result.to(dtype)).view(shape)


def all_reduce(op, dtype, rank, _):
    tensor = numbers(rank, 3, 5, dtype=dtype).abs() if dtype in INTEGERS else numbers(rank, 3, 5, dtype=dtype)
    dist.all_reduce(tensor, op)
    return [tensor]


def coalesced(rank, _):
    tensors = [numbers(rank, 3), numbers(rank, 2, 2)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def reduce(rank, size):
    tensor = numbers(rank, 4)
    dist.reduce(tensor, size - 1)
    return [tensor] if rank == size - 1 else []


def broadcast(rank, _):
    tensors = [numbers(rank, 3, 2), numbers(rank, 0), numbers(rank, 5, dtype=torch.bool), numbers(rank, 4, 4).t()]
    for tensor in tensors:
        dist.broadcast(tensor, 1)
    return tensors


def all_gather(rank, size):
    tensors = [numbers(9, 2, 3) for _ in range(size)]
    dist.all_gather(tensors, numbers(rank, 2, 3))
    return tensors


def all_gather_single(rank, size):
    whole, cuts = torch.empty(size * 2, 3), torch.empty(size * 5, dtype=torch.uint8)
    gather_whole(whole, numbers(rank, 2, 3))
    gather_whole(cuts, numbers(rank, 5, dtype=torch.uint8))
    return [whole, cuts]


def gather(rank, size):
    tensors = [numbers(9, 4) for _ in range(size)] if rank == 1 else None
    dist.gather(numbers(rank, 4), tensors, dst=1)
    return tensors or []


def scatter(rank, size):
    tensor = torch.empty(3)
    dist.scatter(tensor, [numbers(other, 3) for other in range(size)] if rank == 1 else None, src=1)
    return [tensor]


def reduce_scatter(rank, size):
    tensor, tensors = torch.empty(2, 2), [numbers(rank + index, 2, 2) for index in range(size)]
    dist.reduce_scatter(tensor, tensors)
    return [tensor, *tensors]


def reduce_scatter_single(rank, size):
    tensor, whole = torch.empty(2, 3), numbers(rank, 2 * size, 3)
    scatter_whole(tensor, whole)
    return [tensor, whole]


def reduce_scatter_max(rank, size):
    tensor = torch.empty(4, dtype=torch.int64)
    scatter_whole(tensor, numbers(rank, 4 * size, dtype=torch.int64), dist.ReduceOp.MAX)
    return [tensor]


def all_to_all(rank, size):
    tensors = [torch.empty(4) for _ in range(size)]
    dist.all_to_all(tensors, [numbers(rank + other, 4) for other in range(size)])
    return tensors


def all_to_all_single(rank, size):
    tensor = torch.empty(2 * size, 3)
    dist.all_to_all_single(tensor, numbers(rank, 2 * size, 3))
    return [tensor]


def all_to_all_uneven(rank, size):
    given = [(rank + other) % size for other in range(size)]  # the same both ways
    tensor = torch.empty(sum(given), 2)
    dist.all_to_all_single(tensor, numbers(rank, sum(given), 2), given, given)
    return [tensor]


def objects(rank, size):
    result: list[dict[str, object]] = [{}] * size
    dist.all_gather_object(result, {"rank": rank, "text": "x" * (10 * rank)})
    return [torch.tensor([each["rank"], len(str(each["text"]))]) for each in result]


def messages(rank, size):
    """Everybody sends first, more than a pipe holds, and receives afterwards."""
    own, result = numbers(rank, 600_000), torch.empty(600_000)
    ends = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, result, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return [result.sum()]


def tags(rank, size):
    """What was sent first is received last."""
    first, second = torch.empty(2), torch.empty(3)
    sent = [dist.isend(numbers(tag, 1 + tag), (rank + 1) % size, tag=tag) for tag in (1, 2)]
    dist.recv(second, (rank - 1) % size, tag=2)
    dist.recv(first, (rank - 1) % size, tag=1)
    for work in filter(None, sent):
        work.wait()
    return [first, second]


def any_source(rank, size):
    if rank:
        dist.send(torch.full((2,), float(rank)), 0)
        return []
    tensor, senders, total = torch.empty(2), [], torch.zeros(2)
    for _ in range(size - 1):
        senders.append(dist.recv(tensor))
        total += tensor
    return [total, torch.tensor(sorted(senders))]


def sub_groups(rank, size):
    groups = [dist.new_group([size - 2, size - 1]), dist.new_group([0])]
    tensor = numbers(rank, 3)
    dist.all_reduce(tensor, group=groups[0])
    dist.all_reduce(tensor, group=groups[1])
    return [tensor]


def in_flight(rank, _):
    """Collectives are started together, waited for in any order, and one of them not at all."""
    tensors = [numbers(rank, 10 + index) for index in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.broadcast(numbers(rank, 2), 0, async_op=True)
    works[2].wait()
    for index in (3, 0, 1):
        works[index].wait()
    dist.barrier()
    return tensors


def of_the_compiler(rank, size):
    """The collectives of DTensor and torch.compile, which come through C++."""
    group, everything = dist.group.WORLD, []
    assert group is not None
    everything.append(functional.all_reduce(numbers(rank, 3), "sum", group))
    everything.append(functional_gather(numbers(rank, 2, 2), 0, group))
    everything.append(functional_scatter(numbers(rank, 2 * size), "sum", 0, group))
    everything.append(functional.all_to_all_single(numbers(rank, size), None, None, group))
    everything.append(functional.broadcast(numbers(rank, 2), 0, group))
    everything += functional.all_reduce_coalesced([numbers(rank, 2), numbers(rank, 3)], "sum", group)
    return [functional.wait_tensor(each) for each in everything]


SCENARIOS = [
    coalesced, reduce, broadcast, all_gather, all_gather_single, gather, scatter, reduce_scatter,
    reduce_scatter_single, reduce_scatter_max, all_to_all, all_to_all_single, all_to_all_uneven, objects, messages,
    tags, any_source, sub_groups, in_flight, of_the_compiler,
]  # fmt: skip
OPS = {
    "sum": [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.int8],
    "max": [torch.float32, torch.int64, torch.uint8],
    "min": [torch.float64, torch.int32, torch.int8],
    "product": [torch.float32, torch.int64],
    "band": [torch.int64, torch.uint8],
    "bor": [torch.int32],
    "bxor": [torch.int64],
}  # fmt: skip
NAMES = [
    *(scenario.__name__ for scenario in SCENARIOS),
    *(f"{op} {str(dtype)[6:]}" for op, dtypes in OPS.items() for dtype in dtypes),
]


def run_all(rank, size):
    """Return what each operation returns, by its name, as lists."""
    result = {scenario.__name__: scenario(rank, size) for scenario in SCENARIOS}
    for op, dtypes in OPS.items():
        for dtype in dtypes:
            result[f"{op} {str(dtype)[6:]}"] = all_reduce(getattr(dist.ReduceOp, op.upper()), dtype, rank, size)
    return {name: [tensor.tolist() for tensor in tensors] for name, tensors in result.items()}


def no_gloo_has(rank, _):
    """Return what comes of reductions that gloo refuses, and of one that it gets wrong."""
    mean, whole_mean = torch.full((3,), float(rank)), torch.tensor([rank, 7 * rank, -7 * rank])
    for tensor in (mean, whole_mean):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    flags = {}
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        flags[op] = torch.tensor([False, rank == 0, True])
        dist.all_reduce(flags[op], getattr(dist.ReduceOp, op))
    whole = torch.full((2, 4), float(rank + 1))
    dist.all_reduce(whole[:, ::2])
    return mean.tolist(), whole_mean.tolist(), {op: flag.tolist() for op, flag in flags.items()}, whole.tolist()
