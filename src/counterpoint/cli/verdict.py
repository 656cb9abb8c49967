"""What ``counterpoint plan`` says: tables for a person, figures for a program, a page for a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from counterpoint.cli.tables import Column, show_table
from counterpoint.drawing.weighing import write_weighing
from counterpoint.errors import PlanError
from counterpoint.plan import Plan
from counterpoint.planner.account import (
    TEXTS,
    TITLES,
    TRIAL_TITLES,
    account,
    cells,
    explain,
    explain_unseen,
    figures,
    trial_cells,
)
from counterpoint.planner.choose import Choice
from counterpoint.planner.rank import Prediction, Ranking, named

COLUMNS = tuple(Column(title, wraps=True) if title in TEXTS else Column(title, "right") for title in TITLES)
TRIAL_COLUMNS = (
    Column(TRIAL_TITLES[0], wraps=True), *(Column(title, "right") for title in TRIAL_TITLES[1:])
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
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


def show(asked: Asked, ranking: Ranking, verdict: Choice | PlanError, top: int | None) -> None:
    """The plans are on standard output, then what was tried, what is taken, and what cannot be carried out."""
    plans = counted(asked.num_plans)
    typer.echo(
        f"{plans} for -n {asked.num_ranks} that can take {asked.batch_size} samples in a step; {seen(verdict)}\n"
    )
    show_plans(ranking, top)
    notes = remarks(ranking, top)
    if isinstance(verdict, Choice) and verdict.trials:
        typer.echo("")
        show_table(TRIAL_COLUMNS, trial_cells(verdict))
    notes += explain(verdict) if isinstance(verdict, Choice) else [str(verdict), *explain_unseen(ranking)]
    typer.echo("\n".join(["", *notes]), nl=True)


def show_plans(ranking: Ranking, top: int | None) -> None:
    """The table of the plans is on standard output, if there are any."""
    found, shown = ranking.predictions, ranking.predictions[:top]
    if shown:
        show_table(COLUMNS, [cells(one, found[0]) for one in shown])


def seen(verdict: Choice | PlanError) -> str:
    """Return how the figures have come about."""
    if isinstance(verdict, Choice) and verdict.trials:
        return f"predicted, and {counted(len(verdict.trials))} measured"
    return "predicted, not measured"


def remarks(ranking: Ranking, top: int | None) -> list[str]:
    """Return what is to be said below the table."""
    found, shown = ranking.predictions, ranking.predictions[:top]
    notes = []
    if not all(one.is_synchronous for one in shown):
        notes.append(
            "* asynchronous: changes the numbers; `counterpoint strategies NAME` says how, for asp or pipedream"
        )
    if len(shown) < len(found):
        notes.append(f"{counted(len(found) - len(shown))} more after these")
    if len(found) > 1:
        notes.append(why_second(found))
    if ranking.refusals:
        notes.append(f"{counted(len(ranking.refusals))} cannot be carried out:")
        notes += [f"  {named(one.plan)}: {one.reason}" for one in ranking.refusals[:top]]
    return notes


def counted(count: int) -> str:
    """Return how many plans there are, in words."""
    return "1 plan" if count == 1 else f"{count} plans"


def why_second(found: Sequence[Prediction]) -> str:
    """Return the sentence about the second best."""
    first, second = found[:2]
    return f"{named(second.plan)} comes second to {named(first.plan)}: {second.why_not(first)}"


def listed(ranking: Ranking, top: int | None) -> dict[str, Any]:
    """Return the figures of all plans as JSON values."""
    plans = []
    for found in ranking.predictions[:top]:
        own = {key: value for key, value in asdict(found).items() if key not in {"plan", "free_s"}}
        own |= {"communication_s": found.communication_s, "idle_s": found.idle_s}
        why_not = found.why_not(ranking.predictions[0])
        plans.append({**parts(found.plan), **own, "fits": found.fits, "why_not": why_not})
    refused = [{**parts(one.plan), "reason": one.reason} for one in ranking.refusals]
    return {"plans": plans, "refused": refused, "unseen": [parts(one) for one in ranking.unseen]}


def to_json(ranking: Ranking, verdict: Choice | PlanError, top: int | None) -> dict[str, Any]:
    """Return all figures and the verdict as JSON values."""
    told = listed(ranking, top)
    if isinstance(verdict, PlanError):
        return {**told, "taken": None, "obstacle": str(verdict)}
    trials = [{**parts(trial.plan), "step_s": trial.step_s} for trial in verdict.trials]
    return {**told, "taken": parts(verdict.plan), "measured": trials}


def parts(one: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {"plan": str(one), "num_microbatches": one.num_microbatches, "passes": list(one.passes)}


def write_report(asked: Asked, choice: Choice) -> str:
    """Return the page about a choice."""
    subject = f"{asked.model} on {asked.num_ranks} ranks, {asked.batch_size} samples in a step; {seen(choice)}"
    return write_weighing("counterpoint plan", subject, figures(choice), account(choice))
