"""``counterpoint launch``: a script on the system that a user already runs, or what would start it there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.targets.registry import TARGETS, find_target, format_artifacts, render_launch
from counterpoint.launchers.targets.spec import LaunchSpec, ResourceRequest

LAUNCH, NEEDS = LaunchSpec(""), ResourceRequest()


def launch(
    script: Annotated[Path, typer.Argument(help="A Python file; what stands behind it is passed to it unchanged.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="The script's own.")] = None,
    *,
    on: Annotated[str, typer.Option("--on", help=f"Where: {', '.join(TARGETS)}.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many on each host.")] = LAUNCH.ranks_per_host,
    hosts: Annotated[int | None, typer.Option(help="How many; as many as are named when left out, else 1.")] = None,
    host_names: Annotated[str, typer.Option(help="For mpi, torchrun and slurm: a,b; rank 0 is on the first.")] = "",
    name: Annotated[str, typer.Option(help="Of the job.")] = LAUNCH.name,
    port: Annotated[int, typer.Option(help="Where ranks meet, if the system does not say.")] = LAUNCH.port,
    cpus: Annotated[int, typer.Option(help="Cores of each rank.")] = NEEDS.cpus_per_rank,
    gpus: Annotated[int, typer.Option(help="GPUs of each rank.")] = NEEDS.gpus_per_rank,
    memory: Annotated[int, typer.Option(help="GiB of each host; the system's own choice when left out.")] = 0,
    minutes: Annotated[int, typer.Option(help="The longest that the job runs; without a limit when left out.")] = 0,
    grace: Annotated[int, typer.Option(help="Seconds that ranks get to end when they are asked to.")] = NEEDS.grace_s,
    restarts: Annotated[int, typer.Option(help="How often all ranks start again when one has failed.")] = 0,
    image: Annotated[str, typer.Option(help="Of containers: this package and the script are in it.")] = "",
    python: Annotated[str, typer.Option(help="The hosts' interpreter; this one, or python in containers.")] = "",
    transport: Annotated[str | None, typer.Option(help="What joins the ranks: auto, shm, gloo, mpi.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that ranks wait for each other to arrive.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="The job's key: a file that every host has.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be started.")] = False,
) -> None:
    """Start a script on Slurm, Ray, Kubernetes, by mpirun, or by torchrun.

    The script is the same under all of them, and under python. --dry-run shows the batch script, the manifests or the
    command, as a file that can be handed over by hand. The job's key is in none of them.
    """
    target = find_target(on)
    if (inside := detect()) is not None and not dry_run:
        raise LaunchError(
            f"this is already rank {inside.rank} of {inside.world_size}; ranks do not start ranks: start the script "
            f"itself, {script}, with the launcher that started this rank"
        )
    names = tuple(name.strip() for name in host_names.split(",") if name.strip())
    asked = LaunchSpec(
        script=str(script),
        arguments=tuple(arguments or ()),
        name=name,
        num_hosts=max(1, len(names)) if hosts is None else hosts,
        ranks_per_host=ranks,
        host_names=names,
        port=port,
        key_file=key_file,
        transport=transport,
        timeout_s=timeout,
        max_restarts=restarts,
        image=image,
        python=python or ("python" if target.is_remote else sys.executable),
        resources=ResourceRequest(cpus, gpus, memory, minutes, grace),
    )
    written = render_launch(on, asked)
    if dry_run:
        typer.echo(format_artifacts(written), nl=False)
        return
    if not target.is_remote and not script.exists():
        raise LaunchError(f"there is no script {script} in {Path.cwd()}; give the path of a Python file")
    code = target.run(asked, written)
    if code != 0:
        raise typer.Exit(code)
