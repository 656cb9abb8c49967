"""``counterpoint plan``: the plans that fit so many ranks, with what the simulator predicts for each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoint.cli.tables import Column, format_bytes, show_table
from counterpoint.drawing.scale import format_number
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec, chain
from counterpoint.plan import Plan
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.orders import rank_with_orders
from counterpoint.planner.profile import read_profile
from counterpoint.planner.rank import Prediction, Ranking
from counterpoint.planner.staged import rank_graph, staged_plans
from counterpoint.world.cluster import Cluster
from counterpoint.world.cluster_file import load_cluster

MINIBATCHES_PER_RANK = 4
"""Of a profile, in a step for which nobody says how many."""
COLUMNS = (
    Column("plan", wraps=True),
    *(Column(title, "right") for title in ("micros", "step ms", "compute", "comm", "idle", "update", "sent", "memory")),
    Column("why not", wraps=True),
)


def plan(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A built-in job: text, digits, lines.")] = None,
    *,
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks there are.")],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of one global batch; 64 without a job.")
    ] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Without a job: equal blocks; 8 if left out.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Without a job: a block is one linear layer of this width.")] = 1024,
    cluster: Annotated[
        Path | None, typer.Option(help="YAML of the ranks and links, as `counterpoint probe` writes it.")
    ] = None,
    passes: Annotated[list[str] | None, typer.Option("--pass", help="Run on every program, overlap for one.")] = None,
    graph: Annotated[
        Path | None, typer.Option(help="Without a job: layers as PipeDream's profiler writes them, a graph.txt.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Show only the first so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")] = False,
) -> None:
    """List the plans that fit so many ranks, the fastest first, for a JOB's model or one of equal blocks.

    A step is computing, communication that nothing hides, idle time (a pipeline's bubble) and updates.
    """
    if job is not None and blocks is not None:
        raise PlanError(f"{job} has blocks of its own, and --blocks is {blocks}; give either a job or --blocks")
    place = Cluster() if cluster is None else load_cluster(cluster)
    place.require_ranks(ranks)
    if graph is not None:
        if job is not None or blocks is not None:
            raise PlanError(f"{graph} has layers of its own; leave out {job or '--blocks'}")
        show_graph(graph, place, ranks, batch_size, (top, as_json))
        return
    model, size = traced(job, batch_size) if job is not None else (equal_blocks(blocks or 8, width), batch_size or 64)
    found = (*enumerate_plans(ranks, model, batch_size=size), *staged_plans(ranks, model, place, size))
    plans = [replace(one, passes=tuple(passes or ())) for one in dict.fromkeys(found)]
    ranking = rank_with_orders(plans, model, place, batch_size=size)
    if as_json:
        typer.echo(json.dumps(to_json(ranking, top), indent=2))
        return
    typer.echo(f"{counted(plans)} for -n {ranks} that can take {size} samples in a step; predicted, not measured\n")
    show(ranking, top)


def show_graph(path: Path, place: Cluster, ranks: int, batch_size: int | None, shown: tuple[int | None, bool]) -> None:
    """The plans for a profile are on standard output, and the layers of each stage of the best pipeline.

    Args:
        path: of the profile.
        place: where it would run.
        ranks: how many there are.
        batch_size: minibatches in a step.
        shown: how many plans, and whether as JSON.
    """
    try:
        profile = read_profile(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give a graph.txt") from None
    (top, as_json), size = shown, batch_size or MINIBATCHES_PER_RANK * ranks
    found = rank_graph(profile, place, ranks, size)
    if as_json:
        typer.echo(json.dumps(to_json(found.ranking, top), indent=2))
        return
    typer.echo(f"{counted(found.ranking.predictions)} for -n {ranks}, {size} minibatches of {path} in a step\n")
    show(found.ranking, top)
    typer.echo("\n".join(found.describe()))


def show(ranking: Ranking, top: int | None) -> None:
    """The plans are on standard output, then why the second loses, then those that cannot be carried out."""
    found, shown = ranking.predictions, ranking.predictions[:top]
    if shown:
        show_table(COLUMNS, [cells(one, found[0]) for one in shown])
    notes = []
    if not all(one.is_synchronous for one in shown):
        notes.append(
            "* asynchronous: changes the numbers; `counterpoint strategies NAME` says how, for asp or pipedream"
        )
    if len(shown) < len(found):
        notes.append(f"{counted(found[len(shown) :])} more after these")
    if len(found) > 1:
        notes.append(why_second(found))
    if ranking.refusals:
        notes.append(f"{counted(ranking.refusals)} cannot be carried out:")
        notes += [f"  {name(one.plan)}: {one.reason}" for one in ranking.refusals[:top]]
    typer.echo("\n".join(["", *notes] if notes else []), nl=bool(notes))


def counted(plans: Sequence[object]) -> str:
    """Return how many plans there are, in words."""
    return "1 plan" if len(plans) == 1 else f"{len(plans)} plans"


def name(one: Plan) -> str:
    """Return a plan with its microbatches, if it has more than one."""
    return f"{one}" + (f" with {one.num_microbatches} microbatches" if one.num_microbatches > 1 else "")


def why_second(found: Sequence[Prediction]) -> str:
    """Return the sentence about the second best."""
    first, second = found[:2]
    return f"{name(second.plan)} comes second to {name(first.plan)}: {second.why_not(first)}"


def cells(found: Prediction, first: Prediction) -> tuple[str, ...]:
    """Return the row of a plan."""
    times = (found.step_s, found.compute_s, found.communication_s, found.idle_s, found.update_s)
    return (
        f"{found.plan}{'' if found.is_synchronous else ' *'}",
        str(found.plan.num_microbatches),
        *(format_number(float(f"{1e3 * seconds:.3g}")) for seconds in times),
        format_bytes(found.sent_bytes),
        format_bytes(found.memory_bytes),
        found.why_not(first),
    )


def to_json(ranking: Ranking, top: int | None) -> dict[str, list[dict[str, Any]]]:
    """Return all figures as JSON values."""
    plans = []
    for found in ranking.predictions[:top]:
        figures = {key: value for key, value in asdict(found).items() if key != "plan"}
        why_not = found.why_not(ranking.predictions[0])
        plans.append({**named(found.plan), **figures, "fits": found.fits, "why_not": why_not})
    return {"plans": plans, "refused": [{**named(one.plan), "reason": one.reason} for one in ranking.refusals]}


def named(one: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    return {"plan": str(one), "num_microbatches": one.num_microbatches, "passes": list(one.passes)}


def equal_blocks(num_blocks: int, width: int) -> ModelSpec:
    """Return equal linear layers, each with the floating point operations that it takes."""
    model = chain(num_blocks, width=width)
    work = 2.0 * width * width
    return replace(
        model,
        blocks=tuple(
            Block(tuple(replace(piece, cost=work) for piece in block.pieces), block.first_piece)
            for block in model.blocks
        ),
    )


def traced(job: str, batch_size: int | None) -> tuple[ModelSpec, int]:
    """Return a job's model, traced on a few of its own samples, and the global batch."""
    from counterpoint.jobs.table import find
    from counterpoint.runtime.optimizers import Face
    from counterpoint.training.choice import FEW_SAMPLES, trace_spec
    from counterpoint.training.trainer import first_samples

    found = find(job)
    model = found.build_model(0)
    dataset, _ = found.build_data()
    face = Face(found.optimizer, dict(model.named_parameters()))
    inputs = first_samples(dataset, FEW_SAMPLES).inputs(0)
    return trace_spec(model, face, inputs, None), batch_size or found.batch_size
