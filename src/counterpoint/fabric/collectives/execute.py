"""Count a schedule's traffic, run it on arrays in memory, or run it on a fabric."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric.collectives.schedule import (
    AllReduceSchedule,
    ChunkLayout,
    ChunkTransfer,
    RankRound,
    RankSchedule,
    endpoints,
)


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Traffic of one rank.

    Args:
        num_steps: rounds in which it sends or receives.
        num_messages: messages that it sends.
        sent_bytes: their payload.
        reduced_bytes: bytes that it adds to its own.
    """

    num_steps: int = 0
    num_messages: int = 0
    sent_bytes: int = 0
    reduced_bytes: int = 0

    def __add__(self, other: RankTraffic) -> RankTraffic:
        return RankTraffic(
            self.num_steps + other.num_steps,
            self.num_messages + other.num_messages,
            self.sent_bytes + other.sent_bytes,
            self.reduced_bytes + other.reduced_bytes,
        )


def count_traffic(
    schedule: AllReduceSchedule, layout: ChunkLayout, *, element_bytes: int = 1, group: Sequence[int] | None = None
) -> dict[int, RankTraffic]:
    """Return the traffic of each rank of the group for buffers of this many elements.

    Args:
        schedule: the all-reduce.
        layout: the elements.
        element_bytes: size of an element.
        group: the rank that holds each member's buffer; by default member ``i`` is rank ``i``.
    """
    group = tuple(group or range(schedule.num_ranks))
    totals = dict.fromkeys(group, RankTraffic())
    for transfers in schedule.rounds:
        for rank in {
            rank for transfer in transfers if crosses_ranks(transfer, group) for rank in endpoints(transfer, group)
        }:
            totals[rank] += RankTraffic(num_steps=1)
        for transfer in transfers:
            size = layout.size(transfer.chunks, schedule.num_chunks) * element_bytes
            for rank in set(endpoints(transfer, group)):
                totals[rank] += transfer_traffic(transfer, group, rank, size)
    return totals


def transfer_traffic(transfer: ChunkTransfer, group: Sequence[int], rank: int, num_bytes: int) -> RankTraffic:
    """Return a rank's traffic of one transfer, without its step."""
    sender, receiver = endpoints(transfer, group)
    sends = sender == rank != receiver
    adds = receiver == rank and transfer.op == "add"
    return RankTraffic(0, int(sends), num_bytes if sends else 0, num_bytes if adds else 0)


def num_steps(schedule: AllReduceSchedule, group: Sequence[int] | None = None) -> int:
    """Return the number of rounds with a transfer between different ranks."""
    group = tuple(group or range(schedule.num_ranks))
    return sum(any(crosses_ranks(transfer, group) for transfer in transfers) for transfers in schedule.rounds)


def crosses_ranks(transfer: ChunkTransfer, group: Sequence[int]) -> bool:
    """Whether a transfer is between different ranks."""
    sender, receiver = endpoints(transfer, group)
    return sender != receiver


def interpret(schedule: AllReduceSchedule, arrays: Sequence[Any]) -> list[Any]:
    """Return every member's array after the all-reduce; the inputs are unchanged. The reference for all transports.

    Args:
        schedule: the all-reduce.
        arrays: one flat tensor or numpy array per member, of equal length and of any type that can be added.
    """
    results = [_copy(array) for array in arrays]
    extent, num_chunks = ChunkLayout(len(arrays[0])), schedule.num_chunks
    for transfers in schedule.rounds:
        slices = [
            slice(*(extent.offset(end, num_chunks) for end in (transfer.chunks.start, transfer.chunks.stop)))
            for transfer in transfers
        ]
        messages = [_copy(results[transfer.sender][slice_]) for transfer, slice_ in zip(transfers, slices, strict=True)]
        for transfer, slice_, message in zip(transfers, slices, messages, strict=True):
            if transfer.op == "add":
                results[transfer.receiver][slice_] += message
            else:
                results[transfer.receiver][slice_] = message
    return results


def _copy(array: Any) -> Any:  # noqa: ANN401 - numpy arrays and tensors have no type in common
    return array.clone() if isinstance(array, Tensor) else array.copy()


MAX_CHUNKS_IN_FLIGHT = 3


