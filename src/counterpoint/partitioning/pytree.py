"""Flatten nested inputs and outputs to tensors and back; other leaves are part of the structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import ScriptObject, SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    keystr,
    register_dataclass,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from counterpoint.errors import DataError

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


ONE_TENSOR = TensorTree(tree_structure(None), (None,), (0,))
"""The structure of a tensor; None is a leaf, too."""


def build_tensor_tree(value: Any) -> TensorTree:  # noqa: ANN401
    """Return the structure of a nested value."""
    leaves, spec = tree_flatten(value)
    indices = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return TensorTree(spec, tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves), indices)


def find_changed_leaf(first: Any, now: Any) -> tuple[str, Any, Any] | None:  # noqa: ANN401
    """Return where a nested value differs from the first one at a leaf that is not a tensor, and both leaves, or None.

    Example:
        >>> find_changed_leaf({"tau": 1.0}, {"tau": 2.0})
        ("['tau']", 1.0, 2.0)
    """
    paths, _ = tree_flatten_with_path(first)
    leaves, _ = tree_flatten(now)
    for (path, before), after in zip(paths, leaves, strict=False):
        is_changed = before is not after and not isinstance(before, Tensor) and not _are_equal(before, after)
        if is_changed or isinstance(before, Tensor) is not isinstance(after, Tensor):
            return keystr(path), before, after
    if len(paths) != len(leaves):
        return "", f"{len(paths)} values", f"{len(leaves)}"
    return None


def _are_equal(first: object, second: object) -> bool:
    return type(first) is type(second) and bool(first == second)


def require_unchanged_leaves(first: Any, now: Any) -> None:  # noqa: ANN401
    """Check that inputs differ from those that a model was partitioned with in tensors only.

    Raises:
        DataError: another value differs, which the model would not see.
    """
    changed = find_changed_leaf(first, now)
    if changed is not None:
        path, before, after = changed
        if not path:
            raise DataError(
                f"the inputs of the model had {before} when it was split along the operations of one call, and have "
                f"{after} now; give as many in every batch, or use a strategy that keeps the model whole (data, zero "
                "of level 1 or 2, server)"
            )
        values = [f"a tensor of {len(leaf)} samples" if isinstance(leaf, Tensor) and leaf.dim() else repr(leaf)[:80]
                  for leaf in (before, after)]  # fmt: skip
        raise DataError(
            f"the input{path} of the model was {values[0]} when it was split, and is {values[1]} now; a model is "
            "split along the tensor operations of one call, in which other values are constants; give the value as a "
            "tensor with one entry for each sample (torch.full((len(x), 1), value)), or use a strategy that keeps the "
            "model whole (data, zero of level 1 or 2, server)"
        )


def require_unchanged_structure(first: Any, now: Any) -> None:  # noqa: ANN401
    """Check that inputs are nested as those that a model was partitioned with, keys in the same order.

    Raises:
        DataError: they are not, so that their tensors could be taken for others.
    """
    structures = [tree_structure(call) for call in (first, now)]
    if structures[0] != structures[1]:
        keys = [", ".join(keystr(path) for path, _ in tree_flatten_with_path(call)[0]) for call in (first, now)]
        raise DataError(
            f"the inputs of the model are {keys[1]}, and were {keys[0]} when the model was split along its operations; "
            "give them in the same nest in every batch, with the same keys in the same order"
        )


def require_unchanged_dtypes(first: Any, now: Any) -> None:  # noqa: ANN401
    """Check that the tensors among inputs have the dtypes that a model was partitioned with.

    Raises:
        DataError: one has another, of which the operations of a trace know nothing.
    """
    for (path, before), after in zip(tree_flatten_with_path(first)[0], tree_flatten(now)[0], strict=True):
        if isinstance(before, Tensor) and before.dtype != after.dtype:
            raise DataError(
                f"the input{keystr(path)} of the model is {after.dtype}, and was {before.dtype} when the model was "
                f"split along its operations; convert it before the step, with .to({before.dtype})"
            )


def build_output_tree(value: Any) -> TensorTree:  # noqa: ANN401
    """Return the structure of an output; leaves of unknown types become None if the output has tensors."""
    if type(value) is Tensor:
        return ONE_TENSOR
    leaves, spec = tree_flatten(value)
    indices = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    values = (
        None if isinstance(leaf, Tensor) or (indices and not isinstance(leaf, KNOWN_LEAF_TYPES)) else leaf
        for leaf in leaves
    )
    return TensorTree(spec, tuple(values), indices)


def register_dataclasses(values: Any) -> None:  # noqa: ANN401 - any nest
    """Make torch treat the dataclasses in a nest as nests of their fields, as ``torch.export`` asks users to do."""
    for leaf in tree_leaves(values):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            if type(leaf) not in SUPPORTED_NODES:
                register_dataclass(type(leaf))
            register_dataclasses([getattr(leaf, field.name) for field in fields(leaf)])


def strip_unknown_leaves(output: Any) -> Any:  # noqa: ANN401
    """Replace leaves of unknown types by None; return the output itself if no tensor would be left."""
    leaves, _ = tree_flatten(output)
    if all(isinstance(leaf, KNOWN_LEAF_TYPES) for leaf in leaves) or not any(
        isinstance(leaf, Tensor) for leaf in leaves
    ):
        return output
    return tree_map(lambda leaf: leaf if isinstance(leaf, KNOWN_LEAF_TYPES) else None, output)


def has_plain_entries(values: object) -> bool:
    """Tell whether a value is a list or a tuple with entries, but without tensors.

    Example:
        >>> has_plain_entries(["a", "b"]), has_plain_entries([]), has_plain_entries("ab")
        (True, False, False)
    """
    if type(values) not in {list, tuple} or not values:
        return False
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(values))
