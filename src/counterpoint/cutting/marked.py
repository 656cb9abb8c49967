"""Cuts that a user asks for by the name of a module, and what stands in the way of one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from counterpoint.cutting.places import Spans
from counterpoint.errors import PlanError


def require_modules(model: nn.Module, cuts: Sequence[str]) -> None:
    """Check that a model has the modules that a cut is to stand before.

    Raises:
        PlanError: it has no such module; the message has the nearest path.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for cut in cuts:
        if cut not in paths:
            near = difflib.get_close_matches(cut, paths, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise PlanError(
                f"cuts names {cut!r}, but {type(model).__name__} has no such module; {hint}a stage begins with a "
                "module, named by its path as in model.named_modules()"
            )


def marked_places(cuts: Sequence[str], spans: Spans, forbidden: Collection[int]) -> Mapping[str, int]:
    """Return the place in the order of operations at which each named module begins.

    Raises:
        PlanError: a module has no operations, or no cut can be where it begins.
    """
    for cut in cuts:
        if cut not in spans:
            raise PlanError(
                f"cuts names {cut!r}, which runs no operation of its own (it hands its input on, or is not called); no "
                "stage can begin with it; name the module that runs next"
            )
        if spans[cut][0] in forbidden:
            raise PlanError(
                f"cuts names {cut!r}, but no stage can begin there: random numbers are drawn on both sides from one "
                "state, or a tensor is changed in place behind it that is in use before; name a module further on, or "
                "one that has all of it inside"
            )
    return {f">{cut}": spans[cut][0] for cut in cuts}
