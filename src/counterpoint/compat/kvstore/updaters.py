"""What a local store does with pushed gradients: an optimizer step, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim

from counterpoint.compat.kvstore.optimizers import Factory, build_optimizer, make_factory, to_server_rule
from counterpoint.errors import CheckpointError
from counterpoint.optim.validation import shorten
from counterpoint.ps.storage.optimizer_kernels import initial_state, update_rows
from counterpoint.ps.update_rules import UpdateRule


@dataclass(slots=True)
class RowState:
    """State of an update rule for the rows of a key.

    Args:
        slots: state tensors in the shape of the key.
        initialized: which rows have been pushed.
        step: number of pushes.
    """

    slots: tuple[Tensor, ...]
    initialized: Tensor
    step: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the state as named tensors and numbers."""
        named = {f"part{index}": slot for index, slot in enumerate(self.slots)}
        return {**named, "known": self.initialized, "step": self.step}


@dataclass(slots=True)
class SparseRowUpdater:
    """Updater of the pushed rows only, as in MXNet, by an update rule of the servers.

    Args:
        rule: of the updates.
        states: by key.
    """

    rule: UpdateRule
    states: dict[Any, RowState] = field(default_factory=dict)

    def update(self, key: Any, gradient: Tensor, value: Tensor) -> None:  # noqa: ANN401 - an int or a str
        """Update the rows of the gradient; the other rows do not change.

        Args:
            key: of the value.
            gradient: coalesced, sparse in the first dim.
            value: the whole key; changed in place.
        """
        matrix = value.view(len(value), -1)
        state = self.states.get(key)
        if state is None:
            known = torch.zeros(len(matrix), dtype=torch.bool, device=value.device)
            state = self.states[key] = RowState(initial_state(self.rule, matrix), known)
        state.step += 1
        row_indices = gradient.indices()[0]
        tensors = [part.view_as(matrix) for part in (value, *state.slots)]
        rows = [part[row_indices] for part in tensors]
        values = gradient.values().reshape(len(row_indices), -1)
        is_first = ~state.initialized[row_indices][:, None]
        update_rows(self.rule, state.step, rows[0], tuple(rows[1:]), values, is_first=is_first)
        for part, updated in zip(tensors, rows, strict=True):
            part[row_indices] = updated
        state.initialized[row_indices] = True

    def load_state(self, key: Any, saved: dict[str, Any], value: Tensor) -> None:  # noqa: ANN401 - an int or a str
        """Restore the state of a key from :meth:`RowState.to_dict`.

        Raises:
            CheckpointError: it is of another rule, or of a key of another shape.
        """
        matrix = value.view(len(value), -1)
        expected = RowState(initial_state(self.rule, matrix), torch.zeros(len(matrix), dtype=torch.bool)).to_dict()
        _check_state(key, saved, expected)
        names = sorted(name for name in saved if name.startswith("part"))
        self.states[key] = RowState(tuple(saved[name] for name in names), saved["known"], saved["step"])


Updater: TypeAlias = Callable[[Any, Tensor, Tensor], object]
"""Called with the key, the sum of the pushed tensors, and the value, which it changes in place."""

States: TypeAlias = dict[Any, dict[str, Any]]


