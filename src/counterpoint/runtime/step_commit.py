"""The step commit: collect, decide, apply. Every rank of a group decides the same from the same ballots.

How ballots reach all ranks of a commit: as a few numbers, with names behind them only where something is missing.

What one rank's steps leave behind: what was decided, what a server answered, and when calls were made.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import torch

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import format_ranks


@dataclass(frozen=True, slots=True)
class StepGuard:
    """What is checked before an update, and what is done then.

    Args:
        clip_norm: gradients are scaled down to this global norm; None for no clipping.
        watch: ``loss`` checks the losses, ``gradients`` every gradient as well (it is read once more).
        nonfinite: ``error`` ends the run, ``skip`` leaves out the step on all ranks.
        clip_value: then every number of a gradient is brought to at most this size; None for no clipping.
        most_skips: so many skipped steps in a row end the run all the same.
    """

    clip_norm: float | None = None
    check_finite: Literal["loss", "gradients"] = "loss"
    nonfinite: Literal["error", "skip"] = "error"
    clip_value: float | None = None
    max_consecutive_skips: int = 20

    @property
    def needs_norm(self) -> bool:
        """Whether the norm of the gradients has to be computed."""
        return self.clip_norm is not None or self.check_finite == "gradients"


@dataclass(frozen=True, slots=True)
class StepReport:
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
    nonfinite_micro: int = -1
    missing_grads: tuple[str, ...] = ()
    checksum: int = 0
    is_idle: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
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
    skip_reason: str


def make_step_report(
    losses: Mapping[int, float],
    sizes: Mapping[int, int],
    squared_norm: float,
    missing_grads: Sequence[str] = (),
    *,
    checksum: int = 0,
    is_idle: bool = False,
) -> StepReport:
    """Return the ballot of a rank from its microbatches' mean losses."""
    worst = next((micro for micro, loss in sorted(losses.items()) if not math.isfinite(loss)), -1)
    total = sum(loss * sizes[micro] for micro, loss in losses.items())
    return StepReport(
        total, sum(sizes[micro] for micro in losses), squared_norm, worst, tuple(missing_grads), checksum, is_idle
    )


REPORT_NUMBERS = 6
"""How many numbers :func:`encode_report` makes of a ballot."""


def encode_report(report: StepReport) -> list[float]:
    """Return the ballot as numbers of 64 bits, nan and inf among them, and how many parameters are missing."""
    return [
        report.loss_sum,
        report.num_samples,
        report.squared_norm,
        report.nonfinite_micro,
        report.checksum,
        len(report.missing_grads),
    ]


def decode_report(numbers: Sequence[float], missing_grads: Sequence[str] = (), *, is_idle: bool = False) -> StepReport:
    """Return the ballot that :func:`encode_report` was given; what is missing from whom travels apart."""
    loss_sum, num_samples, squared_norm, worst, mark, _ = numbers
    return StepReport(loss_sum, int(num_samples), squared_norm, int(worst), tuple(missing_grads), int(mark), is_idle)


def merge_results(first: StepResult, second: StepResult) -> StepResult:
    """Return what two commits of one step decided, as one: the mean loss over all samples, the first fault.

    Example:
        >>> both(Verdict(1.0, 1, 0.5, 1.0, ""), Verdict(3.0, 3, 0.2, 1.0, "")).loss
        2.5
    """
    count = first.num_samples + second.num_samples
    seen = [verdict for verdict in (first, second) if verdict.num_samples]
    loss = sum(verdict.loss * verdict.num_samples for verdict in seen) / count if count else math.nan
    fault = first.skip_reason or second.skip_reason
    return StepResult(loss, count, max(first.norm, second.norm), min(first.scale, second.scale), fault)


