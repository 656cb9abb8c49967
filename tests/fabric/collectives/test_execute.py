"""A schedule on every transport: the bits of the interpreter, and the counted traffic."""

import hashlib
from functools import cache, partial

import pytest
import torch

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric import LocalWorld
from counterpoint.fabric.collectives import (
    ALGORITHMS,
    ChunkLayout,
    count_traffic,
    execute,
    interpret,
    rank_schedule,
)
from counterpoint.fabric.collectives.algorithms import fixed_tree, ring, shard_owners
from counterpoint.fabric.shm.native import native
from tests.fabric.run_ranks import on_gloo, on_local, on_shm

NEEDS_NATIVE = pytest.mark.skipif(native().library is None, reason=f"no native part: {native().reason}")
PROCESSES = [pytest.param(on_gloo, id="gloo"), pytest.param(on_shm, id="shm", marks=NEEDS_NATIVE)]


def value(member, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(member))


def contents(tensor):
    """The numbers of a tensor, or a hash of the bits of millions of them, which a pipe carries sooner."""
    return tensor.tolist() if len(tensor) < 10_000 else hashlib.blake2b(tensor.numpy().tobytes()).hexdigest()


def summed(fabric, name, length, eager_bytes=0):
    algorithm = ALGORITHMS[name]
    group = algorithm.group(fabric.num_ranks)
    row = rank_schedule(algorithm.schedule(fabric.num_ranks), group, fabric.rank)
    tensors = [value(member, length) for member, rank in enumerate(group) if rank == fabric.rank]
    counts = execute(fabric, row, "grad0", tensors, eager_bytes=eager_bytes)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    return contents(tensors[0]), (counts.num_steps, counts.num_messages, counts.sent_bytes, counts.reduced_bytes)


@cache
def promised(name, num_ranks, length):
    schedule, group = ALGORITHMS[name].schedule(num_ranks), ALGORITHMS[name].group(num_ranks)
    total = interpret(schedule, [value(member, length) for member in range(schedule.num_ranks)])[0]
    counts = count_traffic(schedule, ChunkLayout(length), element_bytes=4, group=group)
    return [
        (contents(total), (c.num_steps, c.num_messages, c.sent_bytes, c.reduced_bytes))
        for _, c in sorted(counts.items())
    ]


@pytest.mark.long(quick=["star-8", "ring-3", "pipelined_ring-5", "torus-2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_does_in_one_process_what_its_schedule_promises(name, num_ranks):
    for length, eager_bytes in ((3, 0), (1001, 0), (1001, 1 << 20), (1001, 256)):
        scenario = partial(summed, name=name, length=length, eager_bytes=eager_bytes)
        assert on_local(scenario, num_ranks) == promised(name, num_ranks, length)


@pytest.mark.long(quick=["hierarchical, hosts of 2 in order-shm", "ring-gloo"])
@pytest.mark.process
@pytest.mark.parametrize("run_scenario", PROCESSES)
@pytest.mark.parametrize("name", ["ring", "halving_doubling", "double_tree", "hierarchical, hosts of 2 in order"])
def test_so_it_does_between_processes(name, run_scenario):
    assert run_scenario(partial(summed, name=name, length=1001), 3) == promised(name, 3, 1001)


@pytest.mark.long(quick=["butterfly-shm"])
@pytest.mark.process
@pytest.mark.parametrize("run_scenario", PROCESSES)
@pytest.mark.parametrize("name", ["butterfly", "ring"])
def test_messages_larger_than_any_buffer_between_two_processes_pass(name, run_scenario):
    for eager_bytes in (0, 3 << 18):
        scenario = partial(summed, name=name, length=2_000_000, eager_bytes=eager_bytes)
        assert run_scenario(scenario, 2) == promised(name, 2, 2_000_000)


def test_a_group_may_be_some_of_the_ranks_in_any_order():
    def work(fabric):
        tensor = torch.full((4,), 10.0**fabric.rank)
        if fabric.rank in (3, 1):
            execute(fabric, rank_schedule(ring(2), (3, 1), fabric.rank), "grad0", [tensor])
        return tensor[0].item()

    with LocalWorld(4) as world:
        assert world.run(work) == [1.0, 1010.0, 100.0, 1010.0]


def test_the_sum_over_shards_has_the_same_bits_on_any_number_of_ranks():
    def work(fabric):
        group = shard_owners(8, fabric.num_ranks)
        tensors = [value(shard, 33) for shard, rank in enumerate(group) if rank == fabric.rank]
        execute(fabric, rank_schedule(fixed_tree(8), group, fabric.rank), "grad0", tensors)
        return tuple(tensors[0].tolist())

    assert len({total for num_ranks in range(1, 9) for total in on_local(work, num_ranks)}) == 1


def test_ranks_with_tensors_of_other_looks_get_an_error_that_names_both():
    def work(fabric):
        dtype = torch.float64 if fabric.rank == 1 else torch.float32
        execute(fabric, rank_schedule(ring(3), (0, 1, 2), fabric.rank), "grad0", [torch.ones(6, dtype=dtype)])

    expected = r"rank \d sent 2 elements of torch.float\d\d of grad0 where rank \d has 2 elements of torch.float\d\d"
    with LocalWorld(3) as world, pytest.raises(PeerError, match=expected):
        world.run(work)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "gives nothing for grad0 and holds 1 members"),
        ([torch.ones(2), torch.ones(2)], "give one tensor for each"),
        ([torch.ones(4, 4).t()], "is not contiguous"),
    ],
)
def test_tensors_that_do_not_fit_the_row_are_refused(tensors, message):
    with LocalWorld(1) as world, pytest.raises(ProgramError, match=message):
        world.run(lambda fabric: execute(fabric, rank_schedule(ring(1), (0,), 0), "grad0", tensors))


def test_the_row_of_another_rank_is_refused():
    with LocalWorld(1) as world, pytest.raises(ProgramError, match="rank 0 was given the schedule of rank 1 in group"):
        world.run(lambda fabric: execute(fabric, rank_schedule(ring(2), (0, 1), 1), "grad0", [torch.ones(2)]))
