"""Keys and what belongs to them: one of each, or lists, as the calls take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from counterpoint.errors import PlanError

Key: TypeAlias = int | str
Keys: TypeAlias = Key | Sequence[Key]
Values: TypeAlias = Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]
"""For one key a tensor, or one for each device; for a list of keys a list of these."""


def group_by_key(what: str, keys: Keys, values: object) -> dict[Key, list[Tensor]]:
    """Return the tensors of each key, in the order in which the keys come; those of a key that comes twice together.

    Args:
        what: the call, for errors.
        keys: one, or a list.
        values: a tensor or a list of tensors for one key, a list of either for a list of keys.

    Raises:
        PlanError: a key is neither a number nor a text, or there are not as many values as keys.

    Example:
        >>> import torch
        >>> one, two = torch.ones(1), torch.ones(2)
        >>> list(group_by_key("push", [5, 7], [[one, one], two]).items())
        [(5, [tensor([1.]), tensor([1.])]), (7, [tensor([1., 1.])])]
    """
    found: dict[Key, list[Tensor]] = {}
    for key, value in _zip_keys(what, keys, values):
        found.setdefault(key, []).extend(_as_tensors(what, key, value))
    kinds = {type(key) for key in found}
    if len(kinds) > 1:
        raise PlanError(f"{what} of the keys {list(found)}: some are numbers and some are texts; use one of the two")
    return found


def check_key(what: str, key: object) -> Key:
    """Return a key that is one.

    Raises:
        PlanError: it is neither a number nor a text.
    """
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise PlanError(f"{what} of the key {key!r}: a key is a number or a text, such as 3 or 'fc1_weight'")
    return key


def _zip_keys(what: str, keys: object, values: object) -> list[tuple[Key, object]]:
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        return [(check_key(what, keys), values)]
    if isinstance(values, Tensor) or not isinstance(values, Sequence) or len(values) != len(keys):
        given = len(values) if isinstance(values, Sequence) else f"a {type(values).__name__}"
        raise PlanError(f"{what} of {len(keys)} keys with {given} for values: give one for each key, in a list")
    return [(check_key(what, key), value) for key, value in zip(keys, values, strict=True)]


def _as_tensors(what: str, key: Key, value: object) -> list[Tensor]:
    listed = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, Sequence) else []
    tensors = [one for one in listed if isinstance(one, Tensor)]
    if not tensors or len(tensors) != len(listed):
        wrong = next((type(one).__name__ for one in listed if not isinstance(one, Tensor)), type(value).__name__)
        raise PlanError(f"{what} of key {key!r} with a {wrong}: give a tensor, or a list of one for each device")
    return tensors
