"""The weights as one flat vector in slices, each with the optimizer's state of its numbers, and both as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import torch
from safetensors.torch import load as read_tensors, save as write_tensors
from torch import Tensor, nn, optim

from counterpoint.errors import PlanError
from counterpoint.runtime.optimizer_spec import OptimizerSpec, argument_names, without_dynamo_import
from counterpoint.runtime.params.flat_layout import FlatLayout, ShardSpan, build_layouts

SliceCodec: TypeAlias = Literal["", "bf16"]
MAX_SLICE_BYTES = 1 << 30
"""What one parcel may have at most: Java has no array of 2 GiB."""

WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class SliceOptimizer:
    """How a slice is updated: the optimizer's class, and the options of each of its groups.

    Args:
        kind: an optimizer of torch that treats every number apart.
        groups: options as the user's optimizer has them.
    """

    optimizer_class: type[optim.Optimizer]
    param_groups: tuple[Mapping[str, Any], ...]


def make_slice_optimizer(optimizer_spec: OptimizerSpec) -> SliceOptimizer:
    """Return how slices are updated as the user's optimizer would.

    Raises:
        PlanError: it looks at whole tensors, of which a slice has only parts.
    """
    if not optimizer_spec.is_elementwise:
        raise PlanError(
            f"{optimizer_spec.optimizer_class.__name__} looks at whole tensors, but on Spark each task updates a slice of all weights, "
            "which ends anywhere within them; take an optimizer that treats every number apart (SGD, AdamW, Adagrad)"
        )
    return SliceOptimizer(
        optimizer_spec.optimizer_class,
        tuple(optimizer_spec.options(group) for group in range(len(optimizer_spec.optimizer.param_groups))),
    )


def make_layout(model: nn.Module, group_of: Mapping[str, int], num_partitions: int) -> FlatLayout:
    """Return how the trained weights lie in the flat vector.

    Args:
        model: any module.
        group_of: the optimizer's group of each trained parameter.
        num_places: into how many slices it will be cut.

    Raises:
        PlanError: weights have several dtypes, or a slice would be too large for Spark.
    """
    params = {name: param for name, param in model.named_parameters() if name in group_of}
    layouts = build_layouts(
        [(name, tuple(param.shape), param.dtype, group_of[name]) for name, param in params.items()],
        may_split_params=True,
    )
    if len(layouts) > 1:
        found = ", ".join(f"{one.slots[0].name} is {one.dtype}" for one in layouts)
        raise PlanError(
            f"weights on Spark lie in one vector, so of one dtype, but {found}; say model.to(torch.float32)"
        )
    layout = layouts[0]
    slice_bytes = -(-layout.num_elements // num_partitions) * layout.dtype.itemsize
    if slice_bytes > MAX_SLICE_BYTES:
        raise PlanError(
            f"a slice of these weights has {slice_bytes:,} bytes in {num_partitions} partitions, and at most "
            f"{MAX_SLICE_BYTES:,} go into one record of Spark's; give "
            f"{-(-slice_bytes * num_partitions // MAX_SLICE_BYTES)} partitions or more"
        )
    return layout


def partition_span(partition: int, num_partitions: int) -> ShardSpan:
    """Return which part of the vector a place updates."""
    return Fraction(partition, num_partitions), Fraction(partition + 1, num_partitions)


def param_views(layout: FlatLayout, span: ShardSpan, flat: Tensor) -> list[tuple[int, Tensor]]:
    """Return what an optimizer is given for a part of the vector: views of it, each with its group."""
    low, _ = layout.element_range(span)
    return [(group, flat[start - low : stop - low]) for group, start, stop in layout.optimizer_ranges(span)]


def encode_slice(weights: Tensor, states: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Return a slice as bytes: its weights, and what the optimizer keeps for each of its parts.

    Example:
        >>> weights, states = decode_slice(encode_slice(torch.ones(2), [{"step": torch.tensor(3.0), "lost": None}]))
        >>> weights, states
        (tensor([1., 1.]), {0: {'step': tensor(3.)}})
    """
    tensors = {WEIGHTS: weights}
    for index, state in enumerate(states):
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.contiguous()
            elif value is not None:
                raise PlanError(
                    f"the optimizer keeps {key!r} as a {type(value).__name__}, but slices hold tensors; take one of "
                    "torch's own optimizers"
                )
    return write_tensors(tensors)


def decode_slice(text: bytes) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
    """Return the weights, and by part the optimizer's state, that ``encode_slice`` was given."""
    states: dict[int, dict[str, Tensor]] = {}
    tensors = read_tensors(text)
    weights = tensors.pop(WEIGHTS)
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        states.setdefault(int(index), {})[key] = value
    return weights, states


def update_slice(
    optimizer: SliceOptimizer,
    parts: Sequence[tuple[int, Tensor]],
    gradients: Sequence[tuple[int, Tensor]],
    states: Mapping[int, Mapping[str, Tensor]],
    lr_factor: float,
) -> list[Mapping[str, Any]]:
    """Step with an optimizer on the parts of a slice; returns what it keeps for each of them.

    Args:
        rule: how.
        parts: views of the slice's weights, with their groups; they change.
        gradients: of the same parts.
        states: what it kept the last time, by part.
        lr_factor: what the learning rate is multiplied with in this step.
    """
    if not parts:
        return []
    listed: dict[int, list[Tensor]] = {}
    for group, part in parts:
        listed.setdefault(group, []).append(part)
    groups = [
        {"params": tensors, **_scale_lr(optimizer.param_groups[group], lr_factor)} for group, tensors in listed.items()
    ]
    with without_dynamo_import():
        made = optimizer.optimizer_class(groups, **_constructor_args(optimizer))
    for index, ((_, part), (_, gradient)) in enumerate(zip(parts, gradients, strict=True)):
        part.grad = gradient
        if index in states:
            made.state[part] = dict(states[index])
    made.step()
    return [made.state[part] for _, part in parts]


def _constructor_args(optimizer: SliceOptimizer) -> dict[str, Any]:
    """Return what the optimizer is made with; some, such as Adagrad's first sum, are not read from groups."""
    options = optimizer.param_groups[0]
    return {name: options[name] for name in argument_names(optimizer.optimizer_class, ()) if name in options}


def _scale_lr(options: Mapping[str, Any], lr_factor: float) -> dict[str, Any]:
    return {**options, "lr": options["lr"] * lr_factor}


def encode_values(values: Tensor, codec: SliceCodec) -> bytes:
    """Return numbers as bytes; with ``bf16`` as the nearest of 16 bits, and the even one of two that are as near."""
    if codec == "bf16":
        values = values.to(torch.bfloat16)
    return values.detach().contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""


def decode_values(text: bytes, dtype: torch.dtype, codec: SliceCodec) -> Tensor:
    """Return numbers that ``encode_values`` wrote, in the dtype that they had.

    Example:
        >>> decode_values(encode_values(torch.tensor([1.0, 1.01171875]), "bf16"), torch.float32, "bf16")
        tensor([1.0000, 1.0156])
    """
    if not text:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(text), dtype=torch.bfloat16 if codec == "bf16" else dtype).to(dtype)
