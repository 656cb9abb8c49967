"""What a model would take, without running it: its operations on tensors without values, and the roof of a device.

An operation takes as long as its arithmetic or as the memory that it reads and writes, whichever is longer. What calls
cost, what caches save, and how far kernels stay below the roof is not in it.

Source:
    Williams, Waterman and Patterson, Roofline: an insightful visual performance model, CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from counterpoint.model.model_profile import (
    NO_TIME,
    BatchSizeProfile,
    LayerProfile,
    ModelProfile,
    ProfiledOn,
    layer_keys,
    param_sizes,
)
from counterpoint.partitioning.flop_counter import FlopCounter, OpCost
from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.profiler.profile_target import ProfileTarget, storage_sizes
from counterpoint.runtime.rank_builder import as_call_args
from counterpoint.simulator.cost_model import ADAM_PASSES
from counterpoint.simulator.memory_traffic import ADD_PASSES
from counterpoint.world.cluster import Device

MATRIX_DIMS = 2
"""Dims of a parameter whose gradient is a product."""


def estimate_model(target: ProfileTarget, name: str, device: Device, *, samples: Sequence[int]) -> ModelProfile:
    """Return how long the pieces of a model would take at the roof of a device; nothing is computed.

    Args:
        subject: what is counted.
        name: of the device.
        device: its arithmetic and its memory.
        samples: sizes of microbatches.
    """
    return ModelProfile(
        model=type(target.model).__name__,
        layers=layer_keys(target.spec),
        params=param_sizes(target.spec),
        profiled_on=ProfiledOn(name, 1, target.optimizer_spec.optimizer_class.__name__, is_measured=False),
        batch_sizes=tuple(_estimate_batch_size(target, device, size) for size in sorted(set(samples))),
        update_s_per_byte=ADAM_PASSES / device.memory_bytes_per_s,
        add_s_per_byte=ADD_PASSES / device.memory_bytes_per_s,
    )


def roofline_s(kernels: Sequence[OpCost], device: Device) -> float:
    """Return how long kernels take one after the other.

    Example:
        >>> seconds_at_roof([Kernel(60, 10), Kernel(0, 20)], Device(cost_per_s=10.0, memory_bytes_per_s=5.0))
        10.0
    """
    return sum(max(one.flops / device.cost_per_s, one.moved_bytes / device.memory_bytes_per_s) for one in kernels)


class FakeTensorModel:
    """A model without values, run piece by piece.

    Args:
        subject: the model.
        device: at whose roof.
        samples: in its microbatch.
    """

    def __init__(self, target: ProfileTarget, device: Device, samples: int) -> None:
        self.subject, self.device, self.samples = target, device, samples
        feed = target.batches(samples, 1)
        self.inputs = target.partitioned.flatten_inputs(as_call_args(feed.inputs(0)))
        pieces = range(len(target.spec.layers))
        self.segments = [target.partitioned.segment(at, at + 1, training=True) for at in pieces]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.params = {name: self.mode.from_tensor(param) for name, param in target.model.named_parameters()}
        self.buffers = {name: self.mode.from_tensor(buffer) for name, buffer in target.model.named_buffers()}
        self.values: dict[int, Tensor] = {at: self.mode.from_tensor(value) for at, value in enumerate(self.inputs)}
        self.targets = tree_map_only(Tensor, self.mode.from_tensor, feed.targets(0))
        self.known_storages = storage_sizes([self.params, self.buffers, self.values, self.targets])

    def run_layer(self, at: int) -> LayerProfile:
        """Run a piece forward and backward; those before it have been run."""
        segment, fresh = self.segments[at], dict[int, int]()
        leaves = [
            self.values[place].detach().requires_grad_(self.values[place].requires_grad) for place in segment.inputs
        ]

        def note(tensor: Tensor) -> Tensor:
            fresh.update(storage_sizes(tensor))
            return tensor

        with self.mode, torch.autograd.graph.saved_tensors_hooks(note, _identity), FlopCounter() as forward:
            outputs = segment(leaves, self.params, self.buffers, no_seed)
            if not segment.outputs:
                outputs = (self.subject.loss(self.subject.partitioned.unflatten_output(outputs), self.targets),)
        self.values.update(zip(segment.outputs, outputs, strict=bool(segment.outputs)))
        fresh.update(storage_sizes(outputs if segment.outputs else ()))
        kept = sum(size for address, size in fresh.items() if address not in self.known_storages)
        self.known_storages.update(fresh)
        made = self.samples * self.subject.spec.layers[at].output_bytes
        forward_s = roofline_s(forward.op_costs, self.device)
        backward = self.backward_times(outputs, leaves, segment.params)
        return LayerProfile(forward_s, *backward, float(made), float(kept), self.grad_accumulate_s(segment.params))

    def grad_accumulate_s(self, names: Sequence[str]) -> float:
        """Return the seconds of adding gradients to earlier ones; products add those of matrices."""
        own = [self.params[name] for name in names if self.params[name].requires_grad]
        num_bytes = sum(param.nbytes for param in own if param.dim() != MATRIX_DIMS)
        return ADD_PASSES * num_bytes / self.device.memory_bytes_per_s

    def backward_times(
        self, outputs: Sequence[Tensor], leaves: Sequence[Tensor], names: Sequence[str]
    ) -> tuple[float, float, float]:
        """Return the seconds of a backward, of its part for inputs, and of the rest."""
        roots = [output for output in outputs if output.requires_grad]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        weights = [self.params[name] for name in names if self.params[name].requires_grad]
        whole_s, input_s = (self.grad_time_s(roots, wanted) for wanted in ([*inputs, *weights], inputs))
        return whole_s, input_s, max(whole_s - input_s, 0.0)

    def grad_time_s(self, roots: Sequence[Tensor], query: Sequence[Tensor]) -> float:
        """Return the seconds of making gradients."""
        if not roots or not query:
            return 0.0
        with self.mode:
            above = [torch.ones_like(root) for root in roots]
            with FlopCounter() as meter:
                torch.autograd.grad(roots, query, above, retain_graph=True, allow_unused=True)
        return roofline_s(meter.op_costs, self.device)


def _estimate_batch_size(target: ProfileTarget, device: Device, samples: int) -> BatchSizeProfile:
    shadow = FakeTensorModel(target, device, samples)
    pieces = tuple(shadow.run_layer(at) for at in range(len(target.spec.layers)))
    total = NO_TIME
    for piece in pieces:
        total = total.add(piece)
    return BatchSizeProfile(samples, pieces, total)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
