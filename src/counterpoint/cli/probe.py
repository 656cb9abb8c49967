"""``counterpoint probe``: what ranks and their links are like, measured, as the file that ``plan --cluster`` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoint.cli.tables import TableColumn, format_bytes, print_table
from counterpoint.errors import LaunchError, PlanError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.launchers.machine import host_memory_bytes, this_host
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.quantities import BANDWIDTH, FLOPS, format_quantity

MIN_RANKS, MAX_RANKS = 2, 8
"""Where nobody says how many: as many as there are cores, but no fewer and no more than these."""
TIMEOUT_S = 120.0


def probe(
    *,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", "-n", min=1, help="Ranks on this host; as many as cores, 2 to 8, if left out."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per rank; cores / ranks when left out.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the cluster file is written; it is shown if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write all figures as JSON.")] = False,
) -> None:
    """Measure what ranks compute, what messages between them take, and write it as a cluster file.

    It starts ranks on this host, or measures those that a launcher has started: `counterpoint run`, torchrun.
    Nothing else should run meanwhile.
    """
    environment = detect()
    if environment is not None and (threads is not None or ranks not in {None, environment.world_size}):
        raise LaunchError(
            f"a launcher has started {environment.world_size} ranks with threads of their own; leave --ranks and "
            "--threads away, or start the command without a launcher"
        )
    if out is not None and not out.parent.is_dir():
        raise PlanError(f"there is no folder {out.parent} to write {out.name} in; make it, or give another --out")
    count = ranks or min(max(this_host().num_usable, MIN_RANKS), MAX_RANKS)
    if environment is not None or count == 1:
        values, rank = measure(), environment.rank if environment is not None else 0
    else:
        values, rank = launch(measure, ranks=count, threads_per_rank=threads, timeout_s=TIMEOUT_S)[0], 0
    if rank != 0:
        return
    if out is not None:
        write_cluster_file(values["cluster"], out)
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        print_measurements(values, out)


def measure() -> dict[str, Any]:
    """Return what the ranks of this job have measured, as JSON values; each of them calls it."""
    import torch

    from counterpoint.profiler.probe import probe_cluster as probe_ranks
    from counterpoint.profiler.timer import training_conditions
    from counterpoint.training.distributed_world import open_world

    world = open_world(detect(), 1, TIMEOUT_S)
    memory, cores = host_memory_bytes(), this_host().num_usable
    try:
        with training_conditions(torch.get_num_threads()):
            found = world.run(lambda fabric: probe_ranks(fabric, host_memory_bytes=memory, max_threads=cores))
    finally:
        world.close()
    return found[0].to_json_dict()


def write_cluster_file(text: str, out: Path) -> None:
    """The text is in its file.

    Raises:
        PlanError: it cannot be written.
    """
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{out} cannot be written: {error.strerror}; give another --out") from None


def print_measurements(values: dict[str, Any], out: Path | None) -> None:
    """The figures are on standard output as tables, then the cluster file or where it is."""
    products, links = values["matmuls"], values["links"]
    sizes = sorted({one["size"] for one in products})
    found = {(one["threads"], one["size"]): one["flops_per_s"] for one in products}
    typer.echo("products of square matrices on rank 0 alone, by rows\n")
    print_table(
        [TableColumn("threads", "right"), *(TableColumn(f"{size:,}", "right") for size in sizes)],
        [
            [str(count), *(format_quantity(found[count, size], FLOPS) for size in sizes)]
            for count in sorted({one["threads"] for one in products})
        ],
    )
    if links:
        typer.echo("\nmessages from one rank to another, by pairs of ranks\n")
        print_table(
            [TableColumn("size", "right"), *(TableColumn(link_title(one), "right") for one in links)],
            list(message_rows(links)),
        )
    typer.echo(f"\n{values['cluster'] if out is None else f'cluster file: {out}'}", nl=out is not None)


def link_title(link: dict[str, Any]) -> str:
    """Return the head of a link's column."""
    first, second = link["ranks"]
    return f"{link['level']} {first}-{second}"


def message_rows(links: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row for each size of messages, and one for the two figures that stand for all."""
    sizes = sorted({size for one in links for size, _ in one["messages"]})
    for size in sizes:
        took = [dict(one["messages"]).get(size) for one in links]
        yield [format_bytes(size), *("" if seconds is None else format_seconds(seconds) for seconds in took)]
    yield ["latency", *(format_seconds(one["latency_s"]) for one in links)]
    yield ["bandwidth", *(format_quantity(one["bytes_per_s"], BANDWIDTH) for one in links)]
