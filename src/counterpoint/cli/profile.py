"""``counterpoint profile``: how long every piece of a job's model takes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.tables import TableColumn, format_bytes, print_table
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import BatchSizeProfile, LayerProfile, ModelProfile, format_profile
from counterpoint.planner.pipeline.graph_models import graph_from_profile
from counterpoint.planner.pipeline.layer_graph import format_graph
from counterpoint.viz.number_format import format_number, format_seconds
from counterpoint.world.cluster import Cluster

COLUMNS = (
    TableColumn("piece"),
    *(TableColumn(title, "right") for title in ("forward ms", "backward ms", "output", "kept", "parameters")),
)


def profile(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A built-in job: text, digits, lines.")],
    *,
    samples: Annotated[
        list[int] | None, typer.Option(min=1, help="Samples of a microbatch; may be given several times.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Threads to compute with; 1 if left out; may be given several times."),
    ] = None,
    roofline: Annotated[bool, typer.Option("--roofline", help="Count operations instead of running them.")] = False,
    graph: Annotated[Path | None, typer.Option(help="Write the profile there as PipeDream's graph.txt.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the timing there, for --profile of other commands.")] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure even what was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")] = False,
) -> None:
    """Time every piece of a JOB's model, forward and backward, on the job's own samples.

    Timings are kept in the user's cache folder and measured again when the model, torch, the processor or what is
    asked for has changed.
    """
    wanted = threads or [1]
    if len(wanted) > 1 and (graph is not None or out is not None):
        raise PlanError(f"--threads was given {len(wanted)} times, but one file holds one timing; give one with --out")
    found = [profile_job(job, samples or [], count, is_counted=roofline, remeasure=remeasure) for count in wanted]
    if out is not None:
        out.write_text(format_profile(found[0]), encoding="utf-8")
    if graph is not None:
        graph.write_text(format_graph(graph_from_profile(found[0], found[0].batch_sizes[-1].samples)), encoding="utf-8")
    if as_json:
        typer.echo("\n".join(format_profile(timing).rstrip() for timing in found))
        return
    for timing in found:
        print_profile(timing)


def print_profile(profile: ModelProfile) -> None:
    """The table of the largest microbatch is on standard output, and what the whole model takes for each size."""
    point, machine = profile.batch_sizes[-1], profile.profiled_on
    how = f"measured with {machine.threads} thread{'s' if machine.threads > 1 else ''}" if machine.is_measured else ""
    typer.echo(f"{profile.model} on {machine.device}, {how or 'not run'}; microbatches of {point.samples}\n")
    named = zip(profile.layers, point.layers, strict=True)
    print_table(COLUMNS, [layer_row(one.name, took, one.weight_bytes) for one, took in named])
    typer.echo("")
    for each in profile.batch_sizes:
        typer.echo(f"{each.samples} samples, not cut: {describe_times(each)}")
    update_s = profile.update_s_per_byte * profile.weight_bytes + profile.overheads.update_s
    typer.echo(f"an update ({machine.optimizer}): {format_seconds(update_s)}; the last piece has the loss")
    if machine.is_measured:
        fixed = profile.overheads
        typer.echo(
            f"beside the work: {format_seconds(fixed.forward_s)} a call forward, {format_seconds(fixed.backward_s)} a "
            f"call backward, {format_seconds(fixed.step_s)} a step"
        )


def layer_row(name: str, took: LayerProfile, weight_bytes: int) -> tuple[str, ...]:
    """Return the row of a piece."""
    times = (format_number(float(f"{1e3 * seconds:.3g}")) for seconds in (took.forward_s, took.backward_s))
    return (name, *times, *map(format_bytes, (took.output_bytes, took.saved_bytes, weight_bytes)))


def describe_times(batch_size: BatchSizeProfile) -> str:
    """Return what the whole model takes."""
    whole = batch_size.unpartitioned
    return (
        f"forward {format_seconds(whole.forward_s)}, backward {format_seconds(whole.backward_s)}, "
        f"{format_bytes(whole.saved_bytes)} kept"
    )


def profile_job(job: str, samples: list[int], threads: int, *, is_counted: bool, remeasure: bool) -> ModelProfile:
    """Return the timing of a job's model on its own samples."""
    from counterpoint.jobs.registry import find_job
    from counterpoint.launchers.variables import cache_dir
    from counterpoint.training.profiling import profile as take
    from counterpoint.training.trainer import take_first_samples

    found = find_job(job)
    dataset, _ = found.build_data()
    feed = take_first_samples(dataset, found.batch_size)
    return take(
        found.build_model(0),
        feed.inputs(0),
        feed.targets(0),
        loss=found.loss,
        optimizer=found.optimizer,
        microbatch_sizes=samples,
        num_threads=threads,
        roofline_device=Cluster().device if is_counted else None,
        cache_dir=cache_dir(),
        remeasure=remeasure,
    )
