"""What a user wants started, wherever: one description, from which every writer makes what its system reads."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.launchers.environment import KEY_FILE, MASTER_VARIABLES, TIMEOUT_S, TRANSPORT
from counterpoint.rpc.job_key import read_key

JOB_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What a launch needs of the hosts that a system chooses for it.

    Args:
        cpus_per_rank: cores of each rank.
        gpus_per_rank: cards of each rank.
        memory_gib: of each host, for all its ranks; 0 leaves it to the system.
        minutes: the longest that the job runs; 0 leaves it to the system.
        grace_s: from the first signal that asks ranks to end to the one that ends them.
    """

    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    memory_gib: int = 0
    minutes: int = 0
    grace_s: int = 30


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A script on so many ranks.

    Args:
        script: a Python file, as the hosts find it.
        arguments: of the script.
        name: of the job, where a system shows jobs by name.
        hosts: how many.
        ranks_per_host: on each of them.
        host_names: who they are, for systems that do not choose them; rank 0 is on the first.
        port: where ranks meet, for systems that do not say.
        key_file: where every host has the job's key, for jobs that have one.
        transport: what joins the ranks; None for what is best.
        deadline_s: how long ranks wait for each other to arrive; None leaves it to the fabric.
        restarts: how often all ranks are started again when one has failed.
        image: of containers.
        python: the interpreter, as the hosts find it.
        needs: of the hosts.
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
        """Return what every rank finds in its environment beside the launcher's words, not the key but its place."""
        told = {KEY_FILE: self.key_file, TRANSPORT: self.transport, TIMEOUT_S: self.timeout_s}
        return {name: str(value) for name, value in told.items() if value is not None}

    def master_variables(self) -> dict[str, str]:
        """Return where ranks meet that have been told their hosts; nothing where they have not."""
        return dict(zip(MASTER_VARIABLES, (self.host_names[0], str(self.port)), strict=True)) if self.host_names else {}


@dataclass(frozen=True, slots=True)
class LaunchArtifacts:
    """What would start a launch.

    Args:
        files: names and texts, for the commands.
        commands: run here, one after the other.
        elsewhere: instead of commands: hosts, and the command that a user gives on each.
        note: what else there is to say of it.
    """

    files: tuple[tuple[str, str], ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    per_host_commands: tuple[tuple[str, tuple[str, ...]], ...] = ()
    note: str = ""


def rank_command(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the command of one rank, for launchers that start ranks themselves."""
    return (spec.python, "-m", "counterpoint.launchers", spec.script, *spec.arguments)


def validate_spec(spec: LaunchSpec) -> None:
    """The description can be written down for any system.

    Raises:
        LaunchError: it cannot; the key is checked without being shown.
    """
    needs = spec.resources
    least = {
        "hosts": (spec.num_hosts, 1), "ranks per host": (spec.ranks_per_host, 1), "restarts": (spec.max_restarts, 0),
        "cores per rank": (needs.cpus_per_rank, 1), "GPUs per rank": (needs.gpus_per_rank, 0),
        "GiB of memory": (needs.memory_gib, 0), "minutes": (needs.minutes, 0), "seconds of grace": (needs.grace_s, 0),
    }  # fmt: skip
    for what, (number, lowest) in least.items():
        if number < lowest:
            raise LaunchError(f"{number} {what} cannot be had; give {lowest} or more")
    if not 0 < spec.port < 65536:
        raise LaunchError(f"port {spec.port} does not exist; give one from 1 to 65535")
    if not JOB_NAME.fullmatch(spec.name):
        raise LaunchError(
            f"{spec.name!r} cannot be the name of a job everywhere; give up to 42 small letters, digits and hyphens, "
            "a letter first and no hyphen last"
        )
    if spec.host_names and len(set(spec.host_names)) != spec.num_hosts:
        raise LaunchError(
            f"{spec.num_hosts} hosts are wanted, but {', '.join(spec.host_names)} names {len(set(spec.host_names))}; "
            "name each of them once"
        )
    if spec.key_file is not None:
        read_key(spec.key_file)
