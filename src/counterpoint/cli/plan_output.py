"""What ``counterpoint plan`` says: tables for a person, figures for a program, a page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from counterpoint.cli.tables import TableColumn, print_table
from counterpoint.errors import PlanError
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
from counterpoint.planner.ranking import PlanRanking, Prediction, format_plan
from counterpoint.viz.plan_comparison import write_comparison_page

PLAN_TABLE = tuple(
    TableColumn(title, wraps=True) if title in TEXT_COLUMNS else TableColumn(title, "right") for title in COLUMNS
)
TRIAL_TABLE = (
    TableColumn(TRIAL_COLUMNS[0], wraps=True), *(TableColumn(title, "right") for title in TRIAL_COLUMNS[1:])
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is wanted for, in words and numbers.

    Args:
        model: what is trained.
        num_ranks: ranks there are.
        batch_size: samples of one global batch.
        num_plans: how many were ranked.
    """

    model: str
    num_ranks: int
    batch_size: int
    num_plans: int


def print_result(request: PlanRequest, ranking: PlanRanking, result: PlanChoice | PlanError, top: int | None) -> None:
    """The plans are on standard output, then what was tried, what is taken, and what cannot be carried out."""
    plans = format_plan_count(request.num_plans)
    typer.echo(
        f"{plans} for -n {request.num_ranks} that can take {request.batch_size} samples in a step; {describe_source(result)}\n"
    )
    print_plans(ranking, top)
    notes = format_remarks(ranking, top)
    if isinstance(result, PlanChoice) and result.trials:
        typer.echo("")
        print_table(TRIAL_TABLE, trial_rows(result))
    notes += explain_choice(result) if isinstance(result, PlanChoice) else [str(result), *explain_skipped(ranking)]
    typer.echo("\n".join(["", *notes]), nl=True)


def print_plans(ranking: PlanRanking, top: int | None) -> None:
    """The table of the plans is on standard output, if there are any."""
    found, shown = ranking.predictions, ranking.predictions[:top]
    if shown:
        print_table(PLAN_TABLE, [table_row(one, found[0]) for one in shown])


def describe_source(result: PlanChoice | PlanError) -> str:
    """Return how the figures have come about."""
    if isinstance(result, PlanChoice) and result.trials:
        return f"predicted, and {format_plan_count(len(result.trials))} measured"
    return "predicted, not measured"


def format_remarks(ranking: PlanRanking, top: int | None) -> list[str]:
    """Return what is to be said below the table."""
    found, shown = ranking.predictions, ranking.predictions[:top]
    notes = []
    if not all(one.is_synchronous for one in shown):
        notes.append(
            "* asynchronous: changes the numbers; `counterpoint strategies NAME` says how, for asp or pipedream"
        )
    if len(shown) < len(found):
        notes.append(f"{format_plan_count(len(found) - len(shown))} more after these")
    if len(found) > 1:
        notes.append(explain_runner_up(found))
    if ranking.rejected:
        notes.append(f"{format_plan_count(len(ranking.rejected))} cannot be carried out:")
        notes += [f"  {format_plan(one.plan)}: {one.reason}" for one in ranking.rejected[:top]]
    return notes


def format_plan_count(count: int) -> str:
    """Return how many plans there are, in words."""
    return "1 plan" if count == 1 else f"{count} plans"


def explain_runner_up(found: Sequence[Prediction]) -> str:
    """Return the sentence about the second best."""
    first, second = found[:2]
    return f"{format_plan(second.plan)} comes second to {format_plan(first.plan)}: {second.why_not(first)}"


def ranking_to_dict(ranking: PlanRanking, top: int | None) -> dict[str, Any]:
    """Return the figures of all plans as JSON values."""
    plans = []
    for found in ranking.predictions[:top]:
        own = {key: value for key, value in asdict(found).items() if key not in {"plan", "free_s"}}
        own |= {"communication_s": found.communication_s, "idle_s": found.idle_s}
        why_not = found.why_not(ranking.predictions[0])
        plans.append({**plan_to_dict(found.plan), **own, "fits": found.fits, "why_not": why_not})
    refused = [{**plan_to_dict(one.plan), "reason": one.reason} for one in ranking.rejected]
    return {"plans": plans, "refused": refused, "unseen": [plan_to_dict(one) for one in ranking.not_evaluated]}


def result_to_dict(ranking: PlanRanking, result: PlanChoice | PlanError, top: int | None) -> dict[str, Any]:
    """Return all figures and the verdict as JSON values."""
    told = ranking_to_dict(ranking, top)
    if isinstance(result, PlanError):
        return {**told, "taken": None, "obstacle": str(result)}
    trials = [{**plan_to_dict(trial.plan), "step_s": trial.step_s} for trial in result.trials]
    return {**told, "taken": plan_to_dict(result.plan), "measured": trials}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {"plan": str(plan), "num_microbatches": plan.num_microbatches, "passes": list(plan.passes)}


def write_report(request: PlanRequest, choice: PlanChoice) -> str:
    """Return the page about a choice."""
    subject = f"{request.model} on {request.num_ranks} ranks, {request.batch_size} samples in a step; {describe_source(choice)}"
    return write_comparison_page("counterpoint plan", subject, stat_cards(choice), build_comparison(choice))
