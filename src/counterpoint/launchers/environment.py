"""Which rank is this process? Read once, from what its launcher has set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from counterpoint.errors import LaunchError
from counterpoint.launchers.dialects import DIALECTS, FOUR, TORCHRUN, Dialect, Told, whole

STORE_FD = "COUNTERPOINT_STORE_FD"
DEADLINE_S = "COUNTERPOINT_DEADLINE_S"
TRANSPORT = "COUNTERPOINT_TRANSPORT"
ERROR_FILE = "COUNTERPOINT_ERROR_FILE"
KEY_FILE = "COUNTERPOINT_KEY_FILE"
MASTER = ("MASTER_ADDR", "MASTER_PORT")

#: Signs that an agent, and not a user or an outer launcher, has set torchrun's variables.
AGENTS = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", ERROR_FILE)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What a launcher told this process.

    Args:
        rank: this process among all, from 0.
        world_size: number of ranks.
        local_rank: this process among those of its host.
        local_world_size: number of ranks on this host.
        master_addr: host on which rank 0 serves the store where ranks meet.
        master_port: port of that store.
        job: name of the run, the same on every rank and no other run's.
        deadline_s: how long ranks wait for each other to arrive; None leaves it to the fabric.
        store_fd: on rank 0, a socket that is bound to ``master_port`` already; None: bind it yourself.
        transport: what joins the ranks: ``shm``, ``gloo``, or what is best; None leaves it to the fabric.
        agent_keeps_store: the launcher serves the store itself, as torchrun's agent does.
        is_placed: the launcher has chosen the threads of every rank, and has said what there is to say of them.
        key_file: where every host has the job's key; None for a job without one.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    job: str
    deadline_s: float | None = None
    store_fd: int | None = None
    agent_keeps_store: bool = False
    transport: str | None = None
    is_placed: bool = False
    key_file: str | None = None


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return which rank this process is, or None where no launcher started it, or one that started nothing else.

    Args:
        environ: the variables to look at; the process's own when left out.

    Raises:
        LaunchError: a launcher has said only half of what a rank must know, or two contradict each other.
    """
    variables = os.environ if environ is None else environ
    for dialect in DIALECTS:
        if dialect.is_at_work(variables):
            told = dialect.heard(variables)
            if dialect is TORCHRUN:
                _require_agreement(told, variables)
            elif told.world_size == 1:  # a shell in an allocation, or a cluster of one host
                continue
            return _environment(told, dialect, variables)
    return None


def rank_variables(found: RankEnvironment) -> dict[str, str]:
    """Return the variables that make ``detect`` find this; they are torchrun's, and a few of our own."""
    own = {
        STORE_FD: found.store_fd, DEADLINE_S: found.deadline_s, TRANSPORT: found.transport, KEY_FILE: found.key_file
    }  # fmt: skip
    return {
        "RANK": str(found.rank),
        "WORLD_SIZE": str(found.world_size),
        "LOCAL_RANK": str(found.local_rank),
        "LOCAL_WORLD_SIZE": str(found.local_world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": found.master_addr,
        "MASTER_PORT": str(found.master_port),
        "TORCHELASTIC_RUN_ID": found.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        **{name: str(value) for name, value in own.items() if value is not None},
    }


def _environment(told: Told, dialect: Dialect, variables: Mapping[str, str]) -> RankEnvironment:
    """Return what the launcher and our own variables say together.

    Raises:
        LaunchError: nobody says where the ranks meet, or a variable of ours is wrong.
    """
    store_fd, deadline_s = variables.get(STORE_FD), variables.get(DEADLINE_S)
    host, port = variables.get(MASTER[0]) or told.host, told.port
    if variables.get(MASTER[1]):
        port = whole(variables, MASTER[1], dialect)
    transport = variables.get(TRANSPORT) or None
    if transport == "mpi":
        host, port = host or "", port or 0  # rank 0 tells them
    if host is None or port is None:
        raise LaunchError(
            f"{dialect.name} has started {told.world_size} ranks on several hosts, but MASTER_ADDR is not set, and "
            "nothing else says on which of them rank 0 is; give its name to all, as `mpirun -x MASTER_ADDR=HOST` does, "
            "or let MPI join them: COUNTERPOINT_TRANSPORT=mpi"
        )
    return RankEnvironment(
        rank=told.rank,
        world_size=told.world_size,
        local_rank=told.local_rank,
        local_world_size=told.local_world_size,
        master_addr=host,
        master_port=port,
        job=told.job or f"{host}:{port}",
        deadline_s=_seconds(deadline_s) if deadline_s else None,
        store_fd=whole(variables, STORE_FD, dialect) if store_fd else None,
        agent_keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        transport=transport,
        is_placed=variables.get(ERROR_FILE) is not None,
        key_file=variables.get(KEY_FILE) or None,
    )


def _require_agreement(told: Told, variables: Mapping[str, str]) -> None:
    """What somebody has set by hand is what an outer launcher says, or fits into it.

    Raises:
        LaunchError: it is not, so that the ranks would wait for each other without end.
    """
    if any(variables.get(agent) for agent in AGENTS):
        return
    for dialect in DIALECTS[1:]:
        outer = dialect.heard(variables) if dialect.is_at_work(variables) else None
        if outer is None or outer.world_size == 1:
            continue
        sizes = {outer.world_size, outer.world_size * told.local_world_size}
        if told.world_size not in sizes or (told.world_size == outer.world_size and told.rank != outer.rank):
            raise LaunchError(
                f"two launchers contradict each other: {TORCHRUN.listed(variables)} say rank {told.rank} of "
                f"{told.world_size}, {dialect.name} says rank {outer.rank} of {outer.world_size} "
                f"({dialect.listed(variables)}); a process has one rank: unset {', '.join(FOUR)} if {dialect.name} "
                "starts the ranks, or let torchrun start those of each host"
            )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"{DEADLINE_S}={text!r} is not a number of seconds above 0; {TORCHRUN.remedy}")
    return seconds
