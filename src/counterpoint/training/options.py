"""How a run trains, apart from its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from counterpoint.errors import PlanError


@dataclass(frozen=True, slots=True)
class Options:
    """Settings that every strategy obeys alike.

    Args:
        seed: of sample order and of everything that is drawn.
        clip_norm: global norm to which gradients are scaled down; None for no clipping.
        watch: ``loss`` checks the losses of a step, ``gradients`` every gradient as well.
        nonfinite: ``error`` ends the run at a loss or gradient that is not finite, ``skip`` leaves the step out.
        unused: what a trainable parameter without a gradient means: ``error``, or ``zero`` for a gradient of zeros.
        dims: names of the (out, in) dims of linear layers by pattern of module path, for tensor(...).
        deadline_s: the longest that any rank waits for another.
        one_copy: whether replicas of one host have one copy of weights and optimizer state, where they can.
        keep_freed: whether memory that a step frees stays with the process for the next one; glibc only.
    """

    seed: int = 0
    clip_norm: float | None = None
    watch: Literal["loss", "gradients"] = "loss"
    nonfinite: Literal["error", "skip"] = "error"
    unused: Literal["error", "zero"] = "error"
    dims: Mapping[str, tuple[str, str]] | None = None
    deadline_s: float = 60.0
    one_copy: bool = True
    keep_freed: bool = True

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise PlanError(f"clip_norm={self.clip_norm} would leave no gradient; give a positive norm, or None")
        if not self.deadline_s > 0:
            raise PlanError(f"deadline_s={self.deadline_s} leaves no time to wait; give a positive number of seconds")
        for name, allowed in (
            ("watch", ("loss", "gradients")),
            ("nonfinite", ("error", "skip")),
            ("unused", ("error", "zero")),
        ):
            if getattr(self, name) not in allowed:
                raise PlanError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
