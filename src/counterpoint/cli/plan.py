"""``counterpoint plan``: rank the plans for a number of ranks by predicted or measured time, and choose one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.plan_output import (
    PlanRequest,
    format_plan_count,
    format_remarks,
    print_plans,
    print_result,
    ranking_to_dict,
    write_report,
)
from counterpoint.cli.workload import (
    JOB_HELP,
    AsJson,
    ScriptArguments,
    Which,
    Workload,
    load_workload,
    require_script,
)
from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_text
from counterpoint.file_writer import require_writable, write_output
from counterpoint.model.model_profile import ModelProfile, format_profile, load_profile, profile_path_for
from counterpoint.model.option_text import merge_option
from counterpoint.model.precision import Precision, parse_precision
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
from counterpoint.world.cluster import Cluster, Device
from counterpoint.world.cluster_file import resolve_cluster

MINIBATCHES_PER_RANK = 4
"""Minibatches of a PipeDream profile per rank in a step, if no batch size is given."""


def print_profile_plans(
    path: Path, cluster: Cluster, ranks: int, batch_size: int | None, shown: tuple[int | None, bool]
) -> None:
    """Print the plans for a PipeDream profile, and the layers of each stage of the best pipeline.

    Args:
        path: the profile.
        cluster: where it would run.
        ranks: number of ranks.
        batch_size: minibatches in a step.
        shown: how many plans to print, and whether as JSON.

    Raises:
        PlanError: the file cannot be read, or is not a profile.
    """
    try:
        profile = parse_graph(read_regular_text(path))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give a graph.txt") from None
    (top, as_json), size = shown, batch_size or MINIBATCHES_PER_RANK * ranks
    graph_ranking = rank_graph(profile, cluster, ranks, size)
    if as_json:
        echo(json.dumps(ranking_to_dict(graph_ranking.ranking, top), indent=2))
        return
    plans = format_plan_count(len(graph_ranking.ranking.predictions))
    echo(f"{plans} for -n {ranks}, {size} minibatches of {path} in a step\n")
    print_plans(graph_ranking.ranking, top)
    echo("\n".join(["", *format_remarks(graph_ranking.ranking, top), *graph_ranking.describe()]))


DEFAULT_PROPOSALS = 2000
"""Proposals of a search without a time budget, so that it finds the same everywhere."""


JobName = Annotated[
    str | None,
    typer.Argument(metavar="[SCRIPT.py|JOB]", help=JOB_HELP),
]
Ranks = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Number of ranks.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Samples of one global batch; 64 without a job.")]
Blocks = Annotated[int | None, typer.Option(min=1, help="Without a job: equal blocks; 8 if omitted.")]
Width = Annotated[int, typer.Option(min=1, help="Without a job: a block is one linear layer of this width.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Cluster file, as `counterpoint probe` writes it; or hosts with GPUs by name: 8xh100, 4x8xa100-80gb.",
    ),
]
MemoryGib = Annotated[float | None, typer.Option(min=0, help="Memory of a rank in GiB.")]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Profile of the model's layers, as `counterpoint profile --out` writes it.")
]
GraphFile = Annotated[
    Path | None, typer.Option(help="Without a job: layers as PipeDream's profiler writes them, a graph.txt.")
]
PlanFile = Annotated[
    Path | None, typer.Option(metavar="FILE.yaml", help="Also rank this plan, by the profile it came with.")
]
Passes = Annotated[
    list[str] | None,
    typer.Option("--pass", help="Pass to run on every program; overlap if omitted, none for no pass."),
]
PrecisionText = Annotated[
    str | None,
    typer.Option("--precision", help="What the model computes in, as bf16; if omitted, as the script or --plan says."),
]
Top = Annotated[int | None, typer.Option(min=1, help="Number of plans to show.")]
NumTrials = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Measure the best K plans and data parallelism on this host.")
]
Search = Annotated[bool, typer.Option("--search", help="Also search for plans by random walks.")]
TimeBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS",
        help="Time limit for ranking and searching, as 10s; if omitted, all plans and 2000 proposals.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the search.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the chosen plan.")]
Report = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with timelines.")]


def plan(
    job: JobName = None,
    arguments: ScriptArguments = None,
    *,
    ranks: Ranks,
    batch_size: BatchSize = None,
    blocks: Blocks = None,
    width: Width = 1024,
    cluster: ClusterName = None,
    memory: MemoryGib = None,
    profile: ProfileFile = None,
    graph: GraphFile = None,
    plan: PlanFile = None,
    passes: Passes = None,
    precision: PrecisionText = None,
    top: Top = None,
    measure: NumTrials = None,
    search: Search = False,
    time_budget: TimeBudget = None,
    seed: Seed = 0,
    out: Out = None,
    report: Report = None,
    which: Which = 1,
    as_json: AsJson = False,
) -> None:
    """List the plans for a number of ranks, the fastest first, for the model of a script or a job, or equal blocks.

    A script is run until the first batch of its cp.Trainer or cp.parallelize, and trains nothing.

    The time of a step is computing, communication that is not overlapped, idle time (pipeline bubbles) and updates.
    """
    require_one_model(job, blocks, graph, measure)
    require_writable(out, report)
    require_script(job, arguments)
    place = cluster_for(cluster, ranks, memory)
    if graph is not None:
        print_profile_plans(graph, place, ranks, batch_size, (top, as_json))
        return
    budget_s = None if time_budget is None else parse_time_budget(time_budget)
    workload = None if job is None else load_workload(job, arguments or (), which, computes_nothing=measure is None)
    size = batch_size or (64 if workload is None else workload.batch_size)
    loaded_plan = None if plan is None else load_plan(plan, ranks, size)
    computed_in = resolve_precision(precision, workload, loaded_plan)
    name, model = build_model(workload, blocks or 8, width, computed_in)
    deadline = None if budget_s is None else Deadline.after(budget_s)
    loaded_profile = resolve_profile(model, profile, loaded_plan, computed_in)
    own_profile = loaded_profile or estimate_workload(workload, place.device, computed_in, size)
    problem = PlanningProblem(model, place, size, own_profile, has_offload_folder=has_offload_folder(workload))
    pass_names = tuple(name for name in passes if name != "none") if passes is not None else DEFAULT_PASSES
    plans = list_candidates(ranks, problem, pass_names, loaded_plan, fraction_of_deadline(deadline, 4))
    ranking = rank_for_problem(plans, problem, fraction_of_deadline(deadline, 2))
    if deadline is not None or search:
        steps, time_s = (DEFAULT_PROPOSALS, None) if deadline is None else (None, deadline.remaining_s)
        ranking = add_search(ranking, ranks, problem, pass_names, SearchBudget(steps, time_s, seed))
    plans, ranking = write_precision(plans, ranking, computed_in)
    result = choose_plan(ranking, plans, problem)
    if isinstance(result, PlanError) and (out is not None or report is not None or measure is not None):
        raise result
    if measure is not None and job is not None and isinstance(result, PlanChoice):
        from counterpoint.cli.measure_plans import measure_on_this_host

        result = measure_on_this_host((job, arguments or [], which), result, measure)
    request = PlanRequest(name, ranks, len(plans), computed_in, problem)
    print_result(request, ranking, result, top, as_json=as_json)
    if isinstance(result, PlanChoice):
        write_outputs(result, request, out, report)


def has_offload_folder(workload: Workload | None) -> bool:
    """Return whether a script gives a folder for what ranks offload, and its model is not on a device."""
    if workload is None or workload.options.offload_folder is None:
        return False
    return all(param.device.type in {"cpu", "meta"} for param in workload.model.parameters())


def resolve_precision(text: str | None, workload: Workload | None, loaded_plan: Plan | None) -> Precision | None:
    """Return what the plans are compared in: the precision of the option, of the script, or of the plan file.

    Raises:
        PlanError: two of them differ, or the text is not a precision.
    """
    chosen = parse_precision(text)
    own = None if workload is None else parse_precision(workload.options.precision)
    if workload is not None and chosen is not None and own is not None and chosen != own:
        raise PlanError(f"--precision is {chosen}, but {workload.name} gives precision={own}; omit one of them")
    return merge_option("precision", chosen or own, None if loaded_plan is None else loaded_plan.precision)


def write_precision(
    plans: Sequence[Plan], ranking: PlanRanking, precision: Precision | None
) -> tuple[tuple[Plan, ...], PlanRanking]:
    """Return plans and their ranking with the precision in which they were compared written into each plan."""

    def compute_in(plan: Plan) -> Plan:
        return replace(plan, precision=precision)

    written = PlanRanking(
        tuple(replace(one, plan=compute_in(one.plan)) for one in ranking.predictions),
        tuple(replace(one, plan=compute_in(one.plan)) for one in ranking.rejected),
        tuple(map(compute_in, ranking.not_evaluated)),
        tuple(map(compute_in, ranking.pruned)),
    )
    return tuple(map(compute_in, plans)), written


def require_one_model(job: str | None, blocks: int | None, graph: Path | None, measure: int | None) -> None:
    """Check that exactly one model is given, and that it can be measured if that is requested.

    Raises:
        PlanError: several are given, or there is nothing to measure.
    """
    if graph is not None and (job is not None or blocks is not None):
        raise PlanError(f"{graph} has layers of its own; omit {job or '--blocks'}")
    if job is not None and blocks is not None:
        raise PlanError(f"{job} has blocks of its own, and --blocks is {blocks}; give either a job or --blocks")
    if measure is not None and job is None:
        raise PlanError(f"--measure {measure} trains for some steps and needs a model and data; give a job too")


def choose_plan(ranking: PlanRanking, plans: Sequence[Plan], problem: PlanningProblem) -> PlanChoice | PlanError:
    """Return the chosen plan, or why none can be run."""
    try:
        return select_plan(ranking, plans, problem)
    except PlanError as error:
        return error


def add_search(
    ranking: PlanRanking, num_ranks: int, problem: PlanningProblem, passes: tuple[str, ...], budget: SearchBudget
) -> PlanRanking:
    """Return the ranking with the plans that random walks find.

    With a time limit they start from the best plans ranked so far.
    """
    starts = None if budget.time_s is None else [prediction.plan for prediction in ranking.eligible[:MAX_STARTS]]
    space = SearchSpace.for_model(problem.model, num_ranks, problem.batch_size, passes)
    found = search_plans(space, problem.cluster, budget=budget, starts=starts, profile=problem.profile)
    return merge_rankings(ranking, found)


def fraction_of_deadline(deadline: Deadline | None, times: int) -> Deadline:
    """Return a deadline after 1 / ``times`` of the remaining time."""
    return NO_DEADLINE if deadline is None else Deadline.after(deadline.remaining_s / times)


def list_candidates(
    num_ranks: int, problem: PlanningProblem, passes: tuple[str, ...], loaded_plan: Plan | None, deadline: Deadline
) -> tuple[Plan, ...]:
    """Return the plans to rank, the simplest first, then the one that was read from a file."""
    model, size, loaded_profile = problem.model, problem.batch_size, problem.profile
    plans_found = (
        *enumerate_plans(num_ranks, model, batch_size=size),
        *find_pipeline_plans(
            num_ranks, model.without_tp, problem.cluster, size, profile=loaded_profile, deadline=deadline
        ),
    )
    if deadline.is_past:
        echo("the time budget ended before all pipelines with replicated stages were enumerated", err=True)
    return resolve_partitions(
        (*(replace(plan, passes=passes) for plan in plans_found), *([loaded_plan] if loaded_plan is not None else [])),
        problem,
    )


def load_plan(path: Path, num_ranks: int, batch_size: int) -> Plan:
    """Load a plan file and check that it is for these numbers of ranks and samples.

    Raises:
        PlanError: it cannot be read, or is for others.
    """
    plan = Plan.from_file(path)
    plan.require_ranks(num_ranks)
    plan.require_batch(batch_size)
    return plan


def resolve_profile(
    model: ModelSpec, path: Path | None, loaded_plan: Plan | None = None, precision: Precision | None = None
) -> ModelProfile | None:
    """Return the profile from a file, or else the one that the plan came with, if any; checked to be of this model.

    Raises:
        PlanError: it cannot be read, is not a profile, or is of another model or another precision.
    """
    if path is None and loaded_plan is not None:
        fit_profile(loaded_plan, model, None)
        return loaded_plan.profile
    loaded_profile = None if path is None else load_profile(path)
    if loaded_profile is not None:
        loaded_profile.match_to(model.without_tp)
        of_profile, wanted = loaded_profile.profiled_on.precision, "" if precision is None else str(precision)
        if of_profile not in {"", wanted}:
            raise PlanError(
                f"the profile {path} is of the model in {of_profile}, but plans are compared in "
                f"{wanted or 'the dtypes of the model'}; give --precision {of_profile}, or another profile"
            )
    return loaded_profile


def estimate_workload(
    workload: Workload | None, device: Device, precision: Precision | None, batch_size: int
) -> ModelProfile | None:
    """Return the profile of a job's or a script's model at the roofline of a device; None without one of either.

    Nothing is computed.
    """
    if workload is None or device.roofline is None:
        return None
    from counterpoint.training.model_checks.validation import min_microbatch_size
    from counterpoint.training.profiling import default_microbatch_sizes

    sizes = default_microbatch_sizes(batch_size, min_microbatch_size(workload.model))
    return workload.profile(sizes, roofline_device=device, precision=precision)


def parse_time_budget(time_budget: str) -> float:
    """Return the seconds of a time budget.

    Raises:
        PlanError: it is not a number of seconds, or negative.

    Example:
        >>> parse_time_budget("1.5s")
        1.5
    """
    try:
        return SearchBudget(time_s=float(time_budget.strip().removesuffix("s"))).time_s or 0.0
    except ValueError:
        raise PlanError(f"--time-budget {time_budget} is not a time; give seconds, as 10s") from None


def write_outputs(choice: PlanChoice, request: PlanRequest, out: Path | None, report: Path | None) -> None:
    """Write the chosen plan with its profile, and the page about it, to the files that were requested."""
    loaded_profile = choice.problem.profile
    profile_path = None if out is None or loaded_profile is None else profile_path_for(out)
    texts: list[tuple[Path | None, Callable[[], str]]] = [
        (out, lambda: choice.plan.to_yaml("" if profile_path is None else profile_path.name)),
        (profile_path, lambda: "" if loaded_profile is None else format_profile(loaded_profile)),
        (report, lambda: write_report(request, choice)),
    ]
    for path, text in texts:
        if path is not None:
            write_output(path, text())
            echo(f"wrote {path}", err=True)


def cluster_for(given: str | None, num_ranks: int, memory_gib: float | None) -> Cluster:
    """Return the cluster of a file or a name, or one laptop core per rank, with ``memory_gib`` per device if given.

    Raises:
        PlanError: there is no such cluster, the file has mistakes, or the cluster has too few ranks.
    """
    cluster = Cluster() if given is None else resolve_cluster(given)
    cluster.require_ranks(num_ranks)
    if memory_gib is None:
        return cluster
    if not isfinite(memory_gib):
        raise PlanError(f"--memory {memory_gib} is not an amount of memory; give a finite number of GiB above 0")
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(memory_gib * 2**30)))


def build_model(
    workload: Workload | None, num_blocks: int, width: int, precision: Precision | None
) -> tuple[str, ModelSpec]:
    """Return the name and the model of a job or a script, or of equal blocks, as it computes in a precision."""
    if workload is not None:
        return workload.name, trace_workload(workload, precision)
    return f"{num_blocks} blocks", build_equal_blocks(num_blocks, width, precision)


def build_equal_blocks(num_blocks: int, width: int, precision: Precision | None = None) -> ModelSpec:
    """Return equal linear layers whose cost is their number of floating point operations."""
    model = linear_chain(num_blocks, width=width, precision=precision)
    work = 2.0 * width * width
    return replace(
        model,
        blocks=tuple(
            Block(tuple(replace(piece, cost=work) for piece in block.layers), block.first_layer)
            for block in model.blocks
        ),
    )


def trace_workload(workload: Workload, precision: Precision | None) -> ModelSpec:
    """Return the model of a job or a script, traced on a few of its samples, as it computes in a precision."""
    from counterpoint.training.plan_resolution import MAX_TRACE_SAMPLES, trace_model_spec

    inputs = workload.inputs(MAX_TRACE_SAMPLES)
    return trace_model_spec(workload.model, workload.optimizer_spec, inputs, workload.options.dims, precision)