class TorchUpdater:
    """Updater that runs a torch optimizer; each key has its own.

    Args:
        optimizer: see :func:`counterpoint.compat.kvstore.optimizers.make_factory`.
    """

    def __init__(self, optimizer: object) -> None:
        self._factory = make_factory(optimizer)
        self._optimizers: dict[Any, optim.Optimizer] = {}
        self._loaded: States = {}
        self._row_updater: SparseRowUpdater | None = None
        build_optimizer(self._factory, nn.Parameter(torch.zeros(1)))

    def __call__(self, key: Any, gradient: Tensor, value: Tensor) -> None:  # noqa: ANN401 - an int or a str
        """Step with this gradient; a sparse gradient changes only its rows."""
        if gradient.layout is torch.sparse_coo:
            self._get_row_updater(key, value).update(key, gradient, value)
            return
        optimizer = self._optimizers.get(key)
        if optimizer is None:
            optimizer = self._optimizers[key] = build_optimizer(self._factory, nn.Parameter(value.detach()))
            if key in self._loaded:
                _load_state(optimizer, self._factory, key, self._loaded.pop(key))
        param = optimizer.param_groups[0]["params"][0]
        param.grad = gradient
        with torch.enable_grad():
            optimizer.step()
        param.grad = None

    def _get_row_updater(self, key: Any, value: Tensor) -> SparseRowUpdater:  # noqa: ANN401 - an int or a str
        row_updater = self._row_updater = self._row_updater or SparseRowUpdater(to_server_rule(self._factory))
        if key in self._loaded:
            row_updater.load_state(key, self._loaded.pop(key)["state"], value)
        return row_updater

    def states(self) -> States:
        """Return the state and the optimizer options of each key."""
        dense = {
            key: {"state": optimizer.state_dict()["state"].get(0, {}), "options": _options(optimizer)}
            for key, optimizer in self._optimizers.items()
        }
        rows = self._row_updater.states if self._row_updater else {}
        return {
            **self._loaded,
            **dense,
            **{key: {"state": row_state.to_dict(), "options": {}} for key, row_state in rows.items()},
        }

    def load_states(self, states: States) -> None:
        """Restore the state of every key when it is first pushed.

        Raises:
            CheckpointError: the states are of another optimizer.
        """
        optimizer = build_optimizer(self._factory, nn.Parameter(torch.zeros(1)))
        for saved in states.values():
            _check_options(optimizer, saved)
        self._optimizers = {}
        self._row_updater = None
        self._loaded = dict(states)


def _load_state(optimizer: optim.Optimizer, factory: Factory, key: object, saved: Mapping[str, Any]) -> None:
    """Restore the optimizer's state, and its options if they were saved.

    Raises:
        CheckpointError: it is of another optimizer, or of a key of another shape.
    """
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0] |= saved["options"]
    state_dict["state"] = {0: dict(saved["state"])} if saved["state"] else {}
    if saved["state"]:
        _check_state(key, saved["state"], _state_after_a_step(optimizer, factory, saved["options"]))
    optimizer.load_state_dict(state_dict)


def _state_after_a_step(optimizer: optim.Optimizer, factory: Factory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that an optimizer with these options keeps for a parameter like this one's."""
    param = nn.Parameter(torch.zeros_like(optimizer.param_groups[0]["params"][0]))
    example = build_optimizer(factory, param)
    example.param_groups[0] |= options
    param.grad = torch.zeros_like(param)
    with torch.enable_grad():
        example.step()
    state: dict[str, Any] = example.state_dict()["state"].get(0, {})
    return state


def _check_state(key: object, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a saved state has the values that are kept for a key, by name, type and shape."""
    flaws = [
        f"{name} is {_describe(saved.get(name))} instead of {_describe(expected.get(name))}"
        for name in sorted(saved.keys() | expected.keys())
        if _describe(saved.get(name)) != _describe(expected.get(name))
    ]
    if flaws:
        raise CheckpointError(
            f"the saved state of key {shorten(repr(key))} is not one of this optimizer and key: "
            f"{shorten('; '.join(flaws))}; set the optimizer that the states were saved from, and keys of the same "
            "shapes"
        )


def _describe(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _check_options(optimizer: optim.Optimizer, saved: Mapping[str, Any]) -> None:
    known = _options(optimizer)
    foreign = [name for name in saved["options"] if name not in known]
    if foreign:
        raise CheckpointError(
            f"saved states have the options {', '.join(foreign)}, but {type(optimizer).__name__} has "
            f"{', '.join(known)}; set the optimizer that they were saved from"
        )
    for name, value in saved["options"].items():
        if _option_kind(value) != _option_kind(known[name]):
            raise CheckpointError(
                f"saved states have the option {name} = {shorten(repr(value))}, but {type(optimizer).__name__} has "
                f"{known[name]!r}; set the optimizer that they were saved from"
            )


def _option_kind(value: object) -> object:
    """Return what two values of an option have in common; flags such as ``foreach`` may be None."""
    if isinstance(value, tuple | list):
        return [_option_kind(part) for part in value]
    return bool if value is None or isinstance(value, bool) else float if isinstance(value, int) else type(value)


def _options(optimizer: optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
