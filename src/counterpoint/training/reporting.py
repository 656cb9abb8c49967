"""What a run's report tells: collected while the run goes on, written as one page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from counterpoint.compiler.compile import Compiled
from counterpoint.drawing.report import Curves, Figure, Heading, HeldOut, ReportData, Timelines, write_report
from counterpoint.drawing.weighing import Weighing
from counterpoint.program.trace import Trace
from counterpoint.training.curves import Curve
from counterpoint.training.views import short_time

NOTE = (
    "The simulated step has the program of the measured one, and costs that are fitted to it: "
    "medians for computing, the fastest rank's time for what ranks do together."
)


@dataclass(slots=True)
class Story:
    """What is known of a run by now; changes with every line of its metrics.

    Args:
        title: of the report.
        compiled: the plan and its program.
        num_steps: steps of the whole run.
        batch_size: samples of one global batch.
        configuration: the text from which the run can be repeated.
        weighing: how the plan was chosen, where that was left open.
        step: steps that are done.
        loss: by step.
        rate: samples per second, by step.
        held_out: every evaluation.
        measured: one step, word by word.
        simulated: the same step on the simulator's clock.
        skipped: steps that were left out.
        ended: whether the run is over.
        error: why it ended early, if it did.
    """

    title: str
    compiled: Compiled | None = None
    num_steps: int = 0
    batch_size: int = 0
    configuration: str = ""
    weighing: Weighing | None = None
    step: int = 0
    loss: Curve = field(default_factory=Curve)
    rate: Curve = field(default_factory=Curve)
    held_out: list[HeldOut] = field(default_factory=list)
    measured: Trace | None = None
    simulated: Trace | None = None
    skipped: int = 0
    ended: bool = False
    error: str | None = None

    def recall(self, line: Mapping[str, Any]) -> None:
        """What a line of the metrics says is known, whether it was written now or before a resume."""
        if line["event"] == "step":
            self.step = line["step"]
            self.skipped += bool(line["fault"])
            self.loss.add(self.step, number(line["loss"]))
            if line["seconds"]:
                self.rate.add(self.step, line["num_samples"] / line["seconds"])
        elif line["event"] == "evaluation":
            metrics = tuple((name, number(value)) for name, value in line["metrics"].items())
            self.held_out.append(HeldOut(line["step"], metrics))

    @property
    def ended_early(self) -> str:
        """Why the run is not finished; empty if it is."""
        if not self.ended:
            return f"killed, or still running; this page was written after step {self.step} of {self.num_steps}"
        return f"{self.error}, after step {self.step} of {self.num_steps}" if self.error is not None else ""


def number(value: float | None) -> float:
    """Return the number that a line of JSON holds; null is nan."""
    return math.nan if value is None else value


def write_story(story: Story) -> str:
    """Return the report as a page."""
    assert story.compiled is not None, "the run has started"
    plan = story.compiled.plan
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    return write_report(
        ReportData(
            Heading(story.title, f"{plan} on {ranks}", story.ended_early),
            tuple(figures(story)),
            Curves(story.loss.drawn(), story.rate.drawn(), tuple(story.held_out)),
            story.compiled.program,
            Timelines(story.simulated, story.measured, NOTE if story.measured else ""),
            story.configuration,
            story.weighing,
        )
    )


def figures(story: Story) -> list[Figure]:
    """Return the numbers to see first: the result, then the speed."""
    last = story.held_out[-1:]
    found = [Figure(f"held-out {name.replace('_', ' ')}", value) for one in last for name, value in one.metrics]
    if loss := story.loss.drawn():
        found.append(Figure("training loss", loss[-1][1]))
    found += [
        Figure("steps", f"{story.step} of {story.num_steps}"),
        Figure("global batch", story.batch_size, "samples"),
    ]
    if rate := story.rate.drawn():
        found.append(Figure("throughput", median(value for _, value in rate), "samples/s"))
    for name, trace in (("measured step", story.measured), ("simulated step", story.simulated)):
        if trace is not None:
            value, unit = short_time(trace.step_s).split()
            found.append(Figure(name, value, unit))
    if story.simulated is not None and story.simulated.num_ranks > 1:
        found.append(Figure("ranks not computing, simulated", f"{100 * story.simulated.bubble:.0f}", "%"))
    if story.skipped:
        found.append(Figure("skipped steps", story.skipped))
    return found
