"""Specification of a launch, from which every target renders its commands, scripts or manifests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import KEY_FILE, MASTER_VARIABLES, TIMEOUT_S, TRANSPORT, require_seconds
from counterpoint.rpc.job_key import read_key

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources that a system allocates for a launch.

    Args:
        cpus_per_rank: cores of each rank.
        gpus_per_rank: GPUs of each rank.
        memory_gib: of each host, for all its ranks; 0 for the system's default.
        minutes: time limit of the job; 0 for the system's default.
        grace_s: from the first signal that asks ranks to end to the one that kills them.
    """

    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    memory_gib: int = 0
    minutes: int = 0
    grace_s: int = 30


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A script, and the ranks to run it on.

    Args:
        script: a Python file, as found on the hosts.
        arguments: of the script.
        name: of the job.
        num_hosts: number of hosts.
        ranks_per_host: number of ranks on each.
        host_names: for systems that do not choose hosts; rank 0 is on the first.
        port: rendezvous port, for systems that do not choose one.
        key_file: where every host has the job's key, if it has one.
        transport: between ranks; None for the best one.
        timeout_s: how long ranks wait for each other to arrive; None for the default.
        max_restarts: how often all ranks are restarted after a failure.
        image: container image.
        python: the interpreter, as found on the hosts.
        resources: of the hosts.
    """

    script: str
    arguments: tuple[str, ...] = ()
    name: str = "counterpoint"
    num_hosts: int = 1
    ranks_per_host: int = 1
    host_names: tuple[str, ...] = ()
    port: int = 29500
    key_file: Path | None = None
    transport: str | None = None
    timeout_s: float | None = None
    max_restarts: int = 0
    image: str = ""
    python: str = "python"
    resources: ResourceRequest = field(default_factory=ResourceRequest)

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.num_hosts * self.ranks_per_host

    def env_variables(self) -> dict[str, str]:
        """Return environment variables of every rank, in addition to the launcher's; the key's path, not the key."""
        variables = {KEY_FILE: self.key_file, TRANSPORT: self.transport, TIMEOUT_S: self.timeout_s}
        return {name: str(value) for name, value in variables.items() if value is not None}

    def master_variables(self) -> dict[str, str]:
        """Return the rendezvous address, if host names are given; empty otherwise."""
        return dict(zip(MASTER_VARIABLES, (self.host_names[0], str(self.port)), strict=True)) if self.host_names else {}


@dataclass(frozen=True, slots=True)
class LaunchArtifacts:
    """What starts a launch.

    Args:
        files: names and texts, used by the commands.
        commands: run here, one after the other.
        per_host_commands: instead of commands: hosts, and the command to run on each.
        note: additional information.
    """

    files: tuple[tuple[str, str], ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    per_host_commands: tuple[tuple[str, tuple[str, ...]], ...] = ()
    note: str = ""


def rank_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of one rank, for launchers that start ranks themselves."""
    return (spec.python, "-m", "counterpoint.launchers", spec.script, *spec.arguments)


def validate_spec(spec: LaunchSpec) -> None:
    """Check that every target can render the specification.

    Raises:
        LaunchError: it is invalid; the key is checked, and never printed.
    """
    needs = spec.resources
    least = {
        "hosts": (spec.num_hosts, 1), "ranks per host": (spec.ranks_per_host, 1), "restarts": (spec.max_restarts, 0),
        "cores per rank": (needs.cpus_per_rank, 1), "GPUs per rank": (needs.gpus_per_rank, 0),
        "GiB of memory": (needs.memory_gib, 0), "minutes": (needs.minutes, 0), "seconds of grace": (needs.grace_s, 0),
    }  # fmt: skip
    for what, (number, lowest) in least.items():
        if number < lowest:
            raise LaunchError(f"{number} {what} are not possible; give {lowest} or more")
    require_seconds("timeout", spec.timeout_s)
    if not 0 < spec.port < 65536:
        raise LaunchError(f"port {spec.port} does not exist; give one from 1 to 65535")
    if not JOB_NAME.fullmatch(spec.name):
        raise LaunchError(
            f"{spec.name!r} is not a valid job name on all systems; give up to 42 lower-case letters, digits and "
            "hyphens, a letter first and no hyphen last"
        )
    if spec.host_names and len(set(spec.host_names)) != spec.num_hosts:
        raise LaunchError(
            f"the launch has {spec.num_hosts} hosts, but {', '.join(spec.host_names)} names "
            f"{len(set(spec.host_names))}; "
            "name each of them once"
        )
    if spec.key_file is not None:
        read_key(spec.key_file)
