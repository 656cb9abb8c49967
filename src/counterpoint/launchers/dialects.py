"""How each launcher tells a process its rank: one table of variables, and readers for what is not simply a number."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from counterpoint.errors import LaunchError
from counterpoint.launchers.hostlist import tasks_of_nodes, unfolded
from counterpoint.launchers.ports import LOOPBACK

DERIVED_PORTS = range(20_000, 32_000)  # below those that systems give to whoever asks for any

RUN_REMEDY = (
    "start the script with `counterpoint run -n N` or torchrun, or unset these variables to train in one process"
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a launcher says of one process.

    Args:
        rank: this process among all, from 0.
        world_size: number of ranks.
        local_rank: this process among those of its host.
        local_world_size: number of ranks on this host.
        host: where rank 0 keeps the meeting place; None where the launcher does not say.
        port: of the meeting place; None where the launcher does not say.
        job: name of the run; empty where the launcher does not say.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str | None = None
    port: int | None = None
    job: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One launcher's variables.

    Args:
        name: the launcher, for errors.
        signs: the variables of which any one means that this launcher was at work.
        needed: all that a process must have to know its rank; the first four of a launcher that counts ranks are the
            rank, the number of ranks, and both on this host.
        read: what they say.
        job: the variable with the name of the run, if there is one.
        remedy: what to do where some are missing or wrong.
    """

    name: str
    signs: tuple[str, ...]
    needed: tuple[str, ...]
    read: Callable[[Dialect, Mapping[str, str]], Told]
    job: str = ""
    remedy: str = RUN_REMEDY

    def is_at_work(self, variables: Mapping[str, str]) -> bool:
        """Tell whether this launcher has left a sign."""
        return any(variables.get(sign) for sign in self.signs)

    def heard(self, variables: Mapping[str, str]) -> Told:
        """Return what the launcher says of this process.

        Raises:
            LaunchError: it has said only half of it, or what contradicts itself.
        """
        missing = [name for name in self.needed if not variables.get(name)]
        if missing:
            raise LaunchError(
                f"{self.listed(variables)}, but {', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set; "
                f"a rank needs all of {', '.join(self.needed)}; {self.remedy}"
            )
        told = self.read(self, variables)
        rank, world, local_rank, local_world = self.needed[:4] if len(self.needed) > 3 else FOUR
        rules = [
            (told.rank < told.world_size, f"{rank} must be below {world}"),
            (told.local_rank < told.local_world_size, f"{local_rank} must be below {local_world}"),
            (told.local_world_size <= told.world_size, f"{local_world} cannot exceed {world}"),
            (told.local_rank <= told.rank, f"{local_rank} cannot exceed {rank}"),
            (told.port is None or 0 < told.port < 65536, "MASTER_PORT must be between 1 and 65535"),
        ]
        broken = [rule for holds, rule in rules if not holds]
        if broken:
            raise LaunchError(f"{self.listed(variables)} contradict each other: {'; '.join(broken)}; {self.remedy}")
        return told

    def listed(self, variables: Mapping[str, str]) -> str:
        """Return what is set of the variables, for errors."""
        names = [*self.needed, *(sign for sign in self.signs if sign not in self.needed)]
        return ", ".join(f"{name}={variables[name]}" for name in names if variables.get(name))


def counted(dialect: Dialect, variables: Mapping[str, str]) -> Told:
    """Return what a launcher says that counts ranks, and leaves it to them where they meet."""
    rank, world_size, local_rank, local_world_size = (whole(variables, name, dialect) for name in dialect.needed[:4])
    job = variables.get(dialect.job, "")
    host = LOOPBACK if local_world_size == world_size else None
    return Told(rank, world_size, local_rank, local_world_size, host, derived_port(job), job)


def of_torchrun(dialect: Dialect, variables: Mapping[str, str]) -> Told:
    """Return what torchrun says, or whoever sets its variables."""
    rank, world_size, local_rank, local_world_size = (whole(variables, name, dialect) for name in FOUR)
    host, port = variables["MASTER_ADDR"], whole(variables, "MASTER_PORT", dialect)
    job = variables.get(dialect.job) or f"{host}:{port}"
    return Told(rank, world_size, local_rank, local_world_size, host, port, job)


