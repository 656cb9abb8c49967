"""Replicas of one host share one copy of the weights, and read each other's gradients in memory."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.runtime.state_dict import has_full_model
from tests.runtime.local_ranks import build_local_ranks, flat_params_of, make_batch, storage_bytes

PLAN = "data(2, update=sharded)"
WIDE = 200  # a weight whose gradient is collected by itself


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 6)).double()


def train(plan=PLAN, steps=2, **options):
    with build_local_ranks(plan, model=wide(), **options) as local_ranks:
        for number in range(steps):
            local_ranks.step(number, make_batch(local_ranks.global_num_microbatches))
        local_ranks.export_weights()
        return torch.cat([param.detach().reshape(-1) for param in local_ranks.model.parameters()])


def test_all_replicas_compute_with_the_same_memory():
    with build_local_ranks(PLAN) as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        addresses = {
            param.data_ptr() for rank in local_ranks.ranks.values() for param in rank.interpreter.store.params.values()
        }
        assert len(addresses) == len(list(local_ranks.model.parameters()))


def test_there_is_one_copy_of_weights_and_one_gradient_for_each_replica():
    with build_local_ranks("data(4, update=sharded)") as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        all_flat_params = [flat_params for rank in local_ranks.ranks.values() for flat_params in flat_params_of(rank)]
        (weights,) = {
            (storage_bytes(flat_params.weights), flat_params.weights.data_ptr()) for flat_params in all_flat_params
        }
        (grads,) = {
            (storage_bytes(flat_params.grads.local_grad), flat_params.grads.replica_grads[0].data_ptr())
            for flat_params in all_flat_params
        }
        padded = -(-sum(param.numel() for param in local_ranks.model.parameters()) // 8) * 8
        assert weights[0] + grads[0] == (4 + 1) * padded * 8


def test_after_a_run_the_model_has_memory_of_its_own():
    with build_local_ranks(PLAN) as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        params = [param for rank in local_ranks.ranks.values() for param in rank.interpreter.store.params.values()]
        shared = {param.data_ptr() for param in params}
        local_ranks.export_weights()
        assert shared.isdisjoint(param.data_ptr() for param in (*params, *local_ranks.model.parameters()))
        assert not any(param._post_accumulate_grad_hooks for param in local_ranks.model.parameters())


@pytest.mark.parametrize(
    ("plan", "has"),
    [("data(2)", True), (PLAN, True), ("zero(2, level=1)", True), ("zero3(2)", False), ("pipeline(2)", False)],
)
def test_weights_are_gathered_only_if_a_rank_lacks_some(plan, has):
    with build_local_ranks(plan, model=wide()) as local_ranks:
        assert has_full_model(local_ranks.shard_map()) == has


def test_a_run_continues_after_weights_were_exported():
    with build_local_ranks(PLAN) as local_ranks:
        for number in range(4):
            local_ranks.step(number, make_batch(local_ranks.global_num_microbatches))
            local_ranks.export_weights()
            local_ranks.import_weights()
        mixed = torch.cat([param.detach().reshape(-1) for param in local_ranks.model.parameters()])
    with build_local_ranks(PLAN, share_params_on_host=False) as local_ranks:
        for number in range(4):
            local_ranks.step(number, make_batch(local_ranks.global_num_microbatches))
        local_ranks.export_weights()
        assert torch.allclose(
            mixed, torch.cat([param.detach().reshape(-1) for param in local_ranks.model.parameters()])
        )


# A gradient that is only rounding noise is divided by epsilon: with 1e-8 its update is 1e8 times as large, and two orders
# of summation no longer agree to 1e-12.
WELL_CONDITIONED = [optim.SGD, partial(optim.Adam, eps=1e-3), partial(optim.RMSprop, eps=1e-3)]


@pytest.mark.long(quick=["1-None-SGD", "1-0.01-Adam", "3-None-RMSprop"])
@pytest.mark.parametrize("optimizer", WELL_CONDITIONED, ids=["SGD", "Adam", "RMSprop"])
@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_shared_memory_does_not_change_results(optimizer, clip_norm, num_microbatches):
    options = {"optimizer": partial(optimizer, lr=0.05), "clip_norm": clip_norm, "num_microbatches": num_microbatches}
    separate, shared = (train(share_params_on_host=is_shared, **options) for is_shared in (False, True))
    assert torch.allclose(shared, separate, rtol=1e-12, atol=1e-14)


def train_small(groups, **options):
    """Return the weights of a model of small layers, whose option groups may have another order than its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()
    params = [*model.parameters()]
    optimizer = optim.SGD([{"params": params[start::groups]} for start in range(groups)], lr=0.1)
    with build_local_ranks(PLAN, model=model, optimizer=optimizer, num_microbatches=2, **options) as local_ranks:
        for number in range(2):
            local_ranks.step(number, make_batch(local_ranks.global_num_microbatches))
        local_ranks.export_weights()
        return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@pytest.mark.parametrize("groups", [1, 2])
def test_small_gradients_are_copied_from_where_their_check_has_found_them(groups, monkeypatch):
    expected, copies = train_small(groups, check_finite="loss"), []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *pairs: copies.append(pairs))
    assert torch.equal(train_small(groups), expected)
    assert not copies


def test_a_skipped_step_changes_nothing():
    with build_local_ranks(PLAN, nonfinite="skip") as local_ranks:
        bad_batch = make_batch(local_ranks.global_num_microbatches)
        bad_batch.batch[1][0] = float("nan")
        before = [param.detach().clone() for param in local_ranks.model.parameters()]
        assert local_ranks.step(0, bad_batch).skip_reason
        assert all(torch.equal(param, old) for param, old in zip(local_ranks.model.parameters(), before, strict=True))
        local_ranks.step(1, make_batch(local_ranks.global_num_microbatches))
        assert not any(
            torch.equal(param, old) for param, old in zip(local_ranks.model.parameters(), before, strict=True)
        )
