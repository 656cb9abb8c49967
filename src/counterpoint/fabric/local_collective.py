"""One collective among ranks of one process: collect the members' tensors, compare signatures, apply the operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.device.accelerator import Event
from counterpoint.device.event_clock import DeviceSpan
from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import CollectiveSignature, describe_mismatch, fingerprint
from counterpoint.fabric.reductions import reduce_in_order

CollectiveInput = Tensor | tuple[Tensor, Tensor] | bytes | None


class LocalCollective:
    """One collective of one group; the last member to join executes it.

    Args:
        group: the expected members.
        index: number of collectives that the group has started before.

    Attributes:
        end: when the device has executed it, if its tensors are on one.
        span: when the device executes it, if a member asks for that.
    """

    def __init__(self, group: Group, index: int) -> None:
        self.group = group
        self.index = index
        self.inputs: dict[int, CollectiveInput] = {}
        self.error: str | None = None
        self.is_done = False
        self.end: Event | None = None
        self.span: DeviceSpan | None = None
        self._seen: dict[int, tuple[bytes, str]] = {}

    def join(self, rank: int, operation: CollectiveSignature, tensors: CollectiveInput) -> None:
        """Add a member's input; when the last member joins, apply the operation to all inputs in place."""
        self._seen[rank] = (fingerprint(operation), str(operation))
        self.inputs[rank] = tensors
        if self.error is None:
            self.error = describe_mismatch(self._seen, self.index)
        if self.error is None and self.all_joined:
            apply_collective(operation, {member: self.inputs[member] for member in self.group})
        self.is_done = self.all_joined or self.error is not None

    @property
    def all_joined(self) -> bool:
        """Whether all members have joined."""
        return len(self.inputs) == len(self.group)

    @property
    def missing(self) -> list[int]:
        """Members that have not joined."""
        return [member for member in self.group if member not in self.inputs]


@torch.no_grad()
def apply_collective(operation: CollectiveSignature, inputs: dict[int, CollectiveInput]) -> None:
    """Apply the operation to the members' tensors in place; reductions follow group order."""
    kind, _, op = operation.kind.partition(" ")
    if kind == "all_to_all":
        exchange(operation, inputs)
        return
    tensors = {rank: part.detach() for rank, part in inputs.items() if isinstance(part, Tensor)}
    owners = list(zip(tensors, operation.bounds, operation.bounds[1:], strict=False))
    if kind == "all_reduce":
        total = reduce_in_order(list(tensors.values()), op)
        for tensor in tensors.values():
            tensor.copy_(total)
    elif kind == "reduce_scatter":
        for rank, start, end in owners:
            tensors[rank][start:end] = reduce_in_order([tensor[start:end] for tensor in tensors.values()], op)
    else:  # a barrier has no tensors, and values are read from the collective's inputs
        copy_to_all(operation, tensors, owners)


def copy_to_all(
    operation: CollectiveSignature, tensors: dict[int, Tensor], owners: Sequence[tuple[int, int, int]]
) -> None:
    """Copy the root's tensor, or each owner's range, to all other members."""
    if operation.kind == "broadcast":
        for rank in tensors.keys() - {operation.root}:
            tensors[rank].copy_(tensors[operation.root])
    for rank, start, end in owners:
        for other in tensors.keys() - {rank}:
            tensors[other][start:end] = tensors[rank][start:end]


def exchange(operation: CollectiveSignature, inputs: dict[int, CollectiveInput]) -> None:
    """Fill each member's receive tensor with the ranges that the others have for it."""
    count = len(inputs)
    pairs = [part for part in inputs.values() if isinstance(part, tuple)]
    counts = [operation.bounds[index * count : (index + 1) * count] for index in range(count)]
    sent = [torch.split(whole, list(row)) for (whole, _), row in zip(pairs, counts, strict=True)]
    for member, (_, received) in enumerate(pairs):
        torch.cat([ranges[member] for ranges in sent], out=received)
