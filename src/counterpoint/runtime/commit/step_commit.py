"""Step commit: every rank of a group decides from the same step reports whether the step is applied.

A rank reports its loss, gradient norm, what is not finite, missing gradients and weight checksum as a few 64-bit
numbers, which are all-gathered; names of parameters follow only where a gradient is missing or not finite. All that
follows is a pure function of the reports, so that all members reach the same result without another message::

    make_step_report --> gather_reports --> decide_step --> decide_skips --> Interpreter.update
    of this rank         of all members     loss, norm,     is the update    applies it, or not
                                            skip_reason     skipped?
                                                '--> require_finite: an error, if steps must not be skipped

:meth:`Interpreter.commit <counterpoint.runtime.interpreter.Interpreter.commit>` calls them in this order. Ranks on a
device may leave the decision there: :mod:`counterpoint.runtime.commit.device_commit`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.runtime.loss.loss_reduction import PartTotal, choose_unit
from counterpoint.runtime.loss.loss_scale import DynamicLossScale
from counterpoint.runtime.params.grad_check import NO_REPORT, GradReport
from counterpoint.terminal_text import warn


@dataclass(frozen=True, slots=True)
class StepGuard:
    """What is checked before an update, and what happens then.

    Args:
        clip_norm: gradients are scaled down to this global norm; None for no clipping.
        check_finite: ``gradients`` checks losses and all gradients, ``loss`` only the losses.
        nonfinite: ``error`` ends the run, ``skip`` skips the step on all members of the commit.
        clip_value: each element of a gradient is clamped to this magnitude; None for no clipping.
        max_consecutive_skips: more skipped steps in a row than this end the run.
        loss_scale: a static factor of the losses that backward starts from, or the rule of a dynamic one; None for
            none.
    """

    clip_norm: float | None = None
    check_finite: Literal["loss", "gradients"] = "gradients"
    nonfinite: Literal["error", "skip"] = "error"
    clip_value: float | None = None
    max_consecutive_skips: int = 20
    loss_scale: float | DynamicLossScale | None = None

    @property
    def needs_norm(self) -> bool:
        """Whether the gradient norm has to be computed."""
        return self.clip_norm is not None


class GivenValues(Protocol):
    """What the user has given a rank for a step, and must be the same on all members of a commit."""

    @property
    def digest(self) -> int:
        """A digest with at most 52 bits; 0 if there is nothing to compare."""
        ...

    def require_same(self, fabric: Fabric, group: Group, step: int) -> None:
        """Exchange the values with all members, whose digests differ, and raise if the values do."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank reports of a step.

    Args:
        loss_sum: mean loss of each microbatch times its weight, summed; nan and inf are kept.
        num_samples: the samples of these microbatches.
        loss_weight: of these microbatches: their samples, or what their means were divided by.
        loss_kinds: the kinds of these losses, added up: means over samples 1, weighted means 2, sums over samples 4;
            8 if they have parts.
        squared_norm: of the gradients that this rank owns.
        nonfinite_micro: the first microbatch whose loss is not finite; -1 for none.
        missing_grads: the parameters that this rank computes with and that got no gradient.
        checksum: of a part of its weights, equal on replicas; 0 where no rank should have the same weights.
        is_idle: whether none of its microbatches had samples.
        grads: which of its gradients is not finite, and how large they are, before any is summed over ranks.
        has_overflow: whether a sum of finite gradients that it owns is not finite.
        given_digest: of what the user has given for the step; 0 where there is nothing to compare.
        busy_s: seconds since the last commit in which it did not wait for other ranks.
        stop_signal: the signal that has asked it to stop; 0 for none.
    """

    loss_sum: float = 0.0
    num_samples: int = 0
    loss_weight: float = 0.0
    loss_kinds: int = 0
    squared_norm: float = 0.0
    nonfinite_micro: int = -1
    missing_grads: tuple[str, ...] = ()
    checksum: int = 0
    is_idle: bool = False
    grads: GradReport = NO_REPORT
    has_overflow: bool = False
    given_digest: int = 0
    busy_s: float = 0.0
    stop_signal: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether this rank's losses and gradients of this step are finite.

        Their sums over ranks are not looked at here, nor are delayed gradients of the step before.
        """
        return self.nonfinite_micro < 0 and self.grads.micro < 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a commit group decided.

    Args:
        loss: mean over the group, or the sum if it is one; nan without samples.
        num_samples: samples of the group.
        norm: global gradient norm; nan if it was not needed.
        scale: what gradients are multiplied with before the update.
        skip_reason: what was not finite, so that the step is skipped; else empty. A step without samples is skipped,
            too: :func:`decide_skips`.
        loss_weight: what the loss was divided by: the number of samples, or the sum of the weights of weighted means.
        weight_unit: the unit of the weights of the next step's losses, see
            :mod:`counterpoint.runtime.loss.loss_reduction`.
        mean_factor: what makes this step's gradients those of the weighted mean, without the loss scale; part of
            ``scale``, unless the gradients are delayed.
        is_sum: whether the loss is a sum.
        busy_s: of each rank of the group with its number, the seconds in which it did not wait for others.
        loss_parts: of a loss that is a dict, by name.
        stop_signal: the signal that has asked a rank of the group to stop; 0 for none.
        loss_scale: the factor of this step's losses in backward.
        nonfinite: ``losses`` if one is not finite, ``gradients`` if only gradients are not; else empty.
    """

    loss: float
    num_samples: int
    norm: float
    scale: float
    skip_reason: str
    loss_weight: float = 0.0
    weight_unit: float = 1.0
    mean_factor: float = 1.0
    is_sum: bool = False
    busy_s: tuple[tuple[int, float], ...] = ()
    loss_parts: Mapping[str, PartTotal] = field(default_factory=dict)
    stop_signal: int = 0
    loss_scale: float = 1.0
    nonfinite: Literal["", "losses", "gradients"] = ""


def make_step_report(  # noqa: PLR0913 - what a report has
    losses: Mapping[int, float],
    sizes: Mapping[int, int],
    squared_norm: float,
    missing_grads: Sequence[str] = (),
    *,
    grads: GradReport = NO_REPORT,
    loss_weights: Mapping[int, float] = MappingProxyType({}),
    is_sum: bool = False,
    has_parts: bool = False,
    checksum: int = 0,
    is_idle: bool = False,
    given_digest: int = 0,
    busy_s: float = 0.0,
    stop_signal: int = 0,
) -> StepReport:
    """Return the report of a rank.

    Args:
        losses: mean losses of its microbatches.
        sizes: their numbers of samples.
        squared_norm: of the gradients that it owns.
        missing_grads: the parameters without a gradient.
        grads: which of its gradients is not finite, and how large they are.
        loss_weights: what the losses that are weighted means were divided by, by microbatch.
        is_sum: whether the user's loss is the sum over the samples.
        has_parts: whether it is a dict.
        checksum: of a part of its weights.
        is_idle: whether none of its microbatches had samples.
        given_digest: of what the user has given for the step.
        busy_s: the seconds in which it did not wait for other ranks.
        stop_signal: the signal that has asked it to stop.
    """
    kinds = {SUM if is_sum else WEIGHTED_MEAN if micro in loss_weights else SAMPLE_MEAN for micro in losses}
    nonfinite_micro = next((micro for micro, loss in sorted(losses.items()) if not math.isfinite(loss)), -1)
    total = sum(loss * loss_weights.get(micro, sizes[micro]) for micro, loss in losses.items())
    return StepReport(
        total,
        sum(sizes[micro] for micro in losses),
        sum(loss_weights.get(micro, sizes[micro]) for micro in losses),
        sum(kinds) + (PARTS if has_parts else 0),
        squared_norm,
        nonfinite_micro,
        tuple(missing_grads),
        checksum,
        is_idle,
        grads,
        given_digest=given_digest,
        busy_s=busy_s,
        stop_signal=stop_signal,
    )


SAMPLE_MEAN, WEIGHTED_MEAN, SUM, PARTS = 1, 2, 4, 8
"""Kinds of losses in a report, and whether they have parts."""

REPORT_NUMBERS = 13
"""Length of :func:`encode_report`."""


def encode_report(report: StepReport) -> list[float]:
    """Return a report as 64-bit numbers, the last one the number of missing gradients."""
    return [
        report.loss_sum,
        report.num_samples,
        report.loss_weight,
        report.loss_kinds,
        report.squared_norm,
        report.nonfinite_micro,
        report.checksum,
        report.grads.micro,
        report.grads.share,
        report.given_digest,
        report.busy_s,
        report.stop_signal,
        len(report.missing_grads),
    ]


def decode_report(
    numbers: Sequence[float], missing_grads: Sequence[str] = (), *, is_idle: bool = False, nonfinite_grad: str = ""
) -> StepReport:
    """Return the report that :func:`encode_report` was given; names of gradients are sent separately."""
    loss_sum, num_samples, loss_weight, loss_kinds, squared_norm, nonfinite_micro, checksum, *rest = numbers
    micro, share, given_digest, busy_s, stop_signal, _ = rest
    return StepReport(
        loss_sum,
        int(num_samples),
        loss_weight,
        int(loss_kinds),
        squared_norm,
        int(nonfinite_micro),
        tuple(missing_grads),
        int(checksum),
        is_idle,
        GradReport(int(micro), nonfinite_grad, share),
        given_digest=int(given_digest),
        busy_s=busy_s,
        stop_signal=int(stop_signal),
    )


def merge_results(first: StepResult, second: StepResult) -> StepResult:
    """Return the results of two commits of one step as one: the mean loss over both, the first skip reason.

    Example:
        >>> first = StepResult(1.0, 1, 0.5, 1.0, "", loss_weight=1.0)
        >>> merge_results(first, StepResult(3.0, 3, 0.2, 1.0, "", loss_weight=3.0)).loss
        2.5
    """
    loss_weight = first.loss_weight + second.loss_weight
    weighted = [result for result in (first, second) if result.loss_weight]
    terms = [result.loss if result.is_sum else result.loss * result.loss_weight / loss_weight for result in weighted]
    return StepResult(
        sum(terms) if terms else math.nan,
        first.num_samples + second.num_samples,
        max(first.norm, second.norm),
        min(first.scale, second.scale),
        first.skip_reason or second.skip_reason,
        loss_weight,
        second.weight_unit,
        second.mean_factor,
        first.is_sum or second.is_sum,
        add_by_rank(first.busy_s, second.busy_s),
        merge_parts([first.loss_parts, second.loss_parts]),
        max(first.stop_signal, second.stop_signal),
        first.loss_scale,
        first.nonfinite or second.nonfinite,
    )


def add_by_rank(
    first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]
) -> tuple[tuple[int, float], ...]:
    """Return the sums of two numbers of each rank.

    Example:
        >>> add_by_rank([(0, 1.0), (1, 2.0)], [(1, 3.0)])
        ((0, 1.0), (1, 5.0))
    """
    totals = dict(first)
    for rank, number in second:
        totals[rank] = totals.get(rank, 0.0) + number
    return tuple(totals.items())


def merge_parts(parts: Iterable[Mapping[str, PartTotal]]) -> dict[str, PartTotal]:
    """Return the parts of several losses as those of one.

    Example:
        >>> merge_parts([{"a": PartTotal(1.0, 1.0)}, {"a": PartTotal(6.0, 3.0)}])["a"].mean
        1.75
    """
    merged: dict[str, PartTotal] = {}
    for part in parts:
        merged |= {name: total.add(merged[name]) if name in merged else total for name, total in part.items()}
    return merged


def gather_parts(fabric: Fabric, own: Iterable[Mapping[str, PartTotal]], group: Group) -> dict[str, PartTotal]:
    """Return the parts of the loss over all members of a group; a collective call.

    Args:
        fabric: this rank's connection to the others.
        own: of this rank's microbatches.
        group: the members.
    """
    values: Any = {name: list(total) for name, total in merge_parts(own).items()}
    gathered: Any = [values] if len(group) == 1 else fabric.gather_values("parts of the loss", values, group)
    return merge_parts({name: PartTotal(*numbers) for name, numbers in part.items()} for part in gathered)


def decide_step(  # noqa: PLR0913 - all that a decision depends on
    reports: Sequence[StepReport],
    group: Sequence[int],
    guard: StepGuard,
    loss_group: Collection[int] = (),
    microbatches_per_batch: int = 0,
    *,
    weight_unit: float = 1.0,
    delayed_mean_factor: float | None = None,
    num_samples: int = 0,
    loss_scale: float = 1.0,
) -> StepResult:
    """Return the result of a group: its loss, its gradient norm, and why the step has to be skipped, if it has.

    It is equal on all members, but for the loss, the gradient norm and the scale of gradients if these have
    ``loss_group`` of their own, as workers of EASGD do.

    Args:
        reports: of all members, in the order of the group.
        group: the members.
        guard: what is checked.
        loss_group: the members over whose samples this rank's loss is averaged, and whose gradients are clipped
            together with its own; empty for all.
        microbatches_per_batch: in an asynchronous pipeline; else 0.
        weight_unit: of the weights in this step; 0 if the gradients are those of the weighted mean already.
        delayed_mean_factor: the ``mean_factor`` of the step before, if this step applies its gradients; else None.
        num_samples: of the microbatches whose gradients are clipped together, which several members report if they are
            tensor-parallel; 0 if each is reported once.
        loss_scale: the factor of the losses that backward started from.

    Raises:
        DataError: some losses are means over samples, others weighted means.
    """
    loss_weight = sum(report.loss_weight for report in reports)
    is_sum = any(report.loss_kinds & SUM for report in reports)
    clipped = [report for rank, report in zip(group, reports, strict=True) if not loss_group or rank in loss_group]
    copies = sum(report.num_samples for report in clipped) / num_samples if num_samples else 1.0
    loss = sum(report.loss_sum for report in reports) / (copies if is_sum else loss_weight) if loss_weight else math.nan
    squared_norm = sum(report.squared_norm for report in reports)
    skip_reason = _find_skip_reason(reports, group, squared_norm, microbatches_per_batch)
    if loss_group:
        squared_norm = sum(report.squared_norm for report in clipped)
    mean_factor, next_unit = _find_mean_factor(clipped, weight_unit)
    mean_factor /= (copies if is_sum else 1.0) * loss_scale
    grad_scale = mean_factor if delayed_mean_factor is None else delayed_mean_factor
    norm = math.sqrt(squared_norm) * grad_scale if guard.needs_norm and math.isfinite(squared_norm) else math.nan
    scale = grad_scale
    if guard.clip_norm is not None and not skip_reason:
        scale *= min(1.0, guard.clip_norm / (norm + 1e-6))
    num_reported = sum(report.num_samples for report in reports)
    busy_s = tuple((rank, report.busy_s) for rank, report in zip(group, reports, strict=True))
    return StepResult(
        loss, num_reported, norm, scale, skip_reason, loss_weight, next_unit, mean_factor, is_sum, busy_s,
        stop_signal=max(report.stop_signal for report in reports),
        loss_scale=loss_scale,
        nonfinite=_find_nonfinite(reports),
    )  # fmt: skip


def _find_nonfinite(reports: Sequence[StepReport]) -> Literal["", "losses", "gradients"]:
    if any(report.nonfinite_micro >= 0 for report in reports):
        return "losses"
    is_finite = math.isfinite(sum(report.squared_norm for report in reports)) and not any(
        report.has_overflow or report.grads.micro >= 0 for report in reports
    )
    return "" if is_finite else "gradients"


def _find_mean_factor(reports: Sequence[StepReport], weight_unit: float) -> tuple[float, float]:
    """Return what makes the gradients those of the weighted mean, and the unit of weights for the next step.

    Raises:
        DataError: some losses are means over samples, others weighted means.
    """
    kinds = functools.reduce(operator.or_, (report.loss_kinds for report in reports), 0) & ~PARTS
    if kinds not in {0, SAMPLE_MEAN, WEIGHTED_MEAN, SUM}:
        raise DataError(
            "the losses of some microbatches are means over samples, those of others weighted means, so they have no "
            "common mean; let the loss function return cp.WeightedMean(total, weight) for every batch"
        )
    loss_weight = sum(report.loss_weight for report in reports)
    num_samples = sum(report.num_samples for report in reports)
    if kinds == SUM:
        return float(num_samples), weight_unit or 1.0
    if kinds != WEIGHTED_MEAN or not loss_weight:
        return 1.0, weight_unit or 1.0
    scale = num_samples * weight_unit / loss_weight if weight_unit else 1.0
    return scale, choose_unit(loss_weight, num_samples)


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
    has_finite_sums = math.isfinite(sum(report.squared_norm for report in reports)) and not any(
        report.has_overflow for report in reports
    )  # of the delayed gradients, applied now
    return skip_delayed or not has_finite_sums, has_unusable_grads(reports) or not has_samples


def has_unusable_grads(reports: Iterable[StepReport]) -> bool:
    """Return whether this step's gradients are unusable: they or a loss are not finite, or no target counts."""
    reports = list(reports)
    has_samples = any(report.num_samples for report in reports)
    return not all(report.is_finite for report in reports) or (
        has_samples and not any(report.loss_weight for report in reports)
    )


