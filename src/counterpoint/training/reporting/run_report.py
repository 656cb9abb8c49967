"""Collect what a run's report shows while the run is going, and render it as one page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.program.trace import Trace
from counterpoint.training.reporting.progress_renderers import format_step_time
from counterpoint.viz.plan_comparison import PlanComparison
from counterpoint.viz.report import (
    EvaluationPoint,
    ReportData,
    ReportHeading,
    StatCard,
    StepTimelines,
    TrainingCurves,
    write_report,
)

MAX_POINTS = 2000


@dataclass(slots=True)
class DownsampledSeries:
    """A curve of any length in bounded memory; if it has too many points, neighbours are averaged.

    Args:
        max_points: the largest number of points kept, an even number.
        stride: how many values one point averages.
        points: ``(x of the last value, mean of the values)``.
        pending: values that do not fill a point yet.
    """

    max_points: int = MAX_POINTS
    stride: int = 1
    points: list[tuple[float, float]] = field(default_factory=list)
    pending: list[tuple[float, float]] = field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        """Add a value; one that is not finite is ignored."""
        if not math.isfinite(y):
            return
        self.pending.append((x, y))
        if len(self.pending) == self.stride:
            self.points.append(mean_point(self.pending))
            self.pending.clear()
        if len(self.points) == self.max_points:
            self.points = [mean_point(list(pair)) for pair in list(pairwise(self.points))[::2]]
            self.stride *= 2

    def all_points(self) -> tuple[tuple[float, float], ...]:
        """Return all points, including the pending values."""
        return tuple(self.points) + ((mean_point(self.pending),) if self.pending else ())


def mean_point(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the last x and the mean of the y."""
    return points[-1][0], math.fsum(y for _, y in points) / len(points)


SIMULATION_NOTE = (
    "The simulated step has the program of the measured one, and costs that are fitted to it: "
    "medians for computing, the fastest rank's time for what ranks do together."
)


@dataclass(slots=True)
class RunSummary:
    """The state of a run for its report; updated with every line of its metrics.

    Args:
        title: of the report.
        compiled: the plan and its program.
        num_steps: steps of the whole run; None if its data do not tell.
        batch_size: samples of one global batch.
        configuration: the text from which the run can be repeated.
        plan_comparison: the candidates of ``strategy="auto"``.
        step: the number of steps that are done.
        loss: by step.
        last_loss: of the last step with a finite one.
        rate: samples per second, by step.
        evaluations: every evaluation.
        measured: one traced step.
        simulated: the same step, simulated.
        skipped: the number of skipped steps.
        slow_ranks: the last that was said of each rank and of the step since which it was slow.
        built_with: what rank 0 computes with, and what of it costs speed.
        has_ended: whether the run is over.
        error: why it ended early, if it did.
    """

    title: str
    compiled: CompiledPlan | None = None
    num_steps: int | None = 0
    batch_size: int = 0
    configuration: str = ""
    plan_comparison: PlanComparison | None = None
    step: int = 0
    loss: DownsampledSeries = field(default_factory=DownsampledSeries)
    last_loss: float = math.nan
    rate: DownsampledSeries = field(default_factory=DownsampledSeries)
    evaluations: list[EvaluationPoint] = field(default_factory=list)
    measured: Trace | None = None
    simulated: Trace | None = None
    skipped: int = 0
    slow_ranks: dict[tuple[int, int], str] = field(default_factory=dict)
    built_with: str = ""
    has_ended: bool = False
    error: str | None = None

    def load(self, line: Mapping[str, Any]) -> None:
        """Add a line of the metrics, written now or before a resume."""
        if line["event"] == "step":
            self.step = line["step"]
            self.skipped += bool(line["skip_reason"])
            loss = parse_number(line["loss"])
            self.loss.add(self.step, loss)
            self.last_loss = loss if math.isfinite(loss) else self.last_loss
            if line["seconds"]:
                self.rate.add(self.step, line["num_samples"] / line["seconds"])
        elif line["event"] == "evaluation":
            metrics = tuple((name, parse_number(value)) for name, value in line["metrics"].items())
            self.evaluations.append(EvaluationPoint(line["step"], metrics))
        elif line["event"] == "build":
            costs = [f"{cost['grade']}: {cost['text']}" for cost in line["speed_costs"]]
            self.built_with = "\n".join([line["text"], *costs])
        elif line["event"] == "slow_rank":
            self.slow_ranks[line["rank"], line["since_step"]] = line["text"]

    def add_trace(self, measured: Trace, simulated: Trace) -> None:
        """Add a traced step, and the same one simulated."""
        self.measured, self.simulated = measured, simulated

    def end(self, error: str | None) -> None:
        """End the run, with an error or without."""
        self.has_ended, self.error = True, error

    @property
    def position(self) -> str:
        """The number of steps that are done, and of all steps."""
        return f"{self.step}" if self.num_steps is None else f"{self.step} of {self.num_steps}"

    @property
    def ended_early(self) -> str:
        """Why the run is not finished; empty if it is."""
        if not self.has_ended:
            return f"killed, or still running; this page was written after step {self.position}"
        return f"{self.error}, after step {self.position}" if self.error is not None else ""


def parse_number(value: float | None) -> float:
    """Return a number of a JSON line; null is nan."""
    return math.nan if value is None else value


def render_report(summary: RunSummary) -> str:
    """Return the report as an HTML page."""
    assert summary.compiled is not None, "the run has started"
    plan = summary.compiled.plan
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    return write_report(
        ReportData(
            ReportHeading(
                summary.title, f"{plan} on {ranks}", summary.ended_early, "; ".join(summary.slow_ranks.values())
            ),
            tuple(summary_cards(summary)),
            TrainingCurves(summary.loss.all_points(), summary.rate.all_points(), tuple(summary.evaluations)),
            summary.compiled.program,
            StepTimelines(summary.simulated, summary.measured, SIMULATION_NOTE if summary.measured else ""),
            summary.configuration,
            summary.plan_comparison,
            summary.built_with,
        )
    )


def summary_cards(summary: RunSummary) -> list[StatCard]:
    """Return the figures to show first: the result, then the speed."""
    last_evaluation = summary.evaluations[-1:]
    cards = [
        StatCard(f"held-out {name.replace('_', ' ')}", value)
        for evaluation in last_evaluation
        for name, value in evaluation.metrics
    ]
    if math.isfinite(summary.last_loss):
        cards.append(StatCard("training loss, last step", summary.last_loss))
    cards += [
        StatCard("steps", summary.position),
        StatCard("global batch", summary.batch_size, "samples"),
    ]
    if rate := summary.rate.all_points():
        cards.append(StatCard("throughput", median(value for _, value in rate), "samples/s"))
    for name, trace in (("measured step", summary.measured), ("simulated step", summary.simulated)):
        if trace is not None:
            value, unit = format_step_time(trace.step_s).split()
            cards.append(StatCard(name, value, unit))
    if summary.simulated is not None and summary.simulated.num_ranks > 1:
        cards.append(StatCard("ranks not computing, simulated", f"{100 * summary.simulated.bubble:.0f}", "%"))
    if summary.skipped:
        cards.append(StatCard("skipped steps", summary.skipped))
    return cards
