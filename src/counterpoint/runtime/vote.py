"""The step commit: collect, decide, apply. Every rank of a group decides the same from the same ballots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from counterpoint.errors import DataError


@dataclass(frozen=True, slots=True)
class Guard:
    """What is checked before an update, and what is done then.

    Args:
        clip_norm: gradients are scaled down to this global norm; None for no clipping.
        watch: ``loss`` checks the losses, ``gradients`` every gradient as well (it is read once more).
        nonfinite: ``error`` ends the run, ``skip`` leaves out the step on all ranks.
        most_skips: so many skipped steps in a row end the run all the same.
    """

    clip_norm: float | None = None
    watch: Literal["loss", "gradients"] = "loss"
    nonfinite: Literal["error", "skip"] = "error"
    most_skips: int = 20

    @property
    def needs_norm(self) -> bool:
        """Whether the norm of the gradients has to be computed."""
        return self.clip_norm is not None or self.watch == "gradients"


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank knows of a step.

    Args:
        loss_sum: sum over its samples of the microbatches' mean losses; nan and inf travel as they are.
        num_samples: how many samples that were.
        squared_norm: of the gradients it answers for.
        worst: the microbatch with a loss that is not finite; -1 for none.
    """

    loss_sum: float = 0.0
    num_samples: int = 0
    squared_norm: float = 0.0
    worst: int = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a group decided.

    Args:
        loss: mean over the samples of the group; nan when it saw none.
        num_samples: samples of the group.
        norm: global gradient norm; nan when it was not needed.
        scale: what gradients are multiplied with before the update.
        fault: why the step is left out; empty when it is applied.
    """

    loss: float
    num_samples: int
    norm: float
    scale: float
    fault: str


def ballot_of(losses: Mapping[int, float], sizes: Mapping[int, int], squared_norm: float) -> Ballot:
    """Return the ballot of a rank from its microbatches' mean losses."""
    worst = next((micro for micro, loss in sorted(losses.items()) if not math.isfinite(loss)), -1)
    total = sum(loss * sizes[micro] for micro, loss in losses.items())
    return Ballot(total, sum(sizes[micro] for micro in losses), squared_norm, worst)


def to_text(ballot: Ballot) -> dict[str, str]:
    """Return the ballot as JSON can hold it, nan and inf included; a float's text reads back as the same float."""
    return {key: repr(value) for key, value in asdict(ballot).items()}


def from_text(text: Mapping[str, str]) -> Ballot:
    """Return the ballot that :func:`to_text` wrote."""
    return Ballot(float(text["loss_sum"]), int(text["num_samples"]), float(text["squared_norm"]), int(text["worst"]))


def decide(ballots: Sequence[Ballot], group: Sequence[int], guard: Guard) -> Verdict:
    """Return the verdict of a group; the same on all its members."""
    count = sum(ballot.num_samples for ballot in ballots)
    loss = sum(ballot.loss_sum for ballot in ballots) / count if count else math.nan
    squared = sum(ballot.squared_norm for ballot in ballots)
    fault = _fault(ballots, group, squared)
    norm = math.sqrt(squared) if guard.needs_norm and math.isfinite(squared) else math.nan
    scale = 1.0
    if guard.clip_norm is not None and not fault:
        scale = min(1.0, guard.clip_norm / (norm + 1e-6))
    return Verdict(loss, count, norm, scale, fault)


def _fault(ballots: Sequence[Ballot], group: Sequence[int], squared_norm: float) -> str:
    for rank, ballot in zip(group, ballots, strict=True):
        if ballot.worst >= 0:
            return f"the loss of microbatch {ballot.worst} on rank {rank} is {ballot.loss_sum}"
    for rank, ballot in zip(group, ballots, strict=True):
        if not math.isfinite(ballot.squared_norm):
            return f"a gradient on rank {rank} is not finite"
    return "" if math.isfinite(squared_norm) else "the gradients' norm is too large to be a number"


def require_finite(fault: str, step: int, skipped: int, guard: Guard) -> None:
    """Check a verdict's fault against what is allowed.

    Raises:
        DataError: the step must not be skipped, or too many were in a row.
    """
    if fault and guard.nonfinite == "error":
        raise DataError(
            f"step {step} cannot be applied: {fault}; the parameters are as they were before the step; look at the "
            "samples of this step, lower the learning rate or clip with clip_norm=1.0, or pass nonfinite='skip' to "
            "leave such steps out on all ranks"
        )
    if skipped > guard.most_skips:
        raise DataError(
            f"{skipped} steps in a row were skipped, the last one, step {step}, because {fault}; the run would only "
            "waste time: lower the learning rate, or start again from an earlier checkpoint"
        )
