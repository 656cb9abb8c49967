"""Operations, each as a scenario, and what every rank must get from it, computed without any other rank."""

import torch

import counterpoint.compat.horovod.torch as hvd
from counterpoint.fabric.collectives.adasum import adasum

DTYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8]


def numbers(rank, *shape, dtype=torch.float64):
    """Return what rank ``rank`` has: other small numbers on every rank."""
    actual = torch.arange(torch.Size(shape).numel()) * 7 % 11 + 2 * rank + 1
    return actual.to(dtype).view(shape)


def of_all(size, *shape, dtype=torch.float64):
    return torch.stack([numbers(rank, *shape, dtype=dtype) for rank in range(size)])


def mine(*shape, dtype=torch.float64):
    return numbers(hvd.rank(), *shape, dtype=dtype)


def reductions():
    ops = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
    return [hvd.allreduce(mine(2, 3, dtype=dtype), op=op, name=f"{op} {dtype}") for dtype in DTYPES for op in ops]


def expected_reductions(_, size):
    actual = []
    for dtype in DTYPES:
        every = of_all(size, 2, 3, dtype=dtype)
        wide = every.double() if dtype.is_floating_point else every.long()
        mean = wide.sum(0) / size if dtype.is_floating_point else wide.sum(0) // size
        actual += [mean, wide.sum(0), wide.amin(0), wide.amax(0), wide.prod(0)]
        actual[-5:] = [result.to(dtype) for result in actual[-5:]]
    return actual


def adaptive_sums():
    """Of each tensor by itself, also in a group."""
    alone = hvd.allreduce(mine(4), op=hvd.Adasum)
    return [alone, *hvd.grouped_allreduce([mine(4), mine(2, 2) * mine(2, 2)], op=hvd.Adasum)]


def expected_adaptive_sums(_, size):
    every, squares = of_all(size, 4), of_all(size, 2, 2) ** 2
    first = adasum(list(every))
    return [first, first, adasum(list(squares))]


def factors():
    return [
        hvd.allreduce(mine(3), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
        hvd.allreduce(mine(3, dtype=torch.int32), op=hvd.Sum, prescale_factor=0.5),
        hvd.allreduce(mine(3), average=False),
        hvd.allreduce(mine(3, dtype=torch.float32), compression=hvd.Compression.fp16),
    ]


def expected_factors(_, size):
    halves = (of_all(size, 3, dtype=torch.int32).double() * 0.5).trunc().to(torch.int32)
    total = of_all(size, 3).sum(0)
    return [total * 2, halves.sum(0).to(torch.int32), total, (total / size).half().float()]


def in_place():
    one, two, flags = mine(4), mine(2, dtype=torch.int64), mine(3, dtype=torch.int64)
    strided = mine(3, 2).T
    same = hvd.allreduce_(one, op=hvd.Sum) is one
    hvd.grouped_allreduce_([two, strided, flags], op=hvd.Max)
    return [one, two, strided, flags, same]


def expected_in_place(_, size):
    largest = [of_all(size, n, dtype=torch.int64).amax(0) for n in (2, 3)]
    return [of_all(size, 4).sum(0), largest[0], of_all(size, 3, 2).amax(0).T, largest[1], True]


def handles():
    """Waited for in another order than they were started in, and asked for until they are over."""
    given = mine(3)
    starting = [
        hvd.allreduce_async(given, op=hvd.Sum, name="a"),
        hvd.broadcast_async(given, 1, name="b"),
        hvd.allgather_async(given, name="c"),
        hvd.grouped_allreduce_async([given, given], op=hvd.Min, name="d"),
    ]
    while not hvd.poll(starting[0]):
        pass
    last, *_ = (hvd.synchronize(handle) for handle in reversed(starting))
    return [*(hvd.synchronize(handle) for handle in starting[:3]), last[0], given]


def expected_handles(rank, size):
    every = of_all(size, 3)
    return [every.sum(0), every[1], every.flatten(), every.amin(0), every[rank]]


def gathers():
    uneven = mine(hvd.rank(), 2, dtype=torch.bool if hvd.size() == 2 else torch.int16)
    return [hvd.allgather(uneven), *hvd.grouped_allgather([mine(1 + hvd.rank()), mine(1, 2)])]


def expected_gathers(_, size):
    uneven = [numbers(rank, rank, 2, dtype=torch.bool if size == 2 else torch.int16) for rank in range(size)]
    lines = [numbers(rank, 1 + rank) for rank in range(size)]
    return [torch.cat(uneven), torch.cat(lines), of_all(size, 1, 2).flatten(0, 1)]


def broadcasts():
    own = mine(2, 3)
    result = hvd.broadcast(own, 1)
    kept = own.clone()
    return [result, kept, hvd.broadcast_(own, 0), own]


def expected_broadcasts(rank, size):
    every = of_all(size, 2, 3)
    return [every[1], every[rank], every[0], every[0]]


def exchanges():
    """Rank ``r`` sends ``r + 1 + place`` rows to the member at each place."""
    splits = torch.tensor([hvd.rank() + 1 + place for place in range(hvd.size())])
    rows, received = hvd.alltoall(mine(int(splits.sum()), 2), splits)
    handle = hvd.alltoall_async(mine(hvd.size()))
    return [rows, received, hvd.alltoall(mine(2 * hvd.size())), hvd.synchronize(handle)[1]]


def expected_exchanges(rank, size):
    rows, even = [], []
    for other in range(size):
        splits = [other + 1 + place for place in range(size)]
        rows.append(numbers(other, sum(splits), 2).split(splits)[rank])
        even.append(numbers(other, 2 * size).split(2)[rank])
    received = torch.tensor([other + 1 + rank for other in range(size)], dtype=torch.int32)
    return [torch.cat(rows), received, torch.cat(even), torch.ones(size, dtype=torch.int32)]


def scatters():
    one = hvd.reducescatter(mine(5, 2))
    several = hvd.grouped_reducescatter([mine(2), mine(4, dtype=torch.int32)], op=hvd.Sum, postscale_factor=2.0)
    return [one, *several, hvd.synchronize(hvd.reducescatter_async(mine(3), op=hvd.Max))]


def expected_scatters(rank, size):
    mean, two, four, three = (of_all(size, *shape) for shape in [(5, 2), (2,), (4,), (3,)])
    return [
        mean.mean(0).tensor_split(size)[rank],
        2 * two.sum(0).tensor_split(size)[rank],
        2 * four.sum(0).tensor_split(size)[rank].to(torch.int32),
        three.amax(0).tensor_split(size)[rank],
    ]


def gradients():
    """Of what each operation does with 2 rows, its result weighed by the place of each number."""
    actual = []
    for operation in [
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0),
        lambda x: hvd.grouped_allreduce([x, 2 * x])[1],
        hvd.allgather,
        lambda x: hvd.broadcast(x, 1),
        lambda x: hvd.alltoall(torch.cat([x] * hvd.size())),
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
    ]:
        x = mine(2, 2).requires_grad_()
        result = operation(x)
        (result * torch.arange(result.numel(), dtype=x.dtype).view_as(result)).sum().backward()
        actual.append(x.grad)
    return actual


