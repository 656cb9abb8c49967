"""What a strategy promises to save is not there: memory is looked at between all calls of a row."""

import pytest

from tests.runtime.local_ranks import build_team, chain, flat_params_of, make_batch, observe_calls, storage_bytes

LAYER_BYTES = 8 * (6 * 6 + 6)


def weight_bytes(rank):
    return sum(storage_bytes(arena.weights) for arena in flat_params_of(rank))


def gradient_bytes(rank):
    return sum(storage_bytes(arena.gradient) for arena in flat_params_of(rank))


def part_bytes(rank):
    return sum(storage_bytes(arena.part) for arena in flat_params_of(rank) if arena.gradient is None)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_level_3_has_the_weights_of_one_block_at_a_time_and_none_in_between(num_microbatches):
    with build_team("zero(2, level=3)", num_microbatches=num_microbatches) as one:
        assert [weight_bytes(rank) for rank in one.ranks.values()] == [0, 0]
        seen = observe_calls(one, weight_bytes)
    assert [max(sizes) for sizes in seen.values()] == [LAYER_BYTES, LAYER_BYTES]
    assert [sizes[-1] for sizes in seen.values()] == [0, 0]


def test_level_3_keeps_a_share_of_the_weights_of_every_block():
    with build_team("zero(2, level=3)") as one:
        kept = [sum(storage_bytes(arena.local_shard) for arena in flat_params_of(rank)) for rank in one.ranks.values()]
    assert kept == [4 * LAYER_BYTES // 2] * 2


@pytest.mark.parametrize("level", [2, 3])
def test_from_level_2_gradients_are_freed_after_each_backward(level):
    """Level 2 does not cut the model, so there is one gradient for all of it; level 3 has one block's at a time."""
    with build_team(f"zero(2, level={level})", num_microbatches=2) as one:
        seen = observe_calls(one, lambda rank: (gradient_bytes(rank), part_bytes(rank)))
    most = LAYER_BYTES if level == 3 else 4 * LAYER_BYTES
    for sizes in seen.values():
        assert max(flat for flat, _ in sizes) == most
        assert sizes[-1] == (0, 0)
        assert max(part for _, part in sizes) == 4 * LAYER_BYTES // 2


def test_level_1_keeps_gradients_and_shares_optimizer_state_only():
    with build_team("zero(2, level=1)", num_microbatches=2, share_params_on_host=False) as one:
        seen = observe_calls(one, gradient_bytes)
        states = [
            sum(value.numel() for run in rank.interpreter.store.optimizers.values() for tensor in run[1]
                for key, value in run[0].state[tensor].items() if key.startswith("exp_avg"))
            for rank in one.ranks.values()
        ]  # fmt: skip
    assert [max(sizes) for sizes in seen.values()] == [4 * LAYER_BYTES] * 2
    assert states == [2 * 4 * 42 // 2] * 2


def alive(rank):
    """The microbatches of which activations are kept for a backward."""
    return len({micro for _, micro in rank.interpreter.compute.tapes})


@pytest.mark.parametrize(
    ("order", "most"), [("gpipe", [8, 8, 8, 8]), ("one_f_one_b", [4, 3, 2, 1])], ids=["gpipe", "1f1b"]
)
def test_a_pipeline_keeps_as_many_microbatches_as_its_order_promises(order, most):
    with build_team(f"pipeline(4, schedule={order})", num_microbatches=8, model=chain(4)) as one:
        seen = observe_calls(one, alive)
    assert [max(counts) for counts in seen.values()] == most


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(4)", "pipeline(2) * data(2)"])
def test_after_a_step_no_activation_is_kept(plan):
    with build_team(plan, num_microbatches=2) as one:
        observe_calls(one, alive)
        for rank in one.ranks.values():
            compute = rank.interpreter.executor
            assert not compute.saved
            assert not compute.values
            assert not compute.grads


def test_a_rank_of_a_pipeline_holds_its_own_stage_only():
    with build_team("pipeline(4)", num_microbatches=4) as one:
        names = [sorted(rank.interpreter.store.params) for rank in one.ranks.values()]
    assert names == [[f"{stage}.0.bias", f"{stage}.0.weight"] for stage in range(4)]


def test_a_gradient_that_nobody_else_needs_has_no_buffer():
    with build_team("pipeline(2)", num_microbatches=2) as one:
        assert [flat_params_of(rank) for rank in one.ranks.values()] == [[], []]


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=2)", "zero(2, level=3)", "server(2)"])
def test_a_step_that_is_left_out_frees_its_gradients(plan):
    with build_team(plan, nonfinite="skip", share_params_on_host=False) as one:
        spoilt = make_batch(one.global_num_microbatches)
        spoilt.batch[1][0] = float("nan")
        assert one.step(0, spoilt).skip_reason.startswith("the loss of microbatch 0 on rank 0 is nan")
        for rank in one.ranks.values():
            assert gradient_bytes(rank) == part_bytes(rank) == 0
            assert all(param.grad is None for param in rank.interpreter.store.params.values())
