"""The step commit: collect, decide, apply. Every rank of a group decides the same from the same ballots."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import ranks


@dataclass(frozen=True, slots=True)
class Guard:
    """What is checked before an update, and what is done then.

    Args:
        clip_norm: gradients are scaled down to this global norm; None for no clipping.
        watch: ``loss`` checks the losses, ``gradients`` every gradient as well (it is read once more).
        nonfinite: ``error`` ends the run, ``skip`` leaves out the step on all ranks.
        clip_value: then every number of a gradient is brought to at most this size; None for no clipping.
        most_skips: so many skipped steps in a row end the run all the same.
    """

    clip_norm: float | None = None
    watch: Literal["loss", "gradients"] = "loss"
    nonfinite: Literal["error", "skip"] = "error"
    clip_value: float | None = None
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
        missing: the parameters it computes with on which none of its microbatches has put a gradient.
        mark: a number for some of its weights, the same for the same ones; 0 where nobody should have the same.
        is_idle: whether none of its microbatches had samples.
    """

    loss_sum: float = 0.0
    num_samples: int = 0
    squared_norm: float = 0.0
    worst: int = -1
    missing: tuple[str, ...] = ()
    mark: int = 0
    is_idle: bool = False


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


def ballot_of(
    losses: Mapping[int, float],
    sizes: Mapping[int, int],
    squared_norm: float,
    missing: Sequence[str] = (),
    *,
    mark: int = 0,
    is_idle: bool = False,
) -> Ballot:
    """Return the ballot of a rank from its microbatches' mean losses."""
    worst = next((micro for micro, loss in sorted(losses.items()) if not math.isfinite(loss)), -1)
    total = sum(loss * sizes[micro] for micro, loss in losses.items())
    return Ballot(total, sum(sizes[micro] for micro in losses), squared_norm, worst, tuple(missing), mark, is_idle)


BALLOT_NUMBERS = 6
"""How many numbers :func:`to_numbers` makes of a ballot."""


def to_numbers(ballot: Ballot) -> list[float]:
    """Return the ballot as numbers of 64 bits, nan and inf among them, and how many parameters are missing."""
    return [ballot.loss_sum, ballot.num_samples, ballot.squared_norm, ballot.worst, ballot.mark, len(ballot.missing)]


def from_numbers(numbers: Sequence[float], missing: Sequence[str] = (), *, is_idle: bool = False) -> Ballot:
    """Return the ballot that :func:`to_numbers` was given; what is missing from whom travels apart."""
    loss_sum, num_samples, squared_norm, worst, mark, _ = numbers
    return Ballot(loss_sum, int(num_samples), squared_norm, int(worst), tuple(missing), int(mark), is_idle)


def both(first: Verdict, second: Verdict) -> Verdict:
    """Return what two commits of one step decided, as one: the mean loss over all samples, the first fault.

    Example:
        >>> both(Verdict(1.0, 1, 0.5, 1.0, ""), Verdict(3.0, 3, 0.2, 1.0, "")).loss
        2.5
    """
    count = first.num_samples + second.num_samples
    seen = [verdict for verdict in (first, second) if verdict.num_samples]
    loss = sum(verdict.loss * verdict.num_samples for verdict in seen) / count if count else math.nan
    fault = first.fault or second.fault
    return Verdict(loss, count, max(first.norm, second.norm), min(first.scale, second.scale), fault)


def decide(
    ballots: Sequence[Ballot], group: Sequence[int], guard: Guard, own: Collection[int] = (), stride: int = 0
) -> Verdict:
    """Return the verdict of a group; the same on all its members, but for norm and scale where these are apart.

    Args:
        ballots: of all members, in the order of the group.
        group: who decides.
        guard: what is checked.
        own: the members whose gradients are one with this rank's; empty for all.
        stride: in a stream, how many microbatches a batch has.
    """
    count = sum(ballot.num_samples for ballot in ballots)
    loss = sum(ballot.loss_sum for ballot in ballots) / count if count else math.nan
    squared = sum(ballot.squared_norm for ballot in ballots)
    fault = _fault(ballots, group, squared, stride)
    if own:
        squared = sum(one.squared_norm for member, one in zip(group, ballots, strict=True) if member in own)
    norm = math.sqrt(squared) if guard.needs_norm and math.isfinite(squared) else math.nan
    scale = 1.0
    if guard.clip_norm is not None and not fault:
        scale = min(1.0, guard.clip_norm / (norm + 1e-6))
    return Verdict(loss, count, norm, scale, fault)


def has_bad_loss(ballots: Iterable[Ballot]) -> bool:
    """Tell whether the gradients that were computed in this step are of no use."""
    return any(ballot.worst >= 0 for ballot in ballots)


