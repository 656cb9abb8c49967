"""Step commit: every rank of a group decides from the same step reports whether the step is applied.

A rank reports its loss, gradient norm, missing gradients and weight checksum as a few 64-bit numbers, which are
all-gathered; names of parameters follow only where a gradient is missing. :func:`decide_step` finds the loss, the norm
and what is not finite; :func:`decide_skips` decides which updates are skipped. Both are pure functions of the reports,
so all members reach the same result without another message.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import format_ranks


@dataclass(frozen=True, slots=True)
class StepGuard:
    """What is checked before an update, and what happens then.

    Args:
        clip_norm: gradients are scaled down to this global norm; None for no clipping.
        check_finite: ``loss`` checks the losses, ``gradients`` also every gradient, which reads it once more.
        nonfinite: ``error`` ends the run, ``skip`` skips the step on all ranks.
        clip_value: each element of a gradient is clamped to this magnitude; None for no clipping.
        max_consecutive_skips: more skipped steps in a row than this end the run.
    """

    clip_norm: float | None = None
    check_finite: Literal["loss", "gradients"] = "loss"
    nonfinite: Literal["error", "skip"] = "error"
    clip_value: float | None = None
    max_consecutive_skips: int = 20

    @property
    def needs_norm(self) -> bool:
        """Whether the gradient norm has to be computed."""
        return self.clip_norm is not None or self.check_finite == "gradients"


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank reports of a step.

    Args:
        loss_sum: mean loss of each microbatch times its samples, summed; nan and inf are kept.
        num_samples: the samples of these microbatches.
        squared_norm: of the gradients that this rank owns.
        nonfinite_micro: the first microbatch whose loss is not finite; -1 for none.
        missing_grads: the parameters that this rank computes with and that got no gradient.
        checksum: of a part of its weights, equal on replicas; 0 where no rank should have the same weights.
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
    """What a commit group decided.

    Args:
        loss: mean over the samples of the group; nan without samples.
        num_samples: samples of the group.
        norm: global gradient norm; nan if it was not needed.
        scale: what gradients are multiplied with before the update.
        skip_reason: what was not finite, so that the step is skipped; else empty. A step without samples is skipped,
            too: :func:`decide_skips`.
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
    """Return the report of a rank from the mean losses of its microbatches."""
    nonfinite_micro = next((micro for micro, loss in sorted(losses.items()) if not math.isfinite(loss)), -1)
    total = sum(loss * sizes[micro] for micro, loss in losses.items())
    return StepReport(
        total,
        sum(sizes[micro] for micro in losses),
        squared_norm,
        nonfinite_micro,
        tuple(missing_grads),
        checksum,
        is_idle,
    )


REPORT_NUMBERS = 6
"""Length of :func:`encode_report`."""


def encode_report(report: StepReport) -> list[float]:
    """Return a report as 64-bit numbers, the last one the number of missing gradients."""
    return [
        report.loss_sum,
        report.num_samples,
        report.squared_norm,
        report.nonfinite_micro,
        report.checksum,
        len(report.missing_grads),
    ]


def decode_report(numbers: Sequence[float], missing_grads: Sequence[str] = (), *, is_idle: bool = False) -> StepReport:
    """Return the report that :func:`encode_report` was given; names of missing gradients are sent separately."""
    loss_sum, num_samples, squared_norm, nonfinite_micro, checksum, _ = numbers
    return StepReport(
        loss_sum, int(num_samples), squared_norm, int(nonfinite_micro), tuple(missing_grads), int(checksum), is_idle
    )


def merge_results(first: StepResult, second: StepResult) -> StepResult:
    """Return the results of two commits of one step as one: the mean loss over all samples, the first skip reason.

    Example:
        >>> merge_results(StepResult(1.0, 1, 0.5, 1.0, ""), StepResult(3.0, 3, 0.2, 1.0, "")).loss
        2.5
    """
    num_samples = first.num_samples + second.num_samples
    with_samples = [result for result in (first, second) if result.num_samples]
    loss = sum(result.loss * result.num_samples for result in with_samples) / num_samples if num_samples else math.nan
    skip_reason = first.skip_reason or second.skip_reason
    return StepResult(loss, num_samples, max(first.norm, second.norm), min(first.scale, second.scale), skip_reason)


