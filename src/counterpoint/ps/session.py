"""Worker API of a job: create keys, push, pull and request tasks, wherever coordinator and servers run.

Requests are sent immediately, in call order; the results are awaited when needed. So pushes and pulls of many keys
are in flight at the same time, and a pull sees every earlier push of the same session.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from counterpoint.ps.consistency import NO_SLICE
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import DataTask, MembershipView, TaskOutcome
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.update_rules import ConstantInit, Initializer, UpdateRule
from counterpoint.rpc.job_key import JobKey

Versions: TypeAlias = tuple[int, ...]
"""Versions of a key, one per part, in shard order: one per shard, or a single one for a small key."""

Answer_co = TypeVar("Answer_co", covariant=True)


class NoTaskYet(Enum):
    """Result of a task request when data is left but no task may start now.

    Under ssp, leave the clock before retrying.
    """

    NO_TASK_YET = "later"


NO_TASK_YET = NoTaskYet.NO_TASK_YET


@dataclass(frozen=True, slots=True)
class PushResult:
    """A push that all parts of its key have counted, and that survives the failure of a server.

    Attributes:
        versions: of the key afterwards.
        are_new: for each part, False if the data slice had already been counted.
    """

    versions: Versions
    are_new: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PullResult:
    """Value of a key, or some of its rows.

    Attributes:
        values: owned by the caller; in the shape of the key, or ``(len(rows), width)``.
        versions: of the parts that were read.
    """

    values: Tensor
    versions: Versions


@dataclass(frozen=True, slots=True, eq=False)
class InitialRows:
    """Initial values of a table, given for some of its rows.

    Attributes:
        rows: row ids, int64, strictly ascending.
        values: ``(len(rows), width)``.
        default: initializer of all other rows.
    """

    rows: Tensor
    values: Tensor
    default: Initializer = field(default_factory=ConstantInit)


class PendingResult(Protocol[Answer_co]):
    """Result of a request that may not have arrived yet."""

    def done(self) -> bool:
        """Tell whether :meth:`wait` returns or raises immediately."""

    def wait(self, timeout_s: float | None = None) -> Answer_co:
        """Return the result.

        Args:
            timeout_s: longest wait; ``timeouts.lease_s`` of the job by default.

        Raises:
            DataError: pushed values are not finite.
            PlanError: the request is invalid: too stale, without its slice index, or the server is out of memory.
            PeerError: no reply in time, or the job continues without this session.
        """


class Session(Protocol):
    """Membership of a worker in a job, until it leaves; also a context manager.

    A session is used by one thread. Its tensors are on the CPU.
    """

    job: JobConfig
    name: str
    job_key: JobKey | None

    @property
    def view(self) -> MembershipView:
        """Newest membership view that this session has received."""

    def wait_view(self, newer_than: int, timeout_s: float) -> MembershipView:
        """Return the view once it is of a newer generation, or when the time is up.

        Args:
            newer_than: a generation.
            timeout_s: longest wait.

        Raises:
            PeerError: the job has stopped, or continues without this session.
        """

    def init(self, key: str, value: Tensor, rule: UpdateRule) -> None:
        """Create a dense key, unless it exists.

        Every session calls this for every key it uses, with the same shape, dtype and rule; the first caller's value
        counts. Large keys are split over all shards.

        Args:
            key: its name.
            value: of any shape; float64, float32, bfloat16 or float16.
            rule: how a push updates it.

        Raises:
            PlanError: the key exists with another definition, a server is out of memory, or the consistency needs an
                optimizer.
        """

    def init_rows(
        self,
        key: str,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        rule: UpdateRule,
        initializer: Initializer | InitialRows,
    ) -> None:
        """Create a table of rows, which are initialized when they are first read.

        Args:
            key: its name.
            num_rows: number of rows.
            width: elements per row.
            dtype: of the elements.
            rule: how a push updates the rows that it names.
            initializer: of the rows; given initial rows count only if this session creates the table.

        Raises:
            PlanError: the key exists with another definition, or initial rows are given under momentum with dampening.
            DataError: an initial value is not finite.
        """

    def push(  # noqa: PLR0913 - fields of a push, most by keyword
        self,
        key: str,
        values: Tensor,
        *,
        slice_index: int = NO_SLICE,
        read_versions: Versions | None = None,
        rows: Tensor | None = None,
        codec: str = "",
        pooling: RowPooling | None = None,
    ) -> PendingResult[PushResult]:
        """Push a gradient; its tensors must not change until the result has arrived.

        Args:
            key: name of the key.
            values: in the shape of the key, or ``(len(rows), width)``.
            slice_index: data slice it was computed from, ``task.epoch * job.data.num_slices + number``; required by
                bsp.
            read_versions: versions it was computed from; by default those of this session's last pull.
            rows: row ids, int64, strictly ascending; may be empty, since a bsp step needs all slices.
            codec: compression codec of a dense key, such as ``int8``, applied to each part; ``values`` then become the
                residual, to be added to the next gradient.
            pooling: which of ``values`` each row's gradient sums; one entry per row.

        Raises:
            PlanError: the key does not exist, or the values have another shape or dtype.
        """

    def pull(
        self,
        key: str,
        *,
        rows: Tensor | None = None,
        min_versions: Versions | int = 0,
        out: Tensor | None = None,
        exact_version: bool = False,
        pooling: RowPooling | None = None,
    ) -> PendingResult[PullResult]:
        """Pull the value of a key, or some of its rows.

        Args:
            key: name of the key.
            rows: row ids, int64, strictly ascending; required for a table.
            min_versions: lowest acceptable versions; under bsp, the step.
            out: tensor that receives the values; newly allocated if not given.
            exact_version: if the key is one version ahead, return it as of ``min_versions``, so that a slice of a step
                is computed from the same weights by every attempt. For bsp with tasks.
            pooling: sums of rows to return instead of the rows; each shard sums its own.

        Raises:
            PlanError: the key does not exist, or rows or ``out`` do not fit it.
        """

    def batch(self) -> AbstractContextManager[None]:
        """Return a context whose pushes and pulls are sent together at its end, which costs less on both sides."""

    def join_clock(self) -> None:
        """Join the ssp clock, before the pull for the first push."""

    def leave_clock(self) -> None:
        """Leave the ssp clock until the next :meth:`join_clock`."""

    def lease(self, timeout_s: float = 0.0) -> DataTask | NoTaskYet | None:
        """Return a task; None if all data of all epochs has been processed.

        Args:
            timeout_s: longest wait for a task before :data:`NO_TASK_YET` is returned.

        Raises:
            PeerError: the job has stopped; the error gives the reason.
        """

    def report(self, task: DataTask, outcome: TaskOutcome, text: str = "") -> None:
        """Report the outcome of a task; done requires that all of its pushes were acknowledged, so wait for them first.

        Args:
            task: which.
            outcome: done, failed or preempted.
            text: error message, if it failed.
        """

    def checkpoint(self) -> int:
        """Request a snapshot and return its number; it is saved once no task is partially applied.

        Tasks that were never started are not assigned until then. This does not wait.
        """

    def leave(self) -> None:
        """Leave the job; leased tasks are assigned to others, and the session cannot be used any more."""

    def close(self) -> None:
        """Leave the job if it can be reached, and release all resources."""

    def __enter__(self) -> Self:
        """Return the session."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the session."""
