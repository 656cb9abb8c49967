"""Parsing of keys and their values: one of each, or lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from counterpoint.errors import PlanError

Key: TypeAlias = int | str
Keys: TypeAlias = Key | Sequence[Key]
Values: TypeAlias = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
"""For one key a tensor, or one per device; for a list of keys a list of these."""


def group_by_key(what: str, keys: Keys, values: object) -> dict[Key, list[Tensor]]:
    """Return the tensors of each key, in the order of the keys; tensors of a repeated key are joined.

    Args:
        what: the call, for errors.
        keys: one, or a list.
        values: a tensor or a list of tensors for one key, a list of either for a list of keys.

    Raises:
        PlanError: a key is neither an int nor a str, or the number of values does not match the keys.

    Example:
        >>> import torch
        >>> one, two = torch.ones(1), torch.ones(2)
        >>> list(group_by_key("push", [5, 7], [[one, one], two]).items())
        [(5, [tensor([1.]), tensor([1.])]), (7, [tensor([1., 1.])])]
    """
    tensors_by_key: dict[Key, list[Tensor]] = {}
    for key, value in _zip_keys(what, keys, values):
        tensors_by_key.setdefault(key, []).extend(_as_tensors(what, key, value))
    kinds = {type(key) for key in tensors_by_key}
    if len(kinds) > 1:
        raise PlanError(f"{what} of the keys {list(tensors_by_key)}: some are int and some are str; use one type")
    return tensors_by_key


def check_key(what: str, key: object) -> Key:
    """Return the key if it is valid.

    Raises:
        PlanError: it is neither an int nor a str.
    """
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise PlanError(f"{what} of the key {key!r}: a key is an int or a str, such as 3 or 'fc1_weight'")
    return key


def _zip_keys(what: str, keys: object, values: object) -> list[tuple[Key, object]]:
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        return [(check_key(what, keys), values)]
    if isinstance(values, Tensor) or not isinstance(values, Sequence) or len(values) != len(keys):
        given = len(values) if isinstance(values, Sequence) else f"a {type(values).__name__}"
        raise PlanError(f"{what} of {len(keys)} keys with {given} as values; give a list with one for each key")
    return [(check_key(what, key), value) for key, value in zip(keys, values, strict=True)]


def _as_tensors(what: str, key: Key, value: object) -> list[Tensor]:
    items = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, Sequence) else []
    tensors = [item for item in items if isinstance(item, Tensor)]
    if not tensors or len(tensors) != len(items):
        wrong_type = next((type(item).__name__ for item in items if not isinstance(item, Tensor)), type(value).__name__)
        raise PlanError(f"{what} of key {key!r} with a {wrong_type}: give a tensor, or a list with one per device")
    return tensors
