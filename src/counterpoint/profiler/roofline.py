"""Estimate a model profile without running the model: fake tensors and the roofline of a device.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer. Call overhead, cache hits, and
how far kernels remain below the roofline are not modelled.

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
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.profiler.profile_target import ProfileTarget, storage_sizes
from counterpoint.runtime.loss.loss_reduction import compute_plain_loss
from counterpoint.simulator.cost_model import ADAM_PASSES
from counterpoint.simulator.memory_traffic import ADD_PASSES
from counterpoint.world.cluster import Device

MATRIX_DIMS = 2
"""Dims of a parameter whose gradient is a matrix product."""


def estimate_model(target: ProfileTarget, name: str, device: Device, *, samples: Sequence[int]) -> ModelProfile:
    """Return how long the layers of a model would take at the roofline of a device; nothing is computed.

    Args:
        target: the model.
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
    """Return the duration of operations, one after the other.

    Example:
        >>> roofline_s([OpCost(60, 10), OpCost(0, 20)], Device(cost_per_s=10.0, memory_bytes_per_s=5.0))
        10.0
    """
    return sum(max(op.flops / device.cost_per_s, op.moved_bytes / device.memory_bytes_per_s) for op in kernels)


class FakeTensorModel:
    """A model on fake tensors, run layer by layer.

    Args:
        target: the model.
        device: whose roofline applies.
        samples: in its microbatch.
    """

    def __init__(self, target: ProfileTarget, device: Device, samples: int) -> None:
        self.target, self.device, self.samples = target, device, samples
        batches = target.batches(samples, 1)
        self.inputs, self.input_shapes = target.partitioned.flatten_inputs(as_call_args(batches.inputs(0)))
        layer_indices = range(len(target.spec.layers))
        self.segments = [target.partitioned.segment(index, index + 1, training=True) for index in layer_indices]
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.params = {name: self.mode.from_tensor(param) for name, param in target.model.named_parameters()}
        self.buffers = {name: self.mode.from_tensor(buffer) for name, buffer in target.model.named_buffers()}
        self.values: dict[int, Tensor] = {
            index: self.mode.from_tensor(value) for index, value in enumerate(self.inputs)
        }
        self.targets = tree_map_only(Tensor, self.mode.from_tensor, batches.targets(0))
        self.known_storages = storage_sizes([self.params, self.buffers, self.values, self.targets])

    def run_layer(self, at: int) -> LayerProfile:
        """Run a layer forward and backward; earlier layers must have been run."""
        segment, saved = self.segments[at], dict[int, int]()
        leaves = [
            self.values[index].detach().requires_grad_(self.values[index].requires_grad) for index in segment.inputs
        ]

        def record(tensor: Tensor) -> Tensor:
            saved.update(storage_sizes(tensor))
            return tensor

        with self.mode, torch.autograd.graph.saved_tensors_hooks(record, _identity), FlopCounter() as forward:
            outputs = segment(leaves, self.params, self.buffers, no_seed, self.input_shapes)
            if not segment.outputs:
                loss = self.target.loss(self.target.partitioned.unflatten_output(outputs), self.targets)
                outputs = (compute_plain_loss(loss),)
        self.values.update(zip(segment.outputs, outputs, strict=bool(segment.outputs)))
        saved.update(storage_sizes(outputs if segment.outputs else ()))
        saved_bytes = sum(size for address, size in saved.items() if address not in self.known_storages)
        self.known_storages.update(saved)
        output_bytes = self.samples * self.target.spec.layers[at].output_bytes
        forward_s = roofline_s(forward.op_costs, self.device)
        backward = self.backward_times(outputs, leaves, segment.params)
        return LayerProfile(
            forward_s, *backward, float(output_bytes), float(saved_bytes), self.grad_accumulate_s(segment.params)
        )

    def grad_accumulate_s(self, names: Sequence[str]) -> float:
        """Return the time of adding gradients to earlier ones; matrix products accumulate their own."""
        params = [self.params[name] for name in names if self.params[name].requires_grad]
        num_bytes = sum(param.nbytes for param in params if param.dim() != MATRIX_DIMS)
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

    def grad_time_s(self, roots: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
        """Return the seconds of computing gradients."""
        if not roots or not wanted:
            return 0.0
        with self.mode:
            grad_outputs = [torch.ones_like(root) for root in roots]
            with FlopCounter() as meter:
                torch.autograd.grad(roots, wanted, grad_outputs, retain_graph=True, allow_unused=True)
        return roofline_s(meter.op_costs, self.device)


def _estimate_batch_size(target: ProfileTarget, device: Device, samples: int) -> BatchSizeProfile:
    fake_model = FakeTensorModel(target, device, samples)
    layers = tuple(fake_model.run_layer(index) for index in range(len(target.spec.layers)))
    total = NO_TIME
    for layer in layers:
        total = total.add(layer)
    return BatchSizeProfile(samples, layers, total)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
