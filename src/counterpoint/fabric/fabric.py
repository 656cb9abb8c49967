"""Interface of a communication backend ("fabric"): what one rank may ask of a transport.

Every transport has the same methods, the same semantics and the same error messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.event_clock import DeviceSpan

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | dict[str, Json] | None"
Group: TypeAlias = tuple[int, ...]
Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]
"""Reduction of a collective. ``mean`` is a sum that is scaled. NaN propagates, also in max and min.

Sums of 16-bit floats are added up in 32 bits and rounded once; a reduce-scatter among hosts of which some have several
members rounds the sum of each host, too.
"""


class Work(ABC):
    """Handle of a started collective; its tensors may be neither read nor written before :meth:`wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the collective is complete on this rank; a second call returns at once.

        Raises:
            PeerError: the members disagree, one of them is gone, or the timeout has passed.
        """

    @property
    def is_complete(self) -> bool:
        """Whether the collective is known to be complete on this rank; neither waits nor makes progress.

        A transport that cannot tell returns False.
        """
        return False

    def completes_within(self, seconds: float) -> bool:
        """Make progress for at most ``seconds``; return whether the collective is complete on this rank.

        A transport that cannot poll waits until completion.

        Raises:
            PeerError: the members disagree, or one of them is gone.
        """
        del seconds
        self.wait()
        return True


class CompletedWork(Work):
    """Work of a group of one rank: complete from the start."""

    @property
    def is_complete(self) -> bool:
        """Always True."""
        return True

    def wait(self) -> None:
        """Return at once."""
        return


class Fabric(ABC):
    """One rank's connection to all others.

    A group is the sorted tuple of its ranks and contains the own rank. All members start the same collectives of a
    group in the same order. Starting a collective never waits for another member. A collective over one rank is a
    no-op.

    After a ``PeerError`` the fabric can only be closed: the state shared by the ranks is undefined.

    Attributes:
        rank: the own rank.
        num_ranks: the world size.
        timeout_s: the longest that any wait may last.
        takes_device_tensors: whether tensors may be on a device; otherwise they must be in host memory.
        needs_own_device: whether no two ranks may have tensors on the same device.
    """

    rank: int
    num_ranks: int
    timeout_s: float
    takes_device_tensors: bool = False
    needs_own_device: bool = False

    def use_accelerator(self, accelerator: Accelerator) -> None:
        """Take note of the device that this rank's tensors will be on; a transport may need streams of it."""
        del accelerator

    def record_spans(self) -> AbstractContextManager[list[DeviceSpan]]:
        """Return a context that collects when a device executes the collectives that this rank starts inside.

        It collects nothing where collectives run on the host, or on streams that the transport does not see.
        """
        return nullcontext(list[DeviceSpan]())

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat uninitialized tensor, if possible in memory that collectives can use without a copy."""
        return torch.empty(num_elements, dtype=dtype)

    def try_empty(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor as :meth:`empty` does; None if it would save no copy, or memory is short."""
        return None

    @property
    def hosts(self) -> Sequence[int]:
        """The host index of every rank; ranks with equal indices can share memory."""
        return range(self.num_ranks)

    def shared_zeros(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Return a flat zero tensor in memory shared by all members; None if the transport cannot share memory.

        A collective call. A write becomes visible to another member after both have passed a :meth:`barrier_async`.
        Before the first member releases the tensor, all members must pass another one.

        Args:
            label: name of the tensor, compared between members and used in errors.
            num_elements: its length.
            dtype: its dtype.
            group: the members.
        """
        return None

    @abstractmethod
    def barrier_async(self, label: str, group: Group) -> Work:
        """Start a barrier; the work is complete when all members have called it."""

    @abstractmethod
    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Send copies of the tensors; the caller may overwrite them at once.

        Messages to one peer arrive in order. Buffering is bounded: a sender that is far ahead of its peer blocks.
        """

    @abstractmethod
    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the tensors of the peer's next message, in memory owned by the caller.

        Raises:
            PeerError: the next message has another label, the peer is gone, or the timeout has passed.
        """

    def irecv(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Return a callable that receives the peer's next message, as :meth:`recv`. Call them in the order of creation.

        Args:
            peer: the sender.
            label: its label.
            like: a tensor with the expected shape and dtype, for transports that post the receive early.
        """
        del like
        return partial(self.recv, peer, label)

    @abstractmethod
    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Return sender, label and tensors of the next message from any of the peers; a server's receive."""

    @abstractmethod
    def all_reduce(self, label: str, tensor: Tensor, group: Group, op: Reduction = "sum") -> Work:
        """Start to replace the tensor, on every member, by its reduction over the group."""

    def all_reduces_in_16_bits(self, tensor: Tensor, group: Group) -> bool:
        """Return whether an all-reduce of a tensor of 16-bit floats sends 16 bits for each, instead of 32.

        Such an all-reduce adds up in 32 bits, in the order of the group, and rounds the sum once, as
        :meth:`reduce_scatter` does, so that a sum has the same bits on every transport. One that rounds after each
        addition, as a ring of 16-bit messages does, has to return False.

        Args:
            tensor: one like those to be reduced.
            group: the members, all of which get the same answer.
        """
        del tensor, group
        return False

    @abstractmethod
    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, op: Reduction = "sum"
    ) -> Work:
        """Start to replace ``whole[bounds[i]:bounds[i + 1]]`` on member ``i`` by its reduction over the group.

        Args:
            label: name of the tensor, compared between members and used in errors.
            whole: flat and contiguous; afterwards everything outside the own range is unspecified.
            bounds: ``len(group) + 1`` offsets, non-decreasing, from 0 to ``len(whole)``; a range may be empty.
            group: the members.
            op: the reduction.
        """

    @abstractmethod
    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start to send every member its range of ``whole``; return the receive buffer and the work.

        Args:
            label: name of the tensor, compared between members and used in errors.
            whole: flat and contiguous, one range per member, concatenated in group order.
            counts: ``counts[i][j]`` elements go from member ``i`` to member ``j``; the same table on all members.
            group: the members.
        """

    @abstractmethod
    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to copy member ``i``'s ``whole[bounds[i]:bounds[i + 1]]`` to the same range on every member."""

    @abstractmethod
    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start to replace the tensor by the root's on every member; ``root`` is a rank of the world."""

    @abstractmethod
    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Return every member's value, in group order, after a JSON round trip (a tuple becomes a list)."""

    def check_same_order(self, group: Group) -> None:
        """Check that the members have started the same collectives, also those of groups within this group.

        A collective call. A transport that compares each collective before its data moves has nothing to check.

        Raises:
            PeerError: they have not.
        """
        del group

    def barrier(self, group: Group) -> None:
        """Block until all members have called it."""
        self.barrier_async("arrival", group).wait()

    @abstractmethod
    def connect_groups(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups now, so that their first collectives need not wait for all members.

        A collective call of all ranks, with the same groups on each; a rank ignores groups that it is not in. A group
        that was not connected here is connected by its first collective.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell the other ranks that this rank cannot continue, and why; afterwards the fabric can only be closed."""

    @abstractmethod
    def close(self) -> None:
        """Wait until everything sent has left this rank, then release threads and connections. Idempotent."""
