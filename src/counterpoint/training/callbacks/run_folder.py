"""A run's folder: what was done, how it went and how it looked, in files that each make sense alone.

Every file is whole at every moment: texts are renamed into place, and lines are written in one piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from counterpoint.errors import PlanError
from counterpoint.model.model_profile import format_profile, profile_path_for
from counterpoint.plan.plan import Plan
from counterpoint.planner.choice_report import build_comparison
from counterpoint.program.text import format_program
from counterpoint.training.callbacks.callback import Callback, EvaluationEnd, RunEnd, RunStart, StepEnd, TraceRecorded
from counterpoint.training.callbacks.progress import format_error
from counterpoint.training.reporting.calibration import simulate_calibrated
from counterpoint.training.reporting.progress_renderers import format_json
from counterpoint.training.reporting.run_report import RunSummary, render_report
from counterpoint.training.reporting.tensorboard import TensorBoardWriter
from counterpoint.viz.perfetto import format_perfetto

METRICS = "metrics.jsonl"
REPORT_EVERY_S = 30.0
"""How old a report may be while the run goes on: one that is killed leaves a report of its last half minute."""


def now_s() -> float:
    """Return the seconds since 1970."""
    return datetime.now(UTC).timestamp()


class RunFolder(Callback):
    """Writes one folder for a run.

    ``plan.yaml``, with ``plan.profile.json`` beside it if it was cut by a timing, and ``program.txt`` stand there before
    the first step; ``metrics.jsonl`` and TensorBoard's events grow with every step; ``trace.json`` (open it in
    ui.perfetto.dev) comes with the first measured step; ``report.html`` is rewritten now and then, and at the end,
    early or not. ``checkpoints/`` is the place for checkpoints.

    Args:
        folder: is made; one that holds another run is refused, unless this run goes on from it.
        title: of the report.
        config: YAML text to keep as ``config.yaml``.
        clock: seconds since 1970.

    Raises:
        PlanError: at the start, if the folder holds a run that this one does not go on from.
    """

    def __init__(
        self, folder: str | Path, *, title: str = "", config: str = "", clock: Callable[[], float] = now_s
    ) -> None:
        self.folder = Path(folder)
        self.title = title
        self.config = config
        self.clock = clock
        self.summary = RunSummary(title or self.folder.name)
        self.metrics: IO[str] | None = None
        self.events: TensorBoardWriter | None = None
        self.reported_s = 0.0

    @property
    def report_path(self) -> Path:
        """Where the report is."""
        return self.folder / "report.html"

    def on_start(self, event: RunStart) -> None:
        """Plan and program are written; what an earlier part of this run wrote about later steps is gone."""
        if event.first_step == 0:
            require_unused_folder(self.folder)
        make_folder(self.folder)
        title = self.title or self.folder.name
        self.summary = RunSummary(title, event.compiled, event.num_steps, event.batch_size, self.config)
        self.summary.plan_comparison = build_comparison(event.choice) if event.choice is not None else None
        kept = list(read_lines_until(self.folder / METRICS, event.first_step))
        write_atomically(self.folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in kept))
        for line in kept:
            self.summary.load(line)
        self.write_plan(event.compiled.plan)
        write_atomically(self.folder / "program.txt", format_program(event.compiled.program) + "\n")
        if self.config:
            write_atomically(self.folder / "config.yaml", self.config)
        self.metrics = (self.folder / METRICS).open("a", encoding="utf-8")
        self.events = TensorBoardWriter(self.folder, self.clock, event.first_step)

    def write_plan(self, plan: Plan) -> None:
        """The plan is in its file, and the timing that it was cut by beside it, so that it is predicted alike."""
        file = self.folder / "plan.yaml"
        beside = profile_path_for(file)
        if plan.profile is not None:
            write_atomically(beside, format_profile(plan.profile))
        write_atomically(file, plan.to_yaml("" if plan.profile is None else beside.name))

    def on_step(self, event: StepEnd) -> None:
        """The step is a line of the metrics and a point of TensorBoard's curves."""
        line = {
            "event": "step",
            "step": event.step + 1,
            "epoch": event.epoch,
            "loss": event.loss,
            "num_samples": event.num_samples,
            "seconds": event.seconds,
            "grad_norm": event.grad_norm,
            "skip_reason": event.skip_reason,
            **event.options,
        }
        self.write_metrics(line)
        rate = event.num_samples / event.seconds if event.seconds else 0.0
        scalars = {"loss": event.loss, "samples_per_s": rate, **event.options}
        if math.isfinite(event.grad_norm):
            scalars["grad_norm"] = event.grad_norm
        self.write_scalars(event.step + 1, "train", scalars)
        if self.clock() - self.reported_s >= REPORT_EVERY_S:
            self.write_report()

    def on_evaluation(self, event: EvaluationEnd) -> None:
        """The metrics are a line and points, and the report is up to date."""
        self.write_metrics({"event": "evaluation", "step": event.step, "metrics": dict(event.metrics)})
        self.write_scalars(event.step, "held_out", event.metrics)
        self.write_report()

    def on_trace(self, event: TraceRecorded) -> None:
        """The measured step and the simulated one are written beside each other."""
        compiled = self.summary.compiled
        assert compiled is not None, "the run has started"
        self.summary.measured = event.trace
        self.summary.simulated = simulate_calibrated(compiled, event.trace, event.step)
        write_atomically(self.folder / "trace.json", format_perfetto(event.trace, self.summary.simulated))
        self.write_report()

    def on_end(self, event: RunEnd) -> None:
        """The report says how the run ended, and all files are closed."""
        if self.metrics is None or self.events is None:  # it ended before it began, and has written nothing
            return
        self.summary.has_ended, self.summary.error = True, format_error(event.error)
        self.write_metrics({"event": "end", "step": event.num_steps, "error": self.summary.error})
        self.metrics.close()
        self.events.close()
        self.write_report()

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """The line is in the metrics, whole, and in the report's curves."""
        assert self.metrics is not None, "the run has started"
        self.metrics.write(format_json(line) + "\n")
        self.metrics.flush()
        self.summary.load(line)

    def write_scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """The values are in TensorBoard's curves."""
        assert self.events is not None, "the run has started"
        self.events.write_scalars(step, {f"{group}/{name}": value for name, value in values.items()})

    def write_report(self) -> None:
        """The report tells what is known by now."""
        write_atomically(self.report_path, render_report(self.summary))
        self.reported_s = self.clock()


def make_folder(folder: Path) -> None:
    """The folder is there.

    Raises:
        PlanError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"the folder {folder} cannot be made: {error.strerror}; give another folder") from None


def require_unused_folder(folder: Path) -> None:
    """Check that no run has written to a folder yet.

    Raises:
        PlanError: one has.
    """
    if (folder / METRICS).exists():
        raise PlanError(
            f"the folder {folder} holds a run already; a run keeps its own: give another folder, or resume that run"
        )


def read_lines_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield what was written about the steps up to one; a line that a crash has cut is left out."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["step"] <= step and line["event"] != "end":
            yield line


def write_atomically(path: Path, text: str) -> None:
    """The file has the text; at no moment has it only a part."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
