"""The options of an optimizer's groups that a schedule may change, as values that can be written and compared.

A schedule's state as JSON, and back with the types it had.

What optimizers remember, kept while no ranks are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from counterpoint.runtime.rank_builder import RankRuntime


def get_group_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that are numbers, switches or a few numbers, as a schedule may change them."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if all(isinstance(item, int | float) for item in (value if isinstance(value, tuple) else (value,)))
    }


def apply_group_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a group the options that :func:`settings` returned."""
    group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})


PAIRS_KEY = "(key, value)"
"""The one key under which a mapping stands as a list of pairs, because not all its keys are texts."""


def to_json(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a nest of values as JSON can hold it; :func:`revived` is its opposite.

    Example:
        >>> to_json({"milestones": {7: 1}, "lrs": (0.1, None)})
        {'milestones': {'(key, value)': [[7, 1]]}, 'lrs': [0.1, None]}
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {PAIRS_KEY: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)


def from_json(saved: Any, like: Any) -> Any:  # noqa: ANN401 - JSON in, whatever a schedule keeps out
    """Return what :func:`plain` was given, with the types of the same value of a new schedule.

    Example:
        >>> from_json({"(key, value)": [[7, 1]]}, Counter({9: 1}))
        Counter({7: 1})
    """
    if isinstance(saved, dict):
        pairs = saved[PAIRS_KEY] if saved.keys() == {PAIRS_KEY} else saved.items()
        mine = like if isinstance(like, Mapping) else {}
        found = {key: from_json(item, mine.get(key)) for key, item in pairs}
        return Counter(found) if isinstance(like, Counter) else found
    if isinstance(like, Tensor):
        return like.new_tensor(saved)
    if isinstance(saved, list):
        others = like if isinstance(like, list | tuple) and len(like) == len(saved) else [None] * len(saved)
        items = [from_json(item, other) for item, other in zip(saved, others, strict=True)]
        return tuple(items) if isinstance(like, tuple) else items
    return saved


OptimizerStates: TypeAlias = Mapping[int, Mapping[tuple[tuple[int, ...], ...], list[dict[str, Any]]]]
"""The state of every tensor that a rank's optimizers update, by rank and by units."""


def export_optimizer_states(ranks: Mapping[int, RankRuntime]) -> OptimizerStates:
    """Return what the optimizers of ranks remember."""
    return {
        number: {
            units: [dict(made.state.get(tensor, {})) for tensor in tensors] if made is not None else []
            for units, (made, tensors) in rank.interpreter.store.optimizers.items()
        }
        for number, rank in ranks.items()
    }


def restore_optimizer_states(ranks: Mapping[int, RankRuntime], optimizer_states: OptimizerStates) -> None:
    """The optimizers go on from what those of the same ranks, built before for the same plan, remembered."""
    for number, known in optimizer_states.items():
        store = ranks[number].interpreter.store
        for units, states in known.items():
            made, tensors = store.optimizer(units)
            if made is not None:
                made.state.update(dict(zip(tensors, states, strict=True)))
