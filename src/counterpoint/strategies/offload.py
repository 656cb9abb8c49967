"""Offload: which tensors leave memory between their uses, and where to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from counterpoint.errors import PlanError
from counterpoint.optim.validation import shorten
from counterpoint.program.instruction import OffloadPlace

OFFLOAD_PASS = "offload"
"""Name of the pass; what is offloaded follows after a colon."""


@dataclass(frozen=True, slots=True)
class Offloading:
    """Where the optimizer state lies between updates, with the master weights of casts.

    Args:
        state: ``disk`` for a file of each rank, ``host`` for the memory of the host of a device.
    """

    state: OffloadPlace

    @staticmethod
    def from_pass(name: str) -> Offloading:
        """Return the offloading of a pass such as ``offload:state=disk``.

        Raises:
            PlanError: it does not say what is offloaded to where.

        Example:
            >>> Offloading.from_pass("offload:state=disk")
            Offloading(state='disk')
        """
        what, _, place = name.partition(":")[2].partition("=")
        for known in get_args(OffloadPlace):
            if (what, place) == ("state", known):
                return Offloading(known)
        places = " or ".join(f"{OFFLOAD_PASS}:state={known}" for known in get_args(OffloadPlace))
        raise PlanError(
            f"the pass {shorten(repr(name))} does not say what is offloaded and where to; write {places}, which keeps "
            "the optimizer state there between updates"
        )
