"""Step commit on a device: the decision is a tensor, which the update reads; the host reads it a step later.

A rank's report is a row of numbers on the device. The rows of all members are gathered there, and
:func:`decide_on_device` finds what optimizers need: whether the update is skipped, and the factor of the gradients. A
copy of the rows is on its way to the host meanwhile. After the next step is launched, the host reads it, and decides
again as :mod:`counterpoint.runtime.commit.step_commit` does, for the texts, the counts and the errors::

    device | forward t   backward t   rows, decision, update t | forward t+1 ...                  update t+1 |
    host   | launch t ..................................... copy | launch t+1 ......... read t, raise for t  |

Both decisions are equal: :func:`decide_on_device` repeats ``decide_step`` and ``decide_skips`` with tensors, and
tests/device/test_device_commit.py compares their results. If step t is an error, the decision of step t+1 is to skip
its update, too, so that weights and optimizer state are those before step t when the error is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator, HostCopy
from counterpoint.device.late_number import LateNumber
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.runtime.commit.step_commit import (
    SUM,
    WEIGHTED_MEAN,
    StepGuard,
    StepReport,
    StepResult,
    may_overflow,
)
from counterpoint.runtime.loss.loss_check import LateLossCheck
from counterpoint.runtime.loss.loss_reduction import PartTotal
from counterpoint.runtime.loss.loss_scale import MAX_SCALE, DynamicLossScale
from counterpoint.runtime.params.grad_check import DeviceGradReport, GradReport


class DecideStep(Protocol):
    """Decides a commit from the reports of all members."""

    def __call__(self, reports: Sequence[StepReport], *, loss_scale: float) -> StepResult:
        """Return the result, given the factor of the losses in backward."""
        ...


NUM_HOST_COMMITS = 1
"""Updates of new ranks, or of ranks with loaded state, that the host decides: they make the optimizer's state."""


class DeviceReport(NamedTuple):
    """What one rank's row consists of; numbers of float64 on the device.

    Args:
        loss_sum: as in :class:`StepReport`, and so the others.
        loss_weight: of its microbatches.
        squared_norm: of the gradients that it owns.
        nonfinite_micro: the first microbatch whose loss is not finite; -1 for none.
        checksum: of a part of its weights; less than 48 bits.
        grad_micro: the first microbatch with a gradient that is not finite; -1 for none.
        grad_share: how large its gradients are.
        has_overflow: 1 if a sum of gradients that it owns is not finite.
        is_unequal: 1 if a recomputed output is not that of the first forward, or a check of the loss has failed.
    """

    loss_sum: Tensor
    loss_weight: Tensor
    squared_norm: Tensor
    nonfinite_micro: Tensor
    checksum: Tensor
    grad_micro: Tensor
    grad_share: Tensor
    has_overflow: Tensor
    is_unequal: Tensor


class DeviceLossScale(NamedTuple):
    """State of a dynamic loss scale on the device, as of :class:`LossScaler`; numbers of float64.

    Args:
        scale: S.
        num_good_steps: steps in a row with finite gradients.
        hysteresis: steps with gradients that are not finite after which the scale shrinks.
    """

    scale: Tensor
    num_good_steps: Tensor
    hysteresis: Tensor

    def update(self, rule: DynamicLossScale, is_finite: Tensor, counts: Tensor) -> DeviceLossScale:
        """Return the state after a step, as :meth:`LossScaler.update` does.

        Args:
            rule: of the scale.
            is_finite: whether the gradients of the step were.
            counts: whether the step counts at all: not if no target counts in its loss.
        """
        zero, full = torch.zeros_like(self.scale), torch.full_like(self.scale, float(rule.hysteresis))
        good = self.num_good_steps + 1
        grows = good >= rule.growth_interval
        grown = torch.where(self.scale * rule.growth_factor <= MAX_SCALE, self.scale * rule.growth_factor, self.scale)
        left = full if rule.consecutive_hysteresis else torch.where(grows, full, self.hysteresis)
        after_good = torch.where(grows, grown, self.scale), torch.where(grows, zero, good), left
        shrunk = (self.scale * rule.backoff_factor).clamp(min=rule.min_scale)
        shrinks = self.hysteresis <= 1
        after_bad = (
            torch.where(shrinks, shrunk, self.scale),
            zero,
            torch.where(shrinks, self.hysteresis, self.hysteresis - 1),
        )
        after = (torch.where(is_finite, one, other) for one, other in zip(after_good, after_bad, strict=True))
        return DeviceLossScale(*(torch.where(counts, new, old) for new, old in zip(after, self, strict=True)))