def expected_gradients(rank, size):
    """As Horovod defines them: the gradient of a sum is summed, that of a gather or a broadcast is averaged."""
    places = torch.arange(4.0 * size, dtype=torch.float64)
    here = places[:4].view(2, 2)
    rows = [torch.arange(2.0 * len(part), dtype=torch.float64) for part in torch.arange(2).tensor_split(size)]
    return [
        3 * size * here, 2 * here, places.view(-1, 2)[2 * rank : 2 * rank + 2],
        here if rank == 1 else 0 * here, size * places.view(size, 4)[rank].view(2, 2),
        size * torch.cat(rows).view(2, 2),
    ]  # fmt: skip


def sets_of_ranks():
    """All but the last rank, and the last; then one is removed, and a set of the same ranks is added again."""
    most, last = list(range(hvd.size() - 1)), hvd.size() - 1
    first, second = hvd.add_process_set(most), hvd.add_process_set(hvd.ProcessSet([last]))
    actual: list[object] = [second.process_set_id, second.included(), first.size(), hvd.global_process_set.ranks]
    if first.included():
        actual += [first.rank(), hvd.allreduce(mine(2), op=hvd.Sum, process_set=first)]
        actual += [hvd.allgather(mine(1), process_set=first), hvd.broadcast(mine(1), last - 1, process_set=first)]
    if second.included():
        actual.append(hvd.allreduce(mine(2), op=hvd.Product, process_set=second))
    actual += [hvd.remove_process_set(first), hvd.remove_process_set(first), first.process_set_id]
    again = hvd.add_process_set(reversed(most))
    return [*actual, again.process_set_id, hvd.remove_process_set(again), hvd.remove_process_set(second)]


def expected_sets_of_ranks(rank, size):
    most = of_all(size - 1, 2).sum(0)
    member = [rank, most, of_all(size - 1, 1).flatten(), numbers(size - 2, 1)] if rank < size - 1 else []
    alone = [numbers(rank, 2)] if rank == size - 1 else []
    actual = [2, rank == size - 1, size - 1, list(range(size)), *member, *alone]
    return [*actual, True, False, None, 3, True, True]


def places():
    actual = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    return [*actual, hvd.is_initialized(), hvd.is_homogeneous(), hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built()]


def expected_places(rank, size):
    return [rank, size, rank, size, 0, 1, True, True, False, True, 0]


SCENARIOS = (
    reductions, adaptive_sums, factors, in_place, handles, gathers, broadcasts, exchanges, scatters, gradients,
    sets_of_ranks, places,
)  # fmt: skip
EXPECTED = (
    expected_reductions, expected_adaptive_sums, expected_factors, expected_in_place, expected_handles,
    expected_gathers, expected_broadcasts, expected_exchanges, expected_scatters, expected_gradients,
    expected_sets_of_ranks, expected_places,
)  # fmt: skip
