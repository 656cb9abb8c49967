"""Estimate a model profile without running the model: fake tensors and the roofline of a device.

An operation takes as long as its arithmetic, in its dtype, or its memory traffic, whichever is longer, and its launch.
How fast the host launches operations, and cache hits, are not modelled. The model may be on torch's device ``meta``,
which has no memory: then attention is one kernel, as on GPUs.

Source:
    Williams, Waterman and Patterson, Roofline: an insightful visual performance model, CACM 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from traceback import extract_tb
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import (
    NO_TIME,
    BatchSizeProfile,
    LayerProfile,
    ModelProfile,
    ProfiledOn,
    layer_keys,
    param_sizes,
)
from counterpoint.model.precision import Precision
from counterpoint.partitioning.flop_counter import FlopCounter, OpCost
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.partitioning.seed_hooks import no_seed
from counterpoint.partitioning.segment_compiler import find_user_frame
from counterpoint.profiler.profile_target import ProfileTarget, storage_sizes
from counterpoint.runtime.loss.loss_reduction import compute_plain_loss
from counterpoint.simulator.cost_model import ADAM_PASSES
from counterpoint.simulator.memory_traffic import ADD_PASSES
from counterpoint.world.cluster import Device

NARROW_BYTES = 2
"""Bytes of a number that the fastest kernel of attention takes."""
MATRIX_DIMS = 2
"""Dims of a parameter whose gradient is a matrix product."""


def estimate_model(
    target: ProfileTarget, name: str, device: Device, *, samples: Sequence[int], precision: Precision | None = None
) -> ModelProfile:
    """Return how long the layers of a model would take at the roofline of a device; nothing is computed.

    Args:
        target: the model, with the casts of the precision.
        name: of the device.
        device: its arithmetic and its memory.
        samples: sizes of microbatches.
        precision: what the model computes in; None for its dtypes. With autocast products have its dtype, and
            everything has the bytes of the model's dtypes.
    """
    sizes = sorted(set(samples))
    return ModelProfile(
        model=type(target.model).__name__,
        layers=layer_keys(target.spec),
        params=param_sizes(target.spec),
        profiled_on=ProfiledOn(
            name,
            1,
            target.optimizer_spec.optimizer_class.__name__,
            is_measured=False,
            precision="" if precision is None else str(precision),
        ),
        batch_sizes=tuple(_estimate_batch_size(FakeTensorModel(target, device, size, precision)) for size in sizes),
        update_s_per_byte=ADAM_PASSES / device.reached_bytes_per_s,
        add_s_per_byte=ADD_PASSES / device.reached_bytes_per_s,
    )


def roofline_s(kernels: Sequence[OpCost], device: Device, product_dtype: str = "") -> float:
    """Return the duration of operations, one after the other; with a dtype, that of all matrix products.

    Example:
        >>> roofline_s([OpCost(60, 10), OpCost(0, 20)], Device(cost_per_s=10.0, memory_bytes_per_s=5.0))
        10.0
    """
    return sum(
        device.kernel_s(op.flops, op.moved_bytes, product_dtype if op.is_product and product_dtype else op.dtype)
        for op in kernels
    )


class FusedAttention(TorchFunctionMode):
    """Computes attention of tensors without memory as one kernel, as GPUs do, instead of as its formula."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - as torch calls it
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call a function of torch, or the kernel in its place."""
        kwargs = kwargs or {}
        if func in {torch.ops.aten.scaled_dot_product_attention.default, functional.scaled_dot_product_attention}:
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _fused_attention(  # noqa: PLR0913 - as torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Return attention by the kernel for narrow dtypes, or by the one for float32 and for masks."""
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    kernels = torch.ops.aten
    if attn_mask is None and query.element_size() == NARROW_BYTES:
        flash = kernels._scaled_dot_product_flash_attention  # noqa: SLF001 - it has no public name
        return cast("Tensor", flash(query, key, value, dropout_p, is_causal, scale=scale)[0])
    efficient = kernels._scaled_dot_product_efficient_attention  # noqa: SLF001 - likewise
    return cast("Tensor", efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0])


