"""Rows of a local store are updated by the rules of the servers: those that are pushed and no others, as in MXNet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from counterpoint.server.choices import Rule
from counterpoint.server.rules import first_parts, update_rows


@dataclass(slots=True)
class RowState:
    """What a rule keeps beside the rows of a key.

    Args:
        parts: in the shape of the key.
        known: which rows have been pushed.
        step: pushes so far.
    """

    parts: tuple[Tensor, ...]
    known: Tensor
    step: int = 0

    def plain(self) -> dict[str, Any]:
        """Return it as named tensors and numbers."""
        named = {f"part{place}": part for place, part in enumerate(self.parts)}
        return {**named, "known": self.known, "step": self.step}


@dataclass(slots=True)
class RowUpdates:
    """Updates of rows by one rule.

    Args:
        rule: which.
        states: what it keeps, by key.
    """

    rule: Rule
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
            state = self.states[key] = RowState(first_parts(self.rule, whole), known)
        state.step += 1
        numbers = gradient.indices()[0]
        kept = [part.view_as(whole) for part in (value, *state.parts)]
        rows = [part[numbers] for part in kept]
        values = gradient.values().reshape(len(numbers), -1)
        is_first = ~state.known[numbers][:, None]
        update_rows(self.rule, state.step, rows[0], tuple(rows[1:]), values, is_first=is_first)
        for part, updated in zip(kept, rows, strict=True):
            part[numbers] = updated
        state.known[numbers] = True

    def adopt(self, key: Any, found: dict[str, Any]) -> None:  # noqa: ANN401 - a number or a text
        """The key goes on from a state that :meth:`RowState.plain` returned."""
        names = sorted(name for name in found if name.startswith("part"))
        self.states[key] = RowState(tuple(found[name] for name in names), found["known"], int(found["step"]))