def decide_step(
    reports: Sequence[StepReport],
    group: Sequence[int],
    guard: StepGuard,
    loss_group: Collection[int] = (),
    microbatches_per_batch: int = 0,
) -> StepResult:
    """Return the verdict of a group; the same on all its members, but for norm and scale where these are apart.

    Args:
        ballots: of all members, in the order of the group.
        group: who decides.
        guard: what is checked.
        own: the members whose gradients are one with this rank's; empty for all.
        stride: in a stream, how many microbatches a batch has.
    """
    count = sum(ballot.num_samples for ballot in reports)
    loss = sum(ballot.loss_sum for ballot in reports) / count if count else math.nan
    squared = sum(ballot.squared_norm for ballot in reports)
    fault = _find_skip_reason(reports, group, squared, microbatches_per_batch)
    if loss_group:
        squared = sum(one.squared_norm for member, one in zip(group, reports, strict=True) if member in loss_group)
    norm = math.sqrt(squared) if guard.needs_norm and math.isfinite(squared) else math.nan
    scale = 1.0
    if guard.clip_norm is not None and not fault:
        scale = min(1.0, guard.clip_norm / (norm + 1e-6))
    return StepResult(loss, count, norm, scale, fault)


def has_nonfinite_loss(reports: Iterable[StepReport]) -> bool:
    """Tell whether the gradients that were computed in this step are of no use."""
    return any(ballot.nonfinite_micro >= 0 for ballot in reports)


def has_nonfinite_grad(reports: Iterable[StepReport]) -> bool:
    """Tell whether the gradients that would be applied in this step are of no use, be they of an earlier one."""
    return not math.isfinite(sum(ballot.squared_norm for ballot in reports))


def _find_skip_reason(
    reports: Sequence[StepReport], group: Sequence[int], squared_norm: float, microbatches_per_batch: int
) -> str:
    bad = [ballot for ballot in reports if ballot.nonfinite_micro >= 0]
    if (
        microbatches_per_batch and bad
    ):  # stages decide each for itself, by a loss that came from the last one, and say the same
        first = min(bad, key=lambda ballot: ballot.nonfinite_micro)
        return f"the loss of microbatch {first.nonfinite_micro % microbatches_per_batch} of batch {first.nonfinite_micro // microbatches_per_batch} is {first.loss_sum}"
    for rank, ballot in zip(group, reports, strict=True):
        if ballot.nonfinite_micro >= 0:
            return f"the loss of microbatch {ballot.nonfinite_micro} on rank {rank} is {ballot.loss_sum}"
    for rank, ballot in zip(group, reports, strict=True):
        if not math.isfinite(ballot.squared_norm):
            return f"a gradient on rank {rank} is not finite"
    return "" if math.isfinite(squared_norm) else "the gradients' norm is too large to be a number"


def require_finite(
    skip_reason: str, step: int, num_skipped: int, guard: StepGuard, *, is_async_pipeline: bool = False
) -> None:
    """Check a verdict's fault against what is allowed; in a stream each stage clips by its own norm, if it does.

    Raises:
        DataError: the step must not be skipped, or too many were in a row.
    """
    if skip_reason and guard.nonfinite == "error":
        clip = "clip_norm=1.0, clip_by='stage'" if is_async_pipeline else "clip_norm=1.0"
        raise DataError(
            f"step {step} cannot be applied: {skip_reason}; the parameters are as they were before the step; look at the "
            f"samples of this step, lower the learning rate or clip with {clip}, or pass nonfinite='skip' to "
            "leave such steps out on all ranks; if weights are not finite by now, an earlier step's gradient was not, "
            "though its loss was: check_finite='gradients' finds that step"
        )
    if num_skipped > guard.max_consecutive_skips:
        raise DataError(
            f"{num_skipped} steps in a row were skipped, the last one, step {step}, because {skip_reason}; the run would only "
            "waste time: lower the learning rate, or start again from an earlier checkpoint"
        )


def find_unused_params(reports: Sequence[StepReport], computing_ranks: Mapping[str, Group]) -> tuple[str, ...]:
    """Return the parameters that got no gradient anywhere: missing on every rank that computes with them.

    One that only some microbatches or ranks used has a gradient, the sum of theirs.
    """
    counts = Counter(name for ballot in reports for name in ballot.missing_grads)
    return tuple(name for name, count in counts.items() if count == len(computing_ranks[name]))


