"""Gradients that move from their parameters into a flat one together: few calls for many small parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSet

import torch
from torch import Tensor, nn

from counterpoint.runtime.layout import Slot


def move_together(
    slots: Iterable[Slot], params: Mapping[str, nn.Parameter], flat: Tensor, held: Iterable[MutableSet[str]]
) -> None:
    """The gradients of these parameters are in their places in the flat one and no longer on the parameters.

    Those that follow one another are copied in one call. What is no dense tensor, or has a history, stays where it is.

    Args:
        slots: of parameters that have nothing in the flat gradient yet.
        params: all parameters, by name.
        flat: the flat gradient.
        held: sets of names, to which those of the parameters are added whose gradient has moved.

    Example:
        >>> one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
        >>> one.grad, other.grad, flat = torch.ones(2), torch.full((1,), 2.0), torch.zeros(3)
        >>> slots = [Slot("one", (2,), 0, 0), Slot("other", (1,), 2, 0)]
        >>> move_together(slots, {"one": one, "other": other}, flat, [names := set()])
        >>> flat, sorted(names), one.grad
        (tensor([1., 1., 2.]), ['one', 'other'], None)
    """
    for run in _runs(sorted((slot for slot in slots if _is_plain(params[slot.name].grad)), key=_start)):
        there = flat[run[0].start : run[-1].stop]
        fresh = [params[slot.name].grad for slot in run]
        torch.cat([gradient.reshape(-1) for gradient in fresh if gradient is not None], out=there)
        for slot in run:
            params[slot.name].grad = None
            for names in held:
                names.add(slot.name)


def _start(slot: Slot) -> int:
    return slot.start


def _is_plain(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.layout == torch.strided and not gradient.requires_grad


def _runs(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """Yield slots that lie back to back, given all in their order."""
    run: list[Slot] = []
    for slot in slots:
        if run and run[-1].stop != slot.start:
            yield run
            run = []
        run.append(slot)
    if run:
        yield run
