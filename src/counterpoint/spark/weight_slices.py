"""Slices of the flat weight vector, each with the optimizer state of its elements, and their encoding as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.errors import PlanError
from counterpoint.runtime.compiler_import import without_dynamo_import
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import FlatLayout, ShardSpan, build_layouts
from counterpoint.runtime.rebuilt_optimizer import argument_names
from counterpoint.tensor_bytes import as_bytes
from counterpoint.value_codec import decode_value, encode_value

SliceCodec: TypeAlias = Literal["", "bf16"]
MAX_SLICE_BYTES = 1 << 30
"""Maximum size of one message: a Java array is smaller than 2 GiB."""


@dataclass(frozen=True, slots=True)
class SliceOptimizer:
    """Optimizer of a slice: its class, and the options of each parameter group.

    Args:
        optimizer_class: an elementwise optimizer of torch.
        param_groups: options of the user's optimizer.
    """

    optimizer_class: type[optim.Optimizer]
    param_groups: tuple[Mapping[str, Any], ...]


def make_slice_optimizer(optimizer_spec: OptimizerSpec) -> SliceOptimizer:
    """Return the slice optimizer that updates as the user's optimizer would.

    Raises:
        PlanError: the optimizer is not elementwise.
    """
    if not optimizer_spec.is_elementwise:
        raise PlanError(
            f"{optimizer_spec.optimizer_class.__name__} is not elementwise, but on Spark each task updates a slice of "
            "the "
            "flat weights, which may split a tensor; use an elementwise optimizer (SGD, AdamW, Adagrad)"
        )
    return SliceOptimizer(
        optimizer_spec.optimizer_class,
        tuple(optimizer_spec.options(group) for group in range(len(optimizer_spec.optimizer.param_groups))),
    )


def make_layout(model: nn.Module, group_of: Mapping[str, int], num_partitions: int) -> FlatLayout:
    """Return the layout of the trained weights in the flat vector.

    Args:
        model: any module.
        group_of: parameter group of each trained parameter.
        num_partitions: number of slices.

    Raises:
        PlanError: weights have several dtypes, or a slice would be too large for Spark.
    """
    params = {name: param for name, param in model.named_parameters() if name in group_of}
    layouts = build_layouts(
        [(name, tuple(param.shape), param.dtype, group_of[name]) for name, param in params.items()],
        split_size=1,
    )
    if len(layouts) > 1:
        dtypes = ", ".join(f"{flat_layout.slots[0].name} is {flat_layout.dtype}" for flat_layout in layouts)
        raise PlanError(f"weights on Spark are one vector, so of one dtype, but {dtypes}; call model.to(torch.float32)")
    layout = layouts[0]
    slice_bytes = -(-layout.num_elements // num_partitions) * layout.dtype.itemsize
    if slice_bytes > MAX_SLICE_BYTES:
        raise PlanError(
            f"a slice of these weights has {slice_bytes:,} bytes in {num_partitions} partitions, but one "
            f"Spark record holds at most {MAX_SLICE_BYTES:,}; give "
            f"{-(-slice_bytes * num_partitions // MAX_SLICE_BYTES)} partitions or more"
        )
    return layout


def partition_span(partition: int, num_partitions: int) -> ShardSpan:
    """Return the fraction of the vector that a partition updates."""
    return Fraction(partition, num_partitions), Fraction(partition + 1, num_partitions)


def param_views(layout: FlatLayout, span: ShardSpan, flat: Tensor) -> list[tuple[int, Tensor]]:
    """Return views of a part of the vector, one per parameter group range, each with its group."""
    low, _ = layout.element_range(span)
    return [(group, flat[start - low : stop - low]) for group, start, stop in layout.optimizer_ranges(span)]


def encode_slice(weights: Tensor, states: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Return a slice as bytes: its weights, and the optimizer state of each of its parts.

    Example:
        >>> weights, states = decode_slice(encode_slice(torch.ones(2), [{"step": torch.tensor(3.0), "lost": None}]))
        >>> weights, states
        (tensor([1., 1.]), {0: {'step': tensor(3.)}})
    """
    tensors_of = [{key: value for key, value in state.items() if value is not None} for state in states]
    for key, value in (item for tensors in tensors_of for item in tensors.items()):
        if not isinstance(value, Tensor):
            raise PlanError(
                f"the optimizer keeps {key!r} as a {type(value).__name__}, but slices hold tensors; use one of "
                "torch's own optimizers"
            )
    return encode_value((weights, {index: tensors for index, tensors in enumerate(tensors_of) if tensors}), "a slice")


def decode_slice(text: bytes) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
    """Return the weights, and the optimizer state by part, given to ``encode_slice``."""
    weights, states = decode_value(text)
    return weights, states


def update_slice(
    optimizer: SliceOptimizer,
    parts: Sequence[tuple[int, Tensor]],
    gradients: Sequence[tuple[int, Tensor]],
    states: Mapping[int, Mapping[str, Tensor]],
    lr_factor: float,
) -> list[Mapping[str, Any]]:
    """Run one optimizer step on the parts of a slice, and return the new state of each part.

    Args:
        optimizer: of the slice.
        parts: views of the slice's weights, with their groups; updated in place.
        gradients: of the same parts.
        states: state after the previous step, by part.
        lr_factor: factor of the learning rate in this step.
    """
    if not parts:
        return []
    tensors_by_group: dict[int, list[Tensor]] = {}
    for group, part in parts:
        tensors_by_group.setdefault(group, []).append(part)
    groups = [
        {"params": tensors, **_scale_lr(optimizer.param_groups[group], lr_factor)}
        for group, tensors in tensors_by_group.items()
    ]
    with without_dynamo_import():
        torch_optimizer = optimizer.optimizer_class(groups, **_constructor_args(optimizer))
    for index, ((_, part), (_, gradient)) in enumerate(zip(parts, gradients, strict=True)):
        part.grad = gradient
        if index in states:
            torch_optimizer.state[part] = dict(states[index])
    torch_optimizer.step()
    return [torch_optimizer.state[part] for _, part in parts]


def _constructor_args(optimizer: SliceOptimizer) -> dict[str, Any]:
    """Return constructor arguments; some, such as Adagrad's initial sum, are not read from parameter groups."""
    options = optimizer.param_groups[0]
    return {name: options[name] for name in argument_names(optimizer.optimizer_class, ()) if name in options}


def _scale_lr(options: Mapping[str, Any], lr_factor: float) -> dict[str, Any]:
    return {**options, "lr": options["lr"] * lr_factor}


def encode_values(values: Tensor, codec: SliceCodec) -> bytes:
    """Return values as bytes; with ``bf16`` rounded to the nearest 16-bit value, ties to even."""
    if codec == "bf16":
        values = values.to(torch.bfloat16)
    return as_bytes(values).numpy().tobytes()


def decode_values(text: bytes, dtype: torch.dtype, codec: SliceCodec) -> Tensor:
    """Return the values written by ``encode_values``, in the given dtype.

    Example:
        >>> decode_values(encode_values(torch.tensor([1.0, 1.01171875]), "bf16"), torch.float32, "bf16")
        tensor([1.0000, 1.0156])
    """
    if not text:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(text), dtype=torch.bfloat16 if codec == "bf16" else dtype).to(dtype)
