"""What a local store does with what is pushed: an optimizer's step, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.compat.kvstore.optimizers import factory_of, made_by, rule_of
from counterpoint.compat.kvstore.row_updates import RowUpdates
from counterpoint.errors import CheckpointError

Updater: TypeAlias = Callable[[Any, Tensor, Tensor], object]
"""Called with the key, the sum of what was pushed, and the value, which it changes in place."""

States: TypeAlias = dict[Any, dict[str, Any]]


class TorchUpdater:
    """An updater that takes steps of a torch optimizer; each key has one for itself.

    Args:
        optimizer: see :func:`counterpoint.compat.kvstore.optimizers.factory_of`.
    """

    def __init__(self, optimizer: object) -> None:
        self._factory = factory_of(optimizer)
        self._made: dict[Any, optim.Optimizer] = {}
        self._loaded: States = {}
        self._rows: RowUpdates | None = None
        made_by(self._factory, nn.Parameter(torch.zeros(1)))

    def __call__(self, key: Any, gradient: Tensor, value: Tensor) -> None:  # noqa: ANN401 - a number or a text
        """The value is as after a step with this gradient; of a sparse one, only its rows have changed."""
        if gradient.layout is torch.sparse_coo:
            self._row_updates(key).update(key, gradient, value)
            return
        optimizer = self._made.get(key)
        if optimizer is None:
            optimizer = self._made[key] = made_by(self._factory, nn.Parameter(value.detach()))
            if key in self._loaded:
                _adopt(optimizer, self._loaded.pop(key))
        param = optimizer.param_groups[0]["params"][0]
        param.grad = gradient
        with torch.enable_grad():
            optimizer.step()
        param.grad = None

    def _row_updates(self, key: Any) -> RowUpdates:  # noqa: ANN401 - a number or a text
        rows = self._rows = self._rows or RowUpdates(rule_of(self._factory))
        if key in self._loaded:
            rows.adopt(key, self._loaded.pop(key)["state"])
        return rows

    def states(self) -> States:
        """Return what is kept for each key, and the options of its optimizer."""
        dense = {
            key: {"state": made.state_dict()["state"].get(0, {}), "options": _options(made)}
            for key, made in self._made.items()
        }
        rows = self._rows.states if self._rows else {}
        return {**self._loaded, **dense, **{key: {"state": kept.plain(), "options": {}} for key, kept in rows.items()}}

    def adopt(self, states: States) -> None:
        """Every key goes on from its state, as soon as it is pushed.

        Raises:
            CheckpointError: the states are of another optimizer.
        """
        made = made_by(self._factory, nn.Parameter(torch.zeros(1)))
        for found in states.values():
            _require_options(made, found)
        self._made = {}
        self._rows = None
        self._loaded = dict(states)


def _adopt(optimizer: optim.Optimizer, found: Mapping[str, Any]) -> None:
    """The optimizer has this state, and these options where they were saved."""
    plain = optimizer.state_dict()
    plain["param_groups"][0] |= found["options"]
    plain["state"] = {0: dict(found["state"])} if found["state"] else {}
    optimizer.load_state_dict(plain)


def _require_options(optimizer: optim.Optimizer, found: Mapping[str, Any]) -> None:
    own = _options(optimizer)
    foreign = [name for name in found["options"] if name not in own]
    if foreign:
        raise CheckpointError(
            f"states with the options {', '.join(foreign)}, which {type(optimizer).__name__} does not have, but only "
            f"{', '.join(own)}; set the optimizer that they were saved from"
        )


def _options(optimizer: optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
