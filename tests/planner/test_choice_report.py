"""The report of a choice."""

import pytest

from counterpoint.plan.plan import Plan
from counterpoint.planner.choice_report import build_comparison, explain_choice, stat_cards, trial_rows
from counterpoint.planner.choose import PlanTrial, decide_by_trials, select_plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.ranking import RejectedPlan, predict_plan, predict_trace, rank_plans
from counterpoint.world.cluster import Cluster
from tests.planner.models import layers

QUESTION = PlanningProblem(layers(4, cost=1e9), Cluster(), 16)


def chosen(plans=None):
    plans = plans or enumerate_plans(2, QUESTION.model, batch_size=16)
    return select_plan(rank_plans(plans, QUESTION.model, QUESTION.cluster, batch_size=16), plans, QUESTION)


def tried(*times):
    choice = chosen()
    trials = [PlanTrial(plan, seconds) for plan, seconds in zip(choice.by_simplicity, times, strict=False)]
    return decide_by_trials(choice, trials, [RejectedPlan(choice.by_simplicity[len(times)], "the model has hooks")])


def test_the_explanation_names_the_choice_and_the_reason():
    assert explain_choice(chosen()) == [
        "data(2) was chosen: it is predicted within 10 % of zero(2, level=1), the fastest synchronous plan, and simpler"
    ]
    assert explain_choice(tried(2.0, 1.0)) == [
        "zero(2, level=1) was chosen: it was measured to be the fastest synchronous plan",
        "zero(2, level=2) could not be tried: the model has hooks",
    ]


def test_ranks_with_different_memory_are_named():
    (choice_text, held) = explain_choice(chosen([Plan.parse("pipeline(2)", num_microbatches=2)]))
    assert choice_text.startswith("pipeline(2) with 2 microbatches was chosen")
    first, second = predict_plan(
        Plan.parse("pipeline(2)", num_microbatches=2), layers(4), Cluster(), batch_size=16
    ).rank_bytes
    assert first != second
    assert held.startswith("its ranks need ")
    assert held.endswith(" on rank 1")


def test_trials_are_listed_with_predictions_the_fastest_first():
    choice = tried(0.5, 0.25)
    rows = list(trial_rows(choice))
    predicted = choice.find_prediction(choice.by_simplicity[1])
    assert [row[0] for row in rows] == ["zero(2, level=1)", "data(2)"]
    assert rows[0][2:] == ("250", f"{0.25 / predicted.step_s:.2f}", "1.00")
    assert rows[1][4] == "2.00"


def test_a_page_has_a_row_for_each_plan_and_steps_of_the_chosen_and_the_best():
    weighing = build_comparison(chosen())
    assert len(weighing.rows) == len(chosen().ranking.predictions)
    assert [step.name for step in weighing.plans] == ["data(2)", "zero(2, level=1)", "zero(2, level=2)"]
    assert all(len(row) == len(weighing.titles) for row in weighing.rows)
    measured = build_comparison(tried(2.0, 1.0))
    assert measured.titles[3] == "measured ms"
    assert all(len(row) == len(measured.titles) for row in measured.rows)
    assert [step.name for step in measured.plans] == ["zero(2, level=1)", "data(2)"]


def test_the_first_figures_are_the_plan_and_its_step():
    assert [one.name for one in stat_cards(tried(2.0, 1.0))] == [
        "plan", "plans compared", "predicted step", "measured step", "memory of a rank"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["data(2)", "pipeline(2)", "pipeline(2, schedule=pipedream)", "zero3(2)"])
def test_the_predicted_trace_takes_as_long_as_predicted(text):
    plan = Plan.parse(text, num_microbatches=2 if text == "pipeline(2)" else 1)
    foreseen = predict_trace(plan, QUESTION.model, QUESTION.cluster, batch_size=16)
    predicted = predict_plan(plan, QUESTION.model, QUESTION.cluster, batch_size=16)
    assert foreseen.step_s == pytest.approx(predicted.step_s)
