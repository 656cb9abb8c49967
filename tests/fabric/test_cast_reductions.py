"""Sums in a narrower dtype: the same bits on all transports, those of a sum in 32 bits that is rounded once."""

from functools import partial
from typing import Any, cast

import pytest
import torch

from counterpoint.fabric.cast_reductions import start_cast_all_reduce, start_cast_reduce_scatter
from counterpoint.fabric.local import LocalWorld
from tests.fabric.run_ranks import on_gloo, on_local, on_process_groups, on_shm

TRIO = (0, 1, 2)
LENGTHS = [0, 1, 2, 1001]
NARROW = [torch.bfloat16, torch.float16]


def values_of(rank, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def add(values, dtype):
    return sum(values[1:], start=values[0]).to(dtype).float()


def summed_once(length, dtype, run_scenario, num_ranks=3):
    """Return the sum over ranks, rounded once; between hosts that of the sums of hosts, each rounded once."""
    places = run_scenario.args[0] if isinstance(run_scenario, partial) else [0] * num_ranks
    narrow = [(place, values_of(rank, length).to(dtype).float()) for rank, place in enumerate(places[:num_ranks])]
    return add([add([values for at, values in narrow if at == place], dtype) for place in dict(narrow)], dtype)


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
    expected = [summed_once(length, dtype, run_scenario, num_ranks).tolist() for length in LENGTHS for dtype in NARROW]
    assert run_scenario(all_reduce, num_ranks) == [expected] * num_ranks


class StartedCollectives:
    """A fabric that notes which collectives are started, with the dtype and the length of their tensors."""

    def __init__(self, fabric):
        self.fabric, self.started = fabric, []

    def __getattr__(self, name):
        method = getattr(self.fabric, name)
        if name not in {"all_reduce", "reduce_scatter", "all_gather"}:
            return method

        def start(label, tensor, *args):
            self.started.append((name, tensor.dtype, len(tensor)))
            return method(label, tensor, *args)

        return start


def started_of_sums(fabric):
    """Return what is started for the sum of a cast, and for one of a tensor in 16 bits."""
    group, noting = tuple(range(fabric.num_ranks)), cast("Any", StartedCollectives(fabric))
    whole, narrow = torch.ones(12), torch.ones(12).bfloat16()
    start_cast_all_reduce(noting, "cast", whole, whole.bfloat16(), group).wait()
    start_cast_all_reduce(noting, "narrow", narrow, narrow, group).wait()
    assert whole.tolist() == narrow.tolist() == [float(len(group))] * 12
    return noting.started


@pytest.mark.long(quick=["2-shm-True", "2-gloo-False", "3-local-True"])
@pytest.mark.parametrize(
    ("transport", "own"), [("local", True), ("shm", True), ("gloo", False), ("process_group", False)]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_has_a_second_step_or_length_only_where_an_all_reduce_would_send_32_bits(num_ranks, transport, own):
    """One that is gathered overlaps with the backward only in its first step, and a pair needs two lengths."""
    run = {"local": on_local, "shm": on_shm, "gloo": on_gloo, "process_group": on_process_groups}[transport]
    one_step, pair = [("all_reduce", torch.bfloat16, 12)], [("all_gather", torch.bfloat16, 24)]
    two_steps = [(name, torch.bfloat16, 12) for name in ("reduce_scatter", "all_gather")]
    expected = one_step if own else pair if num_ranks == 2 else two_steps
    assert run(started_of_sums, num_ranks) == [2 * expected] * num_ranks


BOUNDS = [0, 2, 2, 7]


def reduce_scatter(fabric):
    whole = values_of(fabric.rank, BOUNDS[-1])
    start_cast_reduce_scatter(fabric, "sum", whole, whole.bfloat16(), BOUNDS, TRIO).wait()
    return whole.tolist()


@pytest.mark.long(quick=["local", "shm", "gloo"])
def test_a_reduce_scatter_writes_the_own_range_only(run_scenario):
    total, results = summed_once(BOUNDS[-1], torch.bfloat16, run_scenario), run_scenario(reduce_scatter, 3)
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