class DeviceDecision(NamedTuple):
    """What the update of a step reads on the device.

    Args:
        skips: 1 if it is skipped, else 0, as ``found_inf`` of torch's optimizers.
        scale: what gradients are multiplied with; None for 1.
        num_skipped: steps in a row in which something was not finite, up to this one.
        next_loss_scale: of the next step; None if it is not dynamic.
    """

    skips: Tensor
    scale: Tensor | float | None
    num_skipped: Tensor
    next_loss_scale: DeviceLossScale | None = None


@dataclass(frozen=True, slots=True)
class PendingCommit:
    """A commit whose decision the host has not read.

    Args:
        step: its number.
        group: the members.
        reports: of the members, without what is on the device.
        rows: the rows of the members, on their way to the host.
        grads: of this rank.
        outputs: the locations of outputs that this rank has recomputed, and whether each is the same.
        late_checks: of this rank's checks of the loss, and what each has packed.
        decision: on the device.
        decide: returns the result of complete reports and the loss scale.
        loss_scale: the factor of the losses in backward, on its way to the host if it is dynamic.
    """

    step: int
    group: Group
    reports: Sequence[StepReport]
    rows: HostCopy
    grads: DeviceGradReport
    outputs: tuple[Sequence[str], HostCopy] | None
    late_checks: Sequence[tuple[LateLossCheck, HostCopy]]
    decision: DeviceDecision
    decide: DecideStep
    loss_scale: HostCopy | float

    def result_of(self, reports: Sequence[StepReport]) -> StepResult:
        """Return the result of complete reports."""
        scale = self.loss_scale if isinstance(self.loss_scale, float) else float(self.loss_scale.wait())
        return self.decide(reports, loss_scale=scale)

    def read(self) -> list[StepReport]:
        """Return the complete reports, without names of gradients; wait until they have arrived."""
        rows = self.rows.wait().tolist()
        reports = [add_row(report, row) for report, row in zip(self.reports, rows, strict=True)]
        return reports if may_overflow(reports) else [replace(report, has_overflow=False) for report in reports]

    def read_unequal_output(self) -> str:
        """Return the location of the first recomputed output that is another one than at first; empty for none."""
        if self.outputs is None:
            return ""
        locations, matches = self.outputs
        pairs = zip(locations, matches.wait().tolist(), strict=True)
        return next((location for location, match in pairs if not match), "")


def add_row(report: StepReport, row: Sequence[float]) -> StepReport:
    """Return a report with the numbers of a row."""
    loss_sum, loss_weight, squared_norm, nonfinite_micro, checksum, grad_micro, grad_share, has_overflow, _ = row
    return replace(
        report,
        loss_sum=loss_sum,
        loss_weight=loss_weight,
        squared_norm=squared_norm,
        nonfinite_micro=int(nonfinite_micro),
        checksum=int(checksum),
        grads=GradReport(int(grad_micro), "", grad_share),
        has_overflow=bool(has_overflow),
    )


def add_names(
    fabric: Fabric, reports: Sequence[StepReport], own_name: Callable[[int], str], group: Group
) -> list[StepReport]:
    """Return reports with the names of gradients that are not finite; a collective call if there is one.

    Args:
        fabric: this rank's connection to the others.
        reports: of all members.
        own_name: returns the parameter of this rank whose gradient in a microbatch is not finite.
        group: the members.
    """
    if all(report.grads.micro < 0 for report in reports):
        return list(reports)
    micro = reports[group.index(fabric.rank)].grads.micro
    own = own_name(micro) if micro >= 0 else ""
    names = [own] if len(group) == 1 else fabric.gather_values("names of gradients", own, group)
    return [
        replace(report, grads=report.grads._replace(name=str(name)))
        for report, name in zip(reports, names, strict=True)
    ]


