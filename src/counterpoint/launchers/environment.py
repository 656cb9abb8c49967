"""Which rank is this process? Read once, from what its launcher has set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from counterpoint.errors import LaunchError

STORE_FD = "COUNTERPOINT_STORE_FD"
DEADLINE_S = "COUNTERPOINT_DEADLINE_S"
TRANSPORT = "COUNTERPOINT_TRANSPORT"
ERROR_FILE = "COUNTERPOINT_ERROR_FILE"

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMEDY = "start the script with `counterpoint run -n N` or torchrun, or unset these variables to train in one process"


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


@dataclass(frozen=True, slots=True)
class Detector:
    """One launcher's way to tell a process its rank.

    Args:
        name: the launcher, for errors.
        signs: the variables of which any one means that this launcher was at work.
        read: the reader of all its variables.
    """

    name: str
    signs: tuple[str, ...]
    read: Callable[[Mapping[str, str]], RankEnvironment]


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return which rank this process is, or None where no launcher started it.

    Args:
        environ: the variables to look at; the process's own when left out.
    """
    variables = os.environ if environ is None else environ
    for detector in DETECTORS:
        if any(variables.get(sign) for sign in detector.signs):
            return detector.read(variables)
    return None


def rank_variables(found: RankEnvironment) -> dict[str, str]:
    """Return the variables that make ``detect`` find this; they are torchrun's, and a few of our own."""
    own = {STORE_FD: found.store_fd, DEADLINE_S: found.deadline_s, TRANSPORT: found.transport}
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


def _read_torchrun(variables: Mapping[str, str]) -> RankEnvironment:
    missing = [name for name in TORCHRUN if not variables.get(name)]
    if missing:
        raise LaunchError(
            f"{_listed(variables)}, but {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set; "
            f"a rank needs all of {', '.join(TORCHRUN)}; {REMEDY}"
        )
    store_fd, deadline_s = variables.get(STORE_FD), variables.get(DEADLINE_S)
    found = RankEnvironment(
        rank=_count(variables, "RANK"),
        world_size=_count(variables, "WORLD_SIZE"),
        local_rank=_count(variables, "LOCAL_RANK"),
        local_world_size=_count(variables, "LOCAL_WORLD_SIZE"),
        master_addr=variables["MASTER_ADDR"],
        master_port=_count(variables, "MASTER_PORT"),
        job=variables.get("TORCHELASTIC_RUN_ID") or f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
        deadline_s=_seconds(deadline_s) if deadline_s else None,
        store_fd=_count(variables, STORE_FD) if store_fd else None,
        agent_keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        transport=variables.get(TRANSPORT) or None,
        is_placed=variables.get(ERROR_FILE) is not None,
    )
    _check(found, variables)
    return found


def _check(found: RankEnvironment, variables: Mapping[str, str]) -> None:
    rules = [
        (found.rank < found.world_size, "RANK must be below WORLD_SIZE"),
        (found.local_rank < found.local_world_size, "LOCAL_RANK must be below LOCAL_WORLD_SIZE"),
        (found.local_world_size <= found.world_size, "LOCAL_WORLD_SIZE cannot exceed WORLD_SIZE"),
        (found.local_rank <= found.rank, "LOCAL_RANK cannot exceed RANK"),
        (0 < found.master_port < 65536, "MASTER_PORT must be between 1 and 65535"),
    ]
    broken = [rule for holds, rule in rules if not holds]
    if broken:
        raise LaunchError(f"{_listed(variables)} contradict each other: {'; '.join(broken)}; {REMEDY}")


def _count(variables: Mapping[str, str], name: str) -> int:
    text = variables[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name}={variables[name]!r} is not a number from 0; {REMEDY}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"{DEADLINE_S}={text!r} is not a number of seconds above 0; {REMEDY}")
    return seconds


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in TORCHRUN if variables.get(name)) or "a run id is set"


#: Looked at in this order; a launcher that runs inside another (torchrun inside srun) stands before it.
DETECTORS = (Detector("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"), _read_torchrun),)
