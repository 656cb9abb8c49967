"""``counterpoint parity``: train the first steps of a script in a plain loop and under plans, and show what differs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.error_handling import FAILED
from counterpoint.cli.workload import ScriptArguments, Which

if TYPE_CHECKING:
    from counterpoint.training.parity import ParityReport

_COMMA = re.compile(r",(?![^()]*\))")


def parity(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script that trains.")],
    arguments: ScriptArguments = None,
    *,
    strategies: Annotated[
        list[str] | None,
        typer.Option(help='Plans, as "data(2), pipeline(2)"; the script\'s own and the usual ones if omitted.'),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 3,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks of a plan without a number.")] = 2,
    float64: Annotated[
        bool, typer.Option("--float64", help="Train in float64, which has next to no rounding.")
    ] = False,
    which: Which = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")] = False,
) -> None:
    """Train a script's first steps in a plain PyTorch loop and under each plan, and show what differs.

    All ranks are in this process. The model, the loss, the batches and the optimizer's options of each step are those
    of the script's first cp.Trainer or cp.parallelize. The script is stopped at the last of these steps, and no
    checkpoints are written. The exit code is 1 if a plan differs by more than rounding, or if one that was asked for
    cannot train the model.
    """
    import torch

    from counterpoint.training.parity import DEFAULT_STRATEGIES, compare_plans
    from counterpoint.training.plan_resolution import RequestedPlan
    from counterpoint.training.recording import record_script

    given = [text.strip() for texts in strategies or () for text in _COMMA.split(texts) if text.strip()]
    run = record_script(script, arguments or [], num_steps=steps, which=which)
    requested = [RequestedPlan(text) for text in given or DEFAULT_STRATEGIES]
    if not given and run.requested_plan.strategy not in DEFAULT_STRATEGIES:
        requested.insert(0, run.requested_plan)
    report = compare_plans(run, requested, dtype=torch.float64 if float64 else None, num_ranks=ranks)
    echo(json.dumps(report_to_dict(report), indent=2) if as_json else str(report))
    if not report.all_equal or (given and len(report.compared) < len(report.plans)):
        raise typer.Exit(FAILED)


def report_to_dict(report: ParityReport) -> dict[str, Any]:
    """Return a report as JSON values."""
    plans = [
        {
            "plan": plan.strategy,
            "num_ranks": plan.num_ranks,
            "num_microbatches": plan.num_microbatches,
            "differences": {kind: {"value": one.value, "name": one.name} for kind, one in plan.differences.items()},
            "is_equal": report.is_equal(plan),
            "causes": list(plan.causes),
            "refused": plan.refusal or None,
        }
        for plan in report.plans
    ]
    return {
        "model": report.model,
        "num_steps": report.num_steps,
        "batch_size": report.batch_size,
        "dtype": str(report.dtype).removeprefix("torch."),
        "tolerance": report.tolerance,
        "reference": report.reference,
        "not_compared": list(report.not_compared),
        "plans": plans,
    }
