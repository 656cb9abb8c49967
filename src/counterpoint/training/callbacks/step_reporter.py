"""Report the steps of a run to its callbacks, those of a fit and those of a custom training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from counterpoint.program.trace import Trace
from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.training.callbacks.callback import Callback, StepEnd, TraceRecorded
from counterpoint.training.callbacks.slow_ranks import SlowRankDetector

TRACED_STEP = 3
"""The step of a run that is traced: late enough to be warm. So is one after a rank has become slow."""


class StepReporter:
    """Calls the callbacks of a run after each step; after the next one, if the result of the step is on a device.

    Args:
        callbacks: of this process.
        num_ranks: the number of all ranks, if they run at once; 1 if they take turns in one process, where the figures
            say nothing of a rank.
    """

    def __init__(self, callbacks: Sequence[Callback], num_ranks: int) -> None:
        self.callbacks = callbacks
        self.num_ranks = num_ranks
        self.slow_ranks = SlowRankDetector()
        self.is_trace_due = False  # the same on all ranks
        self._waiting: tuple[StepResult | LateResult, Callable[[], None]] | None = None

    def report(  # noqa: PLR0913 - what a step is
        self,
        number: int,
        result: StepResult | LateResult,
        *,
        epoch: int,
        num_samples: int,
        seconds: float,
        options: Mapping[str, Any],
        trace: Trace | None = None,
    ) -> None:
        """Report one step.

        Args:
            number: of the step.
            result: what the ranks decided.
            epoch: of its batch.
            num_samples: of its batch.
            seconds: its duration.
            options: of the optimizer, after the step.
            trace: of the step, if it was traced.
        """
        numbers = numeric_options(options)

        def notify() -> None:
            """Call the callbacks."""
            event = StepEnd(
                number,
                epoch,
                float(result.loss),
                num_samples,
                seconds,
                float(result.norm),
                result.skip_reason,
                numbers,
                dict(result.busy_s),
                {name: part.mean for name, part in result.loss_parts.items()},
                result.loss_scale,
            )
            self._notify(event, trace)

        self.flush()
        self._waiting = result, notify
        if not isinstance(result, LateResult):
            self.flush()

    def flush(self) -> None:
        """Report the last step if that was left for later; waits for the device."""
        if self._waiting is not None:
            (_, notify), self._waiting = self._waiting, None
            notify()

    def end(self, error: BaseException | None) -> None:
        """Report the last step if that was left for later, unless it is the one that has failed.

        Args:
            error: that has ended the run.
        """
        if error is None or (self._waiting is not None and not self._waiting[0].skip_reason):
            self.flush()

    def _notify(self, event: StepEnd, trace: Trace | None) -> None:
        number, busy_s = event.step, event.busy_s
        changes = self.slow_ranks.add(number, busy_s) if self.num_ranks > 1 else []
        self.is_trace_due = len(busy_s) == self.num_ranks and any(change.until_step is None for change in changes)
        for callback in self.callbacks:
            callback.on_step(event)
            if trace is not None:
                callback.on_trace(TraceRecorded(number, trace))
            for change in changes:
                callback.on_slow_rank(change)


def numeric_options(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the options that are finite numbers, such as the learning rate."""
    return {
        key: float(value)
        for key, value in options.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
