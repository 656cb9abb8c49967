"""Steps with measured costs: layers, calls, updates, and pipelines partitioned by seconds."""

from dataclasses import replace
from math import inf

import pytest

from counterpoint.model.model_profile import Overheads
from counterpoint.model.spec import Block, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.ranking import predict_plan
from counterpoint.world.cluster import Cluster, Link
from tests.model.profiles import build_profile, layer_profile

MODEL = linear_chain(3, width=8)
FREE = Cluster(link=Link(0.0, inf))
UNEVEN = [layer_profile(6.0, 12.0), layer_profile(1.0, 2.0), layer_profile(2.0, 4.0)]


def predicted(plan, timing, *, m=1, cluster=FREE, batch_size=4, passes=(), model=MODEL):
    parsed = replace(Plan.parse(plan, num_microbatches=m), passes=passes)
    return predict_plan(parsed, model, cluster, batch_size=batch_size, profile=timing)


def test_a_single_rank_takes_the_measured_time_of_the_whole_model_and_its_update():
    timing = build_profile(MODEL, UNEVEN, samples=4, unpartitioned=layer_profile(7.0, 13.0), update_s_per_byte=0.01)
    one = predicted("solo", timing)
    assert (one.compute_s, one.update_s) == (20.0, pytest.approx(0.01 * 3 * 4 * 64))


def test_a_call_of_several_blocks_has_the_fixed_cost_of_one():
    timing = build_profile(MODEL, UNEVEN, samples=2, overheads=Overheads(0.5, 0.25, 0.125, 0.0625))
    one = predicted("pipeline(2, balance=(1,2))", timing, m=2, batch_size=4)
    assert one.compute_s == 27.0 * 2 / 2 + 2 * (0.5 + 0.25)
    assert one.update_s == 0.125 + 0.0625


@pytest.mark.parametrize(("plan", "micros", "adds"), [("solo", 1, 0), ("solo", 4, 3), ("pipeline(3)", 4, 3 / 3),
                                                    ("data(2)", 2, 1), ("pipedream(3)", 4, 0)])  # fmt: skip
def test_gradients_are_added_to_those_of_earlier_microbatches_of_a_rank_until_an_update(plan, micros, adds):
    pieces = [replace(piece, accumulate_s=added_s) for piece, added_s in zip(UNEVEN, (0.5, -0.25, 1.0), strict=True)]
    whole = replace(
        layer_profile(sum(one.forward_s for one in UNEVEN), sum(one.backward_s for one in UNEVEN)), accumulate_s=1.25
    )
    plain, adding = (
        build_profile(MODEL, some, unpartitioned=replace(whole, accumulate_s=added_s))
        for some, added_s in ((UNEVEN, 0.0), (pieces, 1.25))
    )
    more_s = [predicted(plan, timing, m=micros).compute_s for timing in (adding, plain)]
    assert more_s[0] - more_s[1] == pytest.approx(adds * 1.25)


def test_a_pipeline_is_partitioned_by_seconds():
    for pieces, balance in ((UNEVEN, "1,2"), (UNEVEN[::-1], "2,1")):
        timing = build_profile(MODEL, pieces)
        explicit = predicted(f"pipeline(2, balance=({balance}))", timing, m=4)
        assert predicted("pipeline(2)", timing, m=4).step_s == explicit.step_s


def test_parts_of_a_backward_take_what_they_were_measured_to_take():
    timing = build_profile(MODEL, [layer_profile(1.0, 2.0)] * 3, samples=2)
    prediction = predicted("pipeline(3, schedule=zero_bubble)", timing, m=2)
    assert prediction.compute_s == 2 * (1.0 + 2.0)


def test_recomputation_takes_another_forward_and_a_call():
    timing = build_profile(MODEL, [layer_profile(1.0, 2.0)] * 3, samples=2, overheads=Overheads(forward_s=0.5))
    plain, again = (predicted("pipeline(3)", timing, m=2, passes=passes) for passes in ((), ("recompute",)))
    assert again.compute_s - plain.compute_s == 2 * 1.5 * 2 / 3, "the last stage goes back at once"


def test_a_plan_without_tensor_parallelism_is_predicted_for_the_partition_that_it_gets():
    coarse = replace(MODEL, blocks=(Block(MODEL.layers, 0),), variant_without_tp=MODEL)
    timing, plan = build_profile(MODEL, UNEVEN), Plan.parse("pipeline(3)", num_microbatches=2)
    result = [predict_plan(plan, model, FREE, batch_size=4, profile=timing) for model in (coarse, MODEL)]
    assert result[0] == result[1]
    assert plan.strategies in {one.strategies for one in enumerate_plans(3, coarse)}


def test_memory_is_what_was_measured():
    few, many = (
        build_profile(MODEL, UNEVEN, samples=4, unpartitioned=layer_profile(1.0, 1.0, kept)) for kept in (0.0, 5000.0)
    )
    assert predicted("solo", many).memory_bytes - predicted("solo", few).memory_bytes == 5000


def test_a_step_of_one_microbatch_takes_what_it_was_measured_to_take():
    timing = build_profile(
        MODEL,
        UNEVEN,
        samples=2,
        unpartitioned=layer_profile(10.0, 20.0),
        overheads=Overheads(step_s=2.0, single_microbatch_step_s=1.0),
    )
    timing = replace(timing, batch_sizes=(replace(timing.batch_sizes[0], single_microbatch=layer_profile(5.0, 10.0)),))
    several, one = (predicted("solo", timing, m=m, batch_size=2 * m) for m in (2, 1))
    assert (several.compute_s, several.update_s) == (60.0, 2.0)
    assert (one.compute_s, one.update_s) == (15.0, 1.0)
    assert predicted("pipeline(2)", timing, batch_size=2).compute_s == 27.0 / 2 / 2, "its pieces by the same part"


def test_a_slow_rank_takes_longer_for_its_calls_too():
    timing = build_profile(
        MODEL, UNEVEN, samples=4, unpartitioned=layer_profile(7.0, 13.0), overheads=Overheads(1.0, 1.0)
    )
    slow = predicted("solo", timing, cluster=replace(FREE, speeds=(0.5,)))
    assert slow.compute_s == 2 * (20.0 + 2.0)


def test_each_stage_merges_the_statistics_of_its_own_batch_norms():
    timing = build_profile(
        MODEL,
        UNEVEN,
        samples=2,
        unpartitioned=layer_profile(10.0, 20.0),
        overheads=Overheads(step_s=3.0, single_microbatch_step_s=1.0),
    )
    timing = replace(timing, batch_sizes=(replace(timing.batch_sizes[0], single_microbatch=layer_profile(5.0, 10.0)),))
    result = predicted("pipeline(2)", timing, m=2, batch_size=4)
    assert result.update_s == pytest.approx(1.0 + 2.0 / 2), "of two stages, each with half of the parameters"
