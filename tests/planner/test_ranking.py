"""Plans by their predicted step time for one and the same global batch, with what the time goes to."""

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.precision import Precision
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import choose_plan, choose_plan_from
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.ranking import build_simulator, predict_plan, predict_with_simulator, rank_plans
from counterpoint.world.cluster import Cluster
from tests.planner.models import layers, memory, named

HEAVY = layers(4, cost=1e9)
"""So much work in so few parameters that reductions of gradients are negligible."""
ONE_HASH = """
from tests.planner.test_ranking import four
print([(str(one.plan), one.step_s) for one in four()])
"""


def plans_of(num_ranks, batch_size=16):
    return enumerate_plans(num_ranks, HEAVY, batch_size=batch_size)


@cache
def four():
    """All plans for four ranks and 16 samples."""
    return ranked(plans_of(4)).predictions


def ranked(plans, model=HEAVY, cluster=None, batch_size=16):
    return rank_plans(plans, model, cluster or Cluster(), batch_size=batch_size)


def test_the_parts_of_a_step_add_up_to_it():
    for one in four():
        assert one.step_s == pytest.approx(one.compute_s + one.communication_s + one.idle_s + one.update_s, rel=1e-8)
        assert min(one.compute_s, one.communication_s, one.idle_s, one.update_s) >= 0


def test_a_single_rank_takes_its_work_and_its_update():
    one = predict_plan(Plan(), layers(3, cost=30e6), Cluster(), batch_size=10)
    assert one.compute_s == pytest.approx(3 * 10 * 3 * 1e-3), "three layers, ten samples, backward twice a forward"
    assert one.update_s == pytest.approx(7 * 3 * 4 * 64 * 64 / 10e9)
    assert (one.communication_s, one.idle_s, one.sent_bytes) == (0, 0, 0)


def test_all_plans_take_the_same_global_batch():
    for one in four():
        assert one.samples_per_microbatch * one.plan.global_num_microbatches == 16


def test_idle_time_of_a_pipeline_is_its_bubble():
    one = predict_plan(Plan.parse("pipeline(4, schedule=gpipe)", num_microbatches=8), HEAVY, Cluster(), batch_size=16)
    assert one.idle_s / one.step_s == pytest.approx(3 / 11, rel=1e-3)


def test_work_without_traffic_prefers_data_to_pipelines():
    order = [str(one.plan) for one in four() if one.is_synchronous]
    assert order.index("data(4)") < min(at for at, plan in enumerate(order) if plan.startswith("pipeline"))


@pytest.mark.long
def test_large_weights_and_small_activations_prefer_pipelines_to_data():
    wide = layers(4, width=1024, cost=2.0 * 1024**2)
    order = [str(one.plan) for one in ranked(enumerate_plans(4, wide), wide, batch_size=16).predictions]
    assert order.index("pipeline(4)") < order.index("data(4)")


def test_the_first_has_no_reason_and_all_others_name_their_largest_loss():
    first, *others = four()
    assert first.why_not(first) == ""
    for other in others:
        assert other.why_not(first).startswith("as fast") or " more of " in other.why_not(first)
    reasons = {named([other.plan])[0]: other.why_not(first) for other in others}
    assert reasons["pipeline(4), 4"].endswith("more of waiting")


def test_what_is_asynchronous_is_marked():
    for one in four():
        assert one.is_synchronous == ("asp" not in str(one.plan) and "pipedream" not in str(one.plan))


def test_plans_that_cannot_be_executed_are_listed_with_the_reason():
    odd = layers(4, width=6)
    ranking = ranked([Plan.parse("tensor(4)"), Plan.parse("data(3)"), Plan.parse("data(4)")], odd)
    assert named([one.plan for one in ranking.predictions]) == ["data(4), 1"]
    assert [one.reason.split(";")[0] for one in ranking.rejected] == [
        "tensor(4) cannot shard hidden of block0: 6 is not divisible by 4",
        "a batch of 16 samples cannot be split into the 3 equal microbatches of data(3) with num_microbatches=1",
    ]


def test_plans_beyond_the_memory_come_last_and_say_by_how_much():
    plans = plans_of(2)
    sizes = sorted(one.memory_bytes for one in ranked(plans).predictions)
    some = ranked(plans, cluster=memory(sizes[2])).predictions
    assert [one.fits for one in some] == sorted((one.fits for one in some), reverse=True)
    assert some[-1].why_not(some[0]) == f"does not fit: {some[-1].memory_bytes} of {sizes[2]} bytes"


def test_activations_count_until_their_backward_with_and_without_partitioning():
    few, many = (predict_plan(Plan(), HEAVY, Cluster(), batch_size=size).memory_bytes for size in (1, 101))
    assert many - few == 100 * 4 * 4 * 64


@pytest.mark.long
def test_the_order_is_the_same_in_a_process_that_hashes_otherwise():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", ONE_HASH], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(["src", "."])},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_the_choice_is_data_for_work_without_traffic_though_zero_updates_less():
    ranking = ranked(plans_of(2))
    assert str(next(one.plan for one in ranking.predictions if one.is_synchronous)) == "zero(2, level=1)"
    assert str(choose_plan(2, HEAVY, Cluster(), 16)) == "data(2)", "simpler, and not 2 % slower"


