"""Where a launch can go: one table of names, and how what was written is carried out."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.targets.commands import render_local, render_mpi, render_slurm, render_torchrun
from counterpoint.launchers.targets.kubernetes import render_jobset, render_kubeflow, render_kubernetes
from counterpoint.launchers.targets.ray import render_ray, run_on_ray
from counterpoint.launchers.targets.spec import LaunchArtifacts, LaunchSpec, validate_spec


def render_sagemaker(spec: LaunchSpec) -> LaunchArtifacts:
    """Refuse: SageMaker is asked for hosts by its own SDK, and starts the script on them itself.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        f"SageMaker starts {spec.script} itself: give it as entry_point of an estimator with "
        f"instance_count={spec.num_hosts}; each host is then a rank, found from SM_HOSTS and SM_CURRENT_HOST"
    )


def run_commands(spec: LaunchSpec, artifacts: LaunchArtifacts) -> int:
    """The commands have run here, one after the other, until one failed; its exit code is returned.

    Raises:
        LaunchError: a command is not installed, or all of them are for other hosts.
    """
    if artifacts.per_host_commands:
        raise LaunchError(
            f"{artifacts.note}, and {spec.num_hosts} hosts are wanted: give on each the command that --dry-run shows"
        )
    absent = next((words[0] for words in artifacts.commands if shutil.which(words[0]) is None), None)
    if absent is not None:
        raise LaunchError(
            f"there is no {absent} on this machine; go where it is, or take what --dry-run shows and start it there"
        )
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
        for name, text in artifacts.files:
            (Path(folder) / name).write_text(text, encoding="utf-8")
        names = {name: str(Path(folder) / name) for name, _ in artifacts.files}
        for words in artifacts.commands:
            code = subprocess.run([names.get(word, word) for word in words], check=False).returncode
            if code != 0:
                return code if code > 0 else 128 - code
    return 0


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """A system on which ranks can be started.

    Args:
        write: what would start them.
        start: starts them; returns an exit code.
        is_remote: its hosts are others than this one, with a Python of their own.
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
        LaunchError: there is none.
    """
    if name not in TARGETS:
        raise LaunchError(f"there is no launcher {name!r}; give one of {', '.join(TARGETS)}")
    return TARGETS[name]


def render_launch(name: str, spec: LaunchSpec) -> LaunchArtifacts:
    """Return what would start a launch on the target of this name.

    Raises:
        LaunchError: there is no such target, or it cannot start this launch.
    """
    target = find_target(name)
    validate_spec(spec)
    return target.render(spec)


def format_artifacts(artifacts: LaunchArtifacts) -> str:
    """Return what would be started as text: files as they are, and all else in comments between them."""
    parts = []
    for name, text in artifacts.files:
        lines = text.splitlines(keepends=True)
        first = 1 if lines and lines[0].startswith("#!") else 0  # a script's interpreter stands in its first line
        parts += [*lines[:first], f"# {name}\n", *lines[first:]]
    mark = "# " if artifacts.files else ""
    parts += [f"{mark}$ {shlex.join(words)}\n" for words in artifacts.commands]
    parts += [f"{host}$ {shlex.join(words)}\n" for host, words in artifacts.per_host_commands]
    if artifacts.note:
        parts.append(f"# {artifacts.note}\n")
    return "".join(parts)
