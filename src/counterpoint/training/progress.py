"""How far a run is, told to whoever watches: a bar on a terminal, one line per interval anywhere else.

A batch system or a pipe keeps every line for ever, so there a line comes every few seconds and not with every step.
The choice is made here, from the stream, and not from what happens to be installed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.training.events import Callback, Evaluated, RunEnd, RunStart, Saved, StepEnd
from counterpoint.training.meter import Meter
from counterpoint.training.views import Record, View, make_view

Mode: TypeAlias = Literal["auto", "rich", "plain", "json", "relay", "off"]
MODES = ("auto", "rich", "plain", "json", "relay", "off")
INTERVAL_S = 5.0
REDRAW_S = 0.1


class ShowProgress(Callback):
    """Shows a run while it goes on; the first and the last step are always shown.

    Args:
        mode: ``rich`` draws a bar, ``plain`` writes lines, ``json`` one object per line, ``off`` nothing; ``auto`` is
            ``rich`` on a terminal and ``plain`` elsewhere. ``relay`` writes what ``rich`` draws, for another process
            to draw it: see :func:`counterpoint.training.views.relayed`.
        name: what is trained, for the first line.
        stream: where to; standard output when left out.
        clock: seconds that only grow.
        interval_s: from one line to the next.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        name: str = "",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        if mode not in MODES:
            raise PlanError(f"there is no progress mode {mode!r}; the modes are {', '.join(MODES)}")
        self.name = name
        self.clock = clock
        self.view: View = make_view(mode, sys.stdout if stream is None else stream, clock)
        self.interval_s = REDRAW_S if self.view.redraws else interval_s
        self.meter = Meter()
        self.num_steps = 0
        self.done = 0
        self.shown = -1
        self.shown_s = 0.0

    def on_start(self, event: RunStart) -> None:
        """The plan is shown, with the arithmetic of the global batch."""
        plan = event.compiled.plan
        self.meter, self.num_steps, self.done, self.shown = Meter(), event.num_steps, event.first_step, -1
        self.view.show(
            {
                "event": "start",
                "name": self.name,
                "plan": str(plan),
                "num_ranks": plan.num_ranks,
                "batch_size": event.batch_size,
                "num_micros": plan.num_micros,
                "step": event.first_step,
                "num_steps": event.num_steps,
            }
        )

    def on_step(self, event: StepEnd) -> None:
        """The step is shown if it is the first, the last, or an interval has gone by."""
        self.meter.add(event)
        self.done = event.step + 1
        if self.shown < 0 or self.done >= self.num_steps or self.clock() - self.shown_s >= self.interval_s:
            self.show_step()

    def on_evaluation(self, event: Evaluated) -> None:
        """The metrics on held-out data are shown."""
        self.tell("evaluation", {"step": event.step, "metrics": dict(event.metrics)})

    def on_saved(self, event: Saved) -> None:
        """The checkpoint's path is shown."""
        self.tell("saved", {"step": event.step, "path": str(event.path)})

    def on_end(self, event: RunEnd) -> None:
        """The last step and the reason of an early end are shown, and the terminal is as it was."""
        try:
            if self.shown not in {-1, self.done}:
                self.show_step()
            self.tell("end", {"step": event.num_steps, "error": described(event.error)})
        finally:
            self.view.close()

    def show_step(self) -> None:
        """The step is shown now."""
        step_s = self.meter.step_s
        self.tell(
            "step",
            {
                "step": self.done,
                "loss": self.meter.mean_loss,
                "samples_per_s": self.meter.samples_per_s,
                "step_s": step_s,
                "eta_s": step_s * max(self.num_steps - self.done, 0),
                "skipped": self.meter.skipped,
            },
        )
        self.shown, self.shown_s = self.done, self.clock()

    def tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """The view has one more record."""
        record: Record = {"event": event, "num_steps": self.num_steps, **facts}
        self.view.show(record)


def described(error: BaseException | None) -> str | None:
    """Return an error in one line; None for none."""
    if error is None:
        return None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by Ctrl-C"
    first = "".join(str(error).splitlines()[:1])
    if isinstance(error, SystemExit) and first:
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
