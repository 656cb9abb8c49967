"""``counterpoint run``: start a script on several ranks of this machine, as torchrun does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.local import run_command, script_command
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding


def run(
    script: Annotated[Path, typer.Argument(help="A Python file; all arguments after it are passed to it.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Arguments of the script.")
    ] = None,
    *,
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Number of processes.")] = 1,
    port: Annotated[int | None, typer.Option(help="Port of the rendezvous; a free port if omitted.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads per rank; cores / ranks if omitted.")] = None,
    bind: Annotated[Binding, typer.Option(help="To which cores each rank is bound.")] = DEFAULT_BINDING,
    transport: Annotated[
        str | None,
        typer.Option(help="Transport between ranks: auto, shm (shared memory), gloo (sockets), process_group."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="What ranks compute on: cpu, cuda, cuda:1, auto.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that ranks wait for each other at startup.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds that ranks have to save and end after a signal.")] = 30.0,
) -> None:
    """Start a script on several ranks, as torchrun does.

    Every line that a rank prints is prefixed with [rank N]. When one rank fails, the others are stopped, the first line
    of the report names the rank and its failure, and the exit code is that of the rank.
    """
    require_no_launcher(script)
    result = run_command(
        script_command(script, arguments or []),
        ranks,
        port=port,
        threads_per_rank=threads,
        bind=bind,
        timeout_s=timeout,
        transport=transport,
        device=device,
        grace_s=grace,
    )
    if result.exit_code != 0:
        echo(result.report, err=True)
        raise typer.Exit(result.exit_code)


def require_no_launcher(script: Path) -> None:
    """Check that this process was not started by a launcher.

    Raises:
        LaunchError: it is a rank already.
    """
    environment = detect()
    if environment is not None:
        raise LaunchError(
            f"this is already rank {environment.rank} of {environment.world_size}; ranks do not start ranks: start the "
            f"script itself, {script}, with the launcher that started this rank"
        )