def decide_step(
    reports: Sequence[StepReport],
    group: Sequence[int],
    guard: StepGuard,
    loss_group: Collection[int] = (),
    microbatches_per_batch: int = 0,
) -> StepResult:
    """Return the result of a group; equal on all members, except norm and scale where ``loss_group`` differs.

    Args:
        reports: of all members, in the order of the group.
        group: the members.
        guard: what is checked.
        loss_group: the members whose gradients are clipped together with this rank's; empty for all.
        microbatches_per_batch: in an asynchronous pipeline; else 0.
    """
    num_samples = sum(report.num_samples for report in reports)
    loss = sum(report.loss_sum for report in reports) / num_samples if num_samples else math.nan
    squared_norm = sum(report.squared_norm for report in reports)
    skip_reason = _find_skip_reason(reports, group, squared_norm, microbatches_per_batch)
    if loss_group:
        squared_norm = sum(
            member_report.squared_norm
            for member, member_report in zip(group, reports, strict=True)
            if member in loss_group
        )
    norm = math.sqrt(squared_norm) if guard.needs_norm and math.isfinite(squared_norm) else math.nan
    scale = 1.0
    if guard.clip_norm is not None and not skip_reason:
        scale = min(1.0, guard.clip_norm / (norm + 1e-6))
    return StepResult(loss, num_samples, norm, scale, skip_reason)


def decide_skips(
    reports: Iterable[StepReport],
    result: StepResult,
    *,
    has_samples: bool,
    delays_grads: bool = False,
    skip_delayed: bool = False,
) -> tuple[bool, bool]:
    """Return whether this step's update is skipped, and whether the one that applies this step's gradients late is.

    All members that share a mean loss call this with the same arguments, so all of them skip the same updates. (Workers
    of ``easgd`` update on their own: one without samples skips its own step.) A skipped update changes neither weights
    nor optimizer state. A step without samples is skipped without a reason; with a reason,
    :func:`require_finite` may raise instead.

    Args:
        reports: of all members.
        result: what :func:`decide_step` returned for them.
        has_samples: whether any microbatch of the commit has samples, on whichever rank.
        delays_grads: whether a step applies the gradients of the step before (``staleness=1``).
        skip_delayed: whether the step before found its own gradients unusable, which this step would apply.

    Example:
        >>> reports = [StepReport(loss_sum=1.0, num_samples=2)]
        >>> result = StepResult(loss=0.5, num_samples=2, norm=math.nan, scale=1.0, skip_reason="")
        >>> decide_skips(reports, result, has_samples=True)
        (False, False)
        >>> decide_skips(reports, result, has_samples=False)
        (True, False)
    """
    if not delays_grads:
        return bool(result.skip_reason) or not has_samples, False
    reports = list(reports)
    has_finite_grads = math.isfinite(sum(report.squared_norm for report in reports))  # the delayed ones, applied now
    return skip_delayed or not has_finite_grads, has_nonfinite_loss(reports) or not has_samples


def has_nonfinite_loss(reports: Iterable[StepReport]) -> bool:
    """Return whether a loss of this step is not finite, so that its gradients are unusable."""
    return any(report.nonfinite_micro >= 0 for report in reports)


def _find_skip_reason(
    reports: Sequence[StepReport], group: Sequence[int], squared_norm: float, microbatches_per_batch: int
) -> str:
    nonfinite = [report for report in reports if report.nonfinite_micro >= 0]
    if microbatches_per_batch and nonfinite:
        # each stage of an asynchronous pipeline decides separately, from the last stage's loss: one text for all
        first = min(nonfinite, key=lambda report: report.nonfinite_micro)
        batch, micro = divmod(first.nonfinite_micro, microbatches_per_batch)
        return f"the loss of microbatch {micro} of batch {batch} is {first.loss_sum}"
    for rank, report in zip(group, reports, strict=True):
        if report.nonfinite_micro >= 0:
            return f"the loss of microbatch {report.nonfinite_micro} on rank {rank} is {report.loss_sum}"
    for rank, report in zip(group, reports, strict=True):
        if not math.isfinite(report.squared_norm):
            return f"a gradient on rank {rank} is not finite"
    return "" if math.isfinite(squared_norm) else "the gradients' norm is too large to be a number"


