"""Memory that a strategy saves is not allocated, at any point between the calls of a program."""

import pytest

from tests.runtime.local_ranks import build_local_ranks, chain, flat_params_of, make_batch, observe_calls, storage_bytes

LAYER_BYTES = 8 * (6 * 6 + 6)


def weight_bytes(rank):
    return sum(storage_bytes(flat_params.weights) for flat_params in flat_params_of(rank))


def grad_bytes(rank):
    return sum(storage_bytes(flat_params.own_grads.flat) for flat_params in flat_params_of(rank))


def shard_bytes(rank):
    return sum(
        storage_bytes(flat_params.own_grads.shard)
        for flat_params in flat_params_of(rank)
        if flat_params.own_grads.flat is None
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_level_3_has_the_weights_of_one_block_at_a_time_and_none_in_between(num_microbatches):
    with build_local_ranks("zero(2, level=3)", num_microbatches=num_microbatches) as local_ranks:
        assert [weight_bytes(rank) for rank in local_ranks.ranks.values()] == [0, 0]
        observed = observe_calls(local_ranks, weight_bytes)
    assert [max(sizes) for sizes in observed.values()] == [LAYER_BYTES, LAYER_BYTES]
    assert [sizes[-1] for sizes in observed.values()] == [0, 0]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prefetched_weights_are_those_of_at_most_depth_blocks_beside_the_one_that_computes(depth, num_microbatches):
    passes = ("overlap", f"prefetch:{depth}")
    with build_local_ranks("zero(2, level=3)", num_microbatches=num_microbatches, passes=passes) as local_ranks:
        observed = observe_calls(local_ranks, weight_bytes)
    assert [max(sizes) for sizes in observed.values()] == [(depth + 1) * LAYER_BYTES] * 2
    assert [sizes[-1] for sizes in observed.values()] == [0, 0]


def test_level_3_keeps_a_shard_of_the_weights_of_every_block():
    with build_local_ranks("zero(2, level=3)") as local_ranks:
        kept = [
            sum(storage_bytes(flat_params.local_shard) for flat_params in flat_params_of(rank))
            for rank in local_ranks.ranks.values()
        ]
    assert kept == [4 * LAYER_BYTES // 2] * 2


@pytest.mark.parametrize("level", [2, 3])
def test_from_level_2_gradients_are_freed_after_each_backward(level):
    """Level 2 does not partition the model, so it has one gradient for all of it; level 3 has one block's at a time."""
    with build_local_ranks(f"zero(2, level={level})", num_microbatches=2) as local_ranks:
        observed = observe_calls(local_ranks, lambda rank: (grad_bytes(rank), shard_bytes(rank)))
    most = LAYER_BYTES if level == 3 else 4 * LAYER_BYTES
    for sizes in observed.values():
        assert max(flat for flat, _ in sizes) == most
        assert sizes[-1] == (0, 4 * LAYER_BYTES // 2)  # until the next step
        assert max(part for _, part in sizes) == 4 * LAYER_BYTES // 2


def test_level_1_keeps_whole_gradients_and_shards_optimizer_state_only():
    with build_local_ranks("zero(2, level=1)", num_microbatches=2, share_params_on_host=False) as local_ranks:
        observed = observe_calls(local_ranks, grad_bytes)
        states = [
            sum(value.numel() for run in rank.interpreter.store.optimizers.values() for tensor in run[1]
                for key, value in run[0].state[tensor].items() if key.startswith("exp_avg"))
            for rank in local_ranks.ranks.values()
        ]  # fmt: skip
    assert [max(sizes) for sizes in observed.values()] == [4 * LAYER_BYTES] * 2
    assert states == [2 * 4 * 42 // 2] * 2


def num_saved_microbatches(rank):
    """Return the number of microbatches with saved activations."""
    return len({micro for _, micro in rank.interpreter.executor.saved})


@pytest.mark.parametrize(
    ("schedule", "most"), [("gpipe", [8, 8, 8, 8]), ("one_f_one_b", [4, 3, 2, 1])], ids=["gpipe", "1f1b"]
)
def test_a_pipeline_saves_activations_of_as_many_microbatches_as_its_schedule_bounds(schedule, most):
    with build_local_ranks(f"pipeline(4, schedule={schedule})", num_microbatches=8, model=chain(4)) as local_ranks:
        observed = observe_calls(local_ranks, num_saved_microbatches)
    assert [max(counts) for counts in observed.values()] == most


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(4)", "pipeline(2) * data(2)"])
def test_after_a_step_no_activation_is_kept(plan):
    with build_local_ranks(plan, num_microbatches=2) as local_ranks:
        observe_calls(local_ranks, num_saved_microbatches)
        for rank in local_ranks.ranks.values():
            executor = rank.interpreter.executor
            assert not executor.saved
            assert not executor.values
            assert not executor.grads


def test_a_rank_of_a_pipeline_holds_its_own_stage_only():
    with build_local_ranks("pipeline(4)", num_microbatches=4) as local_ranks:
        names = [sorted(rank.interpreter.store.params) for rank in local_ranks.ranks.values()]
    assert names == [[f"{stage}.0.bias", f"{stage}.0.weight"] for stage in range(4)]


def test_a_gradient_that_no_other_rank_needs_has_no_flat_buffer():
    with build_local_ranks("pipeline(2)", num_microbatches=2) as local_ranks:
        assert [flat_params_of(rank) for rank in local_ranks.ranks.values()] == [[], []]


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=2)", "zero(2, level=3)", "server(2)"])
def test_a_skipped_step_frees_its_gradients(plan):
    with build_local_ranks(plan, nonfinite="skip", share_params_on_host=False) as local_ranks:
        bad_batch = make_batch(local_ranks.global_num_microbatches)
        bad_batch.batch[1][0] = float("nan")
        assert local_ranks.step(0, bad_batch).skip_reason.startswith("the loss of microbatch 0 on rank 0 is nan")
        for rank in local_ranks.ranks.values():
            assert grad_bytes(rank) == shard_bytes(rank) == 0
            assert all(param.grad is None for param in rank.interpreter.store.params.values())