def test_the_choice_is_what_fits_when_memory_is_short():
    wide = layers(4, width=512, cost=1e9)
    data = predict_plan(Plan.parse("data(2)"), wide, Cluster(), batch_size=16)
    chosen = choose_plan(2, wide, memory(data.memory_bytes * 3 // 5), 16)
    assert predict_plan(chosen, wide, Cluster(), batch_size=16).memory_bytes <= data.memory_bytes * 3 // 5
    assert str(choose_plan(2, wide, Cluster(), 16)) == "data(2)"


def test_the_choice_is_synchronous():
    asp = Plan.parse("asp(2)")
    with pytest.raises(PlanError, match="none of the given plans is synchronous"):
        choose_plan_from([asp], HEAVY, Cluster(), batch_size=16)
    assert choose_plan_from([asp, Plan.parse("data(3)")], HEAVY, Cluster(), batch_size=18) == Plan.parse("data(3)")


def test_where_nothing_fits_the_smallest_plan_is_named_with_its_bytes():
    with pytest.raises(PlanError, match=r"no plan fits: .* needs least, \d+ of 1000 bytes"):
        choose_plan(2, HEAVY, memory(1000), 16)


def test_where_nothing_divides_the_nearest_sizes_are_named():
    whole = replace(HEAVY, blocks=layers(1, width=5).blocks, params=layers(1, width=5).params)
    with pytest.raises(PlanError, match=r"data\(4\), for example: a batch of 5 .* batch_size=4 or 8"):
        choose_plan(4, whole, Cluster(), 5)


def test_local_sgd_is_predicted_as_the_mean_of_all_steps():
    every, eighth = (
        predict_plan(Plan.parse(text), HEAVY, Cluster(), batch_size=16) for text in ("data(4)", "data(4, sync_every=8)")
    )
    assert eighth.sent_bytes == every.sent_bytes // 8
    commit_s = 2 * 2 * Cluster().link.latency_s
    assert eighth.communication_s == pytest.approx(commit_s + (every.communication_s - commit_s) / 8, rel=1e-6)
    assert (every.is_synchronous, eighth.is_synchronous) == (True, False)


def test_delayed_all_reduces_overlap_with_the_next_step():
    plans = (Plan.parse(text) for text in ("data(4)", "data(4, staleness=1)"))
    now, late = (predict_plan(plan, HEAVY, Cluster(), batch_size=16) for plan in plans)
    assert late.communication_s < now.communication_s / 2
    assert late.sent_bytes == now.sent_bytes
    assert not late.is_synchronous


@pytest.mark.parametrize("precision", [None, Precision("bf16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("micros", [1, 4])
def test_weights_that_are_gathered_once_cost_time_and_memory_between_levels_2_and_3(micros, precision):
    model = linear_chain(6, width=64, precision=precision)
    texts = ("zero(4)", "zero(4, level=2)", "zero(4, level=3, reshard_after_forward=off)", "zero(4, level=3)")
    plans = [Plan.parse(text, num_microbatches=micros) for text in texts]
    _, second, once, third = (predict_plan(plan, model, Cluster(), batch_size=64) for plan in plans)
    counted = compile(once.plan, model, samples_per_micro=64 // 4 // micros)
    assert once.sent_bytes == max(counted.sent_bytes()) == max(counted.cost.sent_bytes())
    assert third.memory_bytes < once.memory_bytes < second.memory_bytes
    assert second.step_s < once.step_s < third.step_s
    assert once == predict_with_simulator(once.plan, build_simulator(model, Cluster(), 64))


def test_a_plan_of_large_activations_fits_in_bf16_and_sends_half_as_long():
    pipeline = Plan.parse("pipeline(2)", num_microbatches=2)
    wide, narrow = (
        predict_plan(pipeline, linear_chain(4, width=64, precision=precision), memory(6_000_000), batch_size=16384)
        for precision in (None, Precision("bf16"))
    )
    assert (wide.fits, narrow.fits) == (False, True)
    assert wide.sent_bytes == 2 * narrow.sent_bytes
    assert wide.communication_s / 2 < narrow.communication_s < wide.communication_s * 0.53  # and latencies
    assert narrow.compute_s == pytest.approx(wide.compute_s)


def test_plans_that_cannot_sum_in_a_narrower_dtype_are_listed_and_the_others_send_half():
    plans = [Plan.parse(text) for text in ("data(4)", "zero(4, level=3)", "server(4)", "data(4, staleness=1)")]
    wide, narrow = (
        ranked(plans, linear_chain(4, precision=Precision("fp32", reduce=reduce))) for reduce in ("fp32", "bf16")
    )
    sent, whole = ({str(one.plan): one.sent_bytes for one in each.predictions} for each in (narrow, wide))
    assert sent["data(4)"] == whole["data(4)"] / 2
    assert sent["zero(4, level=3)"] == whole["zero(4, level=3)"] * 5 / 6, "two gathers in float32, and one reduction"
    assert {str(one.plan) for one in narrow.rejected} == {
        "server(4, servers=1, consistency=bsp)",
        "data(4, staleness=1)",
    }
    assert all("precision with reduce=bf16" in one.reason for one in narrow.rejected)
