"""Handles of asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.compat.horovod.errors import translate_peer_errors
from counterpoint.fabric.fabric import Group, Reduction, Work

if TYPE_CHECKING:
    from counterpoint.compat.horovod.timeline import HorovodTimeline

Result: TypeAlias = "Tensor | list[Tensor] | tuple[Tensor, ...] | None"


@dataclass(frozen=True, slots=True)
class JoinableCollective:
    """A collective of the fabric that ranks without data can take part in, with zeros.

    Args:
        op: reduction over ranks; ``gather`` collects one row of every rank.
        label: of the collective in the fabric.
        dtype: torch's name of the tensor's dtype.
        shape: of the tensor; of one row for a gather.
    """

    op: Reduction | Literal["gather"]
    label: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpRequest:
    """An operation requested by the program.

    Args:
        kind: ``allreduce`` and so on.
        name: of the tensor.
        group: members.
        joinable: collectives that joined ranks take part in; None if they cannot.
    """

    kind: str
    name: str
    group: Group
    joinable: tuple[JoinableCollective, ...] | None = None

    def __str__(self) -> str:
        """Return the operation as shown in errors."""
        return f"{self.kind} of {self.name}"


class HorovodHandle:
    """Handle of an asynchronous operation, for ``poll`` and ``synchronize``.

    Args:
        request: of the operation.
        works: pending collectives.
        finish: returns the result after all are complete.
        sequence: number of earlier operations of all ranks; -1 if not all ranks take part.

    Attributes:
        first_polled_s: when the program first polled the operation before it was complete; None otherwise.
    """

    def __init__(
        self, request: OpRequest, works: Sequence[Work], finish: Callable[[], Result], sequence: int = -1
    ) -> None:
        self.request = request
        self.sequence = sequence
        self._works = list(works)
        self._finish: Callable[[], Result] | None = finish
        self._result: Result = None
        self.first_polled_s: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` has returned its result."""
        return self._finish is None

    def poll(self) -> bool:
        """Return whether it is complete, so that waiting returns at once."""
        with translate_peer_errors():
            while self._works and self._works[0].completes_within(0.0):
                self._works.pop(0)
        return not self._works

    def wait(self, wait_for_work: Callable[[Work, OpRequest], None]) -> Result:
        """Wait for the result and return it.

        Args:
            wait_for_work: waits for one collective of the fabric.
        """
        if self._finish is not None:
            with translate_peer_errors(), torch.no_grad():
                while self._works:
                    wait_for_work(self._works[0], self.request)
                    self._works.pop(0)
                self._result = self._finish()
            self._finish = None
        return self._result


class HandleTable:
    """Operations of this rank that have not been waited for; it keeps their tensors alive.

    Args:
        wait_for_work: waits for one collective of the fabric.
    """

    def __init__(self, wait_for_work: Callable[[Work, OpRequest], None]) -> None:
        self.timeline: HorovodTimeline | None = None
        self._wait_for_work = wait_for_work
        self._handles: dict[HorovodHandle, float] = {}

    def start_timeline(self, timeline: HorovodTimeline) -> None:
        """Record operations from now on."""
        self.timeline = timeline

    def stop_timeline(self) -> HorovodTimeline | None:
        """Record no more operations; return the timeline, if there was one."""
        timeline, self.timeline = self.timeline, None
        return timeline

    def add(self, handle: HorovodHandle) -> HorovodHandle:
        """Register a handle and return it."""
        self._handles[handle] = self.timeline.now_us() if self.timeline is not None else 0.0
        return handle

    def finish(self, handle: HorovodHandle) -> Result:
        """Wait for the result of a handle and return it."""
        if handle.is_done:
            return handle.wait(self._wait_for_work)
        timeline = self.timeline
        waits_since_us = timeline.now_us() if timeline is not None else 0.0
        try:
            return handle.wait(self._wait_for_work)
        finally:
            started_us = self._handles.pop(handle, waits_since_us)
            if timeline is not None:
                timeline.record(handle.request.name, f"WAIT_FOR_{handle.request.kind.upper()}", waits_since_us)
                timeline.record(handle.request.name, handle.request.kind.upper(), started_us)

    def finish_all(self) -> None:
        """Wait for all operations."""
        while self._handles:
            self.finish(next(iter(self._handles)))

    def global_handles(self) -> list[HorovodHandle]:
        """Return the operations of all ranks, in the order in which they were started."""
        return [handle for handle in self._handles if handle.sequence >= 0]