def has_bad_gradient(ballots: Iterable[Ballot]) -> bool:
    """Tell whether the gradients that would be applied in this step are of no use, be they of an earlier one."""
    return not math.isfinite(sum(ballot.squared_norm for ballot in ballots))


def _fault(ballots: Sequence[Ballot], group: Sequence[int], squared_norm: float, stride: int) -> str:
    bad = [ballot for ballot in ballots if ballot.worst >= 0]
    if stride and bad:  # stages decide each for itself, by a loss that came from the last one, and say the same
        first = min(bad, key=lambda ballot: ballot.worst)
        return f"the loss of microbatch {first.worst % stride} of batch {first.worst // stride} is {first.loss_sum}"
    for rank, ballot in zip(group, ballots, strict=True):
        if ballot.worst >= 0:
            return f"the loss of microbatch {ballot.worst} on rank {rank} is {ballot.loss_sum}"
    for rank, ballot in zip(group, ballots, strict=True):
        if not math.isfinite(ballot.squared_norm):
            return f"a gradient on rank {rank} is not finite"
    return "" if math.isfinite(squared_norm) else "the gradients' norm is too large to be a number"


def require_finite(fault: str, step: int, skipped: int, guard: Guard, *, is_stream: bool = False) -> None:
    """Check a verdict's fault against what is allowed; in a stream each stage clips by its own norm, if it does.

    Raises:
        DataError: the step must not be skipped, or too many were in a row.
    """
    if fault and guard.nonfinite == "error":
        clip = "clip_norm=1.0, clip_by='stage'" if is_stream else "clip_norm=1.0"
        raise DataError(
            f"step {step} cannot be applied: {fault}; the parameters are as they were before the step; look at the "
            f"samples of this step, lower the learning rate or clip with {clip}, or pass nonfinite='skip' to "
            "leave such steps out on all ranks; if weights are not finite by now, an earlier step's gradient was not, "
            "though its loss was: watch='gradients' finds that step"
        )
    if skipped > guard.most_skips:
        raise DataError(
            f"{skipped} steps in a row were skipped, the last one, step {step}, because {fault}; the run would only "
            "waste time: lower the learning rate, or start again from an earlier checkpoint"
        )


def unreached(ballots: Sequence[Ballot], readers: Mapping[str, Group]) -> tuple[str, ...]:
    """Return the parameters that got no gradient anywhere: missing on every rank that computes with them.

    One that only some microbatches or ranks used has a gradient, the sum of theirs.
    """
    counts = Counter(name for ballot in ballots for name in ballot.missing)
    return tuple(name for name, count in counts.items() if count == len(readers[name]))


def warn_of_parted(ballots: Sequence[Ballot], group: Sequence[int], readers: Mapping[str, Group], step: int) -> bool:
    """Warn of parameters that got a gradient on some ranks only, and return whether there was one.

    Args:
        ballots: of all members, in the order of the group.
        group: who decides.
        readers: the ranks that compute with each parameter.
        step: its number.
    """
    idle = {rank for rank, ballot in zip(group, ballots, strict=True) if ballot.is_idle}
    without: dict[str, Group] = {}
    for name in dict.fromkeys(name for ballot in ballots for name in ballot.missing):
        found = [rank for rank, ballot in zip(group, ballots, strict=True) if name in ballot.missing]
        if set(found) != set(readers[name]) and set(found) - idle:
            without[name] = tuple(sorted(set(found) - idle))
    if not without:
        return False
    first = next(iter(without))
    names = [name for name, found in without.items() if found == without[first] and readers[name] == readers[first]]
    others = tuple(sorted(set(readers[first]) - set(without[first]) - idle))
    warnings.warn(
        f"{listed(names)} got no gradient on {ranks(without[first])} in step {step}, but did on {ranks(others)}; the "
        "gradients are summed as they are, so the step is right, but forward took another way there: if it was not "
        "meant to, look at what it decides by, and if it was, pass unused='zero'",
        stacklevel=2,
    )
    return True


def listed(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def require_reached(missing: Sequence[str], step: int) -> None:
    """Check that every trainable parameter got a gradient in this step.

    Optimizers pass over a parameter without one, but decay one that got zeros, so that plans would come to differ.

    Raises:
        DataError: some got none.
    """
    if missing:
        raise DataError(
            f"no gradient reached {listed(missing)}: the loss does not depend on "
            f"{'it' if len(missing) == 1 else 'them'}; freeze what is not trained with requires_grad_(False), use its "
            f"output in the loss of every step (this was step {step}), or pass unused='zero' to train on with "
            "gradients of zeros"
        )
