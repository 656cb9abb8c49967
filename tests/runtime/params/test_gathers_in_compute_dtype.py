"""ZeRO-3 in mixed precision: weights are gathered in the dtype that the model computes in, with the same numbers."""

import pytest
import torch
from torch import nn

from counterpoint.errors import DataError, PlanError
from counterpoint.model.precision import Precision
from counterpoint.partitioning.module_casts import ModuleCasts
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.runtime.state_dict import gather_weights
from tests.runtime.comm.test_bytes_sent import RingFabric
from tests.runtime.local_ranks import (
    build_local_ranks,
    chain,
    flat_params_of,
    make_batch,
    observe_calls,
    storage_bytes,
)

ZERO3 = "zero(2, level=3)"
WIDE, NARROW = torch.float64.itemsize, torch.bfloat16.itemsize


def with_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6)).double()


class ReadsItself(nn.Module):
    """A layer whose weight is read without a cast, too: in evaluation, or for long inputs."""

    def __init__(self, *, in_evaluation=True):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.in_evaluation = nn.Linear(6, 6).double(), in_evaluation

    def forward(self, x):
        reads_itself = not self.training if self.in_evaluation else len(x) > 4
        weight = dict(self.inner.named_parameters())["weight"] if reads_itself else self.inner.weight
        return self.inner(x) * weight.mean()


def steps(plan, model, num_steps=3, **options):
    """Return the losses of a few steps, and the weights after them."""
    with build_local_ranks(plan, model=model, **options) as one:
        for rank in one.ranks.values():
            rank.interpreter.communication.fabric = RingFabric(rank.interpreter.fabric)
        losses = [one.step(number, make_batch(2)).loss for number in range(num_steps)]
        sent = sum(rank.interpreter.communication.fabric.sent for rank in one.ranks.values())
        shard_map = one.shard_map()
        weights = one.world.run(lambda fabric: gather_weights(shard_map, one.ranks[fabric.rank], fabric))[0]
        return losses, weights, sent


@pytest.mark.long
def test_gathers_send_the_bytes_of_the_compute_dtype():
    """Two of three collectives on each weight are gathers, the third is the reduce-scatter of its gradient."""
    sent = {precision: steps(ZERO3, chain(4), precision=precision)[2] for precision in (None, "bf16", "fp16")}
    assert sent["bf16"] == sent["fp16"] == sent[None] * (2 * NARROW + WIDE) // (3 * WIDE) > 0


def test_weights_that_are_read_in_their_own_dtype_are_gathered_in_it():
    with build_local_ranks(ZERO3, model=with_norm(), precision="bf16") as one:
        read = {
            name: flat_params.layout.read_dtype
            for flat_params in flat_params_of(one.ranks[0])
            for name in flat_params.params
        }
    narrow = dict.fromkeys(("0.weight", "0.bias", "3.weight", "3.bias"), torch.bfloat16)
    assert read == {**narrow, "1.weight": None, "1.bias": None}


def test_no_whole_weight_exists_in_the_master_dtype_during_a_step():
    def observe(rank):
        flats = flat_params_of(rank)
        return (
            sum(storage_bytes(one.weights) for one in flats),
            sum(storage_bytes(one.read_weights) for one in flats),
        )

    with build_local_ranks(ZERO3, model=chain(4), precision="bf16") as one:
        seen = observe_calls(one, observe)[0]
    largest_block = (6 * 6 + 6) * NARROW
    assert {wide for wide, _ in seen} == {0}
    assert max(narrow for _, narrow in seen) == largest_block
    assert seen[-1] == (0, 0)


@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=2)", "pipeline(2)"])
def test_plans_that_keep_their_weights_have_one_buffer_for_each_dtype(plan):
    with build_local_ranks(plan, model=with_norm(), precision="bf16") as one:
        flats = flat_params_of(one.ranks[0])
        assert all(flat_params.layout.read_dtype is None for flat_params in flats)


def test_an_evaluation_that_reads_the_master_weights_gathers_them():
    def evaluate(plan):
        with build_local_ranks(plan, model=ReadsItself(), precision="bf16") as one:
            one.step(0, make_batch(2))
            totals = one.evaluate(make_batch(2), None, 1)
        return sum(parts["loss"].total for parts in totals.values())

    assert evaluate(ZERO3) == pytest.approx(evaluate("data(2)"), rel=1e-12)


def test_inputs_for_which_a_weight_is_read_in_another_dtype_are_refused():
    model = ReadsItself(in_evaluation=False)
    casts = ModuleCasts(model, Precision("bf16"))
    partition = TracedPartition(model, (torch.zeros(2, 6, dtype=torch.float64),))
    assert partition.read_dtypes(training=True) == dict.fromkeys(("inner.weight", "inner.bias"), torch.bfloat16)
    with pytest.raises(PlanError, match=r"reads inner.weight in another dtype than for"):
        partition.split_trace(training=True, input_shapes=((6, 6),))
    casts.remove()


class Penalized(nn.Linear):
    """A child of a Sequential that reads its parameters without a cast, too: in every step, or when it is told to."""

    iterates = True

    def forward(self, x):
        penalty = sum(param.square().mean() for param in self.parameters()) if self.iterates else 0.0
        return super().forward(x) + penalty


def with_penalty():
    torch.manual_seed(0)
    return nn.Sequential(Penalized(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


@pytest.mark.parametrize("model", [with_norm, with_penalty])
def test_weights_are_those_of_replicas_that_cast_whole_weights(model):
    """The second model iterates over its parameters, so that it must get master weights."""
    losses, weights, _ = steps(ZERO3, model(), precision="bf16")
    expected_losses, expected, _ = steps("data(2)", model(), precision="bf16")
    assert losses == expected_losses
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-12, atol=0.0)


def test_a_child_that_begins_to_iterate_over_gathered_casts_is_refused(monkeypatch):
    monkeypatch.setattr(Penalized, "iterates", False)
    with build_local_ranks(ZERO3, model=with_penalty(), precision="bf16") as one:
        one.step(0, make_batch(2))
        monkeypatch.setattr(Penalized, "iterates", True)
        with pytest.raises(DataError, match=r"reads 0\.(weight|bias) without a cast, as iterating over parameters"):
            one.step(1, make_batch(2))
