"""Replicas that something else than an update has changed are found at the next commit, by name."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.runtime.replica_check import sum_bits
from tests.mistakes.documented import documented_messages
from tests.runtime.local_ranks import WIDTH, build_team, chain, make_batch

APART = ["data(3)", "data(3, compress=int8)", "pipeline(2) * data(2)", "zero(2, level=2) * data(2)"]


def changed(one, rank, amount=0.5):
    """Change one weight of a rank that it updates."""
    unit = next(unit for unit in one.ranks[rank].interpreter.store.units.values() if unit.role.span is not None)
    unit.targets(one.face)[0][1].data.view(-1)[3] += amount


def steps(one, *numbers):
    for number in numbers:
        one.step(number, make_batch(one.num_micros))


@pytest.mark.parametrize("plan", APART)
def test_a_replica_whose_weights_somebody_changed_is_found_in_the_next_step(plan):
    with build_team(plan, share_params_on_host=False) as one:
        steps(one, 0)
        changed(one, 1)
        with pytest.raises(cp.DataError, match=r"^replicas differ in step 1, first in \d.0.weight, which on ") as fault:
            steps(one, 1)
    assert "in a callback or in the model's own code; change weights on all ranks alike" in str(fault.value)


def test_the_rank_that_is_unlike_the_others_comes_first():
    with build_team("data(3)", share_params_on_host=False) as one:
        changed(one, 2)
        with pytest.raises(cp.DataError, match=r"^replicas differ .* first in 0.0.weight, which on rank 2 is not w"):
            steps(one, 0)


def test_weights_that_differ_by_rounding_are_told_once_and_trained_on():
    with build_team("data(2)", share_params_on_host=False) as one:
        steps(one, 0)
        changed(one, 1, 1e-14)
        with pytest.warns(RuntimeWarning) as told:
            steps(one, 1, 2)
    assert {str(warning.message) for warning in told} == {documented_messages("Replicas that differ")[1]}
    assert len(told) == len(one.ranks)


def test_a_large_model_is_looked_at_part_by_part():
    wide = nn.Sequential(nn.Linear(WIDTH, 40000), nn.Linear(40000, WIDTH)).double()
    with build_team("data(2)", model=wide, optimizer=partial(optim.SGD, lr=0.0), share_params_on_host=False) as one:
        one.ranks[1].interpreter.store.params["1.bias"].data[0] += 1
        parts = one.ranks[1].interpreter.replica_checksum.parts
        steps(one, *range(len(parts) - 1))
        with pytest.raises(cp.DataError, match=r"^replicas differ in step \d, first in 1.bias, which on rank 1 is"):
            steps(one, len(parts) - 1)


@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=3)", "data(2, sync_every=2)", "server(2)", "tensor(2)"])
def test_ranks_that_hold_nothing_alike_are_not_compared(plan):
    with build_team(plan, model=chain(4)) as one:
        assert [rank.interpreter.replica_checksum.parts for rank in one.ranks.values()] == [[]] * len(one.ranks)
        steps(one, 0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex128])
def test_bits_of_every_dtype_are_compared(dtype):
    numbers = torch.tensor([1.0, float("nan"), -2.0]).to(dtype)
    other = numbers.clone()
    assert sum_bits(numbers) == sum_bits(other)
    other[2] = 2.0
    assert sum_bits(numbers) != sum_bits(other)