def require_finite(
    skip_reason: str, step: int, num_skipped: int, guard: StepGuard, *, is_async_pipeline: bool = False
) -> None:
    """Raise if a step may not be skipped.

    Raises:
        DataError: steps must not be skipped, or too many in a row were.
    """
    if skip_reason and guard.nonfinite == "error":
        clip = "clip_norm=1.0, clip_by='stage'" if is_async_pipeline else "clip_norm=1.0"
        raise DataError(
            f"step {step} cannot be applied: {skip_reason}; the parameters are unchanged; check the samples of this "
            f"step, lower the learning rate or clip with {clip}, or pass nonfinite='skip' to skip such steps on all "
            "ranks; if weights are already not finite, an earlier step had a finite loss but a gradient that was not: "
            "check_finite='gradients' finds that step"
        )
    if num_skipped > guard.max_consecutive_skips:
        raise DataError(
            f"{num_skipped} steps in a row were skipped, the last one, step {step}, because {skip_reason}; lower the "
            "learning rate, or resume from an earlier checkpoint"
        )


def find_unused_params(reports: Sequence[StepReport], computing_ranks: Mapping[str, Group]) -> tuple[str, ...]:
    """Return the parameters without a gradient on every rank that computes with them."""
    counts = Counter(name for report in reports for name in report.missing_grads)
    return tuple(name for name, num_ranks in counts.items() if num_ranks == len(computing_ranks[name]))


def warn_partially_unused(
    reports: Sequence[StepReport], group: Sequence[int], computing_ranks: Mapping[str, Group], step: int
) -> bool:
    """Warn of parameters that got a gradient on some ranks only; return whether there was one.

    Args:
        reports: of all members, in the order of the group.
        group: the members.
        computing_ranks: the ranks that compute with each parameter.
        step: its number.
    """
    idle = {rank for rank, report in zip(group, reports, strict=True) if report.is_idle}
    without: dict[str, Group] = {}
    for name in dict.fromkeys(name for report in reports for name in report.missing_grads):
        ranks_without = [rank for rank, report in zip(group, reports, strict=True) if name in report.missing_grads]
        if set(ranks_without) != set(computing_ranks[name]) and set(ranks_without) - idle:
            without[name] = tuple(sorted(set(ranks_without) - idle))
    if not without:
        return False
    first = next(iter(without))
    names = [
        name
        for name, ranks_without in without.items()
        if ranks_without == without[first] and computing_ranks[name] == computing_ranks[first]
    ]
    ranks_with = tuple(sorted(set(computing_ranks[first]) - set(without[first]) - idle))
    warnings.warn(
        f"{format_names(names)} got no gradient on {format_ranks(without[first])} in step {step}, but did on "
        f"{format_ranks(ranks_with)}; the sum of gradients is correct, but forward took a different branch on those "
        "ranks; if that is intended, pass unused_parameters='zero'",
        stacklevel=2,
    )
    return True


def format_names(names: Sequence[str]) -> str:
    """Return the first eight names as text, and the number of further ones."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def require_all_used(unused: Sequence[str], step: int) -> None:
    """Raise unless every trainable parameter got a gradient in this step.

    Optimizers pass over a parameter without a gradient but decay one with zeros, so plans would give different results.

    Raises:
        DataError: some got none.
    """
    if unused:
        raise DataError(
            f"no gradient reached {format_names(unused)}: the loss does not depend on "
            f"{'it' if len(unused) == 1 else 'them'}; freeze parameters that are not trained with "
            f"requires_grad_(False), use their output in the loss of every step (this was step {step}), or pass "
            "unused_parameters='zero' to use gradients of zeros"
        )


def gather_reports(fabric: Fabric, report: StepReport, group: Group) -> list[StepReport]:
    """Return the reports of all members, in the order of the group; names are sent only where gradients are missing."""
    num_members, position = len(group), group.index(fabric.rank)
    own_numbers = np.zeros((num_members, REPORT_NUMBERS))
    own_numbers[position] = encode_report(report)
    numbers = torch.from_numpy(own_numbers).view(-1)
    bounds = range(0, (num_members + 1) * REPORT_NUMBERS, REPORT_NUMBERS)
    fabric.all_gather("commit", numbers, bounds, group).wait()
    rows = numbers.view(num_members, REPORT_NUMBERS).tolist()
    if not any(row[-1] for row in rows):
        return [decode_report(row) for row in rows]
    gathered = fabric.gather_values("missing gradients", [report.is_idle, *report.missing_grads], group)
    idle_and_names = cast("list[tuple[bool, *tuple[str, ...]]]", gathered)
    return [decode_report(row, names, is_idle=idle) for row, (idle, *names) in zip(rows, idle_and_names, strict=True)]
