"""Nested inputs and outputs as tuples of tensors and back; what is no tensor stays as it was when first seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import ScriptObject, SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

KNOWN_LEAF_TYPES = (Tensor, bool, int, float, str, type(None), SymInt, SymFloat, SymBool, ScriptObject)
"""What may stand in an output; of anything else, as a cache of keys and values, nobody knows the tensors in it."""


@dataclass(frozen=True, slots=True)
class TensorTree:
    """The shape of a nested value.

    Args:
        spec: how it is nested.
        leaves: what is no tensor, at its place; None where a tensor stands.
        places: the indices of the tensors among the leaves.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    tensor_indices: tuple[int, ...]

    def flatten(self, value: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        """Return the tensors of a value that is nested like this."""
        if isinstance(value, Tensor):
            return (value,)
        leaves, _ = tree_flatten(value)
        return tuple(leaves[place] for place in self.tensor_indices)

    def unflatten(self, values: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Return the nested value with these tensors at their places."""
        leaves = list(self.leaves)
        for place, value in zip(self.tensor_indices, values, strict=True):
            leaves[place] = value
        return leaves[0] if self.spec.is_leaf() else tree_unflatten(leaves, self.spec)


def build_tensor_tree(value: Any) -> TensorTree:  # noqa: ANN401
    """Return the shape of a nested value."""
    leaves, spec = tree_flatten(value)
    places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return TensorTree(spec, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), places)


def build_output_tree(value: Any) -> TensorTree:  # noqa: ANN401
    """Return the shape of an output; beside tensors, what is none of :data:`KNOWN` is None in it."""
    leaves, spec = tree_flatten(value)
    places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    kept = (
        None if isinstance(leaf, Tensor) or (places and not isinstance(leaf, KNOWN_LEAF_TYPES)) else leaf
        for leaf in leaves
    )
    return TensorTree(spec, tuple(kept), places)


def strip_unknown_leaves(output: Any) -> Any:  # noqa: ANN401
    """Return an output with None in place of what is none of :data:`KNOWN`; itself where no tensor would be left."""
    leaves, _ = tree_flatten(output)
    if all(isinstance(leaf, KNOWN_LEAF_TYPES) for leaf in leaves) or not any(
        isinstance(leaf, Tensor) for leaf in leaves
    ):
        return output
    return tree_map(lambda leaf: leaf if isinstance(leaf, KNOWN_LEAF_TYPES) else None, output)
