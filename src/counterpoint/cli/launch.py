"""``counterpoint launch``: start a script with a launcher such as Slurm, or show the files that would start it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.run import require_no_launcher
from counterpoint.errors import LaunchError
from counterpoint.launchers.targets.registry import TARGETS, find_target, format_artifacts, render_launch
from counterpoint.launchers.targets.spec import LaunchSpec, ResourceRequest

LAUNCH, NEEDS = LaunchSpec(""), ResourceRequest()


def launch(
    script: Annotated[Path, typer.Argument(help="A Python file; all arguments after it are passed to it.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="Script arguments.")] = None,
    *,
    on: Annotated[str, typer.Option("--on", help=f"The launcher: {', '.join(TARGETS)}.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks per host.")] = LAUNCH.ranks_per_host,
    hosts: Annotated[int | None, typer.Option(help="Number of hosts; by default those named, or 1.")] = None,
    host_names: Annotated[str, typer.Option(help="For mpi, torchrun and slurm: a,b; rank 0 runs on the first.")] = "",
    name: Annotated[str, typer.Option(help="Name of the job.")] = LAUNCH.name,
    port: Annotated[int, typer.Option(help="Port of the rendezvous, if the launcher does not set it.")] = LAUNCH.port,
    cpus: Annotated[int, typer.Option(help="Cores per rank.")] = NEEDS.cpus_per_rank,
    gpus: Annotated[int, typer.Option(help="GPUs per rank.")] = NEEDS.gpus_per_rank,
    memory: Annotated[int, typer.Option(help="GiB per host; the launcher's default if omitted.")] = 0,
    minutes: Annotated[int, typer.Option(help="Time limit of the job; none if omitted.")] = 0,
    grace: Annotated[int, typer.Option(help="Seconds between SIGTERM and SIGKILL.")] = NEEDS.grace_s,
    restarts: Annotated[int, typer.Option(help="How often all ranks are restarted after one has failed.")] = 0,
    image: Annotated[str, typer.Option(help="Container image with this package and the script.")] = "",
    python: Annotated[str, typer.Option(help="Interpreter on the hosts; by default this one, or python.")] = "",
    transport: Annotated[
        str | None, typer.Option(help="Transport between ranks: auto, shm, gloo, process_group, mpi.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that ranks wait for each other at startup.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the job's key, on every host.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be started.")] = False,
) -> None:
    """Start a script on Slurm, Ray or Kubernetes, with mpirun, or with torchrun.

    The script is the same under all of them, and under python. --dry-run shows the batch script, the manifests or the
    command, which can be submitted by hand. They never contain the job's key.
    """
    target = find_target(on)
    if not dry_run:
        require_no_launcher(script)
    host_list = tuple(name.strip() for name in host_names.split(",") if name.strip())
    request = LaunchSpec(
        script=str(script),
        arguments=tuple(arguments or ()),
        name=name,
        num_hosts=max(1, len(host_list)) if hosts is None else hosts,
        ranks_per_host=ranks,
        host_names=host_list,
        port=port,
        key_file=key_file,
        transport=transport,
        timeout_s=timeout,
        max_restarts=restarts,
        image=image,
        python=python or ("python" if target.is_remote else sys.executable),
        resources=ResourceRequest(cpus, gpus, memory, minutes, grace),
    )
    artifacts = render_launch(on, request)
    if dry_run:
        echo(format_artifacts(artifacts), nl=False)
        return
    if not target.is_remote and not script.exists():
        raise LaunchError(f"there is no script {script} in {Path.cwd()}; give the path of a Python file")
    code = target.run(request, artifacts)
    if code != 0:
        raise typer.Exit(code)
