"""Detect which rank this process is, from the environment variables of its launcher.

One table, ``LAUNCHERS``, has each launcher's variables and the function that parses them.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError
from counterpoint.json_reader import parse_json
from counterpoint.launchers.ports import LOOPBACK
from counterpoint.optim.validation import MAX_SECONDS, parse_digits, renamed_hint, shorten
from counterpoint.rpc.job_key import JobKey, read_key

HOST_PART = re.compile(r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*|(?:\[[^\[\]]*\][^,\[\]]*)+")
TASK_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
MAX_NODES = 100_000


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of Slurm's compact host list.

    Raises:
        LaunchError: it is not a host list.

    Example:
        >>> expand_hostlist("gpu[01-03,7],login")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    parts = HOST_PART.findall(text)
    if not parts or ",".join(parts) != text:
        raise LaunchError(f"{shorten(text)!r} is not a host list, such as gpu[01-03,7],login")
    names: list[str] = []
    for part in parts:
        names += _expand_part(part, text)
        _require_few_nodes(len(names), text)
    return names


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from Slurm's compact list.

    Raises:
        LaunchError: it is not a list of numbers.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    matches = [TASK_COUNT.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise LaunchError(f"{shorten(text)!r} is not a list of tasks per node, such as 2(x3),1")
    counts = [
        [parse_digits(number or "1", "a number of tasks", LaunchError) for number in match.groups()]
        for match in matches
        if match
    ]
    _require_few_nodes(sum(num_nodes for _, num_nodes in counts), text)
    return [num_tasks for num_tasks, num_nodes in counts for _ in range(num_nodes)]


def _expand_part(part: str, text: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # outside, inside, outside, ...
    choices = [_expand_range(piece, text) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    _require_few_nodes(math.prod(map(len, choices)), text)
    return map("".join, itertools.product(*choices))


def _expand_range(inside: str, text: str) -> list[str]:
    """Return the numbers of a bracket, with leading zeros as written."""
    numbers: list[str] = []
    for piece in inside.split(","):
        first, _, last = piece.partition("-")
        if not re.fullmatch(r"[0-9]+", first) or not re.fullmatch(r"[0-9]*", last):
            raise LaunchError(
                f"[{shorten(inside)}] in the host list {shorten(text)!r} is not a range, such as [01-03,7]"
            )
        start, end = (parse_digits(bound, "a number of a host list", LaunchError) for bound in (first, last or first))
        if end < start:
            raise LaunchError(
                f"[{shorten(inside)}] in the host list {shorten(text)!r} is not a range, such as [01-03,7]"
            )
        _require_few_nodes(len(numbers) + end - start + 1, text)
        numbers += [f"{number:0{len(first)}d}" for number in range(start, end + 1)]
    return numbers


def _require_few_nodes(num_nodes: int, text: str) -> None:
    if num_nodes > MAX_NODES:
        raise LaunchError(f"{shorten(text)!r} has {num_nodes} nodes; a list of nodes has at most {MAX_NODES}")


DERIVED_PORTS = range(20_000, 32_000)  # below the ephemeral ports

RUN_REMEDY = (
    "start the script with `counterpoint run -n N` or torchrun, or unset these variables to train in one process"
)


@dataclass(frozen=True, slots=True)
class DetectedRank:
    """This process's rank, according to its launcher.

    Args:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on this host.
        local_world_size: number of ranks on this host.
        host: where rank 0 serves the rendezvous store; None if the launcher does not set it.
        port: of the store; None if the launcher does not set it.
        job: name of the run; empty if the launcher does not set it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str | None = None
    port: int | None = None
    job: str = ""


