"""How fast a run is right now: sums over its last seconds, from which all figures of a progress line follow.

How far a run is, told to whoever watches: a bar on a terminal, one line per interval anywhere else.

A batch system or a pipe keeps every line for ever, so there a line comes every few seconds and not with every step.
The choice is made here, from the stream, and not from what happens to be installed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.training.callbacks.callback import Callback, CheckpointSaved, EvaluationEnd, RunEnd, RunStart, StepEnd
from counterpoint.training.reporting.progress_renderers import ProgressRecord, ProgressRenderer, make_renderer

DECAY_S = 5.0


@dataclass(slots=True)
class ThroughputMeter:
    """Sums over steps in which a step counts less the longer it is past; changes with every step.

    Args:
        memory_s: seconds of training after which a step counts 1/e.
    """

    decay_s: float = DECAY_S
    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    loss: float = 0.0
    losses: float = 0.0
    skipped: int = 0

    def add(self, step: StepEnd) -> None:
        """The step is in the sums; one that was left out counts as skipped, and its loss does not count."""
        keep = math.exp(-step.seconds / self.decay_s)
        self.steps = self.steps * keep + 1
        self.samples = self.samples * keep + step.num_samples
        self.seconds = self.seconds * keep + step.seconds
        self.skipped += bool(step.skip_reason)
        if math.isfinite(step.loss):
            self.loss = self.loss * keep + step.loss
            self.losses = self.losses * keep + 1

    @property
    def mean_loss(self) -> float:
        """The loss of the last seconds; nan when none was finite."""
        return self.loss / self.losses if self.losses else math.nan

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second; nan before the first step."""
        return self.samples / self.seconds if self.seconds else math.nan

    @property
    def step_s(self) -> float:
        """Seconds of one step; nan before the first."""
        return self.seconds / self.steps if self.steps else math.nan


ProgressMode: TypeAlias = Literal["auto", "rich", "plain", "json", "relay", "off"]
PROGRESS_MODES = ("auto", "rich", "plain", "json", "relay", "off")
INTERVAL_S = 5.0
REDRAW_S = 0.1


class ProgressCallback(Callback):
    """Shows a run while it goes on; the first and the last step are always shown.

    Args:
        mode: ``rich`` draws a bar, ``plain`` writes lines, ``json`` one object per line, ``off`` nothing; ``auto`` is
            ``rich`` on a terminal and ``plain`` elsewhere. ``relay`` writes what ``rich`` draws, for another process
            to draw it: see :func:`counterpoint.training.reporting.progress_renderers.relayed`.
        name: what is trained, for the first line.
        stream: where to; standard output when left out.
        clock: seconds that only grow.
        interval_s: from one line to the next.
    """

    def __init__(
        self,
        mode: ProgressMode = "auto",
        *,
        name: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        if mode not in PROGRESS_MODES:
            raise PlanError(f"there is no progress mode {mode!r}; the modes are {', '.join(PROGRESS_MODES)}")
        self.name = name
        self.clock = clock
        self.renderer: ProgressRenderer = make_renderer(mode, sys.stdout if stream is None else stream, clock)
        self.interval_s = REDRAW_S if self.renderer.redraws else interval_s
        self.meter = ThroughputMeter()
        self.num_steps = 0
        self.steps_done = 0
        self.last_shown_step = -1
        self.last_shown_s = 0.0

    def on_start(self, event: RunStart) -> None:
        """The plan is shown, with the arithmetic of the global batch."""
        plan = event.compiled.plan
        self.meter, self.num_steps, self.steps_done, self.last_shown_step = (
            ThroughputMeter(),
            event.num_steps,
            event.first_step,
            -1,
        )
        self.renderer.show(
            {
                "event": "start",
                "name": self.name,
                "plan": str(plan),
                "num_ranks": plan.num_ranks,
                "batch_size": event.batch_size,
                "num_micros": plan.global_num_microbatches,
                "step": event.first_step,
                "num_steps": event.num_steps,
            }
        )

    def on_step(self, event: StepEnd) -> None:
        """The step is shown if it is the first, the last, or an interval has gone by."""
        self.meter.add(event)
        self.steps_done = event.step + 1
        if (
            self.last_shown_step < 0
            or self.steps_done >= self.num_steps
            or self.clock() - self.last_shown_s >= self.interval_s
        ):
            self.show_step()

    def on_evaluation(self, event: EvaluationEnd) -> None:
        """The metrics on held-out data are shown."""
        self.emit("evaluation", {"step": event.step, "metrics": dict(event.metrics)})

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """The checkpoint's path is shown."""
        self.emit("saved", {"step": event.step, "path": str(event.path)})

    def on_end(self, event: RunEnd) -> None:
        """The last step and the reason of an early end are shown, and the terminal is as it was."""
        try:
            if self.last_shown_step not in {-1, self.steps_done}:
                self.show_step()
            self.emit("end", {"step": event.num_steps, "error": format_error(event.error)})
        finally:
            self.renderer.close()

    def show_step(self) -> None:
        """The step is shown now."""
        step_s = self.meter.step_s
        self.emit(
            "step",
            {
                "step": self.steps_done,
                "loss": self.meter.mean_loss,
                "samples_per_s": self.meter.samples_per_s,
                "step_s": step_s,
                "eta_s": step_s * max(self.num_steps - self.steps_done, 0),
                "skipped": self.meter.skipped,
            },
        )
        self.last_shown_step, self.last_shown_s = self.steps_done, self.clock()

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """The view has one more record."""
        record: ProgressRecord = {"event": event, "num_steps": self.num_steps, **fields}
        self.renderer.show(record)


def format_error(error: BaseException | None) -> str | None:
    """Return an error in one line; None for none."""
    if error is None:
        return None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    first = "".join(str(error).splitlines()[:1])
    if isinstance(error, SystemExit) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
