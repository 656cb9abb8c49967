"""Export and restore the state of optimizers and learning rate schedulers as plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias

from torch import Tensor, optim

from counterpoint.checkpoint.state_schema import describe_value
from counterpoint.optim.validation import shorten
from counterpoint.runtime.rank_builder import RankRuntime


def get_group_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that a scheduler may change: numbers, booleans or tuples of numbers."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if all(isinstance(item, int | float) for item in (value if isinstance(value, tuple) else (value,)))
    }


def apply_group_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the options that :func:`get_group_options` returned."""
    group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def describe_param_groups(optimizer: optim.Optimizer, params: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return an optimizer's groups as JSON, with the names of their parameters; :func:`torch_state_dict` reads it.

    Args:
        optimizer: whose options are plain values; others are omitted.
        params: all parameters by name; one that is not among them has no name.
    """
    names = {id(param): name for name, param in params.items()}
    plain = (bool, int, float, str, tuple, list, Tensor, type(None))
    return [
        {
            "params": [names.get(id(param), "") for param in group["params"]],
            "options": {
                key: to_json(value)
                for key, value in group.items()
                if key not in {"params", "param_names"} and isinstance(value, plain)
            },
        }
        for group in optimizer.param_groups
    ]


def torch_state_dict(
    param_groups: Sequence[Mapping[str, Any]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return an optimizer's state in the layout of torch's ``Optimizer.state_dict``, which numbers parameters.

    Args:
        param_groups: what :func:`describe_param_groups` returned.
        states: the state of each parameter by name, in the parameter's full shape.

    Example:
        >>> groups = [{"params": ["weight", "bias"], "options": {"lr": 0.1}}]
        >>> torch_state_dict(groups, {"bias": {"step": 3}})
        {'state': {1: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    numbers = count()
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group in param_groups:
        indices = {next(numbers): name for name in group["params"]}
        state |= {index: dict(states[name]) for index, name in indices.items() if name in states}
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in group["options"].items()}
        groups.append({**options, "params": list(indices)})
    return {"state": state, "param_groups": groups}


PAIRS_KEY = "(key, value)"
"""The only key of a mapping that is stored as a list of pairs, because not all its keys are strings."""

FLOAT_KEY = "(float)"
"""The only key of a mapping that stands for a number that JSON does not have: inf, -inf or nan."""


def to_json(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return nested values as JSON; the inverse of :func:`from_json`.

    Example:
        >>> to_json({"milestones": {7: 1}, "lrs": (0.1, None)})
        {'milestones': {'(key, value)': [[7, 1]]}, 'lrs': [0.1, None]}
        >>> to_json(math.inf)
        {'(float)': 'inf'}
    """
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {PAIRS_KEY: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Tensor):
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT_KEY: str(float(value))}
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)


def from_json(saved: Any, like: Any) -> Any:  # noqa: ANN401 - JSON in, whatever a schedule keeps out
    """Return the values that :func:`to_json` was given, with the types of a value ``like`` them.

    Example:
        >>> from_json({"(key, value)": [[7, 1]]}, Counter({9: 1}))
        Counter({7: 1})
    """
    if isinstance(saved, dict) and saved.keys() == {FLOAT_KEY}:
        return float(saved[FLOAT_KEY])
    if isinstance(saved, dict):
        pairs = saved[PAIRS_KEY] if saved.keys() == {PAIRS_KEY} else saved.items()
        template = like if isinstance(like, Mapping) else {}
        restored = {key: from_json(item, template.get(key)) for key, item in pairs}
        return Counter(restored) if isinstance(like, Counter) else restored
    if isinstance(like, Tensor):
        return like.new_tensor(saved)
    if isinstance(saved, list):
        templates = like if isinstance(like, list | tuple) and len(like) == len(saved) else [None] * len(saved)
        items = [from_json(item, template_item) for item, template_item in zip(saved, templates, strict=True)]
        return tuple(items) if isinstance(like, tuple) else items
    return saved