def gather_rows(fabric: Fabric, accelerator: Accelerator, report: DeviceReport, group: Group) -> Tensor:
    """Return the rows of all members as ``(member, number)``, on the device."""
    row = torch.stack(report)
    if len(group) == 1:
        return row[None]
    rows = accelerator.empty(len(group), len(row), dtype=torch.float64)
    rows[group.index(fabric.rank)] = row
    bounds = range(0, rows.numel() + 1, len(row))
    fabric.all_gather("commit on the device", rows.view(-1), bounds, group).wait()
    return rows


def decide_on_device(  # noqa: PLR0913 - all that a decision depends on
    rows: Tensor,
    reports: Sequence[StepReport],
    guard: StepGuard,
    *,
    weight_unit: float,
    num_samples: int,
    num_skipped: Tensor,
    loss_scale: DeviceLossScale | float = 1.0,
) -> DeviceDecision:
    """Return what :func:`decide_step` and :func:`decide_skips` decide, as tensors, for gradients that are not delayed.

    Args:
        rows: of all members.
        reports: of all members, as far as the host knows them.
        guard: what is checked.
        weight_unit: of the weights in this step; 0 if the gradients are those of the weighted mean already.
        num_samples: of the microbatches of the commit.
        num_skipped: the steps in a row before this one in which something was not finite.
        loss_scale: the factor of the losses that backward started from.
    """
    columns = DeviceReport(*rows.unbind(1))
    squared_norm, loss_weight = columns.squared_norm.sum(), columns.loss_weight.sum()
    has_bad_loss = (columns.nonfinite_micro >= 0).any()
    has_bad_grads = (columns.grad_micro >= 0).any() | ~squared_norm.isfinite()
    has_bad_grads = has_bad_grads | (columns.has_overflow.any() & (columns.grad_share.sum() >= 1.0))
    is_bad = has_bad_loss | has_bad_grads | (loss_weight == 0)
    next_loss_scale, may_shrink = None, torch.zeros_like(is_bad)
    if isinstance(loss_scale, DeviceLossScale):
        assert isinstance(guard.loss_scale, DynamicLossScale), "the rule"
        is_finite = ~(has_bad_loss | has_bad_grads)
        next_loss_scale = loss_scale.update(guard.loss_scale, is_finite, ~is_finite | ~is_bad)
        may_shrink = has_bad_grads & ~has_bad_loss & (loss_scale.scale > guard.loss_scale.min_scale)
    # steps in a row that end the run; once reached, no later step is applied
    limit = 0 if guard.nonfinite == "error" else guard.max_consecutive_skips
    is_ended = num_skipped > limit
    before = torch.where(may_shrink, num_skipped, torch.zeros_like(num_skipped))
    counted = torch.where((is_bad & ~may_shrink) | is_ended, num_skipped + 1, before)
    counted = torch.where(columns.is_unequal.any(), torch.full_like(counted, math.inf), counted)
    skips = (is_bad | (counted > limit)).float()
    factor = loss_scale.scale if isinstance(loss_scale, DeviceLossScale) else loss_scale
    grad_scale = _find_scale(loss_weight, squared_norm, reports, guard, weight_unit, num_samples, factor)
    return DeviceDecision(skips, grad_scale, counted, next_loss_scale)


def _find_scale(  # noqa: PLR0913 - all that it depends on
    loss_weight: Tensor,
    squared_norm: Tensor,
    reports: Sequence[StepReport],
    guard: StepGuard,
    weight_unit: float,
    num_samples: int,
    loss_scale: Tensor | float,
) -> Tensor | float | None:
    reported = sum(report.num_samples for report in reports)
    scale: Tensor | float = 1.0 / loss_scale
    if any(report.loss_kinds & SUM for report in reports):
        scale = reported / (reported / num_samples) / loss_scale
    elif weight_unit and any(report.loss_kinds & WEIGHTED_MEAN for report in reports):
        scale = reported * weight_unit / loss_weight / loss_scale
    if guard.clip_norm is not None and math.isfinite(guard.clip_norm):
        norm = squared_norm.sqrt() * scale
        scale = (guard.clip_norm / (norm + 1e-6)).clamp(max=1.0) * scale
    return None if isinstance(scale, float) and scale == 1.0 else scale