def warn_partially_unused(
    reports: Sequence[StepReport], group: Sequence[int], computing_ranks: Mapping[str, Group], step: int
) -> bool:
    """Warn of parameters that got a gradient on some ranks only, and return whether there was one.

    Args:
        ballots: of all members, in the order of the group.
        group: who decides.
        readers: the ranks that compute with each parameter.
        step: its number.
    """
    idle = {rank for rank, ballot in zip(group, reports, strict=True) if ballot.is_idle}
    without: dict[str, Group] = {}
    for name in dict.fromkeys(name for ballot in reports for name in ballot.missing_grads):
        found = [rank for rank, ballot in zip(group, reports, strict=True) if name in ballot.missing_grads]
        if set(found) != set(computing_ranks[name]) and set(found) - idle:
            without[name] = tuple(sorted(set(found) - idle))
    if not without:
        return False
    first = next(iter(without))
    names = [
        name
        for name, found in without.items()
        if found == without[first] and computing_ranks[name] == computing_ranks[first]
    ]
    others = tuple(sorted(set(computing_ranks[first]) - set(without[first]) - idle))
    warnings.warn(
        f"{format_names(names)} got no gradient on {format_ranks(without[first])} in step {step}, but did on {format_ranks(others)}; the "
        "gradients are summed as they are, so the step is right, but forward took another way there: if it was not "
        "meant to, look at what it decides by, and if it was, pass unused_parameters='zero'",
        stacklevel=2,
    )
    return True


def format_names(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def require_all_used(unused: Sequence[str], step: int) -> None:
    """Check that every trainable parameter got a gradient in this step.

    Optimizers pass over a parameter without one, but decay one that got zeros, so that plans would come to differ.

    Raises:
        DataError: some got none.
    """
    if unused:
        raise DataError(
            f"no gradient reached {format_names(unused)}: the loss does not depend on "
            f"{'it' if len(unused) == 1 else 'them'}; freeze what is not trained with requires_grad_(False), use its "
            f"output in the loss of every step (this was step {step}), or pass unused_parameters='zero' to train on with "
            "gradients of zeros"
        )


def gather_reports(fabric: Fabric, report: StepReport, group: Group) -> list[StepReport]:
    """Return the ballots of all members, in their order; names travel only where parameters are missing."""
    count, place = len(group), group.index(fabric.rank)
    own = np.zeros((count, REPORT_NUMBERS))
    own[place] = encode_report(report)
    numbers = torch.from_numpy(own).view(-1)
    bounds = range(0, (count + 1) * REPORT_NUMBERS, REPORT_NUMBERS)
    fabric.all_gather("commit", numbers, bounds, group).wait()
    rows = numbers.view(count, REPORT_NUMBERS).tolist()
    if not any(row[-1] for row in rows):
        return [decode_report(row) for row in rows]
    found = fabric.gather_values("missing gradients", [report.is_idle, *report.missing_grads], group)
    told = cast("list[tuple[bool, *tuple[str, ...]]]", found)
    return [decode_report(row, names, is_idle=idle) for row, (idle, *names) in zip(rows, told, strict=True)]


@dataclass(frozen=True, slots=True)
class PushRecord:
    """One push to a server: which unit, from which worker, and which version was there afterwards.

    That version is what the worker gets back, or a later one where it has to wait for slower workers. A push that
    brings no gradient makes no version; it is noted because of what the worker got back.
    """

    unit: tuple[int, ...]
    worker: int
    version: int


@dataclass(slots=True)
class CallTiming:
    """What the interpreter tells of a call, or of a transfer beside it: the words of the row it was, and its times."""

    start: int
    stop: int
    start_s: float
    stop_s: float
    is_transfer: bool = False


@dataclass(slots=True)
class RankState:
    """What one rank's step left behind.

    Args:
        verdict: of the last commit; None for a rank that commits nothing.
        decided: how many of the step's commits are over.
        skipped: steps left out in a row.
        leaves_out: whether the updates behind the last commit are left out.
        leaves_out_late: whether those with the gradients that were set aside will be.
        has_told: whether it has been said that parameters get gradients on some ranks only.
        journal: the pushes that a server has applied, in order.
        notes: the calls of the last step with their times, when they are kept.
    """

    result: StepResult | None = None
    num_commits: int = 0
    num_skipped: int = 0
    skip_update: bool = False
    skip_delayed_update: bool = False
    has_warned: bool = False
    push_log: list[PushRecord] = field(default_factory=list)
    timings: list[CallTiming] = field(default_factory=list)