def find_schedule_flaw(saved: Mapping[str, Any], scheduler: Any, path: str) -> str:  # noqa: ANN401 - torch's own
    """Return which part of a saved state no scheduler of this class has written; an empty text if there is none.

    Args:
        saved: as JSON.
        scheduler: whose attributes it would set.
        path: of the state, for the text.
    """
    for name in saved:
        attribute = getattr(type(scheduler), name, None)
        if name == "optimizer" or callable(attribute) or isinstance(attribute, property):
            return f"{path} has the name {shorten(repr(name))}, which no scheduler saves"
    own = scheduler.state_dict()
    try:
        from_json(saved, own)
    except (AttributeError, TypeError, ValueError) as error:
        return f"{path} has an invalid mapping ({shorten(str(error))})"
    return find_form_flaw(saved, to_json(own), path)


def find_form_flaw(
    saved: Any,  # noqa: ANN401 - JSON
    own: Any,  # noqa: ANN401 - JSON
    path: str,
    *,
    lengths: Literal["any", "same"] = "any",
) -> str:
    """Return which part of a saved value has another form than this run's own; an empty text if there is none.

    A name that only one of them has, and a null in place of an attribute that is not counted, fits: other versions have
    other attributes.

    Args:
        saved: as JSON.
        own: as JSON.
        path: of the value, for the text.
        lengths: whether lists may have another length.

    Example:
        >>> find_form_flaw({"base_lrs": ["fast"]}, {"base_lrs": [0.1]}, "schedule")
        "schedule.base_lrs[0] is 'fast', but this run has 0.1"
    """
    saved, own = (0.0 if isinstance(value, dict) and value.keys() == {FLOAT_KEY} else value for value in (saved, own))
    if isinstance(own, dict) and isinstance(saved, dict):
        parts = [(f".{shorten(name)}", saved[name], own[name]) for name in saved.keys() & own.keys()]
    elif isinstance(own, list) and isinstance(saved, list):
        if lengths == "same" and len(saved) != len(own):
            return f"{path} has {len(saved)} values, but this run has {len(own)}"
        is_mixed = len({type(item) for item in own}) > 1
        pairs = zip(saved, own if is_mixed else own[:1] * len(saved), strict=False)
        parts = [(f"[{index}]", *pair) for index, pair in enumerate(pairs)]
    else:
        kinds = [float if type(value) is int else type(value) for value in (saved, own)]
        fits = kinds[0] == kinds[1] or own is None or (saved is None and type(own) not in {int, list, dict})
        return "" if fits else f"{path} is {describe_value(saved)}, but this run has {describe_value(own)}"
    flaws = (find_form_flaw(one, other, f"{path}{name}", lengths=lengths) for name, one, other in parts)
    return next(filter(None, flaws), "")


OptimizerStates: TypeAlias = Mapping[int, Mapping[tuple[tuple[int, ...], ...], list[dict[str, Any]]]]
"""The state of every tensor that optimizers update, by rank and by units."""


def export_optimizer_states(ranks: Mapping[int, RankRuntime]) -> OptimizerStates:
    """Return the states of the ranks' optimizers."""
    return {
        number: {
            units: [store.read_state(optimizer, tensor) for tensor in tensors] if optimizer is not None else []
            for units, (optimizer, tensors) in store.optimizers.items()
        }
        for number, store in ((number, rank.interpreter.store) for number, rank in ranks.items())
    }


def restore_optimizer_states(ranks: Mapping[int, RankRuntime], optimizer_states: OptimizerStates) -> None:
    """Load optimizer states into ranks that were built again for the same plan."""
    for number, rank_states in optimizer_states.items():
        store = ranks[number].interpreter.store
        for units, states in rank_states.items():
            optimizer, tensors = store.optimizer(units)
            if optimizer is not None:
                for tensor, state in zip(tensors, states, strict=True):
                    store.write_state(optimizer, tensor, state)
