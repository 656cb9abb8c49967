"""State of a rank between steps and in the current one: results, skipped updates, pushes, timings; and its rollback."""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.runtime.step_commit import StepResult, merge_results


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
    """Times of one call, or of one transfer that overlapped with calls, and the range of its instructions."""

    start: int
    stop: int
    start_s: float
    stop_s: float
    is_transfer: bool = False


@dataclass(slots=True)
class RankState:
    """What a rank's last step produced, and what :meth:`rollback` restores if it failed.

    Args:
        result: of the last commit; None for a rank without commits.
        num_commits: commits of this step that are done.
        num_skipped: commits in a row in which something was not finite.
        skip_update: whether the updates after the last commit are skipped.
        skip_delayed_update: whether the update with this step's delayed gradients will be skipped.
        push_log: the pushes that a server has applied, in order.
        timings: the calls of the last step, if there was a clock.
    """

    result: StepResult | None = None
    num_commits: int = 0
    num_skipped: int = 0
    skip_update: bool = False
    skip_delayed_update: bool = False
    push_log: list[PushRecord] = field(default_factory=list)
    timings: list[CallTiming] = field(default_factory=list)
    _before_step: tuple[int, bool] = (0, False)  # num_skipped and skip_delayed_update

    def begin_step(self) -> None:
        """Start a step without results."""
        self.result, self.num_commits, self.skip_update = None, 0, False
        self.timings.clear()
        self._before_step = (self.num_skipped, self.skip_delayed_update)

    def record_commit(self, result: StepResult, *, skip_update: bool, skip_delayed_update: bool) -> None:
        """Record what a commit has decided."""
        self.result = result if self.result is None else merge_results(self.result, result)
        self.skip_update, self.skip_delayed_update = skip_update, skip_delayed_update
        self.num_commits += 1
        self.num_skipped = self.num_skipped + 1 if result.skip_reason else 0

    def restore_delayed(self, *, is_skipped: bool) -> None:
        """Record whether the update with the delayed gradients of a checkpoint, or of none, will be skipped."""
        self.skip_delayed_update = is_skipped

    def rollback(self) -> None:
        """Restore what a failed step has changed."""
        self.num_skipped, self.skip_delayed_update = self._before_step
