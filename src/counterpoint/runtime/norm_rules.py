"""Which rule the norms of a run follow, and which plans they refuse."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from counterpoint.runtime.build import Parts, domains_of
from counterpoint.runtime.deferred import Deferred, kept_of, peers_of
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.normalizing import Norms
from counterpoint.runtime.together import (
    Together,
    norms_of,
    require_alone,
    require_meetings,
    require_one_forward,
    seats_of,
)

NormRule: TypeAlias = Literal["deferred", "microbatch", "sync", "error"]
"""When running statistics change, and whose values are normalized together; see :class:`Options`."""


def norms_for(parts: Parts, model: nn.Module, interpreter: Interpreter, rule: NormRule | None) -> Norms | None:
    """Return what a rank's modules of batch norm do; None for a model without any that a plan could change.

    Args:
        parts: what all ranks share.
        model: the one whose buffers the rank began with.
        interpreter: of the rank.
        rule: what was asked for.

    Raises:
        PlanError: norms would have to meet where they cannot.
    """
    fabric, store = interpreter.fabric, interpreter.store
    used = {name for segment in interpreter.compute.model.segments.values() for name in segment.buffers}
    kept = [one for one in kept_of(model) if one.mean in used]
    meeting = norms_of(model, every=rule == "sync")
    together = None
    if meeting:
        if parts.turns[-1].stream is None:
            require_meetings(parts.program, meeting)
            require_one_forward(parts.program, meeting)
        else:
            require_alone(parts.program, meeting)
        together = Together(meeting, store, fabric, seats_of(parts.program, fabric.rank))
    if not kept and together is None:
        return None
    is_cut = any(len(domain) > 1 for domain in domains_of(parts.program, fabric.rank))
    deferred = None
    if kept and rule != "microbatch" and (is_cut or parts.guard.nonfinite == "skip"):
        deferred = Deferred(kept, store.buffers, fabric, peers_of(parts.program, fabric.rank))
    return Norms(kept, store, together, deferred)