class FakeTensorModel:
    """A model on fake tensors, run layer by layer.

    Args:
        target: the model, with the casts of the precision.
        device: whose roofline applies.
        samples: in its microbatch.
        precision: as for :func:`estimate_model`.
    """

    def __init__(self, target: ProfileTarget, device: Device, samples: int, precision: Precision | None = None) -> None:
        self.target, self.device, self.samples = target, device, samples
        self.product_dtype = precision.compute if precision is not None and precision.autocast else ""
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
        self.attention = FusedAttention() if target.device.type == "meta" else nullcontext()
        if self.input_shapes:  # traces the model for inputs of these shapes, which is not to be counted
            with self.mode:
                self.segments[0](self.first_values(), self.params, self.buffers, no_seed, self.input_shapes)

    def first_values(self) -> list[Tensor]:
        """Return the values that the first layer reads."""
        return [self.values[index] for index in self.segments[0].inputs]

    def run_layer(self, at: int) -> LayerProfile:
        """Run a layer forward and backward; earlier layers must have been run."""
        segment, saved = self.segments[at], dict[int, int]()
        leaves = [
            self.values[index].detach().requires_grad_(self.values[index].requires_grad) for index in segment.inputs
        ]

        def record(tensor: Tensor) -> Tensor:
            if not _is_of_one_param(tensor):  # the memory of casts is counted with that of weights
                saved.update(storage_sizes(tensor))
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(record, _identity)
        with self.mode, self.attention, hooks, FlopCounter() as forward:
            outputs = segment(leaves, self.params, self.buffers, no_seed, self.input_shapes)
            if not segment.outputs:
                loss = self.target.loss(self.target.partitioned.unflatten_output(outputs), self.targets)
                outputs = (compute_plain_loss(loss),)
        self.values.update(zip(segment.outputs, outputs, strict=bool(segment.outputs)))
        saved.update(storage_sizes(outputs if segment.outputs else ()))
        saved_bytes = sum(size for address, size in saved.items() if address not in self.known_storages)
        self.known_storages.update(saved)
        output_bytes = self.samples * self.target.spec.layers[at].output_bytes
        forward_s = roofline_s(forward.op_costs, self.device, self.product_dtype)
        backward = self.backward_times(outputs, leaves, segment.params)
        return LayerProfile(
            forward_s, *backward, float(output_bytes), float(saved_bytes), self.grad_accumulate_s(segment.params)
        )

    def grad_accumulate_s(self, names: Sequence[str]) -> float:
        """Return the time of adding gradients to earlier ones; matrix products accumulate their own."""
        params = [self.params[name] for name in names if self.params[name].requires_grad]
        num_bytes = sum(param.nbytes for param in params if param.dim() != MATRIX_DIMS)
        return ADD_PASSES * num_bytes / self.device.reached_bytes_per_s

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
        return roofline_s(meter.op_costs, self.device, self.product_dtype)


def _estimate_batch_size(fake_model: FakeTensorModel) -> BatchSizeProfile:
    try:
        layers = tuple(fake_model.run_layer(index) for index in range(len(fake_model.target.spec.layers)))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        frame = find_user_frame(extract_tb(error.__traceback__))
        place = "" if frame is None else f", at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        raise PlanError(
            f"the roofline of {type(fake_model.target.model).__name__} is computed from shapes, but {error.func} "
            f"depends on values{place}; profile without roofline_device= (--roofline), which measures the model on "
            "this machine"
        ) from error
    total = NO_TIME
    for layer in layers:
        total = total.add(layer)
    return BatchSizeProfile(fake_model.samples, layers, total)


def _is_of_one_param(tensor: Tensor) -> bool:
    """Return whether a tensor depends on one parameter alone, as its cast, or a view of that, does."""
    node = tensor.grad_fn
    if node is None or not len(node.next_functions):
        return False
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and not node.next_functions and isinstance(getattr(node, "variable", None), nn.Parameter)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
