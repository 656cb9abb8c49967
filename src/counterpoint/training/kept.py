"""A schedule's state as JSON, and back with the types it had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

PAIRS = "(key, value)"
"""The one key under which a mapping stands as a list of pairs, because not all its keys are texts."""


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a nest of values as JSON can hold it; :func:`revived` is its opposite.

    Example:
        >>> plain({"milestones": {7: 1}, "lrs": (0.1, None)})
        {'milestones': {'(key, value)': [[7, 1]]}, 'lrs': [0.1, None]}
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return {PAIRS: [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)


def revived(saved: Any, own: Any) -> Any:  # noqa: ANN401 - JSON in, whatever a schedule keeps out
    """Return what :func:`plain` was given, with the types of the same value of a new schedule.

    Example:
        >>> revived({"(key, value)": [[7, 1]]}, Counter({9: 1}))
        Counter({7: 1})
    """
    if isinstance(saved, dict):
        pairs = saved[PAIRS] if saved.keys() == {PAIRS} else saved.items()
        mine = own if isinstance(own, Mapping) else {}
        found = {key: revived(item, mine.get(key)) for key, item in pairs}
        return Counter(found) if isinstance(own, Counter) else found
    if isinstance(own, Tensor):
        return own.new_tensor(saved)
    if isinstance(saved, list):
        others = own if isinstance(own, list | tuple) and len(own) == len(saved) else [None] * len(saved)
        items = [revived(item, other) for item, other in zip(saved, others, strict=True)]
        return tuple(items) if isinstance(own, tuple) else items
    return saved
