"""Replicas of one host have one copy of the weights, and read each other's gradients where they lie."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.runtime.state_dict import has_full_model
from tests.runtime.local_ranks import build_team, flat_params_of, make_batch, storage_bytes

PLAN = "data(2, update=sharded)"
WIDE = 200  # a weight whose gradient is moved by itself


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 6)).double()


def stepped(plan=PLAN, steps=2, **options):
    with build_team(plan, model=wide(), **options) as one:
        for number in range(steps):
            one.step(number, make_batch(one.global_num_microbatches))
        one.export_weights()
        return torch.cat([param.detach().reshape(-1) for param in one.model.parameters()])


def test_all_replicas_compute_with_the_same_memory():
    with build_team(PLAN) as one:
        one.step(0, make_batch(one.global_num_microbatches))
        places = {param.data_ptr() for rank in one.ranks.values() for param in rank.interpreter.store.params.values()}
        assert len(places) == len(list(one.model.parameters()))


def test_there_is_one_copy_of_weights_and_one_gradient_for_each_replica():
    with build_team("data(4, update=sharded)") as one:
        one.step(0, make_batch(one.global_num_microbatches))
        every = [arena for rank in one.ranks.values() for arena in flat_params_of(rank)]
        (weights,) = {(storage_bytes(arena.weights), arena.weights.data_ptr()) for arena in every}
        (gradients,) = {
            (storage_bytes(arena.shared.local_grad), arena.shared.replica_grads[0].data_ptr()) for arena in every
        }
        row = -(-sum(param.numel() for param in one.model.parameters()) // 8) * 8
        assert weights[0] + gradients[0] == (4 + 1) * row * 8


def test_after_a_run_the_model_has_memory_of_its_own():
    with build_team(PLAN) as one:
        one.step(0, make_batch(one.global_num_microbatches))
        inside = {param.data_ptr() for param in one.model.parameters()}
        one.export_weights()
        assert inside.isdisjoint(param.data_ptr() for param in one.model.parameters())
        assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in one.model.parameters())


@pytest.mark.parametrize(
    ("plan", "has"),
    [("data(2)", True), (PLAN, True), ("zero(2, level=1)", True), ("zero3(2)", False), ("pipeline(2)", False)],
)
def test_weights_are_gathered_only_where_a_rank_has_not_all_of_them(plan, has):
    with build_team(plan, model=wide()) as one:
        assert has_full_model(one.shard_map()) == has


def test_a_run_goes_on_after_the_model_was_given_back():
    with build_team(PLAN) as one:
        for number in range(4):
            one.step(number, make_batch(one.global_num_microbatches))
            one.export_weights()
            one.import_weights()
        mixed = torch.cat([param.detach().reshape(-1) for param in one.model.parameters()])
    with build_team(PLAN, share_params_on_host=False) as one:
        for number in range(4):
            one.step(number, make_batch(one.global_num_microbatches))
        one.export_weights()
        assert torch.allclose(mixed, torch.cat([param.detach().reshape(-1) for param in one.model.parameters()]))


# What a gradient of nothing but rounding is divided by decides its update: with an epsilon of 1e-8 it is a hundred
# million times as large, and two orders of adding the same numbers are no longer alike to 1e-12.
WELL_CONDITIONED = [optim.SGD, partial(optim.Adam, eps=1e-3), partial(optim.RMSprop, eps=1e-3)]


@pytest.mark.parametrize("optimizer", WELL_CONDITIONED, ids=["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_memory_in_common_changes_nothing(optimizer, clip_norm, num_microbatches):
    given = {"optimizer": partial(optimizer, lr=0.05), "clip_norm": clip_norm, "num_microbatches": num_microbatches}
    apart, together = (stepped(share_params_on_host=one_copy, **given) for one_copy in (False, True))
    assert torch.allclose(together, apart, rtol=1e-12, atol=1e-14)


def test_a_step_that_is_left_out_changes_nothing():
    with build_team(PLAN, nonfinite="skip") as one:
        spoilt = make_batch(one.global_num_microbatches)
        spoilt.batch[1][0] = float("nan")
        before = [param.detach().clone() for param in one.model.parameters()]
        assert one.step(0, spoilt).skip_reason
        assert all(torch.equal(param, old) for param, old in zip(one.model.parameters(), before, strict=True))
        one.step(1, make_batch(one.global_num_microbatches))
        assert not any(torch.equal(param, old) for param, old in zip(one.model.parameters(), before, strict=True))


class Renormed(nn.Module):
    """A table whose rows a forward shortens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(4, 6, max_norm=1.0).double()

    def forward(self, x):
        return self.table(x.sum(1).long().abs() % 4) + x


def test_weights_that_a_forward_changes_are_not_shared():
    with build_team("data(2)", model=Renormed()) as one:
        one.step(0, make_batch(one.global_num_microbatches))
        assert str(one.plan) == "data(2)"
        places = {param.data_ptr() for rank in one.ranks.values() for param in rank.interpreter.store.params.values()}
        assert len(places) == 2
