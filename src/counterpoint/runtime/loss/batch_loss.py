"""A loss of the whole batch: it compares samples with each other, so it is evaluated on all outputs together.

Each rank with the last block runs its microbatches forward and gathers the outputs and targets of all of them. It
evaluates the loss on the concatenation, in the order of the samples, as a loop without microbatches does. The gradient
with respect to its own outputs is all that its backward needs, so the gradients of the others are not sent::

    rank 0   F0.0 -> y0 --+                                 +-> dL/dy0 -> B0.0
             F0.1 -> y1 --+-- all_gather(out0) -> L(y0..y3) +-> dL/dy1 -> B0.1
    rank 1   F0.2 -> y2 --+-- all_gather(out0) -> L(y0..y3) +-> dL/dy2 -> B0.2
             F0.3 -> y3 --+                                 +-> dL/dy3 -> B0.3

A value that all microbatches share, such as the scale of the logits, is used once, and each microbatch gets its share
of the gradient by samples.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.runtime.sample_layout import find_tensor_lists, is_plain_list
from counterpoint.value_codec import decode_value, encode_value

EncodedSamples: TypeAlias = "list[Any]"
"""Of one microbatch: the structure of output and targets as text, then their leaves."""


class MicrobatchOutput(NamedTuple):
    """Output and targets of one of this rank's microbatches.

    Args:
        leaves: of the output, then of the targets; tensors are detached.
        spec: the structure of both.
        requires_grad: for each leaf of the output whether it is a tensor with a gradient; None if it is not a tensor.
    """

    leaves: list[Any]
    spec: TreeSpec
    requires_grad: tuple[bool | None, ...]

    def encode(self) -> EncodedSamples:
        """Return what other ranks need of it."""
        return [repr(self.spec), *self.leaves]


class MergedLeaf(NamedTuple):
    """A part of the outputs or targets of the whole batch.

    Args:
        value: of all samples.
        is_per_sample: whether samples lie along dim 0; otherwise all microbatches have the same value.
    """

    value: Any
    is_per_sample: bool


def flatten_output(output: Any, targets: Any, num_samples: int, what: str) -> MicrobatchOutput:  # noqa: ANN401 - any nests
    """Return output and targets of a microbatch as leaves.

    Args:
        output: of the model.
        targets: of the samples.
        num_samples: how many there are.
        what: the microbatch, for the error.

    Raises:
        DataError: a list may have an entry for each sample.
    """
    if any(len(values) == num_samples for values in find_tensor_lists((output, targets))):
        raise DataError(
            f"output or targets of {what} have a list of {num_samples} tensors for {num_samples} samples, which may "
            "have one for each; a loss of the whole batch needs samples along dim 0: stack them in one tensor, or give "
            "a tuple of tensors with all samples"
        )
    is_leaf = partial(has_entries, num_entries=num_samples)
    output_leaves, _ = tree_flatten(output, is_leaf)
    leaves, spec = tree_flatten((output, targets), is_leaf)
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    flags = tuple(leaf.requires_grad if isinstance(leaf, Tensor) else None for leaf in output_leaves)
    if any(type(leaf) is int and leaf == num_samples for leaf in output_leaves):
        raise DataError(
            f"the output of {what} has the number {num_samples}, which is also its number of samples, so it may be "
            "another one for the whole batch; read the number of samples from a tensor in the loss, or return the "
            "number as a tensor"
        )
    return MicrobatchOutput(detached, spec, flags)


def has_entries(values: object, num_entries: int) -> bool:
    """Tell whether a value is a list without tensors, with so many entries."""
    return is_plain_list(values) and len(cast("Sequence[Any]", values)) == num_entries


def gather_microbatches(
    fabric: Fabric, label: str, own: Mapping[int, EncodedSamples], group: Group
) -> dict[int, EncodedSamples]:
    """Return the microbatches of all members; a collective call.

    Args:
        fabric: this rank's connection to the others.
        label: of what is gathered.
        own: this rank's, those with samples.
        group: the members.

    Raises:
        DataError: a part cannot be sent.
    """
    if len(group) == 1:
        return dict(own)
    encoded = torch.frombuffer(bytearray(encode_value(dict(own), "an output or target")), dtype=torch.uint8)
    sizes = cast("list[int]", fabric.gather_values(f"size of {label}", len(encoded), group))
    bounds = [0, *accumulate(sizes)]
    whole, position = torch.empty(bounds[-1], dtype=torch.uint8), group.index(fabric.rank)
    whole[bounds[position] : bounds[position + 1]] = encoded
    fabric.all_gather(label, whole, bounds, group).wait()
    gathered: dict[int, EncodedSamples] = {}
    for index in range(len(group)):
        part = bytearray(whole[bounds[index] : bounds[index + 1]].numpy().tobytes())  # aligned, as its tensors must be
        gathered |= decode_value(part)
    return gathered


def merge_microbatches(microbatches: Mapping[int, EncodedSamples], sizes: Mapping[int, int]) -> list[MergedLeaf]:
    """Return the leaves of the whole batch.

    Args:
        microbatches: those with samples.
        sizes: number of samples of each.

    Raises:
        DataError: microbatches have different structures, or values that cannot be put together.
    """
    micros = sorted(microbatches)
    first = microbatches[micros[0]]
    for micro in micros:
        if microbatches[micro][0] != first[0]:
            raise DataError(
                f"output and targets of microbatch {micros[0]} have the structure {first[0]}, those of microbatch "
                f"{micro} {microbatches[micro][0]}; a loss of the whole batch needs the same one for all"
            )
    counts = [sizes[micro] for micro in micros]
    return [merge_leaf([microbatches[micro][index] for micro in micros], counts) for index in range(1, len(first))]


def merge_leaf(parts: Sequence[Any], counts: Sequence[int]) -> MergedLeaf:
    """Return a leaf of the whole batch, given those of all microbatches and their numbers of samples.

    Raises:
        DataError: they neither have samples along dim 0 nor are equal.

    Example:
        >>> merge_leaf([torch.ones(1, 2), torch.zeros(2, 2)], [1, 2]).value.shape
        torch.Size([3, 2])
        >>> merge_leaf([0.07, 0.07], [1, 2])
        MergedLeaf(value=0.07, is_per_sample=False)
    """
    if len(parts) > 1 and all(has_entries(part, count) for part, count in zip(parts, counts, strict=True)):
        if all(part == parts[0] for part in parts[1:]):
            raise DataError(
                f"a loss of the whole batch gets the list {reprlib.repr(parts[0])} in microbatches of {counts[0]} "
                "samples, so it may have an entry for each sample, or belong to all of them; make a tensor of what "
                "belongs to samples, or let the loss function hold what belongs to all"
            )
        return MergedLeaf([entry for part in parts for entry in part], is_per_sample=True)
    if len(parts) == 1 or not all(isinstance(part, Tensor) for part in parts):
        if any(type(part) is not type(parts[0]) or not np.array_equal(part, parts[0]) for part in parts[1:]):
            raise DataError(
                f"a loss of the whole batch gets a value that is {parts[0]!r} in one microbatch and differs in "
                "another; what is not a tensor has to be the same for all samples: give tensors with samples along "
                "dim 0"
            )
        has_samples = isinstance(parts[0], Tensor) and parts[0].dim() > 0 and len(parts[0]) == counts[0]
        return MergedLeaf(parts[0], has_samples)
    shapes = [tuple(part.shape) for part in parts]
    if all(shape and shape[0] == count for shape, count in zip(shapes, counts, strict=True)):
        if len({shape[1:] for shape in shapes}) == 1:
            return MergedLeaf(torch.cat(list(parts)), is_per_sample=True)
        remedy = "all microbatches need the same shape after dim 0: pad them to one length"
    elif len(set(shapes)) == 1 and all(torch.equal(part.nan_to_num(), parts[0].nan_to_num()) for part in parts[1:]):
        return MergedLeaf(parts[0], is_per_sample=False)
    else:
        remedy = "return outputs with the samples along dim 0, and what has no samples only if it is the same for all"
    raise DataError(
        f"a loss of the whole batch gets tensors of the shapes {', '.join(map(str, shapes))} from microbatches of "
        f"{', '.join(map(str, counts))} samples, which cannot be put together; {remedy}"
    )


def unflatten_batch(leaves: Sequence[Any], spec: TreeSpec) -> tuple[Any, Any]:
    """Return output and targets of the whole batch."""
    output, targets = tree_unflatten(list(leaves), spec)
    return output, targets


def split_grads(
    leaves: Sequence[MergedLeaf], grads: Sequence[Tensor | None], sizes: Mapping[int, int], micro: int
) -> list[Tensor | None]:
    """Return a microbatch's part of the gradients of the whole batch's outputs.

    Args:
        leaves: the tensors of the output.
        grads: theirs; None for one without.
        sizes: number of samples of every microbatch, in the order of the samples.
        micro: the microbatch.
    """
    first = sum(size for other, size in sizes.items() if other < micro)
    share = sizes[micro] / sum(sizes.values())
    return [
        grad if grad is None else grad[first : first + sizes[micro]] if leaf.is_per_sample else grad * share
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
