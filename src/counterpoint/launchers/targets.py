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
from counterpoint.launchers.commands import on_local, on_mpi, on_torchrun
from counterpoint.launchers.description import Launch, Written, require_sound
from counterpoint.launchers.kubernetes import on_jobset, on_kubeflow, on_kubernetes
from counterpoint.launchers.on_ray import on_ray, start_on_ray
from counterpoint.launchers.slurm import on_slurm


def on_sagemaker(launch: Launch) -> Written:
    """Refuse: SageMaker is asked for hosts by its own SDK, and starts the script on them itself.

    Raises:
        LaunchError: always.
    """
    raise LaunchError(
        f"SageMaker starts {launch.script} itself: give it as entry_point of an estimator with "
        f"instance_count={launch.hosts}; each host is then a rank, found from SM_HOSTS and SM_CURRENT_HOST"
    )


def carry_out(launch: Launch, written: Written) -> int:
    """The commands have run here, one after the other, until one failed; its exit code is returned.

    Raises:
        LaunchError: a command is not installed, or all of them are for other hosts.
    """
    if written.elsewhere:
        raise LaunchError(
            f"{written.note}, and {launch.hosts} hosts are wanted: give on each the command that --dry-run shows"
        )
    absent = next((words[0] for words in written.commands if shutil.which(words[0]) is None), None)
    if absent is not None:
        raise LaunchError(
            f"there is no {absent} on this machine; go where it is, or take what --dry-run shows and start it there"
        )
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
        for name, text in written.files:
            (Path(folder) / name).write_text(text, encoding="utf-8")
        names = {name: str(Path(folder) / name) for name, _ in written.files}
        for words in written.commands:
            code = subprocess.run([names.get(word, word) for word in words], check=False).returncode
            if code != 0:
                return code if code > 0 else 128 - code
    return 0


@dataclass(frozen=True, slots=True)
class Target:
    """A system on which ranks can be started.

    Args:
        write: what would start them.
        start: starts them; returns an exit code.
        is_remote: its hosts are others than this one, with a Python of their own.
    """

    write: Callable[[Launch], Written]
    start: Callable[[Launch, Written], int] = carry_out
    is_remote: bool = False


TARGETS = {
    "local": Target(on_local),
    "torchrun": Target(on_torchrun),
    "mpi": Target(on_mpi),
    "slurm": Target(on_slurm),
    "ray": Target(on_ray, start_on_ray),
    "kubernetes": Target(on_kubernetes, is_remote=True),
    "jobset": Target(on_jobset, is_remote=True),
    "kubeflow": Target(on_kubeflow, is_remote=True),
    "sagemaker": Target(on_sagemaker),
}


def target_of(name: str) -> Target:
    """Return the target of this name.

    Raises:
        LaunchError: there is none.
    """
    if name not in TARGETS:
        raise LaunchError(f"there is no launcher {name!r}; give one of {', '.join(TARGETS)}")
    return TARGETS[name]


def write(name: str, launch: Launch) -> Written:
    """Return what would start a launch on the target of this name.

    Raises:
        LaunchError: there is no such target, or it cannot start this launch.
    """
    target = target_of(name)
    require_sound(launch)
    return target.write(launch)


def shown(written: Written) -> str:
    """Return what would be started as text: files as they are, and all else in comments between them."""
    parts = []
    for name, text in written.files:
        lines = text.splitlines(keepends=True)
        first = 1 if lines and lines[0].startswith("#!") else 0  # a script's interpreter stands in its first line
        parts += [*lines[:first], f"# {name}\n", *lines[first:]]
    mark = "# " if written.files else ""
    parts += [f"{mark}$ {shlex.join(words)}\n" for words in written.commands]
    parts += [f"{host}$ {shlex.join(words)}\n" for host, words in written.elsewhere]
    if written.note:
        parts.append(f"# {written.note}\n")
    return "".join(parts)
