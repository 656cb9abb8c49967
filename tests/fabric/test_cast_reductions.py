"""Sums in a narrower dtype: the same bits on all transports, those of a sum in 32 bits that is rounded once."""

import pytest
import torch

from counterpoint.fabric.cast_reductions import start_cast_all_reduce, start_cast_reduce_scatter
from counterpoint.fabric.local import LocalWorld

TRIO = (0, 1, 2)
LENGTHS = [0, 1, 2, 1001]
NARROW = [torch.bfloat16, torch.float16]


def values_of(rank, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def summed_once(length, dtype, ranks=TRIO):
    narrow = [values_of(rank, length).to(dtype).float() for rank in ranks]
    return sum(narrow[1:], start=narrow[0]).to(dtype).float()


def all_reduce(fabric):
    """Start all of them, then wait for them in the same order."""
    group = tuple(range(fabric.num_ranks))
    wholes = [values_of(fabric.rank, length) for length in LENGTHS for _ in NARROW]
    pairs = zip(wholes, NARROW * len(LENGTHS), strict=True)
    works = [start_cast_all_reduce(fabric, "sum", whole, whole.to(dtype), group) for whole, dtype in pairs]
    for work in works:
        work.wait()
    return [whole.tolist() for whole in wholes]


@pytest.mark.long(quick=["local-2", "local-3", "gloo-2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_all_reduce_is_a_sum_in_32_bits_rounded_once(run_scenario, num_ranks):
    ranks = range(num_ranks)
    expected = [summed_once(length, dtype, ranks).tolist() for length in LENGTHS for dtype in NARROW]
    assert run_scenario(all_reduce, num_ranks) == [expected] * num_ranks


BOUNDS = [0, 2, 2, 7]


def reduce_scatter(fabric):
    whole = values_of(fabric.rank, BOUNDS[-1])
    start_cast_reduce_scatter(fabric, "sum", whole, whole.bfloat16(), BOUNDS, TRIO).wait()
    return whole.tolist()


@pytest.mark.long(quick=["local", "shm", "gloo"])
def test_a_reduce_scatter_writes_the_own_range_only(run_scenario):
    total, results = summed_once(BOUNDS[-1], torch.bfloat16), run_scenario(reduce_scatter, 3)
    for rank, result in enumerate(results):
        expected, (start, stop) = values_of(rank, BOUNDS[-1]), BOUNDS[rank : rank + 2]
        expected[start:stop] = total[start:stop]
        assert result == expected.tolist()


@pytest.mark.parametrize(("large", "expected"), [(40_000.0, torch.inf), (20_000.0, 40_000.0)])
def test_a_sum_beyond_the_largest_number_is_infinite(large, expected):
    def work(fabric):
        whole = torch.full((3,), large)
        start_cast_all_reduce(fabric, "sum", whole, whole.half(), (0, 1)).wait()
        return whole.tolist()

    with LocalWorld(2, 10.0) as world:
        assert world.run(work) == [[expected] * 3] * 2


def test_a_second_wait_leaves_the_result_alone():
    def work(fabric):
        reduction = start_cast_all_reduce(fabric, "sum", whole := torch.ones(3), whole.bfloat16(), (0, 1))
        reduction.wait()
        whole.zero_()
        reduction.wait()
        return whole.tolist()

    with LocalWorld(2, 10.0) as world:
        assert world.run(work) == [[0.0] * 3] * 2
