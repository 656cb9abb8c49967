"""A row on a fabric, by send and receive: one executor for every algorithm and every transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProgramError
from counterpoint.fabric.algorithms.count import Counts, share_of, travels
from counterpoint.fabric.algorithms.schedule import Extent, Move, Row, Step
from counterpoint.fabric.fabric import Fabric


@torch.no_grad()
def execute(fabric: Fabric, row: Row, label: str, tensors: Sequence[Tensor], *, eager_bytes: int = 0) -> Counts:
    """The rank's tensors hold the sum over all members of the row's group.

    All members of the group carry out rows of one schedule at the same point of their programs.

    Args:
        fabric: of this rank.
        row: what it does.
        label: what is added up, for errors.
        tensors: contiguous, one for each member that the rank holds, in the order of the group; elsewhere of the same
            dtype and number of elements.
        eager_bytes: the fabric takes so much for one peer before that peer receives. A step that sends no more sends
            before it receives, so that its messages cross; others take turns, which is safe on every fabric.

    Returns:
        What the rank did, as :func:`~counterpoint.fabric.algorithms.count.count` reads it off the schedule.

    Raises:
        PeerError: another rank has other tensors, is gone or late; the fabric may only be closed.
        ProgramError: the tensors are not what the row needs.
    """
    return _Rank(fabric, row, label, tensors).carry_out(eager_bytes)


class _Rank:
    """One rank within one all-reduce."""

    def __init__(self, fabric: Fabric, row: Row, label: str, tensors: Sequence[Tensor]) -> None:
        members = [member for member, rank in enumerate(row.group) if rank == row.rank]
        _check(fabric, row, label, tensors, num_members=len(members))
        self._fabric = fabric
        self._row = row
        self._label = label
        self._buffers = {member: tensor.detach().view(-1) for member, tensor in zip(members, tensors, strict=True)}
        self._extent = Extent(tensors[0].numel())
        self._element_bytes = tensors[0].element_size()

    def carry_out(self, eager_bytes: int) -> Counts:
        """Every step is done."""
        total = Counts()
        for step in self._row.steps:
            total += Counts(num_steps=int(any(travels(move, self._row.group) for move in step)))
            self._take(self._sends_first(step) if self._is_eager(step, eager_bytes) else step)
            for move in step:
                total += share_of(move, self._row.group, self._row.rank, self._num_bytes(move))
        return total

    def _take(self, moves: Step) -> None:
        """All messages of the step are sent and received; then what came is added or copied."""
        arrived: list[tuple[Move, Tensor]] = []
        for move in moves:
            if move.sender not in self._buffers:
                arrived.append((move, self._receive(move)))
            elif move.receiver in self._buffers:
                arrived.append((move, self._part(move, move.sender).clone()))
            else:
                self._fabric.send(self._row.group[move.receiver], self._label, (self._part(move, move.sender),))
        for move, message in arrived:
            if move.verb == "add":
                self._part(move, move.receiver).add_(message)
            else:
                self._part(move, move.receiver).copy_(message)

    def _receive(self, move: Move) -> Tensor:
        peer = self._row.group[move.sender]
        messages = self._fabric.recv(peer, self._label)
        here = self._part(move, move.receiver)
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

    def _is_eager(self, step: Step, eager_bytes: int) -> bool:
        return sum(self._num_bytes(move) for move in step if move.sender in self._buffers) <= eager_bytes

    def _sends_first(self, step: Step) -> Step:
        return tuple(sorted(step, key=lambda move: move.sender not in self._buffers))


def _looks(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _check(fabric: Fabric, row: Row, label: str, tensors: Sequence[Tensor], *, num_members: int) -> None:
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