def first_nonfinite(values: Sequence[tuple[int, Tensor]], accelerator: Accelerator) -> Tensor:
    """Return the key of the first value that is not finite, -1 if all are; all as float64 on the device."""
    if not values:
        return torch.full((), -1.0, dtype=torch.float64, device=accelerator.device)
    device, first_key = accelerator.device, values[0][0]
    if [key for key, _ in values] == list(range(first_key, first_key + len(values))):
        keys = torch.arange(first_key, first_key + len(values), dtype=torch.float64, device=device)
    else:
        keys = torch.stack([torch.full((), float(key), dtype=torch.float64, device=device) for key, _ in values])
    finite = torch.stack([value.double() for _, value in values]).isfinite()
    places = torch.arange(len(values), device=device)
    first = torch.where(finite, torch.full_like(places, len(values)), places).amin()
    keys = torch.cat([keys, torch.full_like(keys[:1], -1.0)])
    return keys.index_select(0, first[None])[0]  # indexing by a number on the device would wait for it


def add_losses(
    losses: Mapping[int, Tensor | float],
    sizes: Mapping[int, int],
    loss_weights: Mapping[int, Tensor | float],
    scope: Collection[int],
    accelerator: Accelerator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of losses times weights, the sum of weights, and the first microbatch that is not finite.

    Args:
        losses: the mean of each microbatch.
        sizes: the numbers of samples.
        loss_weights: what the losses that are weighted means were divided by, by microbatch.
        scope: the microbatches of the commit.
        accelerator: that the losses are on.
    """

    def as_tensor(value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.double()
        return torch.full((), float(value), dtype=torch.float64, device=accelerator.device)

    own = {micro: as_tensor(loss) for micro, loss in losses.items() if micro in scope}
    if not own:
        return as_tensor(0.0), as_tensor(0.0), as_tensor(-1.0)
    own_weights = {micro: loss_weights.get(micro, float(sizes[micro])) for micro in own}
    total = torch.stack([loss * own_weights[micro] for micro, loss in own.items()]).sum()
    on_device = [weight.double() for weight in own_weights.values() if isinstance(weight, Tensor)]
    known = sum(weight for weight in own_weights.values() if not isinstance(weight, Tensor))
    loss_weight = torch.stack(on_device).sum() + known if on_device else as_tensor(known)
    return total, loss_weight, first_nonfinite(sorted(own.items()), accelerator)


class LateResult:
    """What a commit group decided on a device, as :class:`StepResult`; reading a number waits for the device.

    Args:
        known: what the host knows of it.
        read: returns the result; called once.
    """

    def __init__(self, known: Sequence[StepReport], group: Group, read: Callable[[], StepResult]) -> None:
        self.num_samples = sum(report.num_samples for report in known)
        self.busy_s = tuple((rank, report.busy_s) for rank, report in zip(group, known, strict=True))
        self.stop_signal = max(report.stop_signal for report in known)
        self.loss_parts: Mapping[str, PartTotal] = {}
        self._read: Callable[[], StepResult] | None = read
        self._result: StepResult | None = None

    def resolve(self, result: StepResult) -> None:
        """Take the result that the host has decided."""
        self._result, self._read = result, None

    def read(self) -> StepResult:
        """Return the result; wait for the device if it was not read."""
        if self._result is None:
            assert self._read is not None, "not resolved"
            self.resolve(self._read())
        assert self._result is not None, "resolved"
        return self._result

    @property
    def loss(self) -> LateNumber:
        """The mean loss, which waits when it is read."""
        return LateNumber(lambda: self.read().loss)

    @property
    def norm(self) -> LateNumber:
        """The norm, likewise."""
        return LateNumber(lambda: self.read().norm)

    @property
    def skip_reason(self) -> str:
        """What was not finite; waits for the device."""
        return self.read().skip_reason

    @property
    def loss_scale(self) -> float:
        """The factor of the losses in backward; waits for the device."""
        return self.read().loss_scale
