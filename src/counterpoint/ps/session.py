"""What a worker's program says to a job: make keys, push, pull, take data; wherever coordinator and servers may be.

Requests are sent at once, in the order of the calls; what they return is waited for when it is needed. So pushes and
pulls of many keys are under way together, and a pull sees every push that the same session made before it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import NO_SLICE, DataTask, MembershipView, TaskOutcome
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.update_rules import ConstantInit, Initializer, UpdateRule

Versions: TypeAlias = tuple[int, ...]
"""Of a key, one for each part of it, in the order of the shards that keep one: all of them, or one for a small key."""

Answer_co = TypeVar("Answer_co", covariant=True)


class NoTaskYet(Enum):
    """The answer to a lease when data is left but none may be begun now; under ssp, rest before asking again."""

    NO_TASK_YET = "later"


NO_TASK_YET = NoTaskYet.NO_TASK_YET


@dataclass(frozen=True, slots=True)
class PushResult:
    """A push is counted on all parts of its key, and is not lost with a server.

    Attributes:
        versions: of the key afterwards.
        are_new: whether it was counted now, for each part; not, where its portion had been counted before.
    """

    versions: Versions
    are_new: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PullResult:
    """What a key is, or some of its rows.

    Attributes:
        values: the caller's own; in the shape in which the key was made, or ``(len(rows), width)``.
        versions: of the parts it was read from.
    """

    values: Tensor
    versions: Versions


@dataclass(frozen=True, slots=True, eq=False)
class InitialRows:
    """How a table begins of which some rows have their values already.

    Attributes:
        rows: their numbers, int64, ascending and each once.
        values: ``(len(rows), width)``.
        others: how all other rows begin.
    """

    rows: Tensor
    values: Tensor
    default: Initializer = field(default_factory=ConstantInit)


class PendingResult(Protocol[Answer_co]):
    """What has been asked for, and is here when it is waited for."""

    def done(self) -> bool:
        """Tell whether :meth:`wait` returns, or raises, at once."""

    def wait(self, timeout_s: float | None = None) -> Answer_co:
        """Return the answer.

        Args:
            deadline_s: the longest that this lasts; the job's ``patience.lease_s``, if not given.

        Raises:
            DataError: what was pushed is not finite.
            PlanError: the request cannot be carried out: it is too stale, lacks its portion, or the server is full.
            PeerError: nobody has answered in time, or the job goes on without this session.
        """


class Session(Protocol):
    """A worker's belonging to a job, from when it is made until it leaves; also a context manager.

    A session is used by one thread. Its tensors are on the CPU.
    """

    job: JobConfig
    name: str

    @property
    def view(self) -> MembershipView:
        """Who belongs to the job now, as far as this session has heard."""

    def wait_view(self, newer_than: int, timeout_s: float) -> MembershipView:
        """Return who belongs to the job, as soon as that is of a newer generation, or the time is up.

        Args:
            newer_than: a generation.
            wait_s: the longest that this lasts.

        Raises:
            PeerError: the job has stopped, or goes on without this session.
        """

    def init(self, key: str, value: Tensor, rule: UpdateRule) -> None:
        """The key exists: as it is there already, or as this value.

        Every session says so of every key that it uses, with the same shape, dtype and rule; the first one's value is
        the key's. Large keys are divided over all shards.

        Args:
            key: its name.
            value: of any shape, float64, float32, bfloat16 or float16.
            rule: what a push does to it.

        Raises:
            PlanError: the key is there otherwise, a server is full, or a job that is not bsp needs an optimizer.
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
        """The table of rows exists; its rows begin when they are first asked for.

        Args:
            key: its name.
            rows: how many there may be.
            width: numbers of one.
            dtype: of these.
            rule: what a push does to the rows that it names.
            start: how a row begins; given rows count where this session is the first to make the table.

        Raises:
            PlanError: the key is there otherwise, or rows are given under a momentum with dampening.
            DataError: a number of a given row is not finite.
        """

    def push(  # noqa: PLR0913 - what a push says, most by keyword
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
        """A gradient is on its way; its tensors must stay as they are until it has been answered.

        Args:
            key: of which key.
            values: in the shape of the key, or ``(len(rows), width)``.
            portion: the data it comes from, ``task.epoch * job.work.num_portions + number``; bsp counts by it.
            read: the versions it was computed from; those last pulled by this session, if not given.
            rows: their numbers, int64, ascending and each once; none is a push, too, for a step has all portions.
            code: how a key that is no table is written on the wire, as ``int8``, each part by itself; ``values`` then
                become what was not sent, to be added to the next gradient.
            sums: one for each row, of ``values``, which may then be fewer: a row's gradient is the sum of these.

        Raises:
            PlanError: there is no such key, or the values are not of its shape or dtype.
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
        """What a key is, or some of its rows, is on its way.

        Args:
            key: which.
            rows: their numbers, int64, ascending and each once; required for a table.
            least: versions that the answer must have at least; under bsp the step.
            out: becomes the values; new memory, if not given.
            is_exact: whether a key that is one step further is wanted as it was at ``least``: so a portion of a step is
                computed from the same weights, whoever does it and however often. For bsp with tasks.
            sums: of the rows, which are wanted instead of them, each shard adding up its own.

        Raises:
            PlanError: there is no such key, or rows or ``out`` do not fit it.
        """

    def batch(self) -> AbstractContextManager[None]:
        """Return a block whose pushes and pulls leave in one go at its end, which is less work on both sides."""

    def join_clock(self) -> None:
        """Others wait for this worker from now on (ssp); it comes before the pull for the first push."""

    def leave_clock(self) -> None:
        """Nobody waits for this worker any longer (ssp), until it enters again."""

    def lease(self, timeout_s: float = 0.0) -> DataTask | NoTaskYet | None:
        """Return data to work on; None when all data of all epochs has been counted.

        Args:
            wait_s: how long to wait for a task before the answer is :data:`NO_TASK_YET`.

        Raises:
            PeerError: the job has stopped; the error says why.
        """

    def report(self, task: DataTask, outcome: TaskOutcome, text: str = "") -> None:
        """The coordinator knows how a task ended; done means that all its pushes have been answered, so wait for them.

        Args:
            task: which.
            outcome: done, failed or preempted.
            text: why, if it failed.
        """

    def checkpoint(self) -> int:
        """Return the number of a cut that will be saved as soon as no task is begun and not done; this waits for none.

        No task that nobody has begun is given out until then.
        """

    def leave(self) -> None:
        """The job goes on without this worker, and gives others what it had leased; nothing can be asked any more."""

    def close(self) -> None:
        """The session has left, if it was still in and the job can be reached; nothing of it remains."""

    def __enter__(self) -> Self:
        """Return the session."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """The session is closed."""
