"""Offload: which tensors leave memory between their uses, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Literal, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.optim.validation import shorten
from counterpoint.program.instruction import OffloadPlace
from counterpoint.strategies.recomputation import parse_selector

OFFLOAD_PASS = "offload"
"""Name of the pass; what is offloaded follows after a colon."""

OFFLOAD_ACTIVATIONS_PASS = f"{OFFLOAD_PASS}:activations=disk"
"""The pass for the inputs that blocks are recomputed from; after another colon it may select blocks."""

ActivationPlace: TypeAlias = Literal["disk"]
"""Where activations are offloaded to."""

ParamPlace: TypeAlias = Literal["disk"]
"""Where parameters are offloaded to."""


@dataclass(frozen=True, slots=True)
class Offloading:
    """Where what a step uses for a moment lies the rest of the time.

    Args:
        state: of the optimizer, with the master weights of casts, between updates: ``disk`` for a file of each rank,
            ``host`` for the memory of the host of a device; None to keep it in memory.
        activations: the inputs that blocks are recomputed from, between forward and backward: ``disk``, or None.
        params: this rank's shards of weights that are gathered for each use, between their uses: ``disk``, or None.
        selector: the blocks whose inputs are offloaded, of those that are recomputed, as the pass ``recompute`` selects
            blocks; empty for all.
    """

    state: OffloadPlace | None = None
    activations: ActivationPlace | None = None
    params: ParamPlace | None = None
    selector: str = ""

    @staticmethod
    def from_passes(names: Sequence[str]) -> Offloading:
        """Return the offloading of passes such as ``offload:state=disk``, each of another kind of tensors.

        Raises:
            PlanError: one does not say what is offloaded to where, or two say it of the same.

        Example:
            >>> Offloading.from_passes(["offload:state=disk"])
            Offloading(state='disk', activations=None, params=None, selector='')
        """
        found = Offloading()
        for name in names:
            selector = ""
            if name.startswith(f"{OFFLOAD_ACTIVATIONS_PASS}:"):
                selector = parse_selector(name, OFFLOAD_ACTIVATIONS_PASS)
                own = Offloading(activations="disk")
            elif name not in _OF_PASS:
                near = get_close_matches(name, _OF_PASS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"write {', '.join(_OF_PASS)}"
                raise PlanError(
                    f"the pass {shorten(repr(name))} does not say what is offloaded and where to: state is the "
                    "optimizer's, between updates, activations are what blocks are recomputed from, until their "
                    f"backward, and params are the weights that zero(n, level=3) shards; {hint}"
                )
            else:
                own = _OF_PASS[name]
            moved = {kind: place for kind, place in asdict(own).items() if place}
            if any(getattr(found, kind) for kind in moved):
                raise PlanError(f"the passes {' and '.join(names)} both say what is offloaded; drop one of the two")
            found = replace(found, **moved, selector=selector or found.selector)
        return found


_OF_PASS = {
    f"{OFFLOAD_PASS}:state=disk": Offloading(state="disk"),
    f"{OFFLOAD_PASS}:state=host": Offloading(state="host"),
    OFFLOAD_ACTIVATIONS_PASS: Offloading(activations="disk"),
    f"{OFFLOAD_PASS}:params=disk": Offloading(params="disk"),
}
