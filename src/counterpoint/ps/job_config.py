"""Job-wide configuration of a parameter-server job: consistency, data, retries and timeouts."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct, field

from counterpoint.errors import PlanError
from counterpoint.optim.validation import MAX_SECONDS
from counterpoint.ps.consistency import Bsp, Consistency

MAX_SERVERS = 10_000
MAX_TASKS = 1_000_000
"""The largest number of tasks of an epoch, which the coordinator holds in memory."""


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a job's data is split into slices and tasks.

    Args:
        num_slices: data slices in one epoch.
        num_epochs: passes over them; 0 if workers need no tasks.
        slices_per_task: slices that one task covers.
        slices_per_step: assign tasks of a step only after all earlier steps are done; 0 if there are no steps.
    """

    num_slices: int = 0
    num_epochs: int = 0
    slices_per_task: int = 1
    slices_per_step: int = 0

    def __post_init__(self) -> None:
        if min(self.num_slices, self.num_epochs, self.slices_per_step) < 0 or self.slices_per_task < 1:
            raise PlanError(f"{self} has a negative number, or slices_per_task below 1")
        if self.num_slices > MAX_TASKS * self.slices_per_task:
            raise PlanError(f"{self} has more than {MAX_TASKS:,} tasks in an epoch; give more slices_per_task")
        if self.slices_per_step and (
            self.num_slices % self.slices_per_step
            or self.slices_per_step % min(self.slices_per_task, self.slices_per_step)
        ):
            raise PlanError(
                f"{self} has {self.num_slices} slices in tasks of {self.slices_per_task}, which do not fill whole "
                f"steps of {self.slices_per_step}; make num_slices a multiple of slices_per_step (empty slices may "
                "fill the last step), and slices_per_step a multiple of slices_per_task"
            )


class RetryPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How often a task may be retried before the job stops with an error; no data is ever skipped.

    Args:
        max_failures: retries after an error of the task or the program.
        max_preemptions: retries after a worker was taken away, died or timed out.
        backup_after: assign a task to a second worker when it lasted this many times the usual duration and no other
            task is left; the first to finish counts. 0 disables backup tasks.

    Source:
        Backup tasks: Dean and Ghemawat, MapReduce, OSDI 2004; for slices of a gradient: Dean et al., NIPS 2012.
    """

    max_failures: int = 3
    max_preemptions: int = 1000
    backup_after: float = 0.0

    def __post_init__(self) -> None:
        if min(self.max_failures, self.max_preemptions) < 0 or not self.backup_after >= 0:
            raise PlanError(f"{self} has a negative number")


class Timeouts(Struct, frozen=True, forbid_unknown_fields=True):
    """Time limits of a job.

    Args:
        heartbeat_s: interval between heartbeats of a member.
        failure_timeout_s: a member without a heartbeat for this long is considered dead.
        lease_s: a task that is not finished by then is assigned to another worker; also the default request timeout.
        resend_s: an unanswered request is sent again after this long.
    """

    heartbeat_s: float = 1.0
    failure_timeout_s: float = 5.0
    lease_s: float = 300.0
    resend_s: float = 1.0

    def __post_init__(self) -> None:
        limits = (self.heartbeat_s, self.failure_timeout_s, self.lease_s, self.resend_s)
        if not all(0 < seconds <= MAX_SECONDS for seconds in limits):
            raise PlanError(f"{self} has no time limits; give numbers of seconds above 0, {MAX_SECONDS:.0f} at most")


class JobConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Configuration that must be identical on every member of a job.

    Args:
        name: of the job.
        consistency: how pushes are turned into updates.
        num_servers: each is the primary of one shard and the backup of another; 0 if every worker holds all weights.
        data: slices and tasks.
        retry_policy: how often tasks may be retried.
        timeouts: time limits.
        capacity_bytes: memory limit of one shard.
        is_logged: whether a server without a backup logs every change before it replies. If not, changes since the last
            snapshot are lost with the server, and the job reports it.
        is_replicated: whether each shard has a backup on another server, if there are several. If not, the same
            holds as for a single server without a log.
    """

    name: str
    consistency: Consistency
    num_servers: int = 1
    data: DataConfig = field(default_factory=DataConfig)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeouts: Timeouts = field(default_factory=Timeouts)
    capacity_bytes: int = 1 << 40
    is_logged: bool = True
    is_replicated: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.num_servers <= MAX_SERVERS:
            raise PlanError(f"job {self.name} with {self.num_servers} servers; give 0 to {MAX_SERVERS:,}")
        if self.capacity_bytes < 0:
            raise PlanError(f"job {self.name} with {self.capacity_bytes} bytes a shard; give 0 or more")
        if not self.num_servers and not self.allows_recompute:
            raise PlanError(
                f"job {self.name} without servers trains by allreduce in lockstep, which needs bsp and epochs, but has "
                f"{self.consistency} and {self.data}; give both, or 1 server or more"
            )
        if not self.is_replicated and self.is_logged and self.num_servers > 1:
            raise PlanError(
                f"job {self.name} has {self.num_servers} servers without backups, and only a single server keeps a "
                "log; give is_logged=False to accept losing updates since the last snapshot, or is_replicated=True"
            )

    @property
    def num_shards(self) -> int:
        """Number of shards over which keys are partitioned."""
        return self.num_servers

    @property
    def allows_recompute(self) -> bool:
        """Whether a slice of a step may be computed again, by the worker that takes over the task of a lost one."""
        return isinstance(self.consistency, Bsp) and self.data.num_epochs > 0

    def digest(self) -> str:
        """Return a hash of the configuration, equal for equal jobs."""
        decoded = msgspec.convert(msgspec.to_builtins(self), JobConfig)  # as read from a job file: 1 s becomes 1.0 s
        return hashlib.blake2b(repr(decoded).encode(), digest_size=16).hexdigest()
