"""What a job is for its servers: how pushes are counted, how much data there is, how long one waits for whom."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.errors import PlanError


@dataclass(frozen=True, slots=True)
class Bsp:
    """A step of a key is so many portions of data, added in their order, whoever pushes them."""

    slices_per_step: int

    def __post_init__(self) -> None:
        if self.slices_per_step < 1:
            raise PlanError(
                f"bsp with {self.slices_per_step} portions in a step counts nothing; give portions=1 or more"
            )


@dataclass(frozen=True, slots=True)
class Ssp:
    """A worker is at most so many of its pushes ahead of what it has seen of the slowest.

    Source:
        Ho et al., More effective distributed ML via a stale synchronous parallel parameter server, NIPS 2013.
    """

    staleness: int

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise PlanError(f"ssp with a staleness of {self.staleness}; give 0 or more")


@dataclass(frozen=True, slots=True)
class Asp:
    """Every push is an update of its own, and nobody waits."""


Consistency: TypeAlias = Bsp | Ssp | Asp


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The data of a job.

    Args:
        num_portions: of one epoch.
        num_epochs: passes over them; 0 where the workers need no tasks.
        task_portions: of one task.
        step_portions: tasks of a step are given only when all steps before are done; 0 where there are no steps.
    """

    num_slices: int = 0
    num_epochs: int = 0
    slices_per_task: int = 1
    slices_per_step: int = 0

    def __post_init__(self) -> None:
        if min(self.num_slices, self.num_epochs, self.slices_per_step) < 0 or self.slices_per_task < 1:
            raise PlanError(f"{self} has a number below 0, or tasks of nothing")
        if self.slices_per_step and (
            self.num_slices % self.slices_per_step
            or self.slices_per_step % min(self.slices_per_task, self.slices_per_step)
        ):
            raise PlanError(
                f"{self} has {self.num_slices} portions in tasks of {self.slices_per_task}, which do not make whole "
                f"steps of {self.slices_per_step}; make num_portions a multiple of step_portions (portions without "
                "samples fill the last step), and step_portions a multiple of task_portions"
            )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a task may go wrong before the job stops and says so; nothing is ever left out.

    Args:
        failures: what is the task's or the program's fault.
        preemptions: what is not: machines taken away, workers that die or fall silent.
        backup_after: a task that lasts so many times as long as others did is given to a second worker, too, when
            nothing else is left to be given; who is done first, counts. 0 for never.

    Source:
        Backup tasks: Dean and Ghemawat, MapReduce, OSDI 2004; for portions of a gradient: Dean et al., NIPS 2012.
    """

    max_failures: int = 3
    max_preemptions: int = 1000
    backup_after: float = 0.0

    def __post_init__(self) -> None:
        if min(self.max_failures, self.max_preemptions) < 0 or not self.backup_after >= 0:
            raise PlanError(f"{self} has a number below 0")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long one waits.

    Args:
        beat_s: from one sign of life to the next.
        silence_s: without one, a member is gone.
        lease_s: a task is given to somebody else after so long.
        retry_s: what is not answered is sent again.
    """

    heartbeat_s: float = 1.0
    failure_timeout_s: float = 5.0
    lease_s: float = 300.0
    resend_s: float = 1.0


@dataclass(frozen=True, slots=True)
class JobConfig:
    """All that must be the same for everybody.

    Args:
        name: of the job.
        consistency: how pushes are counted.
        num_servers: each keeps one shard first, and is the backup of another; 0 where every worker has all weights.
        work: the data.
        budget: how often tasks may go wrong.
        patience: how long one waits.
        capacity_bytes: of one shard.
        is_logged: whether a server that keeps a shard alone writes every change down before it answers; if not, what
            it has counted since the last cut is lost with it, and the job says so.
        is_replicated: whether each shard of several servers has a backup on another one; if not, as for a lone server
            that is not logged.
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
        if self.num_servers < 0:
            raise PlanError(f"job {self.name} with {self.num_servers} servers; give 0 or more")
        if not self.num_servers and not self.allows_recompute:
            raise PlanError(
                f"job {self.name} without servers is trained by all workers step by step, which {self.consistency} "
                "with this work does not allow; give bsp and epochs, or 1 server or more"
            )
        if not self.is_replicated and self.is_logged and self.num_servers > 1:
            raise PlanError(
                f"job {self.name} has {self.num_servers} servers without backups, of which no logs are kept; give "
                "is_logged=False to lose with a server what it has counted since the last cut, or leave the backups"
            )

    @property
    def num_shards(self) -> int:
        """Parts into which keys are divided."""
        return self.num_servers

    @property
    def allows_recompute(self) -> bool:
        """Whether a portion of a step may be computed once more, by whoever gets the task of a worker that is gone."""
        return isinstance(self.consistency, Bsp) and self.data.num_epochs > 0

    def digest(self) -> str:
        """Return a word that is the same for equal jobs, and for others only by a miracle."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()
