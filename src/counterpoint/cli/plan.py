"""``counterpoint plan --graph``: the plans for layers that PipeDream's profiler has timed.

``counterpoint plan``: the plans that fit so many ranks, what is predicted and measured of them, which to take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.plan_output import (
    PlanRequest,
    format_plan_count,
    format_remarks,
    print_plans,
    print_result,
    ranking_to_dict,
    result_to_dict,
    write_report,
)
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile, format_profile, load_profile, profile_path_for
from counterpoint.model.spec import Block, ModelSpec, linear_chain
from counterpoint.plan.plan import DEFAULT_PASSES, Plan
from counterpoint.planner.choose import PlanChoice, rank_for_problem, select_plan
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem, resolve_partitions
from counterpoint.planner.pipeline.candidates import find_pipeline_plans, rank_graph
from counterpoint.planner.pipeline.layer_graph import parse_graph
from counterpoint.planner.prepare import fit_profile
from counterpoint.planner.ranking import PlanRanking, merge_rankings
from counterpoint.planner.search.proposals import SearchSpace
from counterpoint.planner.search.search import MAX_STARTS, SearchBudget, search_plans as search_plans
from counterpoint.world.cluster import Cluster
from counterpoint.world.cluster_file import load_cluster

MINIBATCHES_PER_RANK = 4
"""Of a profile, in a step for which nobody says how many."""


def print_profile_plans(
    path: Path, cluster: Cluster, ranks: int, batch_size: int | None, shown: tuple[int | None, bool]
) -> None:
    """The plans for a profile are on standard output, and the layers of each stage of the best pipeline.

    Args:
        path: of the profile.
        place: where it would run.
        ranks: how many there are.
        batch_size: minibatches in a step.
        shown: how many plans, and whether as JSON.

    Raises:
        PlanError: there is no such file, or it is no profile.
    """
    try:
        profile = parse_graph(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give a graph.txt") from None
    (top, as_json), size = shown, batch_size or MINIBATCHES_PER_RANK * ranks
    found = rank_graph(profile, cluster, ranks, size)
    if as_json:
        typer.echo(json.dumps(ranking_to_dict(found.ranking, top), indent=2))
        return
    plans = format_plan_count(len(found.ranking.predictions))
    typer.echo(f"{plans} for -n {ranks}, {size} minibatches of {path} in a step\n")
    print_plans(found.ranking, top)
    typer.echo("\n".join(["", *format_remarks(found.ranking, top), *found.describe()]))


DEFAULT_PROPOSALS = 2000
"""A search without a budget of time makes so many, and finds the same wherever it is made."""


JobName = Annotated[str | None, typer.Argument(metavar="[JOB]", help="A built-in job: text, digits, lines.")]
Ranks = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks there are.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of one global batch; 64 without a job.")]
Blocks = Annotated[int | None, typer.Option(min=1, help="Without a job: equal blocks; 8 if left out.")]
Width = Annotated[int, typer.Option(min=1, help="Without a job: a block is one linear layer of this width.")]
ClusterFile = Annotated[
    Path | None, typer.Option(help="YAML of the ranks and links, as `counterpoint probe` writes it.")
]
MemoryGib = Annotated[float | None, typer.Option(min=0, help="GiB that a rank can hold.")]
ProfileFile = Annotated[
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
    memory: MemoryGib = None,
    profile: ProfileFile = None,
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
        print_profile_plans(graph, cluster_for(cluster, ranks, memory), ranks, batch_size, (top, as_json))
        return
    budget_s = None if time_budget is None else parse_time_budget(time_budget)
    model, size = (
        trace_job_model(job, batch_size)
        if job is not None
        else (build_equal_blocks(blocks or 8, width), batch_size or 64)
    )
    limit = None if budget_s is None else Deadline.after(budget_s)
    read = None if plan is None else load_plan(plan, ranks, size)
    question = PlanningProblem(model, cluster_for(cluster, ranks, memory), size, resolve_profile(model, profile, read))
    asked = tuple(name for name in passes if name != "none") if passes is not None else DEFAULT_PASSES
    plans = list_candidates(ranks, question, asked, read, fraction_of_deadline(limit, 4))
    ranking = rank_for_problem(plans, question, fraction_of_deadline(limit, 2))
    if limit is not None:
        starts = [found.plan for found in ranking.eligible[:MAX_STARTS]]
        budget = SearchBudget(time_s=limit.remaining_s, seed=seed)
        ranking = merge_rankings(ranking, run_search(ranks, question, asked, budget, starts))
    elif search:
        ranking = merge_rankings(
            ranking, run_search(ranks, question, asked, SearchBudget(steps=DEFAULT_PROPOSALS, seed=seed))
        )
    verdict = choose_plan(ranking, plans, question)
    if isinstance(verdict, PlanError) and (out is not None or report is not None or measure is not None):
        raise verdict
    if measure is not None and job is not None and isinstance(verdict, PlanChoice):
        from counterpoint.cli.measure_plans import measure_on_this_host

        verdict = measure_on_this_host(job, verdict, measure)
    subject = PlanRequest(job or f"{model.num_blocks} blocks", ranks, size, len(plans))
    if as_json:
        typer.echo(json.dumps(result_to_dict(ranking, verdict, top), indent=2))
    else:
        print_result(subject, ranking, verdict, top)
    if isinstance(verdict, PlanChoice):
        write_outputs(verdict, subject, out, report)


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


def choose_plan(ranking: PlanRanking, plans: Sequence[Plan], question: PlanningProblem) -> PlanChoice | PlanError:
    """Return the plan to take, or why none can be carried out."""
    try:
        return select_plan(ranking, plans, question)
    except PlanError as obstacle:
        return obstacle


def run_search(
    num_ranks: int,
    question: PlanningProblem,
    passes: tuple[str, ...],
    budget: SearchBudget,
    starts: Sequence[Plan] | None = None,
) -> PlanRanking:
    """Return what random walks have found, from the best of the list or from some plans on."""
    space = SearchSpace.for_model(question.model, num_ranks, question.batch_size, passes)
    return search_plans(space, question.cluster, budget=budget, starts=starts, profile=question.profile)


def fraction_of_deadline(limit: Deadline | None, times: int) -> Deadline:
    """Return when so many times less than what is left will be over."""
    return NO_DEADLINE if limit is None else Deadline.after(limit.remaining_s / times)


def list_candidates(
    num_ranks: int, question: PlanningProblem, passes: tuple[str, ...], read: Plan | None, limit: Deadline
) -> tuple[Plan, ...]:
    """Return the plans that are ranked, the simplest first; one that was read from a file stands behind them."""
    model, size, timing = question.model, question.batch_size, question.profile
    found = (
        *enumerate_plans(num_ranks, model, batch_size=size),
        *find_pipeline_plans(num_ranks, model.without_tp, question.cluster, size, profile=timing, deadline=limit),
    )
    if limit.is_past:
        typer.echo("the time was over before all stages with replicas of their own were looked for", err=True)
    return resolve_partitions(
        (*(replace(one, passes=passes) for one in found), *([read] if read is not None else [])), question
    )


def load_plan(path: Path, num_ranks: int, batch_size: int) -> Plan:
    """Return the plan of a file, which is for so many ranks and samples.

    Raises:
        PlanError: it cannot be read, or is for others.
    """
    plan = Plan.from_file(path)
    plan.require_ranks(num_ranks)
    plan.require_batch(batch_size)
    return plan


def resolve_profile(model: ModelSpec, path: Path | None, read: Plan | None = None) -> ModelProfile | None:
    """Return the timing that a file holds, or else the one that a plan came with, if there is one; it is of this model.

    Raises:
        PlanError: it cannot be read, is no timing, or is of another model.
    """
    if path is None and read is not None:
        fit_profile(read, model, None)
        return read.profile
    timing = None if path is None else load_profile(path)
    if timing is not None:
        timing.match_to(model.without_tp)
    return timing


def parse_time_budget(time_budget: str) -> float:
    """Return the seconds of a budget of time.

    Raises:
        PlanError: it is no number of seconds, or a negative one.

    Example:
        >>> seconds_of("1.5s")
        1.5
    """
    try:
        return SearchBudget(time_s=float(time_budget.strip().removesuffix("s"))).time_s or 0.0
    except ValueError:
        raise PlanError(f"--time-budget {time_budget} is no time; give seconds, as 10s") from None


def write_outputs(choice: PlanChoice, request: PlanRequest, out: Path | None, report: Path | None) -> None:
    """The plan that is taken, with its timing, and the page about it are in their files, where these were asked for."""
    timing = choice.problem.profile
    beside = None if out is None or timing is None else profile_path_for(out)
    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (out, lambda: choice.plan.to_yaml("" if beside is None else beside.name)),
        (beside, lambda: "" if timing is None else format_profile(timing)),
        (report, lambda: write_report(request, choice)),
    ]
    for path, text in texts:
        if path is not None:
            try:
                path.write_text(text(), encoding="utf-8")
            except OSError as error:
                raise PlanError(f"{path} cannot be written: {error.strerror}; give another file") from None
            typer.echo(f"wrote {path}", err=True)


def cluster_for(path: Path | None, num_ranks: int, memory_gib: float | None) -> Cluster:
    """Return the cluster of a file, or a core of a laptop for each rank, with devices of so much memory.

    Raises:
        PlanError: the file is wrong, or the cluster has other ranks.
    """
    cluster = Cluster() if path is None else load_cluster(path)
    cluster.require_ranks(num_ranks)
    if memory_gib is None:
        return cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(memory_gib * 2**30)))


def build_equal_blocks(num_blocks: int, width: int) -> ModelSpec:
    """Return equal linear layers, each with the floating point operations that it takes."""
    model = linear_chain(num_blocks, width=width)
    work = 2.0 * width * width
    return replace(
        model,
        blocks=tuple(
            Block(tuple(replace(piece, cost=work) for piece in block.layers), block.first_layer)
            for block in model.blocks
        ),
    )


def trace_job_model(job: str, batch_size: int | None) -> tuple[ModelSpec, int]:
    """Return a job's model, traced on a few of its own samples, and the global batch."""
    from counterpoint.jobs.registry import find_job
    from counterpoint.runtime.optimizer_spec import OptimizerSpec
    from counterpoint.training.plan_resolution import MAX_TRACE_SAMPLES, trace_model_spec
    from counterpoint.training.trainer import take_first_samples

    found = find_job(job)
    model = found.build_model(0)
    dataset, _ = found.build_data()
    face = OptimizerSpec(found.optimizer, dict(model.named_parameters()))
    inputs = take_first_samples(dataset, MAX_TRACE_SAMPLES).inputs(0)
    return trace_model_spec(model, face, inputs, None), batch_size or found.batch_size
