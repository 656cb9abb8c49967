"""Registry of the systems on which ranks can be started, and execution of their commands."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.signals import ENDING_SIGNALS, collect_signals
from counterpoint.launchers.targets.commands import render_local, render_mpi, render_slurm, render_torchrun
from counterpoint.launchers.targets.kubernetes import render_jobset, render_kubeflow, render_kubernetes
from counterpoint.launchers.targets.ray import render_ray, run_on_ray
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, validate_spec

SIGNAL_POLL_S = 0.1


def render_sagemaker(spec: LaunchSpec) -> LaunchArtifacts:
    """Raise: SageMaker is controlled through its own SDK, and starts the script itself.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        f"SageMaker starts {spec.script} itself: give it as entry_point of an estimator with "
        f"instance_count={spec.num_hosts}; each host is then a rank, found from SM_HOSTS and SM_CURRENT_HOST"
    )


def run_commands(spec: LaunchSpec, artifacts: LaunchArtifacts) -> int:
    """Run the commands here, one after the other, until one fails; return its exit code.

    Raises:
        LaunchError: a command is not installed, or all are for other hosts.
    """
    if artifacts.per_host_commands:
        raise LaunchError(
            f"{artifacts.note}, but the launch has {spec.num_hosts} hosts: run on each the command that --dry-run "
            "prints"
        )
    missing = next((argv[0] for argv in artifacts.commands if shutil.which(argv[0]) is None), None)
    if missing is not None:
        raise LaunchError(
            f"there is no {missing} on this machine; run this where it is installed, or run the output of --dry-run "
            "there"
        )
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
        for name, text in artifacts.files:
            (Path(folder) / name).write_text(text, encoding="utf-8")
        names = {name: str(Path(folder) / name) for name, _ in artifacts.files}
        for argv in artifacts.commands:
            code = run_and_forward([names.get(argument, argument) for argument in argv])
            if code != 0:
                return code if code > 0 else 128 - code
    return 0


def run_and_forward(argv: Sequence[str]) -> int:
    """Run a command until it ends, and pass signals to this process on to it; return its exit code.

    SIGINT is not passed on: the terminal sends it to the command as well, and a second one would kill the ranks.
    """
    with collect_signals((*ENDING_SIGNALS, signal.SIGUSR1)) as received:
        process, num_passed = subprocess.Popen(argv), 0
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(SIGNAL_POLL_S)
            pending, num_passed = received[num_passed:], len(received)
            for number in pending:
                if number != signal.SIGINT:
                    process.send_signal(number)


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """A system on which ranks can be started.

    Args:
        render: returns what starts them.
        run: starts them; returns an exit code.
        is_remote: whether its hosts are others than this one, with a Python of their own.
    """

    render: Callable[[LaunchSpec], LaunchArtifacts]
    run: Callable[[LaunchSpec, LaunchArtifacts], int] = run_commands
    is_remote: bool = False


TARGETS = {
    "local": LaunchTarget(render_local),
    "torchrun": LaunchTarget(render_torchrun),
    "mpi": LaunchTarget(render_mpi),
    "slurm": LaunchTarget(render_slurm),
    "ray": LaunchTarget(render_ray, run_on_ray),
    "kubernetes": LaunchTarget(render_kubernetes, is_remote=True),
    "jobset": LaunchTarget(render_jobset, is_remote=True),
    "kubeflow": LaunchTarget(render_kubeflow, is_remote=True),
    "sagemaker": LaunchTarget(render_sagemaker),
}


def find_target(name: str) -> LaunchTarget:
    """Return the target of this name.

    Raises:
        LaunchError: it does not exist.
    """
    if name not in TARGETS:
        hint = (
            "; for ssh, torchrun with --host-names a,b --dry-run prints the command of each host"
            if name == "ssh"
            else ""
        )
        raise LaunchError(f"there is no launcher {name!r}; give one of {', '.join(TARGETS)}{hint}")
    return TARGETS[name]


def render_launch(name: str, spec: LaunchSpec) -> LaunchArtifacts:
    """Return what starts the launch on the target of this name.

    Raises:
        LaunchError: the target does not exist, or cannot start this launch.
    """
    target = find_target(name)
    validate_spec(spec)
    return target.render(spec)


def format_artifacts(artifacts: LaunchArtifacts) -> str:
    """Format what would be started: files verbatim, and all else as comments between them."""
    parts = []
    for name, text in artifacts.files:
        lines = text.splitlines(keepends=True)
        first = 1 if lines and lines[0].startswith("#!") else 0  # the first line of a script names its interpreter
        parts += [*lines[:first], f"# {name}\n", *lines[first:]]
    comment = "# " if artifacts.files else ""
    parts += [f"{comment}$ {shlex.join(argv)}\n" for argv in artifacts.commands]
    parts += [f"{host}$ {shlex.join(argv)}\n" for host, argv in artifacts.per_host_commands]
    if artifacts.note:
        parts.append(f"# {artifacts.note}\n")
    return "".join(parts)
