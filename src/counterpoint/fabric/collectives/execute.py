"""What a schedule costs, read off it: steps, messages, bytes and additions of every rank.

A schedule on arrays in memory, all ranks at once: what every transport must do, in ten lines.

A row on a fabric, by send and receive: one executor for every algorithm and every transport.
"""

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
    """What one rank does.

    Args:
        num_steps: rounds in which it sends or receives.
        num_messages: those it sends.
        sent_bytes: in them, without frames.
        reduced_bytes: that it adds to its own.
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
    """Return what each rank of the group does to reduce buffers of so many elements.

    Args:
        schedule: the all-reduce.
        extent: the elements.
        element_bytes: size of one of them.
        group: the rank that holds each member's buffer; by default member ``i`` is rank ``i``.
    """
    group = tuple(group or range(schedule.num_ranks))
    totals = dict.fromkeys(group, RankTraffic())
    for moves in schedule.rounds:
        for rank in {rank for move in moves if crosses_ranks(move, group) for rank in endpoints(move, group)}:
            totals[rank] += RankTraffic(num_steps=1)
        for move in moves:
            size = layout.size(move.chunks, schedule.num_chunks) * element_bytes
            for rank in set(endpoints(move, group)):
                totals[rank] += transfer_traffic(move, group, rank, size)
    return totals


def transfer_traffic(transfer: ChunkTransfer, group: Sequence[int], rank: int, num_bytes: int) -> RankTraffic:
    """Return what one move means to a rank, but for the step."""
    sender, receiver = endpoints(transfer, group)
    sends = sender == rank != receiver
    adds = receiver == rank and transfer.op == "add"
    return RankTraffic(0, int(sends), num_bytes if sends else 0, num_bytes if adds else 0)


def num_steps(schedule: AllReduceSchedule, group: Sequence[int] | None = None) -> int:
    """Return in how many rounds anything goes from one rank to another."""
    group = tuple(group or range(schedule.num_ranks))
    return sum(any(crosses_ranks(move, group) for move in moves) for moves in schedule.rounds)


def crosses_ranks(transfer: ChunkTransfer, group: Sequence[int]) -> bool:
    """Whether it goes from one rank to another, and not between buffers of one rank."""
    sender, receiver = endpoints(transfer, group)
    return sender != receiver


def interpret(schedule: AllReduceSchedule, arrays: Sequence[Any]) -> list[Any]:
    """Return every member's array after the all-reduce; those given stay as they are.

    Args:
        schedule: the all-reduce.
        arrays: one flat tensor or numpy array per member, all of one length; of any type that can be added.
    """
    results = [_copy(array) for array in arrays]
    extent, num_chunks = ChunkLayout(len(arrays[0])), schedule.num_chunks
    for moves in schedule.rounds:
        places = [slice(*(extent.offset(end, num_chunks) for end in (m.chunks.start, m.chunks.stop))) for m in moves]
        messages = [_copy(results[move.sender][place]) for move, place in zip(moves, places, strict=True)]
        for move, place, message in zip(moves, places, messages, strict=True):
            if move.op == "add":
                results[move.receiver][place] += message
            else:
                results[move.receiver][place] = message
    return results


def _copy(array: Any) -> Any:  # noqa: ANN401 - numpy arrays and tensors have no type in common
    return array.clone() if isinstance(array, Tensor) else array.copy()


MAX_CHUNKS_IN_FLIGHT = 3  # pieces that a rank may have sent and not seen answered


class ScheduleTransport(Protocol):
    """What carries a schedule: a fabric, or a connection of its own."""

    rank: int

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """The tensors, as they are now, are on their way."""

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the tensors of the peer's next message, in memory that nobody else has."""

    def irecv(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start to receive the peer's next message, which looks like this, and return what waits for it."""

    def abort(self, reason: str) -> None:
        """The other ranks learn that this rank cannot go on."""


@torch.no_grad()
def execute(
    fabric: ScheduleTransport, schedule: RankSchedule, label: str, tensors: Sequence[Tensor], *, eager_bytes: int = 0
) -> RankTraffic:
    """The rank's tensors hold the sum over all members of the row's group.

    All members of the group carry out rows of one schedule at the same point of their programs.

    Args:
        fabric: of this rank.
        row: what it does.
        label: what is added up, for errors.
        tensors: contiguous, one for each member that the rank holds, in the order of the group; elsewhere of the same
            dtype and number of elements.
        eager_bytes: the fabric takes so much for one peer, frames included, before that peer receives. Then messages
            go in pieces, of which so much is on its way while what came before is added. With 0 they go whole and ranks
            take turns, which is safe on every fabric. All members give the same number.

    Returns:
        What the rank did, as :func:`~counterpoint.fabric.collectives.execute.count_traffic` reads it off the schedule.

    Raises:
        PeerError: another rank has other tensors, is gone or late; the fabric may only be closed.
        ProgramError: the tensors are not what the row needs.
    """
    return _ScheduleExecutor(fabric, schedule, label, tensors, eager_bytes).run()


class _ScheduleExecutor:
    """One rank within one all-reduce."""

    def __init__(  # what `execute` is told
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
        self._max_elements = eager_bytes // MAX_CHUNKS_IN_FLIGHT // self._element_bytes  # elements of a piece; 0: all

    def run(self) -> RankTraffic:
        """Every step is done."""
        total = RankTraffic()
        for step in self._schedule.steps:
            total += RankTraffic(num_steps=int(any(crosses_ranks(move, self._schedule.group) for move in step)))
            self._run_step(step)
            for move in step:
                total += transfer_traffic(move, self._schedule.group, self._schedule.rank, self._num_bytes(move))
        return total

    def _run_step(self, step: RankRound) -> None:
        """All messages of the step are sent and received, and what came is added or copied."""
        inside = [move for move in step if move.sender in self._buffers and move.receiver in self._buffers]
        crossing = [move for move in step if move not in inside]
        kept = [(self._slice(move, move.receiver), move, self._slice(move, move.sender).clone()) for move in inside]
        if self._max_elements:
            self._send_recv_pipelined(crossing)
        else:
            kept += self._send_recv_in_order(crossing)
        for here, move, message in kept:
            _apply(here, move, message)

    def _send_recv_in_order(self, transfers: Sequence[ChunkTransfer]) -> list[tuple[Tensor, ChunkTransfer, Tensor]]:
        """Each message goes at its turn; return what came, with where it belongs."""
        arrived = []
        for move in transfers:
            if move.sender in self._buffers:
                for piece in self._chunks(self._slice(move, move.sender)):
                    self._send(move, piece)
            else:
                here = self._slice(move, move.receiver)
                arrived += [(piece, move, self._receive(move, piece)) for piece in self._chunks(here)]
        return arrived

    def _send_recv_pipelined(self, transfers: Sequence[ChunkTransfer]) -> None:
        """Some pieces are always on their way; what comes is added at once.

        No rank waits for ever: in a circle of ranks that all wait for room, each had received more than the next.
        """
        coming = [(move, piece) for move in transfers if move.sender not in self._buffers
                  for piece in self._chunks(self._slice(move, move.receiver))]  # fmt: skip
        come = [move.chunks for move in transfers if move.sender not in self._buffers]
        ahead = deque((move, piece) for move in transfers if move.sender in self._buffers
                      for piece in self._chunks(self._snapshot_if_overwritten(move, come)))  # fmt: skip
        asked = deque(self._irecv(move, piece) for move, piece in coming[: MAX_CHUNKS_IN_FLIGHT - 1])
        for _ in range(min(MAX_CHUNKS_IN_FLIGHT - 1, len(ahead)) if coming else len(ahead)):
            self._send(*ahead.popleft())
        for index, (move, piece) in enumerate(coming):
            asked += [
                self._irecv(*following)
                for following in coming[index + MAX_CHUNKS_IN_FLIGHT - 1 : index + MAX_CHUNKS_IN_FLIGHT]
            ]
            if ahead:
                self._send(*ahead.popleft())
            _apply(piece, move, self._check_received(move, piece, asked.popleft()()))
        for move, piece in ahead:
            self._send(move, piece)

    def _snapshot_if_overwritten(self, transfer: ChunkTransfer, come: Sequence[range]) -> Tensor:
        """Return what a move sends; a copy where pieces that come change what has not been sent."""
        part, sent = self._slice(transfer, transfer.sender), transfer.chunks
        is_safe = all(sent == other or sent.stop <= other.start or other.stop <= sent.start for other in come)
        return part if is_safe else part.clone()

    def _chunks(self, part: Tensor) -> list[Tensor]:
        most = self._max_elements or max(len(part), 1)
        return [part[start : start + most] for start in range(0, max(len(part), 1), most)]

    def _send(self, transfer: ChunkTransfer, chunk: Tensor) -> None:
        self._fabric.send(self._schedule.group[transfer.receiver], self._label, (chunk,))

    def _irecv(self, transfer: ChunkTransfer, chunk: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return self._fabric.irecv(self._schedule.group[transfer.sender], self._label, chunk)

    def _receive(self, transfer: ChunkTransfer, here: Tensor) -> Tensor:
        return self._check_received(
            transfer, here, self._fabric.recv(self._schedule.group[transfer.sender], self._label)
        )

    def _check_received(self, transfer: ChunkTransfer, here: Tensor, messages: Sequence[Tensor]) -> Tensor:
        peer = self._schedule.group[transfer.sender]
        if [_describe(message) for message in messages] != [_describe(here)]:
            story = (
                f"rank {peer} sent {', '.join(map(_describe, messages))} of {self._label} where rank {self._schedule.rank} has "
                f"{_describe(here)}; all ranks give tensors of one dtype and number of elements, and rows of one schedule"
            )
            self._fabric.abort(story)
            raise PeerError(story)
        return messages[0]

    def _slice(self, transfer: ChunkTransfer, member: int) -> Tensor:
        start, stop = (
            self._layout.offset(end, self._schedule.num_chunks) for end in (transfer.chunks.start, transfer.chunks.stop)
        )
        return self._buffers[member][start:stop]

    def _num_bytes(self, transfer: ChunkTransfer) -> int:
        return self._layout.size(transfer.chunks, self._schedule.num_chunks) * self._element_bytes


def _apply(here: Tensor, transfer: ChunkTransfer, message: Tensor) -> None:
    if transfer.op == "add":
        here.add_(message)
    else:
        here.copy_(message)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _check(
    fabric: ScheduleTransport, schedule: RankSchedule, label: str, tensors: Sequence[Tensor], *, num_members: int
) -> None:
    """The rank can carry out the row with these tensors."""
    if fabric.rank != schedule.rank or num_members == 0:
        raise ProgramError(
            f"rank {fabric.rank} was given the row of rank {schedule.rank} in group {schedule.group} for {label}; "
            f"each rank carries out its own, row_of(schedule, group, fabric.rank)"
        )
    if len(tensors) != num_members or len({_describe(tensor) for tensor in tensors}) != 1:
        raise ProgramError(
            f"rank {schedule.rank} gives {', '.join(map(_describe, tensors)) or 'nothing'} for {label} and holds {num_members} "
            f"members of group {schedule.group}; give one tensor for each, all of one dtype and number of elements"
        )
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ProgramError(
            f"{label} of rank {schedule.rank} is not contiguous; it is summed in place: give a flat range"
        )