@dataclass(frozen=True, slots=True)
class LauncherEnv:
    """Environment variables of one launcher.

    Args:
        name: of the launcher, for errors.
        marker_variables: any of them means that this launcher started the process.
        required_variables: all that a rank needs; for a launcher that counts ranks, the first four are rank, world
            size, local rank and local world size.
        parser: parses them.
        job: the variable with the name of the run, if there is one.
        remedy: advice for errors, if some are missing or wrong.
    """

    name: str
    marker_variables: tuple[str, ...]
    required_variables: tuple[str, ...]
    parser: Callable[[LauncherEnv, Mapping[str, str]], DetectedRank]
    job: str = ""
    remedy: str = RUN_REMEDY

    def is_present(self, variables: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process."""
        return any(variables.get(name) for name in self.marker_variables)

    def parse(self, variables: Mapping[str, str]) -> DetectedRank:
        """Return the rank of this process.

        Raises:
            LaunchError: variables are missing, or contradict each other.
        """
        missing = [name for name in self.required_variables if not variables.get(name)]
        if missing:
            raise LaunchError(
                f"{self.format_variables(variables)}, but {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} "
                "not set; "
                f"a rank needs all of {', '.join(self.required_variables)}; {self.remedy}"
            )
        detected = self.parser(self, variables)
        rank, world, local_rank, local_world = (
            self.required_variables[:4] if len(self.required_variables) > 3 else RANK_VARIABLES
        )
        rules = [
            (detected.rank < detected.world_size, f"{rank} must be below {world}"),
            (detected.local_rank < detected.local_world_size, f"{local_rank} must be below {local_world}"),
            (detected.local_world_size <= detected.world_size, f"{local_world} cannot exceed {world}"),
            (detected.local_rank <= detected.rank, f"{local_rank} cannot exceed {rank}"),
            (detected.port is None or 0 < detected.port < 65536, "MASTER_PORT must be between 1 and 65535"),
        ]
        broken = [rule for is_satisfied, rule in rules if not is_satisfied]
        if broken:
            raise LaunchError(
                f"{self.format_variables(variables)} contradict each other: {'; '.join(broken)}; {self.remedy}"
            )
        return detected

    def format_variables(self, variables: Mapping[str, str]) -> str:
        """Return the variables that are set, for errors."""
        names = [
            *self.required_variables,
            *(name_ for name_ in self.marker_variables if name_ not in self.required_variables),
        ]
        return ", ".join(f"{name}={variables[name]}" for name in names if variables.get(name))


def parse_counted(launcher: LauncherEnv, variables: Mapping[str, str]) -> DetectedRank:
    """Parse rank counts; ranks of several hosts must get the rendezvous host elsewhere."""
    rank, world_size, local_rank, local_world_size = (
        parse_int(variables, name, launcher) for name in launcher.required_variables[:4]
    )
    job = variables.get(launcher.job, "")
    host = LOOPBACK if local_world_size == world_size else None
    return DetectedRank(rank, world_size, local_rank, local_world_size, host, derived_port(job), job)


def parse_torchrun(launcher: LauncherEnv, variables: Mapping[str, str]) -> DetectedRank:
    """Parse torchrun's variables, which other launchers set as well."""
    rank, world_size, local_rank, local_world_size = (parse_int(variables, name, launcher) for name in RANK_VARIABLES)
    host, port = variables["MASTER_ADDR"], parse_int(variables, "MASTER_PORT", launcher)
    job = variables.get(launcher.job) or f"{host}:{port}"
    return DetectedRank(rank, world_size, local_rank, local_world_size, host, port, job)


def parse_srun(launcher: LauncherEnv, variables: Mapping[str, str]) -> DetectedRank:
    """Parse srun's variables; the first node of the step has rank 0.

    Raises:
        LaunchError: this node is not one of the step's.
    """
    rank, world_size, local_rank, node = (
        parse_int(variables, name, launcher)
        for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    )
    nodes = expand_hostlist(variables["SLURM_STEP_NODELIST"])
    tasks = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
    name = variables.get("SLURMD_NODENAME") or (nodes[node] if node < len(nodes) else f"node {node}")
    if name not in nodes or len(tasks) != len(nodes) or node >= len(nodes):
        raise LaunchError(
            f"this is {name}, SLURM_NODEID={node}, but SLURM_STEP_NODELIST={variables['SLURM_STEP_NODELIST']} has "
            f"{len(nodes)} nodes and SLURM_STEP_TASKS_PER_NODE={variables['SLURM_STEP_TASKS_PER_NODE']} has "
            f"{len(tasks)}; a rank is on a node of its step: {launcher.remedy}"
        )
    job = f"slurm-{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
    host = LOOPBACK if tasks[node] == world_size else nodes[0]
    return DetectedRank(rank, world_size, local_rank, tasks[node], host, derived_port(job), job)


def parse_sagemaker(launcher: LauncherEnv, variables: Mapping[str, str]) -> DetectedRank:
    """Parse SageMaker's variables; it starts one process per host.

    Raises:
        LaunchError: the host list is invalid, or this host is not in it.
    """
    text, current = variables["SM_HOSTS"], variables["SM_CURRENT_HOST"]
    try:
        hosts = parse_json(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise LaunchError(
            f'SM_HOSTS={text!r} is not a list of host names, such as ["algo-1", "algo-2"]; {launcher.remedy}'
        )
    ordered = sorted(hosts, key=lambda host: (len(host), host))  # algo-2 before algo-10
    if current not in ordered:
        raise LaunchError(
            f"SM_CURRENT_HOST={current} is not one of SM_HOSTS={text}; the rank of a host is its index in that list: "
            f"{launcher.remedy}"
        )
    job = variables.get(launcher.job) or "sagemaker"
    return DetectedRank(ordered.index(current), len(ordered), 0, 1, ordered[0], derived_port(job), job)


def parse_kubeflow(launcher: LauncherEnv, variables: Mapping[str, str]) -> DetectedRank:
    """Parse a TrainJob's variables in a pod with one rank; in a pod with several, torchrun starts them.

    Raises:
        LaunchError: the pod has several.
    """
    rank, world_size, port = (
        parse_int(variables, n, launcher) for n in ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_PORT")
    )
    if variables["PET_NPROC_PER_NODE"] != "1":
        raise LaunchError(
            f"PET_NPROC_PER_NODE={variables['PET_NPROC_PER_NODE']}, and this is the only process of its pod; "
            f"{launcher.remedy}"
        )
    job = variables.get(launcher.job) or "trainjob"
    return DetectedRank(rank, world_size, 0, 1, variables["PET_MASTER_ADDR"], port, job)


def derived_port(job: str) -> int:
    """Return the rendezvous port of a run whose launcher gives none; the same on all ranks.

    Example:
        >>> derived_port("slurm-12.0") in DERIVED_PORTS
        True
    """
    return DERIVED_PORTS[zlib.crc32(job.encode()) % len(DERIVED_PORTS)]


def parse_int(variables: Mapping[str, str], name: str, launcher: LauncherEnv) -> int:
    """Return a variable's value as an integer.

    Raises:
        LaunchError: it is not a non-negative integer.
    """
    text = variables[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name}={variables[name]!r} is not a number from 0; {launcher.remedy}")
    return parse_digits(text, f"the number {name}", LaunchError)


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DEEPSPEED_LOCAL_SIZE = "LOCAL_SIZE"
MPI_REMEDY = "start the script with mpirun, which sets them, and pass all of them into containers"
MPICH_VARIABLES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
OPEN_MPI_VARIABLES = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
SRUN_VARIABLES = tuple(
    f"SLURM_{name}"
    for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE", "NODEID", "STEP_NODELIST", "JOB_ID")
)
KUBEFLOW_VARIABLES = tuple(
    f"PET_{name}" for name in ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
)

TORCHRUN = LauncherEnv(
    "torchrun",
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"),
    parse_torchrun,
    "TORCHELASTIC_RUN_ID",
)

#: Checked in this order; a launcher that runs inside another (torchrun inside srun) precedes it.
LAUNCHERS = (
    TORCHRUN,
    LauncherEnv(
        "Open MPI's mpirun", OPEN_MPI_VARIABLES[:2], OPEN_MPI_VARIABLES, parse_counted, "PMIX_NAMESPACE", MPI_REMEDY
    ),
    LauncherEnv("MPICH's mpiexec", MPICH_VARIABLES[2:], MPICH_VARIABLES, parse_counted, "PMI_KVS", MPI_REMEDY),
    LauncherEnv(
        "srun",
        ("SLURM_STEP_ID",),
        SRUN_VARIABLES,
        parse_srun,
        remedy="start the script with srun, which sets them, and pass all SLURM_ variables into containers",
    ),
    LauncherEnv(
        "SageMaker",
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        parse_sagemaker,
        "TRAINING_JOB_NAME",
        "SageMaker's training toolkit sets both: use an image that has it",
    ),
    LauncherEnv(
        "Kubeflow Trainer",
        ("PET_NODE_RANK",),
        KUBEFLOW_VARIABLES,
        parse_kubeflow,
        "PET_RDZV_ID",
        "take torchrun as the command of a pod with several ranks; it reads these variables",
    ),
)


STORE_FD = "COUNTERPOINT_STORE_FD"
TIMEOUT_S = "COUNTERPOINT_TIMEOUT_S"
TRANSPORT = "COUNTERPOINT_TRANSPORT"
DEVICE = "COUNTERPOINT_DEVICE"
ERROR_FILE = "COUNTERPOINT_ERROR_FILE"
EXITED_FILE = "exited"
"""Name of the file, in the folder of the error files, that exists once a rank of the run has ended."""

KEY_FILE = "COUNTERPOINT_KEY_FILE"
MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
RENAMED_VARIABLES = {"COUNTERPOINT_DEADLINE_S": TIMEOUT_S}
"""Present names of our own variables by the names that they had before."""

#: Set if an agent, and not a user or an outer launcher, has set torchrun's variables.
AGENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", ERROR_FILE)


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What a rank's launcher has specified.

    Args:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on this host.
        local_world_size: number of ranks on this host.
        master_addr: host on which rank 0 serves the rendezvous store.
        master_port: port of the store.
        job: name of the run, the same on every rank and unique.
        timeout_s: how long ranks wait for each other to arrive; None for the default.
        store_fd: on rank 0, a socket that is already bound to ``master_port``; None to bind it.
        transport: ``shm``, ``gloo``, ``process_group``, ``mpi``; None for the best one.
        agent_keeps_store: whether the launcher serves the store, as torchrun's agent does.
        is_placed: whether the launcher has chosen the threads of every rank, and reported it.
        key_file: the job's key on every host; None for a job without a key.
        device: what ranks compute on if their script does not say; None for the device of their model.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    job: str
    timeout_s: float | None = None
    store_fd: int | None = None
    agent_keeps_store: bool = False
    transport: str | None = None
    is_placed: bool = False
    key_file: str | None = None
    device: str | None = None


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return which rank this process is; None if no launcher started it, or only this process.

    Args:
        environ: the variables; the process's own by default.

    Raises:
        LaunchError: variables of a launcher are missing, or two launchers contradict each other.
    """
    variables = add_local_world_size(os.environ if environ is None else environ)
    for launcher in LAUNCHERS:
        if launcher.is_present(variables):
            detected = launcher.parse(variables)
            if launcher is TORCHRUN:
                _check_outer_launcher(detected, variables)
            elif detected.world_size == 1:  # a shell in an allocation, or a cluster of one host
                continue
            return _rank_environment(detected, launcher, variables)
    return None


def environment_variables() -> Mapping[str, str]:
    """Return the environment variables of this process, as they are when they are read.

    Example:
        >>> environment_variables().get("COUNTERPOINT_NO_SUCH_VARIABLE") is None
        True
    """
    return os.environ


def add_local_world_size(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with ``LOCAL_WORLD_SIZE``, if only this one of a rank's is missing and others imply it.

    DeepSpeed's launcher sets ``LOCAL_SIZE`` instead. Ranks that meet at this host's loopback address are all on it, and
    so is a single one.

    Example:
        >>> ranks = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
        >>> add_local_world_size(ranks)["LOCAL_WORLD_SIZE"]
        '2'
    """
    *given, missing = RANK_VARIABLES
    if variables.get(missing) or not all(variables.get(name) for name in given):
        return variables
    is_one_host = variables.get("MASTER_ADDR") in {LOOPBACK, "localhost"} or variables["WORLD_SIZE"] == "1"
    size = variables.get(DEEPSPEED_LOCAL_SIZE) or (variables["WORLD_SIZE"] if is_one_host else None)
    return {**variables, missing: size} if size else variables


def rank_variables(environment: RankEnvironment) -> dict[str, str]:
    """Return the environment variables from which ``detect`` returns this: torchrun's, and a few of our own."""
    own_variables = {
        STORE_FD: environment.store_fd,
        TIMEOUT_S: environment.timeout_s,
        TRANSPORT: environment.transport,
        DEVICE: environment.device,
        KEY_FILE: environment.key_file,
    }
    return {
        "RANK": str(environment.rank),
        "WORLD_SIZE": str(environment.world_size),
        "LOCAL_RANK": str(environment.local_rank),
        "LOCAL_WORLD_SIZE": str(environment.local_world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": environment.master_addr,
        "MASTER_PORT": str(environment.master_port),
        "TORCHELASTIC_RUN_ID": environment.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        **{name: str(value) for name, value in own_variables.items() if value is not None},
    }


def _rank_environment(detected: DetectedRank, launcher: LauncherEnv, variables: Mapping[str, str]) -> RankEnvironment:
    """Combine the launcher's variables with our own.

    Raises:
        LaunchError: the rendezvous host is unknown, or one of our variables is invalid or has an earlier name.
    """
    for old in RENAMED_VARIABLES.keys() & variables.keys():
        raise LaunchError(f"{old}={variables[old]!r} is set, but is not read{renamed_hint(old, RENAMED_VARIABLES)}")
    store_fd, timeout_s = variables.get(STORE_FD), variables.get(TIMEOUT_S)
    host, port = variables.get(MASTER_VARIABLES[0]) or detected.host, detected.port
    if variables.get(MASTER_VARIABLES[1]):
        port = parse_int(variables, MASTER_VARIABLES[1], launcher)
    transport = variables.get(TRANSPORT) or None
    if transport == "mpi":
        host, port = host or "", port or 0  # rank 0 broadcasts them over MPI
    if host is None or port is None:
        raise LaunchError(
            f"{launcher.name} has started {detected.world_size} ranks on several hosts, but MASTER_ADDR is not set, so "
            "the host of rank 0 is unknown; set it on all, as `mpirun -x MASTER_ADDR=HOST` does, or connect them over "
            "MPI: COUNTERPOINT_TRANSPORT=mpi"
        )
    return RankEnvironment(
        rank=detected.rank,
        world_size=detected.world_size,
        local_rank=detected.local_rank,
        local_world_size=detected.local_world_size,
        master_addr=host,
        master_port=port,
        job=detected.job or f"{host}:{port}",
        timeout_s=_seconds(timeout_s) if timeout_s else None,
        store_fd=parse_int(variables, STORE_FD, launcher) if store_fd else None,
        agent_keeps_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        transport=transport,
        is_placed=variables.get(ERROR_FILE) is not None,
        key_file=variables.get(KEY_FILE) or None,
        device=variables.get(DEVICE) or None,
    )


def _check_outer_launcher(detected: DetectedRank, variables: Mapping[str, str]) -> None:
    """Check that variables set by hand agree with those of an outer launcher.

    Raises:
        LaunchError: they do not, so that ranks would wait for each other forever.
    """
    if any(variables.get(agent) for agent in AGENT_VARIABLES):
        return
    for launcher in LAUNCHERS[1:]:
        outer = launcher.parse(variables) if launcher.is_present(variables) else None
        if outer is None or outer.world_size == 1:
            continue
        sizes = {outer.world_size, outer.world_size * detected.local_world_size}
        if detected.world_size not in sizes or (
            detected.world_size == outer.world_size and detected.rank != outer.rank
        ):
            raise LaunchError(
                f"two launchers contradict each other: {TORCHRUN.format_variables(variables)} say rank "
                f"{detected.rank} of "
                f"{detected.world_size}, {launcher.name} says rank {outer.rank} of {outer.world_size} "
                f"({launcher.format_variables(variables)}); a process has one rank: unset {', '.join(RANK_VARIABLES)} "
                f"if {launcher.name} "
                "starts the ranks, or let torchrun start those of each host"
            )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_SECONDS:
        raise LaunchError(
            f"{TIMEOUT_S}={text!r} is not a number of seconds above 0, {MAX_SECONDS:.0f} at most; {TORCHRUN.remedy}"
        )
    return seconds


def require_seconds(name: str, seconds: float | None, least: float | None = None) -> None:
    """Check that a time limit, if it is given, is one that passes.

    Args:
        name: of the option.
        seconds: the limit.
        least: the smallest that it can be; None for one above 0.

    Raises:
        LaunchError: it is not.
    """
    if seconds is not None and not (0 < seconds <= MAX_SECONDS or seconds == least):
        lowest = "above 0" if least is None else f"from {least:g} on"
        raise LaunchError(
            f"{name}={seconds:g} is not a time limit; give a number of seconds {lowest}, {MAX_SECONDS:.0f} at most"
        )


def read_job_key(environment: RankEnvironment) -> JobKey | None:
    """Return the job's key; None if its launcher gave none.

    Raises:
        LaunchError: this host does not have it; the message names the rank and the host.
    """
    if environment.key_file is None:
        return None
    try:
        return read_key(Path(environment.key_file))
    except LaunchError as error:
        raise LaunchError(f"rank {environment.rank} on {socket.gethostname()}: {error}") from error
