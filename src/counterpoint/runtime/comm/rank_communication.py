"""Communication of one rank: what each send, receive and collective instruction transfers, and its label.

A message of an edge is a header followed by tensors. The header of activations says for each value whether it needs a
gradient (``NEEDS_GRAD``), or is not sent (``MISSING``) because no other rank reads it in evaluation; then come the
shapes of the model's inputs, which the receiver may not read itself. That of gradients says which values have one.
Messages and collectives of parameters work on flat buffers; tables with sparse
gradients are gathered as rows instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.model.spec import Unit
from counterpoint.partitioning.input_shapes import pack_shapes, unpack_shapes
from counterpoint.program.compression import find_codec
from counterpoint.program.edges import edge_endpoints
from counterpoint.program.instruction import ACTIVATIONS, UNIT_TENSORS, Collective, TensorRef
from counterpoint.program.text import format_tensor_ref
from counterpoint.runtime.autograd.segment_executor import SegmentExecutor, StoredValue
from counterpoint.runtime.comm.compressed_collectives import (
    compressed_all_reduce,
    decode_message,
    encode_message,
    scale_tensors,
)
from counterpoint.runtime.comm.reducer import BackwardOverlap
from counterpoint.runtime.loss.batch_loss import gather_microbatches
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.param_store import ParamStore, UnitParams
from counterpoint.strategies.buckets import BucketConfig

_Pending: TypeAlias = tuple[FlatParams | None, Work, Collective]
"""The flat parameters that a collective works on, if any, the work, and the instruction."""

NEEDS_GRAD, MISSING = 1, 2
"""Flags in the header of a message: the value needs a gradient; the value is not sent."""


class RankCommunication:
    """Runs the communication instructions of one rank.

    Args:
        fabric: the rank's connection to its peers.
        executor: stores activations and their gradients.
        store: stores parameters and their gradients.
        compressed_contributions: for each group and unit with a compressed all-reduce the microbatches that each member
            contributes.
        bucket_sizes: of reductions that overlap with backward.
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
        self.completed: list[tuple[FlatParams | None, Collective]] = []  # in this step, with a wait of their own
        self.overlap = BackwardOverlap(fabric, store, bucket_sizes)

    def begin_step(self) -> None:
        """Start a step, in which nothing is complete."""
        self.completed.clear()

    def delayed_grads_summed_elsewhere(self) -> list[FlatParams]:
        """Return the flat parameters whose all-reduced delayed gradient another rank keeps: the first of the group."""
        pending = [started for works in self.started.values() for started in works]
        completed = [(flat_params, instruction) for flat_params, work, instruction in pending if work.is_complete]
        return [
            flat_params
            for flat_params, instruction in (*self.completed, *completed)
            if flat_params is not None
            and instruction.tensor.name == "delayed_grad"
            and instruction.group[0] != self.fabric.rank
        ]

    def send(self, tensor: TensorRef, peer: int, codec: str = "") -> None:
        """Send activations or their gradients; parameters or their gradient, compressed if there is a codec."""
        label = format_tensor_ref(tensor)
        if tensor.micro is not None:
            if self.executor.is_empty(tensor.micro):
                return
            self.fabric.send(peer, label, self.encode(tensor, tensor.micro))
            return
        unit = self.store.units[tensor.blocks]
        if tensor.name == "weight":
            self.fabric.send(peer, label, [flat_params.weights for flat_params in unit.flat_params])
        else:
            scale = 1.0 / self.loss_scale if codec else 1.0
            self.fabric.send(peer, label, self.grad_message(unit, peer, codec, scale))
            unit.clear_grads()

    def grad_message(self, unit: UnitParams, peer: int, codec: str, scale: float = 1.0) -> list[Tensor]:
        """Return a unit's gradient as tensors to be sent to a peer; :func:`add_grad` is its inverse.

        Args:
            unit: which.
            peer: the receiver.
            codec: of the message; empty for none.
            scale: what the gradient is multiplied with.
        """
        if not codec:
            packed = [tensor for flat_params in unit.flat_params for tensor in flat_params.own_grads.pack()]
            return scale_tensors(packed, scale)
        pair = peer_pair(peer, self.fabric.rank)
        return [
            tensor
            for flat_params in unit.flat_params
            for tensor in encode_message(flat_params, pair, find_codec(codec), scale)
        ]

    def recv(self, tensor: TensorRef, peer: int, codec: str = "") -> None:
        """Receive what the peer's :meth:`send` of the same tensor sent."""
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
            add_grad(unit, tensors, codec, self.loss_scale if codec else 1.0)

    def encode(self, tensor: TensorRef, micro: int) -> list[Tensor]:
        """Return the message of an edge's activations or their gradients."""
        executor, values = self.executor, self.executor.model.edge_values[edge_endpoints(tensor)]
        if tensor.name in ACTIVATIONS:
            stored = [executor.values.get((index, micro)) for index in values]
            if tensor.name == "x":  # only the receiver reads it
                self.drop_values(tensor, micro)
            flags = [MISSING if stored_value is None else int(stored_value.requires_grad) for stored_value in stored]
            header = torch.tensor([*flags, *pack_shapes(executor.shapes_of(micro))])
            return [header, *(stored_value.value for stored_value in stored if stored_value is not None)]
        grads = [executor.grads.pop((index, micro), None) for index in values]
        present = [grad for grad in grads if grad is not None]
        return [torch.tensor([int(grad is not None) for grad in grads]), *executor.pack_loss(micro), *present]

    def decode(self, tensor: TensorRef, micro: int, peer: int, message: Sequence[Tensor]) -> None:
        """Store the message of an edge's activations, or add that of their gradients."""
        executor, values = self.executor, self.executor.model.edge_values[edge_endpoints(tensor)]
        header, *tensors = message
        numbers: list[int] = header.tolist()
        flags = numbers[: len(values)]
        if tensor.name in ACTIVATIONS:
            executor.input_shapes[micro] = unpack_shapes(numbers[len(values) :])
            received = iter(tensors)
            for index, flag in zip(values, flags, strict=True):
                if flag != MISSING:
                    executor.values[index, micro] = StoredValue(next(received), flag == NEEDS_GRAD)
            return
        remaining = iter(executor.receive_loss(micro, peer, tensors))
        for index, has_gradient in zip(values, flags, strict=True):
            if has_gradient:
                executor.add_grad(index, micro, next(remaining))

    def run_collectives(self, instructions: Sequence[Collective]) -> None:
        """Run blocking collectives of one operation and group concurrently."""
        works = [work for instruction in instructions for work in self.start_collective(instruction)]
        for flat_params, work, instruction in works:
            work.wait()
            self.finish(flat_params, instruction)

    def gather_outputs(self, instruction: Collective) -> None:
        """Gather the outputs of all microbatches, on which the loss is then evaluated."""
        own = {micro: output.encode() for micro, output in self.executor.outputs.items()}
        label = format_tensor_ref(instruction.tensor)
        self.executor.compute_batch_loss(gather_microbatches(self.fabric, label, own, instruction.group))

    def start(self, instruction: Collective) -> None:
        """Start a collective that a later instruction waits for, or the part of it that backward has not started."""
        reducer = self.overlap.active.get(instruction.tensor)
        self.started[instruction.tensor] = (
            self.start_collective(instruction) if reducer is None else list(reducer.start_remaining(instruction))
        )

    def wait(self, instruction: Collective) -> None:
        """Wait for a started collective."""
        self.overlap.wait(instruction)
        for flat_params, work, started in self.started.pop(instruction.tensor):
            work.wait()
            self.completed.append((flat_params, started))
            self.finish(flat_params, started)

    def start_collective(self, instruction: Collective) -> list[_Pending]:
        """Start one collective on every tensor that it names."""
        tensor_ref, group = instruction.tensor, instruction.group
        label = format_tensor_ref(tensor_ref)
        if tensor_ref.micro is not None:
            if tensor_ref.name == "x":
                buffers = enumerate(self.executor.allocate_inputs(tensor_ref))
                return [
                    (None, self.fabric.all_gather(f"{label}[{number}]", whole, bounds, group), instruction)
                    for number, (whole, bounds) in buffers
                ]
            block = tensor_ref.blocks[0]
            find = self.executor.partial_output if tensor_ref.name == "y" else self.executor.partial_input_grad
            tensor = find(block, tensor_ref.micro)
            return [] if tensor is None else [(None, self.fabric.all_reduce(label, tensor, group), instruction)]
        started: list[_Pending] = []
        for index, flat_params in enumerate(self.store.units[tensor_ref.blocks].flat_params):
            name = f"{label}[{index}]" if index else label
            started.append((flat_params, self.start_on_flat_params(instruction, flat_params, name), instruction))
        return started

    def start_on_flat_params(self, instruction: Collective, flat_params: FlatParams, label: str) -> Work:
        """Start one collective on the flat parameters of one dtype."""
        group = instruction.group
        match instruction.op:
            case "reduce_scatter":
                return flat_params.grads.start_reduce_scatter(self.fabric, instruction, label)
            case "all_gather":
                return flat_params.start_all_gather(self.fabric, instruction, label, self.executor.model.read_dtypes)
            case "all_reduce_mean":
                return self.fabric.all_reduce(label, flat_params.weights.data, group, "mean")
            case "broadcast":
                return self.fabric.broadcast(label, flat_params.weights.data, group, group[0])
            case "all_reduce" if instruction.tensor.name == "delayed_grad":
                return self.fabric.all_reduce(label, flat_params.ensure_delayed_grad(), group)
            case "all_reduce" if instruction.codec:
                return self.start_compressed(instruction, flat_params, label)
            case "all_reduce":
                return flat_params.own_grads.start_all_reduce(self.fabric, instruction, label)

    def start_compressed(self, instruction: Collective, flat_params: FlatParams, label: str) -> Work:
        """Start to all-reduce a compressed gradient; rows of tables with sparse gradients stay uncompressed."""
        flat_params.own_grads.collect_all()
        return compressed_all_reduce(
            self.fabric,
            label,
            flat_params,
            instruction.group,
            find_codec(instruction.codec),
            self.sample_fractions(instruction),
            partial(self.store.momenta, instruction.tensor.blocks, flat_params),
            self.loss_scale,
        )

    @property
    def loss_scale(self) -> float:
        """The factor of the losses that this step's gradients come from; the host knows it where it decides steps."""
        return float(self.executor.loss_factors.loss_scale)

    def sample_fractions(self, instruction: Collective) -> list[float]:
        """Return for each member of a compressed all-reduce its gradient's samples divided by those of the loss."""
        contributions = self.compressed_contributions[instruction.group, instruction.tensor.blocks]
        return [sum(self.executor.loss_factors.sample_fractions[micro] for micro in micros) for micros in contributions]

    def finish(self, flat_params: FlatParams | None, instruction: Collective) -> None:
        """Store the result of a collective, and gather the rows of tables with sparse gradients."""
        if flat_params is None or instruction.tensor.name != "grad":
            return
        label = format_tensor_ref(instruction.tensor)
        if instruction.op == "reduce_scatter":
            flat_params.grads.finish_reduce_scatter(self.fabric, instruction, label)
        elif instruction.op == "all_reduce":
            flat_params.own_grads.gather_rows(self.fabric, instruction, label)

    def free(self, tensor: TensorRef) -> None:
        """Free gathered weights, a gradient that was used, or activations, but for this rank's part of them."""
        if tensor.name in UNIT_TENSORS:
            for flat_params in self.store.units[tensor.blocks].flat_params:
                if tensor.name == "weight":
                    flat_params.reshard_weights()
                elif tensor.name == "delayed_grad":
                    flat_params.drop_delayed_grad()
                else:
                    flat_params.own_grads.free()
        elif tensor in self.executor.recompute_store.recompute_set.partitioned:
            self.executor.keep_part(tensor, self.fabric.rank)
        elif tensor.micro is not None:
            self.drop_values(tensor, tensor.micro)

    def drop_values(self, tensor: TensorRef, micro: int) -> None:
        """Drop the values of an edge for a microbatch."""
        for index in (
            self.executor.model.edge_values.get(edge_endpoints(tensor), ()) if tensor.name in ACTIVATIONS else ()
        ):
            self.executor.values.pop((index, micro), None)


def set_weights(unit: UnitParams, tensors: Sequence[Tensor]) -> None:
    """Replace a unit's weights by received ones."""
    for flat_params, tensor in zip(unit.flat_params, tensors, strict=True):
        flat_params.weights.data.copy_(tensor)


def add_grad(unit: UnitParams, tensors: Sequence[Tensor], codec: str = "", scale: float = 1.0) -> None:
    """Add a received gradient to a unit's.

    Args:
        unit: which.
        tensors: of the message.
        codec: of the message; empty for none.
        scale: what the gradient of a compressed message is multiplied with.
    """
    remaining = iter(tensors)
    for flat_params in unit.flat_params:
        if codec:
            decoded = decode_message(flat_params, remaining, find_codec(codec))
            flat_params.own_grads.add_packed(iter(scale_tensors(decoded, scale)))
        else:
            flat_params.own_grads.add_packed(remaining)


def peer_pair(peer: int, rank: int) -> Group:
    """Return two ranks in order, as the key of the error feedback between them."""
    return (min(peer, rank), max(peer, rank))
