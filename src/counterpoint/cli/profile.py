"""``counterpoint profile``: how long every piece of a job's model takes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.tables import Column, format_bytes, show_table
from counterpoint.drawing.scale import format_number, format_seconds
from counterpoint.errors import PlanError
from counterpoint.model.timing import PieceTime, Point, Timing
from counterpoint.model.timing_file import write_timing
from counterpoint.planner.profile import write_profile
from counterpoint.planner.profiled import profile_of
from counterpoint.world.cluster import Cluster

COLUMNS = (
    Column("piece"),
    *(Column(title, "right") for title in ("forward ms", "backward ms", "output", "kept", "parameters")),
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
    out: Annotated[Path | None, typer.Option(help="Write the timing there, for --timing of other commands.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even what was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")] = False,
) -> None:
    """Time every piece of a JOB's model, forward and backward, on the job's own samples.

    Timings are kept in the user's cache folder and measured again when the model, torch, the processor or what is
    asked for has changed.
    """
    wanted = threads or [1]
    if len(wanted) > 1 and (graph is not None or out is not None):
        raise PlanError(f"--threads was given {len(wanted)} times, but one file holds one timing; give one with --out")
    found = [timed(job, samples or [], count, is_counted=roofline, anew=again) for count in wanted]
    if out is not None:
        out.write_text(write_timing(found[0]), encoding="utf-8")
    if graph is not None:
        graph.write_text(write_profile(profile_of(found[0], found[0].points[-1].samples)), encoding="utf-8")
    if as_json:
        typer.echo("\n".join(write_timing(timing).rstrip() for timing in found))
        return
    for timing in found:
        show(timing)


def show(timing: Timing) -> None:
    """The table of the largest microbatch is on standard output, and what the whole model takes for each size."""
    point, machine = timing.points[-1], timing.machine
    how = f"measured with {machine.threads} thread{'s' if machine.threads > 1 else ''}" if machine.is_measured else ""
    typer.echo(f"{timing.model} on {machine.device}, {how or 'not run'}; microbatches of {point.samples}\n")
    named = zip(timing.pieces, point.pieces, strict=True)
    show_table(COLUMNS, [cells(one.name, took, one.weight_bytes) for one, took in named])
    typer.echo("")
    for each in timing.points:
        typer.echo(f"{each.samples} samples, not cut: {in_words(each)}")
    update_s = timing.update_s_per_byte * timing.weight_bytes + timing.fixed.update_s
    typer.echo(f"an update ({machine.optimizer}): {format_seconds(update_s)}; the last piece has the loss")
    if machine.is_measured:
        fixed = timing.fixed
        typer.echo(
            f"beside the work: {format_seconds(fixed.forward_s)} a call forward, {format_seconds(fixed.backward_s)} a "
            f"call backward, {format_seconds(fixed.step_s)} a step"
        )


def cells(name: str, took: PieceTime, weight_bytes: int) -> tuple[str, ...]:
    """Return the row of a piece."""
    times = (format_number(float(f"{1e3 * seconds:.3g}")) for seconds in (took.forward_s, took.backward_s))
    return (name, *times, *map(format_bytes, (took.output_bytes, took.kept_bytes, weight_bytes)))


def in_words(point: Point) -> str:
    """Return what the whole model takes."""
    whole = point.whole
    return (
        f"forward {format_seconds(whole.forward_s)}, backward {format_seconds(whole.backward_s)}, "
        f"{format_bytes(whole.kept_bytes)} kept"
    )


def timed(job: str, samples: list[int], threads: int, *, is_counted: bool, anew: bool) -> Timing:
    """Return the timing of a job's model on its own samples."""
    from counterpoint.jobs.table import find
    from counterpoint.launchers.folders import cache_folder
    from counterpoint.training.profiling import profile as take
    from counterpoint.training.trainer import first_samples

    found = find(job)
    dataset, _ = found.build_data()
    feed = first_samples(dataset, found.batch_size)
    return take(
        found.build_model(0),
        feed.inputs(0),
        feed.targets(0),
        loss=found.loss,
        optimizer=found.optimizer,
        samples=samples,
        threads=threads,
        roof=Cluster().device if is_counted else None,
        folder=cache_folder(),
        anew=anew,
    )
