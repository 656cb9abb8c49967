"""A row on a fabric, by send and receive: one executor for every algorithm and every transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric.algorithms.count import Counts, share_of, travels
from counterpoint.fabric.algorithms.schedule import Extent, Move, Row, Step

NUM_AHEAD = 3  # pieces that a rank may have sent and not seen answered


class Messages(Protocol):
    """What carries a schedule: a fabric, or a connection of its own."""

    rank: int

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """The tensors, as they are now, are on their way."""

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Return the tensors of the peer's next message, in memory that nobody else has."""

    def ask(self, peer: int, label: str, like: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start to receive the peer's next message, which looks like this, and return what waits for it."""

    def stop(self, reason: str) -> None:
        """The other ranks learn that this rank cannot go on."""


@torch.no_grad()
def execute(fabric: Messages, row: Row, label: str, tensors: Sequence[Tensor], *, eager_bytes: int = 0) -> Counts:
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
        What the rank did, as :func:`~counterpoint.fabric.algorithms.count.count` reads it off the schedule.

    Raises:
        PeerError: another rank has other tensors, is gone or late; the fabric may only be closed.
        ProgramError: the tensors are not what the row needs.
    """
    return _Rank(fabric, row, label, tensors, eager_bytes).carry_out()


class _Rank:
    """One rank within one all-reduce."""

    def __init__(  # what `execute` is told
        self, fabric: Messages, row: Row, label: str, tensors: Sequence[Tensor], eager_bytes: int
    ) -> None:
        members = [member for member, rank in enumerate(row.group) if rank == row.rank]
        _check(fabric, row, label, tensors, num_members=len(members))
        self._fabric = fabric
        self._row = row
        self._label = label
        self._buffers = {member: tensor.detach().view(-1) for member, tensor in zip(members, tensors, strict=True)}
        self._extent = Extent(tensors[0].numel())
        self._element_bytes = tensors[0].element_size()
        self._most = eager_bytes // NUM_AHEAD // self._element_bytes  # elements of a piece; 0: all

    def carry_out(self) -> Counts:
        """Every step is done."""
        total = Counts()
        for step in self._row.steps:
            total += Counts(num_steps=int(any(travels(move, self._row.group) for move in step)))
            self._take(step)
            for move in step:
                total += share_of(move, self._row.group, self._row.rank, self._num_bytes(move))
        return total

    def _take(self, step: Step) -> None:
        """All messages of the step are sent and received, and what came is added or copied."""
        inside = [move for move in step if move.sender in self._buffers and move.receiver in self._buffers]
        crossing = [move for move in step if move not in inside]
        kept = [(self._part(move, move.receiver), move, self._part(move, move.sender).clone()) for move in inside]
        if self._most:
            self._interleave(crossing)
        else:
            kept += self._take_turns(crossing)
        for here, move, message in kept:
            _apply(here, move, message)

    def _take_turns(self, moves: Sequence[Move]) -> list[tuple[Tensor, Move, Tensor]]:
        """Each message goes at its turn; return what came, with where it belongs."""
        arrived = []
        for move in moves:
            if move.sender in self._buffers:
                for piece in self._pieces(self._part(move, move.sender)):
                    self._send(move, piece)
            else:
                here = self._part(move, move.receiver)
                arrived += [(piece, move, self._receive(move, piece)) for piece in self._pieces(here)]
        return arrived

    def _interleave(self, moves: Sequence[Move]) -> None:
        """Some pieces are always on their way; what comes is added at once.

        No rank waits for ever: in a circle of ranks that all wait for room, each had received more than the next.
        """
        coming = [(move, piece) for move in moves if move.sender not in self._buffers
                  for piece in self._pieces(self._part(move, move.receiver))]  # fmt: skip
        come = [move.chunks for move in moves if move.sender not in self._buffers]
        ahead = deque((move, piece) for move in moves if move.sender in self._buffers
                      for piece in self._pieces(self._as_it_stands(move, come)))  # fmt: skip
        asked = deque(self._ask(move, piece) for move, piece in coming[: NUM_AHEAD - 1])
        for _ in range(min(NUM_AHEAD - 1, len(ahead)) if coming else len(ahead)):
            self._send(*ahead.popleft())
        for index, (move, piece) in enumerate(coming):
            asked += [self._ask(*following) for following in coming[index + NUM_AHEAD - 1 : index + NUM_AHEAD]]
            if ahead:
                self._send(*ahead.popleft())
            _apply(piece, move, self._looked_at(move, piece, asked.popleft()()))
        for move, piece in ahead:
            self._send(move, piece)

    def _as_it_stands(self, move: Move, come: Sequence[range]) -> Tensor:
        """Return what a move sends; a copy where pieces that come change what has not been sent."""
        part, sent = self._part(move, move.sender), move.chunks
        is_safe = all(sent == other or sent.stop <= other.start or other.stop <= sent.start for other in come)
        return part if is_safe else part.clone()

    def _pieces(self, part: Tensor) -> list[Tensor]:
        most = self._most or max(len(part), 1)
        return [part[start : start + most] for start in range(0, max(len(part), 1), most)]

    def _send(self, move: Move, piece: Tensor) -> None:
        self._fabric.send(self._row.group[move.receiver], self._label, (piece,))

    def _ask(self, move: Move, piece: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return self._fabric.ask(self._row.group[move.sender], self._label, piece)

    def _receive(self, move: Move, here: Tensor) -> Tensor:
        return self._looked_at(move, here, self._fabric.recv(self._row.group[move.sender], self._label))

    def _looked_at(self, move: Move, here: Tensor, messages: Sequence[Tensor]) -> Tensor:
        peer = self._row.group[move.sender]
        if [_looks(message) for message in messages] != [_looks(here)]:
            story = (
                f"rank {peer} sent {', '.join(map(_looks, messages))} of {self._label} where rank {self._row.rank} has "
                f"{_looks(here)}; all ranks give tensors of one dtype and number of elements, and rows of one schedule"
            )
            self._fabric.stop(story)
            raise PeerError(story)
        return messages[0]

    def _part(self, move: Move, member: int) -> Tensor:
        start, stop = (self._extent.at(end, self._row.num_chunks) for end in (move.chunks.start, move.chunks.stop))
        return self._buffers[member][start:stop]

    def _num_bytes(self, move: Move) -> int:
        return self._extent.size(move.chunks, self._row.num_chunks) * self._element_bytes


def _apply(here: Tensor, move: Move, message: Tensor) -> None:
    if move.verb == "add":
        here.add_(message)
    else:
        here.copy_(message)


def _looks(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _check(fabric: Messages, row: Row, label: str, tensors: Sequence[Tensor], *, num_members: int) -> None:
    """The rank can carry out the row with these tensors."""
    if fabric.rank != row.rank or num_members == 0:
        raise ProgramError(
            f"rank {fabric.rank} was given the row of rank {row.rank} in group {row.group} for {label}; "
            f"each rank carries out its own, row_of(schedule, group, fabric.rank)"
        )
    if len(tensors) != num_members or len({_looks(tensor) for tensor in tensors}) != 1:
        raise ProgramError(
            f"rank {row.rank} gives {', '.join(map(_looks, tensors)) or 'nothing'} for {label} and holds {num_members} "
            f"members of group {row.group}; give one tensor for each, all of one dtype and number of elements"
        )
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ProgramError(f"{label} of rank {row.rank} is not contiguous; it is summed in place: give a flat range")
