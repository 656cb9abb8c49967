"""What a rank keeps of its last step: the commit's result, which updates are skipped, pushes and timings."""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.runtime.step_commit import StepResult


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
    """What a rank's last step produced.

    Args:
        result: of the last commit; None for a rank without commits.
        num_commits: commits of this step that are done.
        num_skipped: steps skipped in a row.
        skip_update: whether the updates after the last commit are skipped.
        skip_delayed_update: whether the update with this step's delayed gradients will be skipped.
        has_warned: whether the warning of partially unused parameters was given.
        push_log: the pushes that a server has applied, in order.
        timings: the calls of the last step, if there was a clock.
    """

    result: StepResult | None = None
    num_commits: int = 0
    num_skipped: int = 0
    skip_update: bool = False
    skip_delayed_update: bool = False
    has_warned: bool = False
    push_log: list[PushRecord] = field(default_factory=list)
    timings: list[CallTiming] = field(default_factory=list)
