"""Collectives of the stand-in device on a stream of their own, as NCCL runs them, so that a missing wait is found.

The ranks of one process are threads, whose collectives otherwise run where the last member calls them. Here they run on
a communication stream: it waits for what each member has been given when it starts the collective, and a member's
stream waits for the collective where the program calls ``wait()``::

    stream 0       | backward, all_reduce ---.  ...  wait() <--. update
    communication  |                  waits '-> all_reduce ----'

A wait can be left out by the line of source code that calls it. What then reads or writes too early is a race.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Json, Reduction, Work
from counterpoint.fabric.local import LocalWork, LocalWorld
from counterpoint.testing.stand_in_accelerator import StandInAccelerator, StandInEvent, StandInStream
from counterpoint.testing.stand_in_device import StandInTensor, find_line
from counterpoint.testing.stand_in_streams import SourceLine

T = TypeVar("T")


class StreamedWork(Work):
    """A collective on the communication stream.

    Args:
        world: of the ranks.
        work: the collective of the local transport.
    """

    def __init__(self, world: StreamedWorld, work: Work) -> None:
        self._world, self._work = world, work
        if isinstance(work, LocalWork) and work.is_complete and _is_on_device(work):
            event = world.accelerator.new_event()
            event.record(world.communication)
            world.ends[_collective_of(work)] = cast("StandInEvent", event)

    @property
    def is_complete(self) -> bool:
        """Whether the last member has joined."""
        return self._work.is_complete

    def wait(self) -> None:
        """Let this thread's stream wait for the collective, unless the calling line is left out."""
        line = find_line()
        self._world.waits[line] += 1
        if line == self._world.without:
            return
        self._work.wait()
        end = self._world.ends.get(_collective_of(self._work)) if isinstance(self._work, LocalWork) else None
        if end is not None:
            end.wait()


def _collective_of(work: LocalWork) -> Any:  # noqa: ANN401 - of the local transport
    return work._collective  # noqa: SLF001 - the part of a work that all members share


def _is_on_device(work: LocalWork) -> bool:
    first = next(iter(_collective_of(work).inputs.values()))
    return isinstance(first[0] if isinstance(first, tuple) else first, StandInTensor)


class StreamedFabric(Fabric):
    """One rank of a :class:`StreamedWorld`.

    Args:
        world: of the ranks.
        inner: the rank's connection by the local transport.
    """

    takes_device_tensors = True

    def __init__(self, world: StreamedWorld, inner: Fabric) -> None:
        self._world, self._inner = world, inner
        self.rank, self.num_ranks, self.timeout_s = inner.rank, inner.num_ranks, inner.timeout_s

    def _start(self, tensor: Tensor | None, start: Callable[[], T]) -> T:
        """Start a collective, on the communication stream unless it is one of tensors in host memory."""
        if not isinstance(tensor, StandInTensor):
            return start()
        accelerator, communication = self._world.accelerator, self._world.communication
        communication.wait_stream(cast("StandInStream", accelerator.current_stream()))
        with accelerator.stream(communication):
            return start()

    @property
    def hosts(self) -> Sequence[int]:
        """One host."""
        return self._inner.hosts

    def barrier_async(self, label: str, group: Group) -> Work:
        """Start a barrier."""
        return StreamedWork(self._world, self._start(None, lambda: self._inner.barrier_async(label, group)))

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Send copies of the tensors."""
        self._inner.send(peer, label, tensors)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the tensors of the peer's next message."""
        return self._inner.recv(peer, label)

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Return sender, label and tensors of the next message from any of the peers."""
        return self._inner.recv_any(peers)

    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start an all-reduce."""
        return StreamedWork(self._world, self._start(tensor, lambda: self._inner.all_reduce(label, tensor, group, op)))

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start a reduce-scatter."""
        start = self._start(whole, lambda: self._inner.reduce_scatter(label, whole, bounds, group, op))
        return StreamedWork(self._world, start)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start an exchange."""
        received, work = self._start(whole, lambda: self._inner.all_to_all(label, whole, counts, group))
        return received, StreamedWork(self._world, work)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start an all-gather."""
        return StreamedWork(
            self._world, self._start(whole, lambda: self._inner.all_gather(label, whole, bounds, group))
        )

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start a broadcast."""
        return StreamedWork(self._world, self._start(tensor, lambda: self._inner.broadcast(label, tensor, group, root)))

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Return every member's value."""
        return self._inner.gather_values(label, value, group)

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return memory that all members share."""
        return self._inner.shared_zeros(label, num_elements, dtype, group)

    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Validate the groups."""
        self._inner.connect_groups(groups)

    def abort(self, reason: str) -> None:
        """Make the other ranks raise at their next wait."""
        self._inner.abort(reason)

    def close(self) -> None:
        """Do nothing: the world owns the threads."""
        return


class StreamedWorld:
    """Ranks of one process whose collectives run on a communication stream of the stand-in device.

    Args:
        num_ranks: how many.
        without: the line of source code whose waits are left out; None for none.

    Attributes:
        waits: by line, how often a wait was called there.
    """

    def __init__(self, num_ranks: int, without: SourceLine | None = None) -> None:
        self.accelerator = StandInAccelerator()
        self.communication = cast("StandInStream", self.accelerator.new_stream())
        self.without = without
        self.waits: Counter[SourceLine] = Counter()
        self.ends: weakref.WeakKeyDictionary[Any, StandInEvent] = weakref.WeakKeyDictionary()
        self._inner = LocalWorld(num_ranks)
        self.fabrics: Sequence[Fabric] = tuple(StreamedFabric(self, fabric) for fabric in self._inner.fabrics)

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return ``work(fabric)`` of each rank."""
        return self._inner.run(lambda fabric: work(self.fabrics[fabric.rank]))

    def close(self) -> None:
        """End the threads."""
        self._inner.close()