class ScheduleTransport(Protocol):
    """Transport of a schedule's messages: a fabric, or a channel of its own."""

    rank: int

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Send copies of the tensors."""

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the tensors of the peer's next message, in memory owned by the caller."""

    def irecv(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start to receive the peer's next message, with the shape of ``like``; return a callable that waits for it."""

    def abort(self, reason: str) -> None:
        """Tell the other ranks that this rank cannot continue."""


@torch.no_grad()
def execute(
    fabric: ScheduleTransport, schedule: RankSchedule, label: str, tensors: Sequence[Tensor], *, eager_bytes: int = 0
) -> RankTraffic:
    """Run this rank's part of an all-reduce: its tensors are replaced by the sum over all members.

    All ranks of the group run their part of one schedule at the same point of their programs.

    Args:
        fabric: of this rank.
        schedule: this rank's part.
        label: name of the tensor, for errors.
        tensors: contiguous, one for each member that the rank holds, in group order; all ranks use one dtype and
            length.
        eager_bytes: how much the fabric buffers for a peer that does not receive yet, frames included. Messages are
            then sent in chunks, with several in flight while earlier ones are added. With 0, messages are sent whole
            and ranks take turns, which works on every fabric. The same on all ranks.

    Returns:
        This rank's traffic, as :func:`count_traffic` predicts it.

    Raises:
        PeerError: another rank has other tensors, is gone or late; the fabric can only be closed.
        ProgramError: the tensors do not fit the schedule.
    """
    return _ScheduleExecutor(fabric, schedule, label, tensors, eager_bytes).run()


class _ScheduleExecutor:
    def __init__(
        self, fabric: ScheduleTransport, schedule: RankSchedule, label: str, tensors: Sequence[Tensor], eager_bytes: int
    ) -> None:
        members = [member for member, rank in enumerate(schedule.group) if rank == schedule.rank]
        _check(fabric, schedule, label, tensors, num_members=len(members))
        self._fabric = fabric
        self._schedule = schedule
        self._label = label
        self._buffers = {member: tensor.detach().view(-1) for member, tensor in zip(members, tensors, strict=True)}
        self._layout = ChunkLayout(tensors[0].numel())
        self._element_bytes = tensors[0].element_size()
        self._max_elements = eager_bytes // MAX_CHUNKS_IN_FLIGHT // self._element_bytes  # per chunk; 0: unlimited

    def run(self) -> RankTraffic:
        total = RankTraffic()
        for step in self._schedule.steps:
            total += RankTraffic(num_steps=int(any(crosses_ranks(transfer, self._schedule.group) for transfer in step)))
            self._run_step(step)
            for transfer in step:
                total += transfer_traffic(
                    transfer, self._schedule.group, self._schedule.rank, self._num_bytes(transfer)
                )
        return total

    def _run_step(self, step: RankRound) -> None:
        local = [
            transfer for transfer in step if transfer.sender in self._buffers and transfer.receiver in self._buffers
        ]
        remote = [transfer for transfer in step if transfer not in local]
        pending = [
            (self._slice(transfer, transfer.receiver), transfer, self._slice(transfer, transfer.sender).clone())
            for transfer in local
        ]
        if self._max_elements:
            self._send_recv_pipelined(remote)
        else:
            pending += self._send_recv_in_order(remote)
        for target, transfer, message in pending:
            _apply(target, transfer, message)

    def _send_recv_in_order(self, transfers: Sequence[ChunkTransfer]) -> list[tuple[Tensor, ChunkTransfer, Tensor]]:
        """Send and receive each message in order; return those received, with their destination."""
        received = []
        for transfer in transfers:
            if transfer.sender in self._buffers:
                for chunk in self._chunks(self._slice(transfer, transfer.sender)):
                    self._send(transfer, chunk)
            else:
                target = self._slice(transfer, transfer.receiver)
                received += [(chunk, transfer, self._receive(transfer, chunk)) for chunk in self._chunks(target)]
        return received

    def _send_recv_pipelined(self, transfers: Sequence[ChunkTransfer]) -> None:
        """Keep several chunks in flight; add what arrives at once.

        Deadlock-free: in a cycle of ranks that all wait for buffer space, each would have received more than the next
        one.
        """
        to_receive = [(transfer, chunk) for transfer in transfers if transfer.sender not in self._buffers
                  for chunk in self._chunks(self._slice(transfer, transfer.receiver))]  # fmt: skip
        receive_ranges = [transfer.chunks for transfer in transfers if transfer.sender not in self._buffers]
        to_send = deque((transfer, chunk) for transfer in transfers if transfer.sender in self._buffers
                      for chunk in self._chunks(self._snapshot_if_overwritten(transfer, receive_ranges)))  # fmt: skip
        posted = deque(self._irecv(transfer, chunk) for transfer, chunk in to_receive[: MAX_CHUNKS_IN_FLIGHT - 1])
        for _ in range(min(MAX_CHUNKS_IN_FLIGHT - 1, len(to_send)) if to_receive else len(to_send)):
            self._send(*to_send.popleft())
        for index, (transfer, chunk) in enumerate(to_receive):
            posted += [
                self._irecv(*receive)
                for receive in to_receive[index + MAX_CHUNKS_IN_FLIGHT - 1 : index + MAX_CHUNKS_IN_FLIGHT]
            ]
            if to_send:
                self._send(*to_send.popleft())
            _apply(chunk, transfer, self._check_received(transfer, chunk, posted.popleft()()))
        for transfer, chunk in to_send:
            self._send(transfer, chunk)

    def _snapshot_if_overwritten(self, transfer: ChunkTransfer, receive_ranges: Sequence[range]) -> Tensor:
        """Return what a transfer sends; a copy if received chunks may overwrite it before it is sent."""
        part, sent = self._slice(transfer, transfer.sender), transfer.chunks
        is_safe = all(sent == other or sent.stop <= other.start or other.stop <= sent.start for other in receive_ranges)
        return part if is_safe else part.clone()

    def _chunks(self, part: Tensor) -> list[Tensor]:
        chunk_elements = self._max_elements or max(len(part), 1)
        return [part[start : start + chunk_elements] for start in range(0, max(len(part), 1), chunk_elements)]

    def _send(self, transfer: ChunkTransfer, chunk: Tensor) -> None:
        self._fabric.send(self._schedule.group[transfer.receiver], self._label, (chunk,))

    def _irecv(self, transfer: ChunkTransfer, chunk: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return self._fabric.irecv(self._schedule.group[transfer.sender], self._label, chunk)

    def _receive(self, transfer: ChunkTransfer, target: Tensor) -> Tensor:
        return self._check_received(
            transfer, target, self._fabric.recv(self._schedule.group[transfer.sender], self._label)
        )

    def _check_received(self, transfer: ChunkTransfer, target: Tensor, messages: Sequence[Tensor]) -> Tensor:
        peer = self._schedule.group[transfer.sender]
        if [_describe(message) for message in messages] != [_describe(target)]:
            text = (
                f"rank {peer} sent {', '.join(map(_describe, messages))} of {self._label} where rank "
                f"{self._schedule.rank} has {_describe(target)}; all ranks give tensors of one dtype and number of "
                "elements, and run one schedule"
            )
            self._fabric.abort(text)
            raise PeerError(text)
        return messages[0]

    def _slice(self, transfer: ChunkTransfer, member: int) -> Tensor:
        start, stop = (
            self._layout.offset(end, self._schedule.num_chunks) for end in (transfer.chunks.start, transfer.chunks.stop)
        )
        return self._buffers[member][start:stop]

    def _num_bytes(self, transfer: ChunkTransfer) -> int:
        return self._layout.size(transfer.chunks, self._schedule.num_chunks) * self._element_bytes


def _apply(target: Tensor, transfer: ChunkTransfer, message: Tensor) -> None:
    if transfer.op == "add":
        target.add_(message)
    else:
        target.copy_(message)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _check(
    fabric: ScheduleTransport, schedule: RankSchedule, label: str, tensors: Sequence[Tensor], *, num_members: int
) -> None:
    if fabric.rank != schedule.rank or num_members == 0:
        raise ProgramError(
            f"rank {fabric.rank} was given the schedule of rank {schedule.rank} in group {schedule.group} for {label}; "
            f"each rank runs its own, rank_schedule(schedule, group, fabric.rank)"
        )
    if len(tensors) != num_members or len({_describe(tensor) for tensor in tensors}) != 1:
        raise ProgramError(
            f"rank {schedule.rank} gives {', '.join(map(_describe, tensors)) or 'nothing'} for {label} and holds "
            f"{num_members} members of group {schedule.group}; give one tensor for each, all of one dtype and length"
        )
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ProgramError(
            f"{label} of rank {schedule.rank} is not contiguous, but it is reduced in place: give a flat range"
        )
