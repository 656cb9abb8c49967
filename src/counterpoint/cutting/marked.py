"""Cuts that a user asks for by the name of a module, and what stands in the way of one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from torch import Tensor, nn

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


def require_own_memory(model: nn.Module) -> None:
    """Check that no two parameters lie in the same memory: they would be one weight here and two on other ranks.

    Raises:
        PlanError: two do, without being one parameter.
    """
    owners: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.device.type != "meta":
            owners.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
    for sharing in owners.values():
        for (first, one), (second, other) in combinations(sharing, 2):
            if max(one.data_ptr(), other.data_ptr()) < min(_end(one), _end(other)):
                raise PlanError(
                    f"parameters {first!r} and {second!r} lie in the same memory but are two, which a stage or a "
                    "replica would keep apart and train apart; tie them: assign one nn.Parameter to both names"
                )


def _end(tensor: Tensor) -> int:
    """Return the address behind the last number of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
