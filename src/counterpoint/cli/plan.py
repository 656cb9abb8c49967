"""``counterpoint plan``: the plans that fit so many ranks, what is predicted and measured of them, which to take."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.graph import show_graph
from counterpoint.cli.verdict import Asked, show, to_json, write_report
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec, chain
from counterpoint.model.timing import Timing
from counterpoint.model.timing_file import file_beside, load_timing, write_timing
from counterpoint.plan import PASSES, Plan
from counterpoint.planner.choose import Choice, pick, rank_for
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.given import fitted_to
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.rank import Ranking, merged
from counterpoint.planner.remedies import Question, settle_all
from counterpoint.planner.search.moves import Space
from counterpoint.planner.search.search import MOST_STARTS, Budget, search as search_plans
from counterpoint.planner.staged import staged_plans
from counterpoint.world.cluster import Cluster
from counterpoint.world.cluster_file import load_cluster

PROPOSALS = 2000
"""A search without a budget of time makes so many, and finds the same wherever it is made."""


JobName = Annotated[str | None, typer.Argument(metavar="[JOB]", help="A built-in job: text, digits, lines.")]
Ranks = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks there are.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of one global batch; 64 without a job.")]
Blocks = Annotated[int | None, typer.Option(min=1, help="Without a job: equal blocks; 8 if left out.")]
Width = Annotated[int, typer.Option(min=1, help="Without a job: a block is one linear layer of this width.")]
ClusterFile = Annotated[
    Path | None, typer.Option(help="YAML of the ranks and links, as `counterpoint probe` writes it.")
]
Memory = Annotated[float | None, typer.Option(min=0, help="GiB that a rank can hold.")]
TimingFile = Annotated[
    Path | None, typer.Option(help="Seconds of the JOB's pieces, as `counterpoint profile --out` writes them.")
]
GraphFile = Annotated[
    Path | None, typer.Option(help="Without a job: layers as PipeDream's profiler writes them, a graph.txt.")
]
PlanFile = Annotated[
    Path | None, typer.Option(metavar="FILE.yaml", help="Rank this plan, too, by the timing it came with.")
]
Passes = Annotated[
    list[str] | None, typer.Option("--pass", help="Run on every program, as overlap is if left out; none for none.")
]
Top = Annotated[int | None, typer.Option(min=1, help="Show only the first so many.")]
NumTrials = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Try the best K and data parallelism on this host's ranks.")
]
Search = Annotated[bool, typer.Option("--search", help="Look for plans that are on no list, by random walks.")]
TimeBudget = Annotated[
    str | None,
    typer.Option(metavar="SECONDS", help="How long to rank and search, as 10s; all, and 2000 proposals, if left out."),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the search.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the plan that is taken.")]
Report = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with timelines.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")]


def plan(
    job: JobName = None,
    *,
    ranks: Ranks,
    batch_size: BatchSize = None,
    blocks: Blocks = None,
    width: Width = 1024,
    cluster: ClusterFile = None,
    memory: Memory = None,
    timing: TimingFile = None,
    graph: GraphFile = None,
    plan: PlanFile = None,
    passes: Passes = None,
    top: Top = None,
    measure: NumTrials = None,
    search: Search = False,
    time_budget: TimeBudget = None,
    seed: Seed = 0,
    out: Out = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """List the plans that fit so many ranks, the fastest first, for a JOB's model or one of equal blocks.

    A step is computing, communication that nothing hides, idle time (a pipeline's bubble) and updates.
    """
    require_one_model(job, blocks, graph, measure)
    if graph is not None:
        show_graph(graph, place_of(cluster, ranks, memory), ranks, batch_size, (top, as_json))
        return
    budget_s = None if time_budget is None else seconds_of(time_budget)
    model, size = traced(job, batch_size) if job is not None else (equal_blocks(blocks or 8, width), batch_size or 64)
    limit = None if budget_s is None else Limit.within(budget_s)
    read = None if plan is None else own_plan(plan, ranks, size)
    question = Question(model, place_of(cluster, ranks, memory), size, timing_of(model, timing, read))
    asked = tuple(name for name in passes if name != "none") if passes is not None else PASSES
    plans = candidates(ranks, question, asked, read, part_of(limit, 4))
    ranking = rank_for(plans, question, part_of(limit, 2))
    if limit is not None:
        starts = [found.plan for found in ranking.kept[:MOST_STARTS]]
        budget = Budget(time_s=limit.left_s, seed=seed)
        ranking = merged(ranking, searched(ranks, question, asked, budget, starts))
    elif search:
        ranking = merged(ranking, searched(ranks, question, asked, Budget(steps=PROPOSALS, seed=seed)))
    verdict = verdict_on(ranking, plans, question)
    if isinstance(verdict, PlanError) and (out is not None or report is not None or measure is not None):
        raise verdict
    if measure is not None and job is not None and isinstance(verdict, Choice):
        from counterpoint.cli.trials import measured_here

        verdict = measured_here(job, verdict, measure)
    subject = Asked(job or f"{model.num_blocks} blocks", ranks, size, len(plans))
    if as_json:
        typer.echo(json.dumps(to_json(ranking, verdict, top), indent=2))
    else:
        show(subject, ranking, verdict, top)
    if isinstance(verdict, Choice):
        keep(verdict, subject, out, report)


def require_one_model(job: str | None, blocks: int | None, graph: Path | None, measure: int | None) -> None:
    """Check that it is said of one model that it is to be planned for, and that this one can be tried if it shall be.

    Raises:
        PlanError: of several, or there is nothing to try.
    """
    if graph is not None and (job is not None or blocks is not None):
        raise PlanError(f"{graph} has layers of its own; leave out {job or '--blocks'}")
    if job is not None and blocks is not None:
        raise PlanError(f"{job} has blocks of its own, and --blocks is {blocks}; give either a job or --blocks")
    if measure is not None and job is None:
        raise PlanError(f"--measure {measure} trains for some steps, and needs a model and data; give a job as well")


def verdict_on(ranking: Ranking, plans: Sequence[Plan], question: Question) -> Choice | PlanError:
    """Return the plan to take, or why none can be carried out."""
    try:
        return pick(ranking, plans, question)
    except PlanError as obstacle:
        return obstacle


def searched(
    num_ranks: int,
    question: Question,
    passes: tuple[str, ...],
    budget: Budget,
    starts: Sequence[Plan] | None = None,
) -> Ranking:
    """Return what random walks have found, from the best of the list or from some plans on."""
    space = Space.of(question.model, num_ranks, question.batch_size, passes)
    return search_plans(space, question.cluster, budget=budget, starts=starts, timing=question.timing)


def part_of(limit: Limit | None, times: int) -> Limit:
    """Return when so many times less than what is left will be over."""
    return ENDLESS if limit is None else Limit.within(limit.left_s / times)


def candidates(
    num_ranks: int, question: Question, passes: tuple[str, ...], read: Plan | None, limit: Limit
) -> tuple[Plan, ...]:
    """Return the plans that are ranked, the simplest first; one that was read from a file stands behind them."""
    model, size, timing = question.model, question.batch_size, question.timing
    found = (
        *enumerate_plans(num_ranks, model, batch_size=size),
        *staged_plans(num_ranks, model.unsliced, question.cluster, size, timing=timing, limit=limit),
    )
    if limit.is_over:
        typer.echo("the time was over before all stages with replicas of their own were looked for", err=True)
    return settle_all(
        (*(replace(one, passes=passes) for one in found), *([read] if read is not None else [])), question
    )


def own_plan(path: Path, num_ranks: int, batch_size: int) -> Plan:
    """Return the plan of a file, which is for so many ranks and samples.

    Raises:
        PlanError: it cannot be read, or is for others.
    """
    plan = Plan.from_file(path)
    plan.require_ranks(num_ranks)
    plan.require_batch(batch_size)
    return plan


def timing_of(model: ModelSpec, path: Path | None, read: Plan | None = None) -> Timing | None:
    """Return the timing that a file holds, or else the one that a plan came with, if there is one; it is of this model.

    Raises:
        PlanError: it cannot be read, is no timing, or is of another model.
    """
    if path is None and read is not None:
        fitted_to(read, model, None)
        return read.timing
    timing = None if path is None else load_timing(path)
    if timing is not None:
        timing.fitted(model.unsliced)
    return timing


def seconds_of(time_budget: str) -> float:
    """Return the seconds of a budget of time.

    Raises:
        PlanError: it is no number of seconds, or a negative one.

    Example:
        >>> seconds_of("1.5s")
        1.5
    """
    try:
        return Budget(time_s=float(time_budget.strip().removesuffix("s"))).time_s or 0.0
    except ValueError:
        raise PlanError(f"--time-budget {time_budget} is no time; give seconds, as 10s") from None


def keep(choice: Choice, subject: Asked, out: Path | None, report: Path | None) -> None:
    """The plan that is taken, with its timing, and the page about it are in their files, where these were asked for."""
    timing = choice.question.timing
    beside = None if out is None or timing is None else file_beside(out)
    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (out, lambda: choice.plan.to_yaml("" if beside is None else beside.name)),
        (beside, lambda: "" if timing is None else write_timing(timing)),
        (report, lambda: write_report(subject, choice)),
    ]
    for path, text in texts:
        if path is not None:
            try:
                path.write_text(text(), encoding="utf-8")
            except OSError as error:
                raise PlanError(f"{path} cannot be written: {error.strerror}; give another file") from None
            typer.echo(f"wrote {path}", err=True)


def place_of(path: Path | None, num_ranks: int, memory_gib: float | None) -> Cluster:
    """Return the cluster of a file, or a core of a laptop for each rank, with devices of so much memory.

    Raises:
        PlanError: the file is wrong, or the cluster has other ranks.
    """
    cluster = Cluster() if path is None else load_cluster(path)
    cluster.require_ranks(num_ranks)
    if memory_gib is None:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(memory_gib * 2**30)))


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
