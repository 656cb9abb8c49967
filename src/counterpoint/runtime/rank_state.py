"""State of a rank between steps and in the current one: results, skipped updates, pushes, timings; and its rollback."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from counterpoint.device.event_clock import DeviceSpan, EventClock
from counterpoint.runtime.commit.device_commit import LateResult, PendingCommit
from counterpoint.runtime.commit.step_commit import StepResult, merge_results
from counterpoint.runtime.loss.loss_scale import LossScaler


@dataclass(frozen=True, slots=True)
class PushRecord:
    """One push that a server applied: the unit, the worker, and the unit's version afterwards.

    The worker receives that version, or a later one if it waits for slower workers. A push without a gradient makes no
    new version and is recorded because of what the worker receives.
    """

    unit: tuple[int, ...]
    worker: int
    version: int


@dataclass(slots=True)
class CallTiming:
    """Times of one call, or of one transfer that overlapped with calls, and the range of its instructions.

    Args:
        start: the index of the first instruction.
        stop: one past the last one.
        start_s: start, in seconds of the clock.
        stop_s: end.
        is_transfer: whether it is a transfer.
        text: what it is, if not the instructions.
    """

    start: int
    stop: int
    start_s: float
    stop_s: float
    is_transfer: bool = False
    text: str = ""


class EventTiming(NamedTuple):
    """The same in events of a device, which are read when it has done the step.

    Args:
        start: the index of the first instruction.
        stop: one past the last one.
        spans: when the device does its parts; there is none of what ran on the host.
        is_transfer: whether it is a transfer.
        text: what it is, if not the instructions.
    """

    start: int
    stop: int
    spans: Sequence[DeviceSpan]
    is_transfer: bool = False
    text: str = ""


def read_event_timings(clock: EventClock, timings: Sequence[EventTiming]) -> list[CallTiming]:
    """Return the times of events on a device, each from the begin of its first part to the end of its last one."""
    found = [
        (timing, [event for span in timing.spans for event in (span.began, span.ended) if event is not None])
        for timing in timings
    ]
    seconds = iter(clock.read([event for _, events in found for event in events]))
    read = [(timing, list(islice(seconds, len(events)))) for timing, events in found]
    return [
        CallTiming(timing.start, timing.stop, min(times), max(times), timing.is_transfer, timing.text)
        for timing, times in read
        if times
    ]


@dataclass(slots=True)
class RankState:
    """What a rank's last step produced, and what :meth:`rollback` restores if it failed.

    Args:
        result: of the last commit; None for a rank without commits.
        late_result: of the last commit, if its decision is on the device.
        pending_commits: those whose decision the host has not read, with their results.
        num_commits: commits of this step that are done.
        num_skipped: commits in a row in which something was not finite.
        scale: what the last commit multiplies gradients with; a rank with several commits in a step has one for each.
        skip_update: whether the updates after the last commit are skipped.
        skip_delayed_update: whether the update with this step's delayed gradients will be skipped.
        weight_unit: the unit of the weights of losses in this step, see
            :mod:`counterpoint.runtime.loss.loss_reduction`.
        delayed_mean_factor: what makes the delayed gradients those of a weighted mean.
        loss_scaler: the loss scale of this step, and what the next one depends on.
        push_log: the pushes that a server has applied, in order.
        timings: the calls of the last step, if there was a clock of the host.
        event_timings: the calls of the last step, and their transfers, if there was a clock of the device.
    """

    result: StepResult | None = None
    late_result: LateResult | None = None
    pending_commits: list[tuple[PendingCommit, LateResult]] = field(default_factory=list)
    num_commits: int = 0
    num_skipped: int = 0
    scale: float = 1.0
    skip_update: bool = False
    skip_delayed_update: bool = False
    weight_unit: float = 1.0
    delayed_mean_factor: float = 1.0
    loss_scaler: LossScaler = field(default_factory=LossScaler)
    push_log: list[PushRecord] = field(default_factory=list)
    timings: list[CallTiming] = field(default_factory=list)
    event_timings: list[EventTiming] = field(default_factory=list)
    _before_step: tuple[int, bool, float, float, tuple[float, int, int]] | None = None
    """What a commit changes for later steps."""

    def begin_step(self) -> None:
        """Start a step without results."""
        self.result, self.late_result, self.num_commits, self.scale, self.skip_update = None, None, 0, 1.0, False
        self.timings.clear()
        self.event_timings.clear()
        self.keep_for_rollback()

    def keep_for_rollback(self) -> None:
        """Keep what a failed step goes back to."""
        self._before_step = (
            self.num_skipped, self.skip_delayed_update, self.weight_unit, self.delayed_mean_factor,
            self.loss_scaler.state(),
        )  # fmt: skip

    def end_step(self) -> None:
        """Find the loss scale of the next step, if the host has decided this one."""
        if self.result is not None:
            self.update_loss_scale(self.result)

    def record_commit(self, result: StepResult, *, skip_update: bool, skip_delayed_update: bool) -> None:
        """Record what a commit has decided."""
        self.result = result if self.result is None else merge_results(self.result, result)
        self.skip_update, self.skip_delayed_update = skip_update, skip_delayed_update
        self.weight_unit, self.delayed_mean_factor = result.weight_unit, result.mean_factor
        self.scale = result.scale
        self.num_commits += 1
        self.count_skip(result)

    def count_skip(self, result: StepResult) -> None:
        """Count a skipped step, unless a smaller loss scale follows."""
        if not (result.nonfinite == "gradients" and self.loss_scaler.may_shrink):
            self.num_skipped = self.num_skipped + 1 if result.skip_reason else 0

    def update_loss_scale(self, result: StepResult) -> None:
        """Find the loss scale of the next step."""
        if result.nonfinite or not result.skip_reason:
            self.loss_scaler.update(is_finite=not result.nonfinite)

    def record_late_commit(self, pending: PendingCommit, result: LateResult) -> None:
        """Record a commit whose decision the host reads a step later."""
        self.pending_commits.append((pending, result))
        self.late_result = result
        self.num_commits += 1

    def record_late_result(self, result: StepResult) -> None:
        """Record what the commit of the step before has decided."""
        self.weight_unit = result.weight_unit
        self.count_skip(result)
        self.update_loss_scale(result)
        self.keep_for_rollback()

    def restore_delayed(self, *, is_skipped: bool, mean_factor: float = 1.0) -> None:
        """Record whether the update with the delayed gradients of a checkpoint will be skipped, and their scale."""
        self.skip_delayed_update, self.delayed_mean_factor = is_skipped, mean_factor

    def rollback(self, unread_steps: Collection[int] = ()) -> None:
        """Restore what a failed step has changed.

        Args:
            unread_steps: earlier steps whose decisions stay on the device.
        """
        self.pending_commits = [pair for pair in self.pending_commits if pair[0].step in unread_steps]
        if self._before_step is not None:
            (
                self.num_skipped, self.skip_delayed_update, self.weight_unit, self.delayed_mean_factor, loss_scale,
            ) = self._before_step  # fmt: skip
            self.loss_scaler.restore(loss_scale)
