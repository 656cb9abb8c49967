"""Flatten nested inputs and outputs to tensors and back; other leaves keep the value they had first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import ScriptObject, SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

KNOWN_LEAF_TYPES = (Tensor, bool, int, float, str, type(None), SymInt, SymFloat, SymBool, ScriptObject)
"""Leaves an output may have; any other object, such as a key-value cache, may hide tensors."""


@dataclass(frozen=True, slots=True)
class TensorTree:
    """The structure of a nested value.

    Args:
        spec: the pytree spec.
        leaves: the leaves that are not tensors; None where a tensor is.
        tensor_indices: the indices of the tensors among the leaves.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    tensor_indices: tuple[int, ...]

    def flatten(self, value: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the tensors of a value with this structure."""
        if isinstance(value, Tensor):
            return (value,)
        leaves, _ = tree_flatten(value)
        return tuple(leaves[index] for index in self.tensor_indices)

    def unflatten(self, values: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Return the nested value with these tensors in it."""
        leaves = list(self.leaves)
        for index, value in zip(self.tensor_indices, values, strict=True):
            leaves[index] = value
        return leaves[0] if self.spec.is_leaf() else tree_unflatten(leaves, self.spec)


def build_tensor_tree(value: Any) -> TensorTree:  # noqa: ANN401
    """Return the structure of a nested value."""
    leaves, spec = tree_flatten(value)
    indices = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return TensorTree(spec, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), indices)


def build_output_tree(value: Any) -> TensorTree:  # noqa: ANN401
    """Return the structure of an output; leaves of unknown types become None if the output has tensors."""
    leaves, spec = tree_flatten(value)
    indices = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    values = (
        None if isinstance(leaf, Tensor) or (indices and not isinstance(leaf, KNOWN_LEAF_TYPES)) else leaf
        for leaf in leaves
    )
    return TensorTree(spec, tuple(values), indices)


def strip_unknown_leaves(output: Any) -> Any:  # noqa: ANN401
    """Replace leaves of unknown types by None; return the output itself if no tensor would be left."""
    leaves, _ = tree_flatten(output)
    if all(isinstance(leaf, KNOWN_LEAF_TYPES) for leaf in leaves) or not any(
        isinstance(leaf, Tensor) for leaf in leaves
    ):
        return output
    return tree_map(lambda leaf: leaf if isinstance(leaf, KNOWN_LEAF_TYPES) else None, output)
