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
from counterpoint.runtime.layout import Layout, Span, lay_out
from counterpoint.runtime.optimizers import Face, argument_names
from counterpoint.runtime.uncompiled import without_compiler

Code: TypeAlias = Literal["", "bf16"]
MOST_BYTES = 1 << 30
"""What one parcel may have at most: Java has no array of 2 GiB."""

WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a slice is updated: the optimizer's class, and the options of each of its groups.

    Args:
        kind: an optimizer of torch that treats every number apart.
        groups: options as the user's optimizer has them.
    """

    kind: type[optim.Optimizer]
    groups: tuple[Mapping[str, Any], ...]


def rule_of(face: Face) -> Rule:
    """Return how slices are updated as the user's optimizer would.

    Raises:
        PlanError: it looks at whole tensors, of which a slice has only parts.
    """
    if not face.is_elementwise:
        raise PlanError(
            f"{face.kind.__name__} looks at whole tensors, but on Spark each task updates a slice of all weights, "
            "which ends anywhere within them; take an optimizer that treats every number apart (SGD, AdamW, Adagrad)"
        )
    return Rule(face.kind, tuple(face.options(group) for group in range(len(face.optimizer.param_groups))))


def layout_of(model: nn.Module, group_of: Mapping[str, int], num_places: int) -> Layout:
    """Return how the trained weights lie in the flat vector.

    Args:
        model: any module.
        group_of: the optimizer's group of each trained parameter.
        num_places: into how many slices it will be cut.

    Raises:
        PlanError: weights have several dtypes, or a slice would be too large for Spark.
    """
    params = {name: param for name, param in model.named_parameters() if name in group_of}
    layouts = lay_out(
        [(name, tuple(param.shape), param.dtype, group_of[name]) for name, param in params.items()], cut_anywhere=True
    )
    if len(layouts) > 1:
        found = ", ".join(f"{one.slots[0].name} is {one.dtype}" for one in layouts)
        raise PlanError(
            f"weights on Spark lie in one vector, so of one dtype, but {found}; say model.to(torch.float32)"
        )
    layout = layouts[0]
    slice_bytes = -(-layout.num_elements // num_places) * layout.dtype.itemsize
    if slice_bytes > MOST_BYTES:
        raise PlanError(
            f"a slice of these weights has {slice_bytes:,} bytes in {num_places} partitions, and at most "
            f"{MOST_BYTES:,} go into one record of Spark's; give "
            f"{-(-slice_bytes * num_places // MOST_BYTES)} partitions or more"
        )
    return layout


def span_of(place: int, num_places: int) -> Span:
    """Return which part of the vector a place updates."""
    return Fraction(place, num_places), Fraction(place + 1, num_places)


def parts_of(layout: Layout, span: Span, flat: Tensor) -> list[tuple[int, Tensor]]:
    """Return what an optimizer is given for a part of the vector: views of it, each with its group."""
    low, _ = layout.range_of(span)
    return [(group, flat[start - low : stop - low]) for group, start, stop in layout.updated(span)]


def write_slice(weights: Tensor, states: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Return a slice as bytes: its weights, and what the optimizer keeps for each of its parts.

    Example:
        >>> weights, states = read_slice(write_slice(torch.ones(2), [{"step": torch.tensor(3.0), "lost": None}]))
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


def read_slice(text: bytes) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
    """Return the weights, and by part the optimizer's state, that ``write_slice`` was given."""
    states: dict[int, dict[str, Tensor]] = {}
    tensors = read_tensors(text)
    weights = tensors.pop(WEIGHTS)
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        states.setdefault(int(index), {})[key] = value
    return weights, states


def update(
    rule: Rule,
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
    groups = [{"params": tensors, **_scaled(rule.groups[group], lr_factor)} for group, tensors in listed.items()]
    with without_compiler():
        made = rule.kind(groups, **_arguments(rule))
    for index, ((_, part), (_, gradient)) in enumerate(zip(parts, gradients, strict=True)):
        part.grad = gradient
        if index in states:
            made.state[part] = dict(states[index])
    made.step()
    return [made.state[part] for _, part in parts]


def _arguments(rule: Rule) -> dict[str, Any]:
    """Return what the optimizer is made with; some, such as Adagrad's first sum, are not read from groups."""
    options = rule.groups[0]
    return {name: options[name] for name in argument_names(rule.kind, ()) if name in options}


def _scaled(options: Mapping[str, Any], lr_factor: float) -> dict[str, Any]:
    return {**options, "lr": options["lr"] * lr_factor}


def to_bytes(values: Tensor, code: Code) -> bytes:
    """Return numbers as bytes; with ``bf16`` as the nearest of 16 bits, and the even one of two that are as near."""
    if code == "bf16":
        values = values.to(torch.bfloat16)
    return values.detach().contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""


def from_bytes(text: bytes, dtype: torch.dtype, code: Code) -> Tensor:
    """Return numbers that ``to_bytes`` wrote, in the dtype that they had.

    Example:
        >>> from_bytes(to_bytes(torch.tensor([1.0, 1.01171875]), "bf16"), torch.float32, "bf16")
        tensor([1.0000, 1.0156])
    """
    if not text:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(text), dtype=torch.bfloat16 if code == "bf16" else dtype).to(dtype)