def _find_skip_reason(
    reports: Sequence[StepReport], group: Sequence[int], squared_norm: float, microbatches_per_batch: int
) -> str:
    """Return the first thing that is not finite, or that no target counts; empty if the step can be applied."""
    nonfinite = [report for report in reports if report.nonfinite_micro >= 0]
    if microbatches_per_batch and nonfinite:
        # each stage of an asynchronous pipeline decides separately, from the last stage's loss: one text for all
        first = min(nonfinite, key=lambda report: report.nonfinite_micro)
        what = _format_micro(first.nonfinite_micro, microbatches_per_batch)
        return f"the loss of {what} is {first.loss_sum}"
    for rank, report in zip(group, reports, strict=True):
        if report.nonfinite_micro >= 0:
            return f"the loss of microbatch {report.nonfinite_micro} on rank {rank} is {report.loss_sum}"
    for rank, report in zip(group, reports, strict=True):
        if report.grads.micro >= 0:
            what = _format_micro(report.grads.micro, microbatches_per_batch)
            return f"the gradient of {report.grads.name} in {what} on rank {rank} is not finite"
    for rank, report in zip(group, reports, strict=True):
        if report.has_overflow:
            return f"the sum of gradients over microbatches and ranks is not finite on rank {rank}, although they are"
        if not math.isfinite(report.squared_norm):
            return f"the norm of the gradients on rank {rank} is not finite"
    if any(report.num_samples for report in reports) and not any(report.loss_weight for report in reports):
        return "no target of the batch counts in its loss"
    return "" if math.isfinite(squared_norm) else "the gradients' norm is too large to be a number"


