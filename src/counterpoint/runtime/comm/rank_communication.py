"""What travels between ranks and how it is called there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.model.spec import Unit
from counterpoint.program.compression import find_codec
from counterpoint.program.edges import edge_endpoints
from counterpoint.program.instruction import ACTIVATIONS, UNIT_TENSORS, Collective, TensorRef
from counterpoint.program.text import format_tensor_ref
from counterpoint.runtime.autograd.segment_executor import SegmentExecutor, StoredValue
from counterpoint.runtime.comm.bucket_plan import ElementRange
from counterpoint.runtime.comm.reducer import BackwardOverlap
from counterpoint.runtime.params.compressed_collectives import compressed_all_reduce, decode_message, encode_message
from counterpoint.runtime.params.flat_layout import ShardSpan
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.param_store import ParamStore, UnitParams
from counterpoint.runtime.params.sparse_grads import CombinedWork
from counterpoint.strategies.buckets import BucketConfig

_Pending: TypeAlias = tuple[FlatParams | None, Work, Collective]
"""The arena a collective works on, if any, the work, and the word."""

NEEDS_GRAD, MISSING = 1, 2
"""What a message says of a value: a gradient can come back for it; it is not there."""


class RankCommunication:
    """The communication words of one rank.

    Args:
        fabric: the rank's way to its peers.
        compute: where activations and their gradients lie.
        store: where parameters and their gradients lie.
        brought: for a group and a unit that it sums in a code the microbatches that each member brings.
        sizes: of the buckets in which sums begin early.
    """

    def __init__(
        self,
        fabric: Fabric,
        executor: SegmentExecutor,
        store: ParamStore,
        compressed_contributions: Mapping[tuple[Group, Unit], Sequence[Sequence[int]]],
        bucket_sizes: BucketConfig,
    ) -> None:
        self.fabric = fabric
        self.executor = executor
        self.store = store
        self.compressed_contributions = compressed_contributions
        self.started: dict[TensorRef, list[_Pending]] = {}
        self.completed: list[tuple[FlatParams | None, Collective]] = []  # what was started and waited for in this step
        self.overlap = BackwardOverlap(self, bucket_sizes)

    def clear(self) -> None:
        """Forget what is under way, and what a group has agreed on, of which some members may not have heard."""
        self.started.clear()
        self.completed.clear()
        self.overlap.clear()

    def send(self, tensor: TensorRef, peer: int, codec: str = "") -> None:
        """Send values, their gradients, a gradient of parameters, be it in a code, or parameters."""
        label = format_tensor_ref(tensor)
        if tensor.micro is not None:
            if self.executor.is_empty(tensor.micro):
                return
            self.fabric.send(peer, label, self.encode(tensor, tensor.micro))
            return
        unit = self.store.units[tensor.blocks]
        if tensor.name == "weight":
            self.fabric.send(peer, label, [arena.weights for arena in unit.flat_params])
        else:
            self.fabric.send(peer, label, self.grad_message(unit, peer, codec))
            unit.clear_grads()

    def grad_message(self, unit: UnitParams, peer: int, codec: str) -> list[Tensor]:
        """Return a unit's gradient as tensors to be sent to a peer; :func:`add_grad` is its opposite."""
        if not codec:
            return [tensor for arena in unit.flat_params for tensor in arena.pack_grad()]
        way = peer_pair(peer, self.fabric.rank)
        return [tensor for arena in unit.flat_params for tensor in encode_message(arena, way, find_codec(codec))]

    def recv(self, tensor: TensorRef, peer: int, codec: str = "") -> None:
        """Receive what the peer's :meth:`send` of the same value sent."""
        label = format_tensor_ref(tensor)
        if tensor.micro is not None:
            if self.executor.is_empty(tensor.micro):
                return
            self.decode(tensor, tensor.micro, peer, self.fabric.recv(peer, label))
            return
        unit = self.store.units[tensor.blocks]
        tensors = list(self.fabric.recv(peer, label))
        if tensor.name == "weight":
            set_weights(unit, tensors)
        else:
            add_grad(unit, tensors, codec)

    def encode(self, tensor: TensorRef, micro: int) -> list[Tensor]:
        """Return the message that a strand or its gradient is: a mask, then the tensors.

        The mask of a strand says for which values a gradient can come back (``NEEDS_GRAD``), and which are not there
        because no other rank reads them in evaluation (``ABSENT``); that of a gradient says for which there is one.
        """
        compute, places = self.executor, self.executor.model.edge_values[edge_endpoints(tensor)]
        if tensor.name in ACTIVATIONS:
            kept = [compute.values.get((at, micro)) for at in places]
            if tensor.name == "x":  # nobody here reads it
                self.drop_values(tensor, micro)
            mask = _mask(MISSING if one is None else int(one.requires_grad) for one in kept)
            return [mask, *(one.value for one in kept if one is not None)]
        gradients = [compute.grads.pop((at, micro), None) for at in places]
        there = [gradient for gradient in gradients if gradient is not None]
        return [_mask(int(gradient is not None) for gradient in gradients), *compute.attached_loss(micro), *there]

    def decode(self, tensor: TensorRef, micro: int, peer: int, message: Sequence[Tensor]) -> None:
        """Put a message of a strand or its gradient where it belongs."""
        compute, places = self.executor, self.executor.model.edge_values[edge_endpoints(tensor)]
        mask, *tensors = message
        flags: list[int] = mask.tolist()
        if tensor.name in ACTIVATIONS:
            came = iter(tensors)
            for at, flag in zip(places, flags, strict=True):
                if flag != MISSING:
                    compute.values[at, micro] = StoredValue(next(came), flag == NEEDS_GRAD)
            return
        left = iter(compute.receive_loss(micro, peer, tensors))
        for at, has_gradient in zip(places, flags, strict=True):
            if has_gradient:
                compute.add_grad(at, micro, next(left))

    def run_collectives(self, instructions: Sequence[Collective]) -> None:
        """Do blocking collectives of one verb and group, side by side."""
        works = [work for word in instructions for work in self.start_collective(word)]
        for arena, work, word in works:
            work.wait()
            self.finish(arena, word)

    def start(self, instruction: Collective) -> None:
        """Start a collective that a later word waits for, or what is left of it to be started."""
        site = self.overlap.active.get(instruction.tensor)
        self.started[instruction.tensor] = (
            self.start_collective(instruction) if site is None else list(site.start_remaining(instruction))
        )

    def wait(self, instruction: Collective) -> None:
        """Wait for a started collective."""
        self.overlap.wait(instruction)
        for arena, work, begun in self.started.pop(instruction.tensor):
            work.wait()
            self.completed.append((arena, begun))
            self.finish(arena, begun)

    def start_collective(self, instruction: Collective) -> list[_Pending]:
        """Start one collective on every tensor of its value."""
        value, group = instruction.tensor, instruction.group
        label = format_tensor_ref(value)
        if value.micro is not None:
            block = value.blocks[0]
            find = self.executor.partial_output if value.name == "y" else self.executor.partial_input_grad
            tensor = find(block, value.micro)
            return [] if tensor is None else [(None, self.fabric.all_reduce(label, tensor, group), instruction)]
        begun: list[_Pending] = []
        for index, arena in enumerate(self.store.units[value.blocks].flat_params):
            name = f"{label}[{index}]" if index else label
            begun.append((arena, self.start_on_flat_params(instruction, arena, name), instruction))
        return begun

    def start_on_flat_params(self, instruction: Collective, flat_params: FlatParams, label: str) -> Work:
        """Start one collective on one arena."""
        group = instruction.group
        if flat_params.shared is not None and instruction.op in {"reduce_scatter", "all_gather"}:
            if instruction.op == "reduce_scatter":
                flat_params.publish_grad()
            return self.fabric.barrier_async(label, group)
        if instruction.op == "all_reduce_mean":
            return self.fabric.all_reduce(label, flat_params.weights.data, group, "mean")
        if instruction.tensor.name == "delayed_grad":
            return self.fabric.all_reduce(label, flat_params.ensure_delayed_grad(), group)
        if instruction.op == "broadcast":
            return self.fabric.broadcast(label, flat_params.weights.data, group, group[0])
        if instruction.op == "all_gather":
            flat_params.unshard_weights()
            return self.fabric.all_gather(
                label, flat_params.weights.data, flat_params.layout.shard_bounds(len(group)), group
            )
        if instruction.codec:
            return self.start_compressed(instruction, flat_params, label)
        span = self.store.units[instruction.tensor.blocks].role.update_shard
        return self.start_reduce(instruction, flat_params, label, span if instruction.op == "all_reduce" else None)

    def start_reduce(
        self, instruction: Collective, flat_params: FlatParams, label: str, span: ShardSpan | None
    ) -> Work:
        """Start to add up one arena's gradient, or this rank's share of it, range by range between rows of tables.

        Args:
            word: the share or sum.
            arena: whose gradient.
            label: what it is called.
            span: the share that is added up where there is one already; None for the whole gradient.
        """
        group = instruction.group
        flat = flat_params.collect_flat_grad() if span is None else flat_params.reducible_grad(span)
        has_share = flat_params.grad_shard is not None and instruction.op == "all_reduce"
        low = flat_params.layout.element_range(span)[0] if has_share and span is not None else 0
        strewn = flat_params.sparse_grads
        if strewn.slots:
            strewn.all_gather(
                self.fabric, group, label, reduced_already=instruction.op == "all_reduce" and bool(strewn.reduced)
            )
        works = self.start_range_reduces(
            instruction, flat_params, label, strewn.dense_ranges(low, low + len(flat)), flat, low
        )
        return works[0] if len(works) == 1 else CombinedWork(works)

    def start_range_reduces(
        self,
        instruction: Collective,
        flat_params: FlatParams,
        label: str,
        ranges: Iterable[ElementRange],
        flat: Tensor,
        low: int = 0,
    ) -> list[Work]:
        """Start to add up ranges of an arena's gradient, or of this rank's share of it.

        Args:
            word: the share or sum.
            arena: whose gradient.
            label: what it is called.
            ranges: elements of the arena.
            flat: the gradient or share.
            low: where in the arena it begins.
        """
        bounds, works = flat_params.layout.shard_bounds(len(instruction.group)), []
        for start, stop in ranges:
            part = flat[start - low : stop - low]
            if instruction.op == "reduce_scatter":
                inside = [min(max(bound, start), stop) - start for bound in bounds]
                works.append(self.fabric.reduce_scatter(label, part, inside, instruction.group))
            else:
                works.append(self.fabric.all_reduce(label, part, instruction.group))
        return works

    def start_compressed(self, instruction: Collective, flat_params: FlatParams, label: str) -> Work:
        """Start to add up one arena's gradient in a code; rows of tables with sparse gradients travel as they are."""
        if flat_params.sparse_grads.slots:
            flat_params.collect_grads()
            flat_params.sparse_grads.all_gather(
                self.fabric, instruction.group, label, reduced_already=bool(flat_params.sparse_grads.reduced)
            )
        return compressed_all_reduce(
            self.fabric,
            label,
            flat_params,
            instruction.group,
            find_codec(instruction.codec),
            self.sample_fractions(instruction),
        )

    def sample_fractions(self, instruction: Collective) -> list[float]:
        """Return for each member of a coded sum which part of the mean over all samples its gradient is."""
        brought = self.compressed_contributions[instruction.group, instruction.tensor.blocks]
        return [sum(self.executor.loss_weights.weights[micro] for micro in micros) for micros in brought]

    def finish(self, flat_params: FlatParams | None, instruction: Collective) -> None:
        """Put the result of a collective where it belongs."""
        if flat_params is not None and flat_params.shared is not None:
            if instruction.op == "reduce_scatter":
                flat_params.read_published(self.fabric, instruction.group, format_tensor_ref(instruction.tensor))
        elif flat_params is not None and instruction.op == "reduce_scatter":
            bounds = flat_params.layout.shard_bounds(len(instruction.group))
            at = instruction.group.index(self.fabric.rank)
            flat_params.accumulate_shard(bounds[at], bounds[at + 1])

    def free(self, tensor: TensorRef) -> None:
        """Free what was gathered, or a gradient that has been used."""
        if tensor.name in UNIT_TENSORS:
            for arena in self.store.units[tensor.blocks].flat_params:
                if tensor.name == "weight":
                    arena.reshard_weights()
                elif tensor.name == "delayed_grad":
                    arena.delayed_grad = None
                else:
                    arena.free_grad()
        elif tensor.micro is not None:
            self.drop_values(tensor, tensor.micro)

    def drop_values(self, tensor: TensorRef, micro: int) -> None:
        """Free values that belong to a microbatch."""
        for at in self.executor.model.edge_values.get(edge_endpoints(tensor), ()) if tensor.name in ACTIVATIONS else ():
            self.executor.values.pop((at, micro), None)


def _mask(flags: Iterable[int]) -> Tensor:
    return torch.tensor(list(flags), dtype=torch.uint8)


def set_weights(unit: UnitParams, tensors: Sequence[Tensor]) -> None:
    """Replace a unit's weights by received ones."""
    for arena, tensor in zip(unit.flat_params, tensors, strict=True):
        arena.weights.data.copy_(tensor)


def add_grad(unit: UnitParams, tensors: Sequence[Tensor], codec: str = "") -> None:
    """Add a received gradient to a unit's."""
    left = iter(tensors)
    for arena in unit.flat_params:
        if codec:
            arena.add_packed_grad(iter(decode_message(arena, left, find_codec(codec))))
        else:
            arena.add_packed_grad(left)


def peer_pair(peer: int, rank: int) -> Group:
    """Return the two ends of a way, as what a code keeps for it is named by."""
    return (min(peer, rank), max(peer, rank))
