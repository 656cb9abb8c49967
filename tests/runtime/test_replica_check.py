"""Replicas that were changed outside of updates are found at the next commit, by parameter name."""

from functools import partial

import pytest
import torch
from torch import nn, optim

import counterpoint as cp
from counterpoint.runtime.commit.replica_check import sum_bits
from tests.mistakes.documented import documented_messages
from tests.runtime.local_ranks import WIDTH, build_local_ranks, chain, make_batch

REPLICATED = ["data(3)", "data(3, compress=int8)", "pipeline(2) * data(2)", "zero(2, level=2) * data(2)"]


def change_weight(local_ranks, rank, amount=0.5):
    """Change one weight of a rank that it updates."""
    unit = next(
        unit for unit in local_ranks.ranks[rank].interpreter.store.units.values() if unit.role.update_shard is not None
    )
    unit.optimizer_targets(local_ranks.optimizer_spec)[0][1].data.view(-1)[3] += amount


def run_steps(local_ranks, *values):
    for number in values:
        local_ranks.step(number, make_batch(local_ranks.global_num_microbatches))


@pytest.mark.parametrize("plan", REPLICATED)
def test_a_replica_with_changed_weights_is_found_in_the_next_step(plan):
    with build_local_ranks(plan, share_params_on_host=False) as local_ranks:
        run_steps(local_ranks, 0)
        change_weight(local_ranks, 1)
        with pytest.raises(
            cp.DataError, match=r"^replicas differ in step 1, first in \d.0.weight, whose value on "
        ) as fault:
            run_steps(local_ranks, 1)
    assert "an in-place change in a callback or in the model; change weights equally on all ranks" in str(fault.value)


def test_the_message_names_the_rank_that_differs_from_the_others_first():
    with build_local_ranks("data(3)", share_params_on_host=False) as local_ranks:
        change_weight(local_ranks, 2)
        with pytest.raises(
            cp.DataError, match=r"^replicas differ .* first in 0.0.weight, whose value on rank 2 is not that on"
        ):
            run_steps(local_ranks, 0)


def test_weights_that_differ_by_rounding_are_reported_once_and_training_continues():
    with build_local_ranks("data(2)", share_params_on_host=False) as local_ranks:
        run_steps(local_ranks, 0)
        change_weight(local_ranks, 1, 1e-14)
        with pytest.warns(RuntimeWarning) as warned:
            run_steps(local_ranks, 1, 2)
    assert {str(warning.message) for warning in warned} == {documented_messages("Replicas that differ")[1]}
    assert len(warned) == len(local_ranks.ranks)


def test_a_large_model_is_checked_part_by_part():
    wide = nn.Sequential(nn.Linear(WIDTH, 40000), nn.Linear(40000, WIDTH)).double()
    with build_local_ranks(
        "data(2)", model=wide, optimizer=partial(optim.SGD, lr=0.0), share_params_on_host=False
    ) as local_ranks:
        local_ranks.ranks[1].interpreter.store.params["1.bias"].data[0] += 1
        parts = local_ranks.ranks[1].interpreter.replica_checksum.parts
        run_steps(local_ranks, *range(len(parts) - 1))
        with pytest.raises(
            cp.DataError, match=r"^replicas differ in step \d, first in 1.bias, whose value on rank 1 is"
        ):
            run_steps(local_ranks, len(parts) - 1)


@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=3)", "data(2, sync_every=2)", "server(2)", "tensor(2)"])
def test_ranks_without_replicas_are_not_compared(plan):
    with build_local_ranks(plan, model=chain(4)) as local_ranks:
        assert [rank.interpreter.replica_checksum.parts for rank in local_ranks.ranks.values()] == [[]] * len(
            local_ranks.ranks
        )
        run_steps(local_ranks, 0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex128])
def test_bits_of_every_dtype_are_compared(dtype):
    values = torch.tensor([1.0, float("nan"), -2.0]).to(dtype)
    other = values.clone()
    assert sum_bits(values) == sum_bits(other)
    other[2] = 2.0
    assert sum_bits(values) != sum_bits(other)