def _format_micro(micro: int, microbatches_per_batch: int) -> str:
    """Return the number of a microbatch, in an asynchronous pipeline that in its batch."""
    if not microbatches_per_batch:
        return f"microbatch {micro}"
    batch, micro_in_batch = divmod(micro, microbatches_per_batch)
    return f"microbatch {micro_in_batch} of batch {batch}"


def may_overflow(reports: Sequence[StepReport]) -> bool:
    """Return whether a sum of the ranks' gradients may exceed the largest number, although each of them is finite."""
    return sum(report.grads.share for report in reports) >= 1.0 and all(report.is_finite for report in reports)


IN_FLIGHT_STATE = (
    "the stage that found it does not apply it, but the stages of an asynchronous pipeline update one after the other: "
    "some may have applied this batch, and some not yet those before it, so go on from the last checkpoint"
)
"""What the parameters of an asynchronous pipeline are after an error."""


MASK_REMEDY = "if no value of that microbatch counts, as under a mask, return cp.WeightedMean(total, weight); else "
"""A mean over nothing is nan, although that of the whole batch may be a number."""


def require_finite(
    result: StepResult,
    step: int,
    num_skipped: int,
    guard: StepGuard,
    *,
    may_shrink: bool = False,
    is_async_pipeline: bool = False,
) -> None:
    """Raise if a step may not be skipped.

    Args:
        result: what the commit group decided.
        step: its number.
        num_skipped: steps in a row that were skipped.
        guard: what is checked.
        may_shrink: whether a smaller loss scale follows, if the gradients are not finite.
        is_async_pipeline: whether the stages decide separately.

    Raises:
        DataError: steps must not be skipped, or too many in a row were.
    """
    if result.nonfinite == "gradients" and may_shrink:
        return
    skip_reason = result.skip_reason
    if skip_reason and guard.nonfinite == "error":
        clip = "clip_norm=1.0, clip_by='stage'" if is_async_pipeline else "clip_norm=1.0"
        state = IN_FLIGHT_STATE if is_async_pipeline else "the parameters are unchanged"
        remedy = ""
        if result.nonfinite == "gradients" and isinstance(guard.loss_scale, DynamicLossScale):
            skip_reason += f", at the smallest loss scale, {result.loss_scale:g}"
        elif result.nonfinite == "gradients" and guard.loss_scale is not None and result.loss_scale > 1:
            skip_reason += f", with loss_scale={result.loss_scale:g}"
            remedy = "give a smaller loss_scale, or 'dynamic', "
        elif result.nonfinite == "losses" and skip_reason.endswith(" is nan"):
            remedy = MASK_REMEDY
        raise DataError(
            f"step {step} cannot be applied: {skip_reason}; {state}; {remedy}check the samples of this step, lower the "
            f"learning rate or clip with {clip}, or pass nonfinite='skip' to skip such steps on all ranks"
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
    warn(
        f"{format_names(names)} got no gradient on {format_ranks(without[first])} in step {step}, but did on "
        f"{format_ranks(ranks_with)}; the sum of gradients is correct, but forward took a different branch on those "
        "ranks; if that is intended, pass unused_parameters='skip'",
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
            "unused_parameters='skip' to leave them as they are in such a step, or 'zero' to use gradients of zeros"
        )


def gather_reports(fabric: Fabric, report: StepReport, group: Group) -> list[StepReport]:
    """Return the reports of all members, in the order of the group; names of gradients are sent only where needed."""
    num_members, position = len(group), group.index(fabric.rank)
    own_numbers = np.zeros((num_members, REPORT_NUMBERS))
    own_numbers[position] = encode_report(report)
    numbers = torch.from_numpy(own_numbers).view(-1)
    bounds = range(0, (num_members + 1) * REPORT_NUMBERS, REPORT_NUMBERS)
    fabric.all_gather("commit", numbers, bounds, group).wait()
    fabric.check_same_order(group)  # before the update
    rows = numbers.view(num_members, REPORT_NUMBERS).tolist()
    reports = [decode_report(row) for row in rows]
    if not any(row[-1] for row in rows) and all(report.grads.micro < 0 for report in reports):
        return reports
    gathered = fabric.gather_values(
        "names of gradients", [report.is_idle, report.grads.name, *report.missing_grads], group
    )
    details = cast("list[tuple[bool, str, *tuple[str, ...]]]", gathered)
    return [
        decode_report(row, names, is_idle=idle, nonfinite_grad=nonfinite)
        for row, (idle, nonfinite, *names) in zip(rows, details, strict=True)
    ]
