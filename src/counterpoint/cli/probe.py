"""``counterpoint probe``: measure ranks and links, and write the cluster file that ``plan --cluster`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.tables import TableColumn, format_bytes, print_table
from counterpoint.errors import LaunchError
from counterpoint.file_writer import require_writable, write_output
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.launchers.machine import host_memory_bytes, this_host
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.quantities import BANDWIDTH, FLOPS, format_quantity

MIN_RANKS, MAX_RANKS = 2, 8
"""By default there is one rank per core, but at least and at most these numbers."""
TIMEOUT_S = 120.0


def probe(
    *,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Ranks on this host; one per core, 2 to 8, if omitted."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per rank; cores / ranks if omitted.")] = None,
    out: Annotated[Path | None, typer.Option(help="Path of the cluster file; if omitted, it is printed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")] = False,
) -> None:
    """Measure compute speed and messages of ranks, and write them as a cluster file.

    Starts ranks on this host, or measures those that a launcher has started: `counterpoint run`, torchrun. No other
    program should run.
    """
    environment = detect()
    if environment is not None and (threads is not None or ranks not in {None, environment.world_size}):
        raise LaunchError(
            f"a launcher has started {environment.world_size} ranks with their own number of threads; omit "
            "--ranks and "
            "--threads, or start the command without a launcher"
        )
    require_writable(out)
    count = ranks or min(max(this_host().num_usable, MIN_RANKS), MAX_RANKS)
    if environment is not None or count == 1:
        values, rank = measure(), environment.rank if environment is not None else 0
    else:
        values, rank = launch(measure, ranks=count, threads_per_rank=threads, timeout_s=TIMEOUT_S)[0], 0
    if rank != 0:
        return
    if out is not None:
        write_output(out, values["cluster"])
    if as_json:
        echo(json.dumps(values, indent=2))
    else:
        print_measurements(values, out)


def measure() -> dict[str, Any]:
    """Return the measurements of the ranks of this job as JSON values; every rank calls it."""
    import torch

    from counterpoint.profiler.probe import probe_cluster as probe_ranks
    from counterpoint.profiler.timer import training_conditions
    from counterpoint.training.distributed_world import open_world

    world = open_world(detect(), 1, TIMEOUT_S)
    memory, cores = host_memory_bytes(), this_host().num_usable
    try:
        with training_conditions(torch.get_num_threads()):
            measured = world.run(lambda fabric: probe_ranks(fabric, host_memory_bytes=memory, max_threads=cores))
    finally:
        world.close()
    return measured[0].to_json_dict()


def print_measurements(values: dict[str, Any], out: Path | None) -> None:
    """Print the measurements as tables, then the cluster file or its path."""
    products, links = values["matmuls"], values["links"]
    sizes = sorted({link["size"] for link in products})
    measured = {(link["threads"], link["size"]): link["flops_per_s"] for link in products}
    echo("products of square matrices on rank 0, by number of rows\n")
    print_table(
        [TableColumn("threads", "right"), *(TableColumn(f"{size:,}", "right") for size in sizes)],
        [
            [str(count), *(format_quantity(measured[count, size], FLOPS) for size in sizes)]
            for count in sorted({link["threads"] for link in products})
        ],
    )
    if links:
        echo("\nmessages from one rank to another, by pairs of ranks\n")
        print_table(
            [TableColumn("size", "right"), *(TableColumn(link_title(link), "right") for link in links)],
            list(message_rows(links)),
        )
    echo(f"\n{values['cluster'] if out is None else f'cluster file: {out}'}", nl=out is not None)


def link_title(link: dict[str, Any]) -> str:
    """Return the column title of a link."""
    first, second = link["ranks"]
    return f"{link['level']} {first}-{second}"


def message_rows(links: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each message size, and one for each of latency and bandwidth."""
    sizes = sorted({size for link in links for size, _ in link["messages"]})
    for size in sizes:
        times = [dict(link["messages"]).get(size) for link in links]
        yield [format_bytes(size), *("" if seconds is None else format_seconds(seconds) for seconds in times)]
    yield ["latency", *(format_seconds(link["latency_s"]) for link in links)]
    yield ["bandwidth", *(format_quantity(link["bytes_per_s"], BANDWIDTH) for link in links)]