def of_srun(dialect: Dialect, variables: Mapping[str, str]) -> Told:
    """Return what srun says: the first node of its step has rank 0.

    Raises:
        LaunchError: this node is not one of the step's.
    """
    rank, world_size, local_rank, node = (
        whole(variables, name, dialect)
        for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
    )
    nodes = unfolded(variables["SLURM_STEP_NODELIST"])
    tasks = tasks_of_nodes(variables["SLURM_STEP_TASKS_PER_NODE"])
    name = variables.get("SLURMD_NODENAME") or (nodes[node] if node < len(nodes) else f"node {node}")
    if name not in nodes or len(tasks) != len(nodes) or node >= len(nodes):
        raise LaunchError(
            f"this is {name}, SLURM_NODEID={node}, but SLURM_STEP_NODELIST={variables['SLURM_STEP_NODELIST']} has "
            f"{len(nodes)} nodes and SLURM_STEP_TASKS_PER_NODE={variables['SLURM_STEP_TASKS_PER_NODE']} speaks of "
            f"{len(tasks)}; a rank is on a node of its step: {dialect.remedy}"
        )
    job = f"slurm-{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
    host = LOOPBACK if tasks[node] == world_size else nodes[0]
    return Told(rank, world_size, local_rank, tasks[node], host, derived_port(job), job)


def of_sagemaker(dialect: Dialect, variables: Mapping[str, str]) -> Told:
    """Return what SageMaker says, which starts one process on each host.

    Raises:
        LaunchError: the list is none, or this host is not in it.
    """
    text, current = variables["SM_HOSTS"], variables["SM_CURRENT_HOST"]
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) for host in hosts):
        raise LaunchError(f'SM_HOSTS={text!r} is no list of host names, such as ["algo-1", "algo-2"]; {dialect.remedy}')
    ordered = sorted(hosts, key=lambda host: (len(host), host))  # algo-2 before algo-10
    if current not in ordered:
        raise LaunchError(
            f"SM_CURRENT_HOST={current} is not one of SM_HOSTS={text}; the rank of a host is its place in that list: "
            f"{dialect.remedy}"
        )
    job = variables.get(dialect.job) or "sagemaker"
    return Told(ordered.index(current), len(ordered), 0, 1, ordered[0], derived_port(job), job)


def of_kubeflow(dialect: Dialect, variables: Mapping[str, str]) -> Told:
    """Return what a TrainJob says to a pod that has one rank; where it has more, torchrun starts them.

    Raises:
        LaunchError: it has more.
    """
    rank, world_size, port = (whole(variables, n, dialect) for n in ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_PORT"))
    if variables["PET_NPROC_PER_NODE"] != "1":
        raise LaunchError(
            f"PET_NPROC_PER_NODE={variables['PET_NPROC_PER_NODE']}, and this is the only process of its pod; "
            f"{dialect.remedy}"
        )
    job = variables.get(dialect.job) or "trainjob"
    return Told(rank, world_size, 0, 1, variables["PET_MASTER_ADDR"], port, job)


def derived_port(job: str) -> int:
    """Return the port where the ranks of a run meet whose launcher names none: the same on all of them.

    Example:
        >>> derived_port("slurm-12.0") in DERIVED_PORTS
        True
    """
    return DERIVED_PORTS[zlib.crc32(job.encode()) % len(DERIVED_PORTS)]


def whole(variables: Mapping[str, str], name: str, dialect: Dialect) -> int:
    """Return a variable's number.

    Raises:
        LaunchError: it is none.
    """
    text = variables[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name}={variables[name]!r} is not a number from 0; {dialect.remedy}")
    return int(text)


FOUR = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI_REMEDY = "start the script with mpirun, which sets them, and pass all of them on where a container stands between"
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
SRUN = tuple(
    f"SLURM_{name}"
    for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID", "STEP_TASKS_PER_NODE", "NODEID", "STEP_NODELIST", "JOB_ID")
)
KUBEFLOW = tuple(f"PET_{name}" for name in ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))

TORCHRUN = Dialect(
    "torchrun",
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    (*FOUR, "MASTER_ADDR", "MASTER_PORT"),
    of_torchrun,
    "TORCHELASTIC_RUN_ID",
)

#: Looked at in this order; a launcher that runs inside another (torchrun inside srun) stands before it.
DIALECTS = (
    TORCHRUN,
    Dialect("Open MPI's mpirun", OPEN_MPI[:2], OPEN_MPI, counted, "PMIX_NAMESPACE", MPI_REMEDY),
    Dialect("MPICH's mpiexec", MPICH[2:], MPICH, counted, "PMI_KVS", MPI_REMEDY),
    Dialect(
        "srun",
        ("SLURM_STEP_ID",),
        SRUN,
        of_srun,
        remedy="start the script with srun, which sets them, and pass all SLURM_ variables on where a container stands "
        "between",
    ),
    Dialect(
        "SageMaker",
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        of_sagemaker,
        "TRAINING_JOB_NAME",
        "SageMaker's training toolkit sets both: use an image that has it",
    ),
    Dialect(
        "Kubeflow Trainer",
        ("PET_NODE_RANK",),
        KUBEFLOW,
        of_kubeflow,
        "PET_RDZV_ID",
        "take torchrun as the command of a pod with several ranks; it reads these variables",
    ),
)
