"""``counterpoint bench``: measure the claims that the documentation makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.error_handling import FAILED
from counterpoint.cli.tables import TableColumn, print_table
from counterpoint.errors import LaunchError
from counterpoint.file_writer import require_writable, write_output
from counterpoint.testing.claims import (
    BenchmarkOptions,
    Claim,
    build_record,
    find_benchmarks,
    find_claim,
    read_claims,
    run_benchmark,
)


def bench(
    claim: Annotated[str | None, typer.Argument(help="A folder of benchmarks/; if omitted, list all.")] = None,
    *,
    processes: Annotated[
        bool, typer.Option("--processes", help="Also measure on real processes, if the benchmark can.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Repetitions; the claim's own number if omitted.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run the smallest size once, to see that it runs; no bar is judged.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure a claim side by side with its peers; exit with 1 if it misses the stated bar."""
    if quick and (rounds is not None or json_file is not None):
        raise LaunchError(
            "--quick was given with --rounds or --json, but it runs the smallest size once, and its figures mean "
            "nothing; omit --quick to measure"
        )
    folder = find_benchmarks()
    if claim is None:
        print_claims(read_claims(folder))
        return
    require_writable(json_file)
    found = find_claim(folder, claim)
    echo(f"claim   {found.claim}\nbar     {found.bar}\nsource  {found.source}\n")
    result = run_benchmark(
        folder,
        claim,
        BenchmarkOptions(processes, rounds, lambda line: echo(f"measuring {line}", err=True), is_quick=quick),
    )
    print_table([TableColumn(name) for name in result.columns], result.rows)
    for key, text in result.notes.items():
        echo(f"{key} {text}")
    if json_file is not None:
        write_output(json_file, json.dumps(build_record(claim, found, result), indent=2) + "\n")
        echo(f"figures are in {json_file}")
    if quick:
        echo("the benchmark runs; no bar was judged, because of --quick")
        return
    for line in result.missed:
        echo(f"missed: {line}")
    if result.missed:
        raise typer.Exit(FAILED)
    echo("the claim holds")


def print_claims(claims: dict[str, Claim]) -> None:
    """Print every claim with its bar."""
    print_table(
        [TableColumn("claim"), TableColumn("statement", wraps=True), TableColumn("bar", wraps=True)],
        [(name, claim.claim, claim.bar) for name, claim in claims.items()],
    )
