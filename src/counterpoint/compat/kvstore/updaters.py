"""Rows of a local store are updated by the rules of the servers: those that are pushed and no others, as in MXNet.

What a local store does with what is pushed: an optimizer's step, or a function of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.compat.kvstore.optimizers import build_optimizer, make_factory, to_server_rule
from counterpoint.errors import CheckpointError
from counterpoint.ps.storage.optimizer_kernels import initial_state, update_rows
from counterpoint.ps.update_rules import UpdateRule


@dataclass(slots=True)
class RowState:
    """What a rule keeps beside the rows of a key.

    Args:
        parts: in the shape of the key.
        known: which rows have been pushed.
        step: pushes so far.
    """

    slots: tuple[Tensor, ...]
    initialized: Tensor
    step: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return it as named tensors and numbers."""
        named = {f"part{place}": part for place, part in enumerate(self.slots)}
        return {**named, "known": self.initialized, "step": self.step}


@dataclass(slots=True)
class SparseRowUpdater:
    """Updates of rows by one rule.

    Args:
        rule: which.
        states: what it keeps, by key.
    """

    rule: UpdateRule
    states: dict[Any, RowState] = field(default_factory=dict)

    def update(self, key: Any, gradient: Tensor, value: Tensor) -> None:  # noqa: ANN401 - a number or a text
        """The rows that the gradient has are as after a step more; the others have not changed.

        Args:
            key: which.
            gradient: coalesced, with its rows by number.
            value: the whole key; changed in place.
        """
        whole = value.view(len(value), -1)
        state = self.states.get(key)
        if state is None:
            known = torch.zeros(len(whole), dtype=torch.bool, device=value.device)
            state = self.states[key] = RowState(initial_state(self.rule, whole), known)
        state.step += 1
        numbers = gradient.indices()[0]
        kept = [part.view_as(whole) for part in (value, *state.slots)]
        rows = [part[numbers] for part in kept]
        values = gradient.values().reshape(len(numbers), -1)
        is_first = ~state.initialized[numbers][:, None]
        update_rows(self.rule, state.step, rows[0], tuple(rows[1:]), values, is_first=is_first)
        for part, updated in zip(kept, rows, strict=True):
            part[numbers] = updated
        state.initialized[numbers] = True

    def load_state(self, key: Any, found: dict[str, Any]) -> None:  # noqa: ANN401 - a number or a text
        """The key goes on from a state that :meth:`RowState.to_dict` returned."""
        names = sorted(name for name in found if name.startswith("part"))
        self.states[key] = RowState(tuple(found[name] for name in names), found["known"], int(found["step"]))


Updater: TypeAlias = Callable[[Any, Tensor, Tensor], object]
"""Called with the key, the sum of what was pushed, and the value, which it changes in place."""

States: TypeAlias = dict[Any, dict[str, Any]]


class TorchUpdater:
    """An updater that takes steps of a torch optimizer; each key has one for itself.

    Args:
        optimizer: see :func:`counterpoint.compat.kvstore.optimizers.make_factory`.
    """

    def __init__(self, optimizer: object) -> None:
        self._factory = make_factory(optimizer)
        self._optimizers: dict[Any, optim.Optimizer] = {}
        self._loaded: States = {}
        self._row_updater: SparseRowUpdater | None = None
        build_optimizer(self._factory, nn.Parameter(torch.zeros(1)))

    def __call__(self, key: Any, gradient: Tensor, value: Tensor) -> None:  # noqa: ANN401 - a number or a text
        """The value is as after a step with this gradient; of a sparse one, only its rows have changed."""
        if gradient.layout is torch.sparse_coo:
            self._get_row_updater(key).update(key, gradient, value)
            return
        optimizer = self._optimizers.get(key)
        if optimizer is None:
            optimizer = self._optimizers[key] = build_optimizer(self._factory, nn.Parameter(value.detach()))
            if key in self._loaded:
                _load_state(optimizer, self._loaded.pop(key))
        param = optimizer.param_groups[0]["params"][0]
        param.grad = gradient
        with torch.enable_grad():
            optimizer.step()
        param.grad = None

    def _get_row_updater(self, key: Any) -> SparseRowUpdater:  # noqa: ANN401 - a number or a text
        rows = self._row_updater = self._row_updater or SparseRowUpdater(to_server_rule(self._factory))
        if key in self._loaded:
            rows.load_state(key, self._loaded.pop(key)["state"])
        return rows

    def states(self) -> States:
        """Return what is kept for each key, and the options of its optimizer."""
        dense = {
            key: {"state": made.state_dict()["state"].get(0, {}), "options": _options(made)}
            for key, made in self._optimizers.items()
        }
        rows = self._row_updater.states if self._row_updater else {}
        return {
            **self._loaded,
            **dense,
            **{key: {"state": kept.to_dict(), "options": {}} for key, kept in rows.items()},
        }

    def load_states(self, states: States) -> None:
        """Every key goes on from its state, as soon as it is pushed.

        Raises:
            CheckpointError: the states are of another optimizer.
        """
        made = build_optimizer(self._factory, nn.Parameter(torch.zeros(1)))
        for found in states.values():
            _check_options(made, found)
        self._optimizers = {}
        self._row_updater = None
        self._loaded = dict(states)


def _load_state(optimizer: optim.Optimizer, found: Mapping[str, Any]) -> None:
    """The optimizer has this state, and these options where they were saved."""
    plain = optimizer.state_dict()
    plain["param_groups"][0] |= found["options"]
    plain["state"] = {0: dict(found["state"])} if found["state"] else {}
    optimizer.load_state_dict(plain)


def _check_options(optimizer: optim.Optimizer, found: Mapping[str, Any]) -> None:
    own = _options(optimizer)
    foreign = [name for name in found["options"] if name not in own]
    if foreign:
        raise CheckpointError(
            f"states with the options {', '.join(foreign)}, which {type(optimizer).__name__} does not have, but only "
            f"{', '.join(own)}; set the optimizer that they were saved from"
        )


def _options(optimizer: optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
