"""Output of ``counterpoint plan``: tables, JSON, and a page with timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from counterpoint.cli.echo import echo
from counterpoint.cli.tables import TableColumn, print_table
from counterpoint.errors import PlanError
from counterpoint.model.precision import Precision
from counterpoint.plan.plan import Plan
from counterpoint.planner.choice_report import (
    COLUMNS,
    TEXT_COLUMNS,
    TRIAL_COLUMNS,
    build_comparison,
    explain_choice,
    explain_skipped,
    stat_cards,
    table_row,
    trial_rows,
)
from counterpoint.planner.choose import PlanChoice
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.ranking import PlanRanking, Prediction, format_plan
from counterpoint.viz.number_format import format_bytes
from counterpoint.viz.plan_comparison import write_comparison_page

PLAN_TABLE = tuple(
    TableColumn(title, wraps=True) if title in TEXT_COLUMNS else TableColumn(title, "right") for title in COLUMNS
)
TRIAL_TABLE = (
    TableColumn(TRIAL_COLUMNS[0], wraps=True), *(TableColumn(title, "right") for title in TRIAL_COLUMNS[1:])
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request that plans were ranked for.

    Args:
        model: what is trained.
        num_ranks: number of ranks.
        num_plans: number of ranked plans.
        precision: what the model computes in; None for the dtypes of its parameters.
        problem: what plans were predicted for.
    """

    model: str
    num_ranks: int
    num_plans: int
    precision: Precision | None
    problem: PlanningProblem

    @property
    def roofline(self) -> str:
        """The name of the device whose roofline the times come from; "" if they come from a measurement."""
        roofline, profile = self.problem.cluster.device.roofline, self.problem.profile
        is_measured = profile is not None and profile.profiled_on.is_measured
        return "" if roofline is None or is_measured else roofline.name or "the device"

    def describe_source(self, result: PlanChoice | PlanError) -> str:
        """Return whether the times are predicted or measured, and what predictions come from."""
        predicted = f"predicted from the roofline of {self.roofline}" if self.roofline else "predicted"
        if isinstance(result, PlanChoice) and result.trials:
            return f"{predicted}, and {format_plan_count(len(result.trials))} measured"
        return f"{predicted}, not measured"

    def describe_reserve(self) -> list[str]:
        """Return how much memory of a device no plan may take, if any."""
        device = self.problem.cluster.device
        if not device.reserve_bytes:
            return []
        reserved, whole = format_bytes(device.reserve_bytes), format_bytes(device.memory_bytes)
        return [f"{reserved} of the {whole} of a device are kept for its context, libraries and fragmentation"]

    def describe_step(self) -> str:
        """Return the samples of a step, and what it computes in if it has a precision."""
        computed = "" if self.precision is None else f", computed in {self.precision}"
        return f"{self.problem.batch_size} samples in a step{computed}"


def print_result(
    request: PlanRequest, ranking: PlanRanking, result: PlanChoice | PlanError, top: int | None, *, as_json: bool
) -> None:
    """Print the ranked plans, the measurements, the choice, and the plans that cannot be run."""
    if as_json:
        echo(json.dumps(result_to_dict(request, ranking, result, top), indent=2))
        return
    plans = format_plan_count(request.num_plans)
    echo(f"{plans} for -n {request.num_ranks} that can take {request.describe_step()}; ", nl=False)
    echo(f"{request.describe_source(result)}\n")
    print_plans(ranking, top)
    notes = [*request.describe_reserve(), *format_remarks(ranking, top)]
    if isinstance(result, PlanChoice) and result.trials:
        echo("")
        print_table(TRIAL_TABLE, trial_rows(result))
    notes += explain_choice(result) if isinstance(result, PlanChoice) else [str(result), *explain_skipped(ranking)]
    echo("\n".join(["", *notes]), nl=True)


def print_plans(ranking: PlanRanking, top: int | None) -> None:
    """Print the table of plans, if there are any."""
    predictions, shown_predictions = ranking.predictions, ranking.predictions[:top]
    if shown_predictions:
        print_table(PLAN_TABLE, [table_row(plan, predictions[0]) for plan in shown_predictions])


def format_remarks(ranking: PlanRanking, top: int | None) -> list[str]:
    """Return the remarks below the table."""
    predictions, shown_predictions = ranking.predictions, ranking.predictions[:top]
    notes = []
    if not all(plan.is_synchronous for plan in shown_predictions):
        notes.append(
            "* asynchronous: changes the results; `counterpoint strategies NAME` explains how, for asp or pipedream"
        )
    if len(shown_predictions) < len(predictions):
        notes.append(f"{format_plan_count(len(predictions) - len(shown_predictions))} more after these")
    if len(predictions) > 1:
        notes.append(explain_runner_up(predictions))
    if ranking.rejected:
        notes.append(f"{format_plan_count(len(ranking.rejected))} cannot be run:")
        notes += [f"  {format_plan(plan.plan)}: {plan.reason}" for plan in ranking.rejected[:top]]
    return notes


def format_plan_count(count: int) -> str:
    """Return a number of plans as text."""
    return "1 plan" if count == 1 else f"{count} plans"


def explain_runner_up(predictions: Sequence[Prediction]) -> str:
    """Return a sentence about the second best plan."""
    first, second = predictions[:2]
    return f"{format_plan(second.plan)} is second to {format_plan(first.plan)}: {second.why_not(first)}"


def ranking_to_dict(ranking: PlanRanking, top: int | None) -> dict[str, Any]:
    """Return the predictions of all plans as JSON values."""
    plans = []
    for predictions in ranking.predictions[:top]:
        prediction_fields = {key: value for key, value in asdict(predictions).items() if key not in {"plan", "free_s"}}
        prediction_fields |= {"communication_s": predictions.communication_s, "idle_s": predictions.idle_s}
        why_not = predictions.why_not(ranking.predictions[0])
        plans.append(
            {**plan_to_dict(predictions.plan), **prediction_fields, "fits": predictions.fits, "why_not": why_not}
        )
    refused = [{**plan_to_dict(plan.plan), "reason": plan.reason} for plan in ranking.rejected]
    return {"plans": plans, "refused": refused, "unseen": [plan_to_dict(plan) for plan in ranking.not_evaluated]}


def result_to_dict(
    request: PlanRequest, ranking: PlanRanking, result: PlanChoice | PlanError, top: int | None
) -> dict[str, Any]:
    """Return all predictions and the choice as JSON values."""
    report = ranking_to_dict(ranking, top) | ({"roofline": request.roofline} if request.roofline else {})
    if isinstance(result, PlanError):
        return {**report, "taken": None, "obstacle": str(result)}
    trials = [{**plan_to_dict(trial.plan), "step_s": trial.step_s} for trial in result.trials]
    return {**report, "taken": plan_to_dict(result.plan), "measured": trials}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {"plan": str(plan), "num_microbatches": plan.num_microbatches, "passes": list(plan.passes)}


def write_report(request: PlanRequest, choice: PlanChoice) -> str:
    """Return the HTML page about a choice."""
    workload = f"{request.model} on {request.num_ranks} ranks, {request.describe_step()}"
    subject = f"{workload}; {request.describe_source(choice)}"
    return write_comparison_page("counterpoint plan", subject, stat_cards(choice), build_comparison(choice))
