"""Show the progress of a run: a bar on a terminal, one line per interval anywhere else.

A batch system or a pipe keeps every line, so there a line is written every few seconds and not with every step. The
mode depends on the output stream, not on which packages are installed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO, TypeAlias

from counterpoint.errors import PlanError, first_line
from counterpoint.training.callbacks.callback import (
    Callback,
    CheckpointFailed,
    CheckpointSaved,
    EvaluationEnd,
    RunEnd,
    RunStart,
    SlowRank,
    StepEnd,
)
from counterpoint.training.reporting.progress_renderers import ProgressRecord, ProgressRenderer, make_renderer

DECAY_S = 5.0


@dataclass(slots=True)
class ThroughputMeter:
    """Exponentially decaying sums over the steps of a run, and the loss of its last step.

    Args:
        decay_s: seconds of training after which a step has the weight 1/e.
    """

    decay_s: float = DECAY_S
    steps: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    loss: float = math.nan
    skipped: int = 0

    def add(self, step: StepEnd) -> None:
        """Add a step; a skipped one is counted as skipped, and a loss that is not finite is ignored."""
        keep = math.exp(-step.seconds / self.decay_s)
        self.steps = self.steps * keep + 1
        self.samples = self.samples * keep + step.num_samples
        self.seconds = self.seconds * keep + step.seconds
        self.skipped += bool(step.skip_reason)
        if math.isfinite(step.loss):
            self.loss = step.loss

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second; nan before the first step."""
        return self.samples / self.seconds if self.seconds else math.nan

    @property
    def step_s(self) -> float:
        """Seconds per step; nan before the first."""
        return self.seconds / self.steps if self.steps else math.nan


ProgressMode: TypeAlias = Literal["auto", "rich", "plain", "json", "relay", "off"]
PROGRESS_MODES = ("auto", "rich", "plain", "json", "relay", "off")
INTERVAL_S = 5.0
REDRAW_S = 0.1


class ProgressCallback(Callback):
    """Shows the progress of a run; the first and the last step are always shown.

    Args:
        mode: ``rich`` draws a bar, ``plain`` writes lines, ``json`` one object per line, ``off`` nothing; ``auto`` is
            ``rich`` on a terminal and ``plain`` elsewhere. ``relay`` writes what ``rich`` draws, for another process
            to draw it: see :func:`counterpoint.training.reporting.progress_renderers.parse_relayed`.
        name: what is trained, for the first line.
        stream: output stream; standard output by default.
        clock: monotonic seconds.
        interval_s: time between two lines.
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
        self.loss_parts: Mapping[str, float] = {}  # of the last step
        self.num_steps: int | None = 0
        self.steps_done = 0
        self.last_shown_step = -1
        self.last_shown_s = 0.0

    def on_start(self, event: RunStart) -> None:
        """Show the plan, with the arithmetic of the global batch."""
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
                "resume_path": None if event.resume_path is None else str(event.resume_path),
                "checkpoint": None if event.checkpoint is None else str(event.checkpoint),
            }
        )

    def on_step(self, event: StepEnd) -> None:
        """Show the step if it is the first, the last, or an interval has passed."""
        self.meter.add(event)
        self.loss_parts = event.loss_parts
        self.steps_done = event.step + 1
        if (
            self.last_shown_step < 0
            or self.steps_done == self.num_steps
            or self.clock() - self.last_shown_s >= self.interval_s
        ):
            self.show_step()

    def on_evaluation(self, event: EvaluationEnd) -> None:
        """Show the metrics on held-out data."""
        self.emit("evaluation", {"step": event.step, "metrics": dict(event.metrics)})

    def on_slow_rank(self, event: SlowRank) -> None:
        """Show which rank is slow and since when, or was."""
        self.emit("slow_rank", {"step": self.steps_done, **asdict(event), "text": str(event)})

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """Show the checkpoint's path."""
        self.emit("saved", {"step": event.step, "path": str(event.path)})

    def on_checkpoint_failed(self, event: CheckpointFailed) -> None:
        """Show why a checkpoint could not be written."""
        self.emit("save_failed", asdict(event))

    def on_end(self, event: RunEnd) -> None:
        """Show the last step and the error of an early end, and restore the terminal."""
        try:
            if self.last_shown_step not in {-1, self.steps_done}:
                self.show_step()
            self.emit("end", {"step": event.num_steps, "error": format_error(event.error)})
        finally:
            self.renderer.close()

    def show_step(self) -> None:
        """Show the current step."""
        step_s = self.meter.step_s
        self.emit(
            "step",
            {
                "step": self.steps_done,
                "loss": self.meter.loss,
                **({"loss_parts": dict(self.loss_parts)} if self.loss_parts else {}),
                "samples_per_s": self.meter.samples_per_s,
                "step_s": step_s,
                "eta_s": math.nan if self.num_steps is None else step_s * max(self.num_steps - self.steps_done, 0),
                "skipped": self.meter.skipped,
            },
        )
        self.last_shown_step, self.last_shown_s = self.steps_done, self.clock()

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        """Render one more record."""
        record: ProgressRecord = {"event": event, "num_steps": self.num_steps, **fields}
        self.renderer.show(record)


def format_error(error: BaseException | None) -> str | None:
    """Return an error in one line; None for none."""
    if error is None:
        return None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    first = first_line(error)
    if isinstance(error, SystemExit) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
