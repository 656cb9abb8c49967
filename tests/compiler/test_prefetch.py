"""Weights are gathered and gradients reduced during computations, without changing results."""

import pytest

from counterpoint.compiler.compile import message_size_fn
from counterpoint.compiler.prefetch import prefetch
from counterpoint.program.instruction import Backward, Collective, Forward, Free, Recompute, TensorRef
from counterpoint.program.text import format_program, parse_program
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Cluster, Device, Link
from tests.program.verify.random_plans import compile_text

PASSES = ("overlap", "prefetch")
UNIT_BYTES = 4 * 256 * 256


def early(text, depth=1):
    return format_program(prefetch(parse_program(text), depth))


def test_a_gather_starts_before_the_computation_in_front():
    assert early("all_gather(weight0)@0 F0.0 free(weight0) all_gather(weight1)@0 F1.0 free(weight1)") == (
        "all_gather(weight0)@0 all_gather_start(weight1)@0 F0.0 free(weight0) all_gather_wait(weight1)@0 F1.0 free(weight1)"
    )


def test_two_gathers_are_under_way_during_a_computation_with_depth_2():
    text = " ".join(f"all_gather(weight{block})@0 F{block}.0 free(weight{block})" for block in range(4))
    assert early(text, depth=2) == (
        "all_gather(weight0)@0 all_gather_start(weight1)@0 all_gather_start(weight2)@0 F0.0 free(weight0) "
        "all_gather_wait(weight1)@0 all_gather_start(weight3)@0 F1.0 free(weight1) "
        "all_gather_wait(weight2)@0 F2.0 free(weight2) all_gather_wait(weight3)@0 F3.0 free(weight3)"
    )


def test_depth_0_changes_nothing():
    text = "all_gather(weight0)@0 F0.0 free(weight0) all_gather(weight0)@0 B0.0 reduce_scatter(grad0)@0 free(grad0) free(weight0)"
    assert early(text, depth=0) == text


@pytest.mark.parametrize(("depth", "is_kept"), [(1, False), (2, True)])
def test_weights_whose_next_gather_would_start_at_once_are_not_freed(depth, is_kept):
    text = "all_gather(weight0)@0 F0.0 free(weight0) F1.0 B1.0 all_gather(weight0)@0 B0.0 free(weight0)"
    kept = "all_gather(weight0)@0 F0.0 F1.0 B1.0 B0.0 free(weight0)"
    assert (early(text, depth) == kept) is is_kept


def test_what_is_needed_next_is_not_freed():
    assert early("all_gather(weight0)@0 F0.0 free(weight0) all_gather(weight0)@0 B0.0 free(weight0)") == (
        "all_gather(weight0)@0 F0.0 B0.0 free(weight0)"
    )


def test_a_gradient_is_awaited_after_the_next_backward_has_started_its_own_reduction():
    assert early("B1.0 reduce_scatter(grad1)@0 free(grad1) B0.0 reduce_scatter(grad0)@0 free(grad0) commit@0") == (
        "B1.0 reduce_scatter_start(grad1)@0 B0.0 reduce_scatter_start(grad0)@0 reduce_scatter_wait(grad1)@0 free(grad1) "
        "reduce_scatter_wait(grad0)@0 free(grad0) commit@0"
    )


@pytest.mark.parametrize(
    "text",
    [
        "F0.0 commit@0 U0 all_gather(weight0)@0 F0.1",
        "F0.0 B0.0 commit@0 U0 all_gather(weight0)@0",
        "B0.0 reduce_scatter(grad0)@0 commit@0 U0",
    ],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_gathers_stay_behind_updates_and_gradients_that_are_kept_are_not_awaited_later(text, depth):
    assert early(text, depth) == text


def test_a_gather_starts_right_after_an_update_that_is_nearer_than_its_depth():
    assert early("F0.0 commit@0 U0 U1 F0.1 F1.1 all_gather(weight2)@0 F2.1", depth=3) == (
        "F0.0 commit@0 U0 U1 all_gather_start(weight2)@0 F0.1 F1.1 all_gather_wait(weight2)@0 F2.1"
    )


def test_one_gather_of_the_last_block_is_saved_in_each_microbatch_and_one_of_the_first_between_two():
    before, after = (compile_text("zero(2, level=3)", m=2, blocks=4, passes=one) for one in (("overlap",), PASSES))
    size = UNIT_BYTES // 2
    saved = before.sent_bytes()[0] - after.sent_bytes()[0]
    assert saved == 3 * size
    assert before.sent_bytes()[0] == 3 * 2 * 4 * size


def deep(depth, blocks=8):
    return compile_text("zero(2, level=3)", m=2, blocks=blocks, passes=("overlap", f"prefetch:{depth}"))


def test_a_larger_depth_saves_gathers_of_more_blocks_where_the_order_of_blocks_turns():
    """Twice in each of two microbatches, but after the last one: each two computations more keep one block more."""
    saved = [16 * 3 - deep(depth).sent_bytes()[0] / (UNIT_BYTES // 2) for depth in range(6)]
    assert saved == [0, 3, 6, 6, 9, 9]


def most_whole_units(instructions):
    """Return of how many units weights are gathered or on their way, at most, during a computation."""
    whole, most = set(), 0
    for instruction in instructions:
        match instruction:
            case Collective("all_gather", TensorRef("weight", unit), phase="" | "start"):
                whole.add(unit)
            case Free(TensorRef("weight", unit)):
                whole.remove(unit)
            case Forward() | Recompute() | Backward():
                most = max(most, len(whole))
            case _:
                pass
    assert not whole
    return most


@pytest.mark.parametrize("recompute", [(), ("recompute",)])
@pytest.mark.parametrize("text", ["zero(2, level=3)", "pipeline(2) * zero(2, level=3)", "zero(2, level=3) * data(2)"])
@pytest.mark.parametrize("depth", range(6))
def test_no_more_units_are_whole_than_the_depth_and_the_one_that_computes(text, depth, recompute):
    passes = ("overlap", f"prefetch:{depth}", *recompute)
    program = compile_text(text, m=2, blocks=8, passes=passes).program
    most = max(most_whole_units(rank_program.body) for rank_program in program.rank_programs)
    assert most <= depth + 1
    if not recompute and "pipeline" not in text:
        assert most == depth + 1


def test_the_predicted_peak_has_one_more_unit_for_each_depth():
    def peak(depth):
        compiled = deep(depth)
        return peak_memory_bytes(compiled.program, without_activations(message_size_fn(compiled.model, 1)))[0]

    assert [peak(depth + 1) - peak(depth) for depth in range(1, 4)] == [UNIT_BYTES] * 3


def without_activations(size_of):
    return lambda tensor, codec="": size_of(tensor, codec) if tensor.micro is None and tensor.name != "g" else 0


@pytest.mark.parametrize("bytes_per_s", [1e7, 5e7])
@pytest.mark.parametrize("recompute", [(), ("recompute",)])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_simulated_step_on_a_slow_link_is_shorter_with_a_larger_depth(num_microbatches, recompute, bytes_per_s):
    def step_s(*passes):
        options = {"m": num_microbatches, "blocks": 8, "passes": ("overlap", *passes, *recompute)}
        compiled = compile_text("zero(4, level=3)", **options)
        cluster = Cluster(Device(cost_per_s=1e3), Link(1e-5, bytes_per_s))
        sizes = message_size_fn(compiled.model, 1)
        return simulate(compiled.program, analytic_costs(compiled.model, cluster, sizes), cluster).step_s

    assert step_s("prefetch:2") < step_s("prefetch") < step_s()
