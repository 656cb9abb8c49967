"""If nothing fits: by how much, and which change would fit; every suggestion is checked."""

from dataclasses import replace

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import choose_plan, choose_plan_from
from counterpoint.planner.memory_suggestions import PlanningProblem, suggest_changes
from counterpoint.planner.ranking import predict_plan, predict_rank_bytes
from counterpoint.world.cluster import Cluster, Device, Roofline
from tests.planner.models import layers, memory

WEIGHTS = layers(4, cost=1e9)
"""Four layers of 16 KiB of weights, and tiny activations."""


def heavy_between(num_blocks=4, output_bytes=64_000):
    """Small weights, large activations."""
    model = layers(num_blocks, width=8)
    pieces = [replace(piece, output_bytes=output_bytes, tp=None) for piece in model.layers]
    return replace(model, blocks=tuple(Block((piece,), at) for at, piece in enumerate(pieces)))


def suggestions(model, limit_bytes, plans, batch_size=16):
    problem = PlanningProblem(model, memory(limit_bytes), batch_size)
    result = [predict_plan(plan, model, memory(limit_bytes), batch_size=batch_size) for plan in plans]
    assert not any(one.fits for one in result)
    return problem, list(suggest_changes(result, plans, problem))


def test_the_error_names_the_excess_of_the_smallest_plan():
    least = min(
        max(predict_rank_bytes(Plan.parse(text), WEIGHTS, memory(1), batch_size=16)) for text in ("data(2)", "zero3(2)")
    )
    with pytest.raises(PlanError) as caught:
        choose_plan_from([Plan.parse("data(2)"), Plan.parse("zero3(2)")], WEIGHTS, memory(5000), batch_size=16)
    expected = (
        f"no plan fits: zero(2, level=3) needs least, {least} of 5000 bytes on the rank with most, {least - 5000} bytes"
    )
    assert str(caught.value).startswith(expected)


def test_every_suggestion_fits():
    for model, limit_bytes in ((WEIGHTS, 120_000), (heavy_between(), 1_200_000)):
        problem, result = suggestions(model, limit_bytes, [Plan.parse("data(2)")])
        assert result
        for suggestion in result:
            held = predict_rank_bytes(suggestion.plan, model, problem.cluster, batch_size=suggestion.batch_size)
            assert max(held) == suggestion.memory_bytes <= limit_bytes


def test_another_level_of_zero_comes_first_where_only_data_was_asked_for():
    _, result = suggestions(WEIGHTS, 200_000, [Plan.parse("data(2)")])
    assert result[0].change == "another plan"
    assert "zero" in str(result[0].plan) or "pipeline" in str(result[0].plan)


def test_where_weights_are_kept_from_forward_to_backward_freeing_them_is_suggested():
    """Three blocks on two stages are two on one of them, so that no pipeline fits either."""
    model = layers(3, cost=1e9)
    kept, freed = (Plan.parse(f"zero(2, level=3, reshard_after_forward={reshard})") for reshard in ("off", "on"))
    limit_bytes = predict_plan(freed, model, memory(1), batch_size=16).memory_bytes
    _, result = suggestions(model, limit_bytes, [kept])
    assert str(result[0]) == f"another plan (zero(2, level=3): {limit_bytes} bytes)"


def test_where_weights_are_gathered_too_early_for_the_memory_a_smaller_depth_is_suggested():
    """Half of it does not fit either."""
    early, later = (
        replace(Plan.parse("zero(2, level=3)"), passes=("overlap", f"prefetch:{depth}")) for depth in (4, 1)
    )
    model = layers(8, cost=1e9)
    limit_bytes = predict_plan(later, model, memory(1), batch_size=16).memory_bytes
    _, result = suggestions(model, limit_bytes, [early])
    assert str(result[0]) == f"prefetch:1 instead of prefetch:4 (zero(2, level=3) + prefetch:1: {limit_bytes} bytes)"


def test_large_activations_need_recomputation_microbatches_or_a_smaller_batch():
    _, result = suggestions(heavy_between(), 1_600_000, [Plan.parse("data(2)")])
    changes = [suggestion.change for suggestion in result]
    assert "recomputation of block 0" in changes
    assert "2 microbatches instead of 1" in changes
    assert "a batch of 12 samples instead of 16" in changes


LARGE_STATES = layers(4, width=4096)
"""Four layers of 64 MiB of weights each, and as much of states as an optimizer with two numbers for each has."""


@pytest.mark.parametrize(
    ("roofline", "change", "place"),
    [
        (None, "optimizer state on disk", "disk"),
        (Roofline("gpu", (("fp32", 1e12),)), "optimizer state in the memory of the host", "host"),
    ],
)
def test_optimizer_state_may_be_on_disk_or_with_an_accelerator_on_its_host(roofline, change, place):
    plan = Plan.parse("solo")
    cluster = Cluster(device=replace(Device(), roofline=roofline))
    offloaded = replace(plan, passes=(*plan.passes, f"offload:state={place}"))
    limit_bytes = max(predict_rank_bytes(offloaded, LARGE_STATES, cluster, batch_size=16))
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=limit_bytes))
    predictions = [predict_plan(plan, LARGE_STATES, cluster, batch_size=16)]
    found = list(suggest_changes(predictions, [plan], PlanningProblem(LARGE_STATES, cluster, 16)))
    assert str(found[0]) == f"{change} (solo + offload:state={place}: {limit_bytes} bytes)"


def test_the_batch_that_fits_is_the_largest_one():
    problem, result = suggestions(heavy_between(), 1_600_000, [Plan.parse("data(2)")])
    smaller = next(suggestion for suggestion in result if suggestion.change.startswith("a batch of"))
    more = smaller.batch_size + smaller.plan.global_num_microbatches
    assert max(predict_rank_bytes(smaller.plan, problem.model, problem.cluster, batch_size=more)) > 1_600_000


def test_where_weights_do_not_fit_the_fewest_ranks_that_hold_them_are_named():
    expected = (
        r"the smallest change that fits: 4 ranks instead of 2 \(pipeline\(4\) with 16 microbatches: 66560 bytes\)"
    )
    with pytest.raises(PlanError, match=expected):
        choose_plan(2, WEIGHTS, memory(100_000), 16)


def test_where_nothing_helps_it_says_what_was_tried():
    with pytest.raises(
        PlanError, match="nor more microbatches, offloaded optimizer state, a smaller batch, more ranks or weights on"
    ):
        choose_plan(2, WEIGHTS, memory(1000), 16)


def test_weights_may_be_on_disk_where_nothing_else_fits_on_the_same_ranks():
    """Of 16 layers, a rank has gradients of a half, and for a moment the weights of two."""
    model = layers(16, width=4096)
    both = replace(Plan.parse("zero(2, level=3)"), passes=("offload:state=disk", "offload:params=disk"))
    limit_bytes = max(predict_rank_bytes(both, model, memory(1), batch_size=16))
    _, result = suggestions(model, limit_bytes, [Plan.parse("data(2)")])
    assert [one.change.split()[1:] for one in result[:-1]] == [["ranks", "instead", "of", "2"]]
    assert str(result[-1]).startswith(
        "weights and optimizer state on disk (zero(2, level=3) + offload:state=disk + offl"
    )
    assert result[-1].memory_bytes <= limit_bytes
