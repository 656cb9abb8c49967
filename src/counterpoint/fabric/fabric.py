"""What a rank may ask of the world around it; every transport answers in the same words and with the same errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | dict[str, Json] | None"
Group: TypeAlias = tuple[int, ...]
Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]
"""How numbers of several ranks become one; a mean is a sum, scaled, and rounded once. NaN wins over every number."""


class Work(ABC):
    """A collective that has been started; its tensors may be neither read nor written until it has been waited for."""

    @abstractmethod
    def wait(self) -> None:
        """The collective is complete on this rank; a second call returns at once.

        Raises:
            PeerError: the members disagree, one of them is gone, or the deadline has passed.
        """

    @property
    def is_complete(self) -> bool:
        """Whether it can be seen to be complete on this rank, without waiting and without taking part in it.

        A transport that cannot tell says no.
        """
        return False

    def completes_within(self, seconds: float) -> bool:
        """Return whether it is complete on this rank after at most that long, with this rank taking part.

        A transport that cannot tell without waiting waits.

        Raises:
            PeerError: the members disagree, or one of them is gone.
        """
        del seconds
        self.wait()
        return True


class CompletedWork(Work):
    """A collective of one rank, which is complete before it starts."""

    @property
    def is_complete(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Return at once."""
        return


class Fabric(ABC):
    """One rank's connection to all others.

    A group is the sorted tuple of its ranks, the own rank among them; its members start the same collectives in the
    same order. Starting never waits for another member. A collective over one rank does nothing.

    After a ``PeerError`` the fabric may only be closed: what the ranks still hold in common is unknown.

    Attributes:
        rank: the own one.
        num_ranks: how many there are.
        deadline_s: the longest that any wait may last.
    """

    rank: int
    num_ranks: int
    timeout_s: float

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor, its numbers unspecified, that collectives of this fabric need not copy if they can."""
        return torch.empty(num_elements, dtype=dtype)

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor as :meth:`empty` does; None where it would spare no copy, or memory is short."""
        return None

    @property
    def hosts(self) -> Sequence[int]:
        """The host of every rank, as a number; ranks with the same one can have memory in common."""
        return range(self.num_ranks)

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return a flat tensor of zeros that is the same memory on all members; None where they can have none.

        All members call it together. What one writes another may read after both have met (:meth:`meet`). When no
        member may use it any more, they meet before the first of them lets go of it.

        Args:
            label: what it is for, for errors and comparison.
            num_elements: its length.
            dtype: of its numbers.
            group: the members.
        """
        return None

    @abstractmethod
    def barrier_async(self, label: str, group: Group) -> Work:
        """Start to tell the members that this rank has come to this point; complete when all have."""

    @abstractmethod
    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """The tensors, as they are now, are on their way; the caller may overwrite them at once.

        Messages to one peer arrive in the order in which they were sent. A program may not rely on the fabric to hold
        many of them: a sender that is far ahead of its peer waits for it.
        """

    @abstractmethod
    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the tensors of the peer's next message, in memory that nobody else has.

        Raises:
            PeerError: the next message has another label, the peer is gone, or the deadline has passed.
        """

    def irecv(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Return what receives the peer's next message, :meth:`recv`; messages are asked for in their order.

        Args:
            peer: who sends it.
            label: its label.
            like: as it looks, for those who can make room for it beforehand.
        """
        del like
        return partial(self.recv, peer, label)

    @abstractmethod
    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Return who of the peers sent the next message, its label and its tensors: what a server waits for."""

    @abstractmethod
    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start to replace the tensor by its sum (or mean, largest, smallest) over the group, on every member."""

    @abstractmethod
    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start to replace ``whole[bounds[i]:bounds[i + 1]]`` by its sum over the group, on member ``i``.

        Args:
            label: what is added up, for errors and comparison.
            whole: flat and contiguous; afterwards what lies outside of the own range is unspecified.
            bounds: one more than there are members, rising from 0 to the length of ``whole``; a range may be empty.
            group: the members.
            verb: how the members' numbers become one.
        """

    @abstractmethod
    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start to send every member its range of ``whole``; return where what they send is put, in their order.

        Args:
            label: what is exchanged.
            whole: flat and contiguous, the members' ranges back to back in their order.
            counts: the same on all members: ``counts[i][j]`` numbers go from member ``i`` to member ``j``.
            group: the members.
        """

    @abstractmethod
    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to copy member ``i``'s ``whole[bounds[i]:bounds[i + 1]]`` to the same place on every member."""

    @abstractmethod
    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start to replace the tensor by the root's, on every member; ``root`` is a rank of the world."""

    @abstractmethod
    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Return every member's value in the order of the group, as JSON reads it back (a tuple becomes a list)."""

    def barrier(self, group: Group) -> None:
        """All members have come to this point."""
        self.barrier_async("arrival", group).wait()

    @abstractmethod
    def connect_groups(self, groups: Sequence[Group]) -> None:
        """The connections of the groups exist, so that the first collective of each need not wait for its members.

        Every rank gives the same groups; those it is not in are skipped. A group that was not formed is formed by its
        first collective.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """The other ranks learn that this rank cannot go on, and why; the fabric may only be closed afterwards."""

    @abstractmethod
    def close(self) -> None:
        """All that was sent has left this rank; its threads and connections are gone; a second call does nothing."""
