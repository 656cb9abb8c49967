"""``counterpoint profile``: measure the time and memory of every layer of a model on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.tables import TableColumn, format_bytes, print_table
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
from counterpoint.file_writer import require_writable, write_output
from counterpoint.model.compilation import Compilation, parse_compilation
from counterpoint.model.model_profile import (
    BatchSizeProfile,
    CompiledTimes,
    LayerProfile,
    ModelProfile,
    format_profile,
)
from counterpoint.planner.choice_report import describe_repayment
from counterpoint.planner.pipeline.graph_models import graph_from_profile
from counterpoint.planner.pipeline.layer_graph import format_graph
from counterpoint.viz.number_format import format_number, format_seconds, format_share
from counterpoint.world.cluster import Cluster

if TYPE_CHECKING:
    from counterpoint.profiler.exponent_histogram import ExponentHistogram
    from counterpoint.profiler.gradient_profile import Quantity

COLUMNS = (
    TableColumn("layer"),
    *(TableColumn(title, "right") for title in ("forward ms", "backward ms", "output", "saved", "parameters")),
)

MAX_EXPONENT_ROWS = 20
"""Of a histogram of gradients, without those of zero and of what is not finite."""


def profile(
    job: Annotated[
        str,
        typer.Argument(metavar="SCRIPT.py|JOB", help=JOB_HELP),
    ],
    arguments: ScriptArguments = None,
    *,
    samples: Annotated[
        list[int] | None, typer.Option(min=1, help="Samples per microbatch; may be given several times.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of threads; 1 if omitted; may be given several times."),
    ] = None,
    compile: Annotated[  # noqa: A002 - as of a plan
        str | None,
        typer.Option(
            metavar="PARTS", help="Also measure the model compiled: segments or blocks, as compile= of a plan."
        ),
    ] = None,
    roofline: Annotated[bool, typer.Option("--roofline", help="Count operations instead of running them.")] = False,
    graph: Annotated[Path | None, typer.Option(help="Write the profile to this file as PipeDream's graph.txt.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the timing there, for --profile of other commands.")] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Ignore cached profiles.")] = False,
    gradients: Annotated[
        bool,
        typer.Option("--gradients", help="Count the gradients by power of two instead: what fp16 would lose of them."),
    ] = False,
    which: Which = 1,
    as_json: AsJson = False,
) -> None:
    """Profile every layer of the model of a script or a job, forward and backward, on its own samples.

    A script is run until the first batch of its cp.Trainer or cp.parallelize, and trains nothing.
    Profiles are cached in the user's cache folder, and measured again when the model, torch, the processor or the
    options change.
    """
    from counterpoint.launchers.variables import cache_dir

    thread_counts = threads or [1]
    if len(thread_counts) > 1 and (graph is not None or out is not None):
        raise PlanError(
            f"--threads was given {len(thread_counts)} times, but a file holds one profile; give one value with "
            "--out or --graph"
        )
    require_writable(out, graph)
    require_script(job, arguments)
    if gradients:
        given = {
            "--compile": compile,
            "--threads": threads,
            "--roofline": roofline,
            "--graph": graph,
            "--out": out,
            "--remeasure": remeasure,
        }
        require_gradient_options([option for option, value in given.items() if value], samples or [])
    compilation = read_compilation(compile, is_counted=roofline)
    workload = load_workload(job, arguments or (), which, computes_nothing=roofline and not gradients)
    if gradients:
        print_gradients(workload, samples or [workload.batch_size], as_json=as_json)
        return
    roofline_device = Cluster().device if roofline else None
    how = {"compile": compilation, "roofline_device": roofline_device, "remeasure": remeasure, "cache_dir": cache_dir()}
    profiles = [workload.profile(samples or [], num_threads=count, **how) for count in thread_counts]
    write_profiles(profiles, out, graph, as_json=as_json)


def read_compilation(text: str | None, *, is_counted: bool) -> Compilation | None:
    """Return the compilation that is to be measured, too.

    Raises:
        PlanError: the text is not a compilation, or operations are counted.
    """
    if is_counted and text is not None:
        raise PlanError("--roofline counts operations and compiles nothing; give one of --roofline and --compile")
    return parse_compilation(text)


def write_profiles(profiles: Sequence[ModelProfile], out: Path | None, graph: Path | None, *, as_json: bool) -> None:
    """Write the first profile to the files that were requested, and print all of them."""
    if out is not None:
        write_output(out, format_profile(profiles[0]))
    if graph is not None:
        write_output(graph, format_graph(graph_from_profile(profiles[0], profiles[0].batch_sizes[-1].samples)))
    if as_json:
        echo("\n".join(format_profile(profile).rstrip() for profile in profiles))
        return
    for profile in profiles:
        print_profile(profile)


def require_gradient_options(timing_options: list[str], samples: list[int]) -> None:
    """Check that no option for times is given together with ``--gradients``.

    Raises:
        PlanError: one is, or there are several sizes of the batch.
    """
    if timing_options:
        raise PlanError(
            f"--gradients counts gradients and measures no times, so it takes no {' or '.join(timing_options)}; run "
            "the command once for each"
        )
    if len(samples) > 1:
        raise PlanError(
            f"--samples was given {len(samples)} times, but --gradients counts those of one batch; give one"
        )


def print_gradients(workload: Workload, samples: list[int], *, as_json: bool) -> None:
    """Print the gradients of the first batch by power of two: what fp16 loses, and the loss scale that saves it."""
    from counterpoint.profiler.gradient_profile import profile_gradients

    batch = workload.make_batch(samples[0], 1)
    counted = profile_gradients(
        workload.model,
        batch.inputs(0),
        batch.targets(0),
        loss=workload.loss,
        num_samples=sum(batch.sizes.values()),
    )
    if as_json:
        echo(json.dumps(counted.to_dict(), indent=2))
        return
    echo(
        f"{counted.model} on {counted.device}, gradients of {counted.num_samples} samples in "
        f"{' and '.join(counted.dtypes)}\n"
    )
    exponent = counted.loss_scale_exponent
    title = "zero with loss scale" if exponent is None else f"zero with loss scale 2^{exponent}"
    shares = ("zero", "zero in fp16", "subnormal in fp16", "infinite in fp16", title)
    columns = (
        TableColumn("gradients of"),
        TableColumn("modules"),
        *(TableColumn(name, "right") for name in ("values", *shares)),
    )
    rows = [(*kind, histogram) for kind, histogram in counted.by_kind.items()]
    rows += [(quantity, "all", counted.total(quantity)) for quantity in counted.quantities()]
    print_table(columns, [gradient_row(*row, exponent or 0) for row in rows])
    echo("\nzero: share of all values; the other columns: share of the finite values that are not zero\n")
    print_exponents({quantity: counted.total(quantity) for quantity in counted.quantities()})
    echo(f"\nfp16: {counted.recommendation}\nbf16: {counted.range_of_bf16}")


def gradient_row(quantity: str, modules: str, histogram: ExponentHistogram, scale_exponent: int) -> tuple[str, ...]:
    """Return the table row of the gradients of one class of modules."""
    counts = (
        histogram.num_lost(),
        histogram.num_subnormal(),
        histogram.num_overflowing,
        histogram.num_lost(scale_exponent),
    )
    zeros = format_share(histogram.num_zeros / histogram.num_values if histogram.num_values else 0.0)
    return (
        quantity,
        modules,
        format_number(histogram.num_values),
        zeros,
        *(format_share(histogram.share(count)) for count in counts),
    )


def print_exponents(totals: Mapping[Quantity, ExponentHistogram]) -> None:
    """Print shares of all values by power of two, several powers to a row if there are many."""
    exponents = [exponent for histogram in totals.values() for exponent in histogram.exponents]
    rows = [("zero", [histogram.num_zeros for histogram in totals.values()])]
    if exponents:
        first, last = min(exponents), max(exponents)
        width = -(-(last + 1 - first) // MAX_EXPONENT_ROWS)
        for low in range(first, last + 1, width):
            powers = range(low, low + width)
            counts = [sum(map(histogram.exponents.get, powers, repeat(0))) for histogram in totals.values()]
            rows.append((f"2^{low} to 2^{low + width}", counts))
    nonfinite = [histogram.num_nonfinite for histogram in totals.values()]
    if any(nonfinite):
        rows.append(("infinite or nan", nonfinite))
    nums = [histogram.num_values or 1 for histogram in totals.values()]
    print_table(
        (TableColumn("magnitude"), *(TableColumn(quantity, "right") for quantity in totals)),
        [
            (name, *(format_share(count / num) for count, num in zip(counts, nums, strict=True)))
            for name, counts in rows
        ],
    )


def print_profile(profile: ModelProfile) -> None:
    """Print the table of the largest microbatch, and the times of the whole model for each size."""
    batch_size, machine = profile.batch_sizes[-1], profile.profiled_on
    how = f"measured with {machine.threads} thread{'s' if machine.threads > 1 else ''}" if machine.is_measured else ""
    echo(f"{profile.model} on {machine.device}, {how or 'not run'}; microbatches of {batch_size.samples}\n")
    named = zip(profile.layers, batch_size.layers, strict=True)
    print_table(COLUMNS, [layer_row(key.name, layer, key.weight_bytes) for key, layer in named])
    echo("")
    for batch_size in profile.batch_sizes:
        echo(f"{batch_size.samples} samples, unpartitioned: {describe_times(batch_size)}")
    update_s = profile.update_s_per_byte * profile.weight_bytes + profile.overheads.update_s
    echo(f"an update ({machine.optimizer}): {format_seconds(update_s)}; the last layer includes the loss")
    if machine.is_measured:
        fixed = profile.overheads
        echo(
            f"overheads: {format_seconds(fixed.forward_s)} a call forward, {format_seconds(fixed.backward_s)} a "
            f"call backward, {format_seconds(fixed.step_s)} a step"
        )
    if profile.compiled is not None:
        print_compiled(profile, profile.compiled)


def print_compiled(profile: ModelProfile, compiled: CompiledTimes) -> None:
    """Print the times of the compiled model for each size, and how long it takes to pay back."""
    echo(f"\ncompile={compiled.compilation}: compiling takes {format_seconds(compiled.compile_s)}")
    for batch_size in compiled.batch_sizes:
        echo(f"{batch_size.samples} samples, unpartitioned: {describe_times(batch_size)}")
        echo(f"  {describe_repayment(profile, batch_size.samples)}")


def layer_row(name: str, layer: LayerProfile, weight_bytes: int) -> tuple[str, ...]:
    """Return the table row of a layer."""
    times = (format_number(float(f"{1e3 * seconds:.3g}")) for seconds in (layer.forward_s, layer.backward_s))
    return (name, *times, *map(format_bytes, (layer.output_bytes, layer.saved_bytes, weight_bytes)))


def describe_times(batch_size: BatchSizeProfile) -> str:
    """Return the times of the whole model as text."""
    unpartitioned = batch_size.unpartitioned
    return (
        f"forward {format_seconds(unpartitioned.forward_s)}, backward {format_seconds(unpartitioned.backward_s)}, "
        f"{format_bytes(unpartitioned.saved_bytes)} saved"
    )
