"""Operations that go on: who started them keeps a handle, asks whether they are over, and waits for them."""

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
        verb: of a sum over ranks; ``gather`` collects one row of every rank.
        label: as the fabric is told it.
        dtype: of the tensor, by its name in torch.
        shape: of the tensor; of a row where rows are collected.
    """

    op: Reduction | Literal["gather"]
    label: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpRequest:
    """An operation as the program asked for it.

    Args:
        kind: ``allreduce`` and so on.
        name: of the tensor.
        group: among whom.
        parts: what ranks that have joined do meanwhile; None where they cannot.
    """

    kind: str
    name: str
    group: Group
    joinable: tuple[JoinableCollective, ...] | None = None

    def __str__(self) -> str:
        """Read as in an error."""
        return f"{self.kind} of {self.name}"


class HorovodHandle:
    """What an asynchronous operation returns: for ``poll`` and ``synchronize``, and kept until then.

    Args:
        call: what was asked for.
        works: what is under way.
        finish: returns the result, when all that is complete.
        turn: the operations of all ranks that were started before; -1 where not all ranks take part.

    Attributes:
        asked_since_s: when a program first asked whether it is over and was told that it is not; None before.
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
        """Whether it has been waited for."""
        return self._finish is None

    def poll(self) -> bool:
        """Return whether it is over; where it is, waiting returns at once."""
        with translate_peer_errors():
            while self._works and self._works[0].completes_within(0.0):
                self._works.pop(0)
        return not self._works

    def wait(self, wait_for_work: Callable[[Work, OpRequest], None]) -> Result:
        """Return the result, when it is there.

        Args:
            patiently: waits for one collective of the fabric.
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
    """The operations of this rank that nobody has waited for; their tensors live as long.

    Args:
        patiently: waits for one collective of the fabric.
    """

    def __init__(self, wait_for_work: Callable[[Work, OpRequest], None]) -> None:
        self.timeline: HorovodTimeline | None = None
        self._wait_for_work = wait_for_work
        self._handles: dict[HorovodHandle, float] = {}

    def add(self, handle: HorovodHandle) -> HorovodHandle:
        """Remember it."""
        self._handles[handle] = self.timeline.now_us() if self.timeline is not None else 0.0
        return handle

    def finish(self, handle: HorovodHandle) -> Result:
        """Return its result, when it is there."""
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
        """Nothing is under way."""
        while self._handles:
            self.finish(next(iter(self._handles)))

    def global_handles(self) -> list[HorovodHandle]:
        """Return the operations in which all ranks take part, in the order in which they were started."""
        return [handle for handle in self._handles if handle.sequence >= 0]
