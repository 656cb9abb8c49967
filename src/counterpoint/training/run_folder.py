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

from counterpoint.drawing.perfetto import write_perfetto
from counterpoint.errors import PlanError
from counterpoint.model.timing_file import file_beside, write_timing
from counterpoint.plan import Plan
from counterpoint.planner.account import account
from counterpoint.program.text import format_program
from counterpoint.training.events import Callback, Evaluated, RunEnd, RunStart, StepEnd, Timed
from counterpoint.training.fitted import simulated_beside
from counterpoint.training.progress import described
from counterpoint.training.reporting import Story, write_story
from counterpoint.training.tensorboard import EventFile
from counterpoint.training.views import as_json

METRICS = "metrics.jsonl"
REPORT_EVERY_S = 30.0
"""How old a report may be while the run goes on: one that is killed leaves a report of its last half minute."""


def now_s() -> float:
    """Return the seconds since 1970."""
    return datetime.now(UTC).timestamp()


class RunFolder(Callback):
    """Writes one folder for a run.

    ``plan.yaml``, with ``plan.timing.json`` beside it if it was cut by a timing, and ``program.txt`` stand there before
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
        self.story = Story(title or self.folder.name)
        self.metrics: IO[str] | None = None
        self.events: EventFile | None = None
        self.reported_s = 0.0

    @property
    def report(self) -> Path:
        """Where the report is."""
        return self.folder / "report.html"

    def on_start(self, event: RunStart) -> None:
        """Plan and program are written; what an earlier part of this run wrote about later steps is gone."""
        if event.first_step == 0:
            require_free(self.folder)
        make(self.folder)
        title = self.title or self.folder.name
        self.story = Story(title, event.compiled, event.num_steps, event.batch_size, self.config)
        self.story.weighing = account(event.choice) if event.choice is not None else None
        kept = list(lines_until(self.folder / METRICS, event.first_step))
        replace(self.folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in kept))
        for line in kept:
            self.story.recall(line)
        self.write_plan(event.compiled.plan)
        replace(self.folder / "program.txt", format_program(event.compiled.program) + "\n")
        if self.config:
            replace(self.folder / "config.yaml", self.config)
        self.metrics = (self.folder / METRICS).open("a", encoding="utf-8")
        self.events = EventFile(self.folder, self.clock, event.first_step)

    def write_plan(self, plan: Plan) -> None:
        """The plan is in its file, and the timing that it was cut by beside it, so that it is predicted alike."""
        file = self.folder / "plan.yaml"
        beside = file_beside(file)
        if plan.timing is not None:
            replace(beside, write_timing(plan.timing))
        replace(file, plan.to_yaml("" if plan.timing is None else beside.name))

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
            "fault": event.fault,
            **event.options,
        }
        self.note(line)
        rate = event.num_samples / event.seconds if event.seconds else 0.0
        scalars = {"loss": event.loss, "samples_per_s": rate, **event.options}
        if math.isfinite(event.grad_norm):
            scalars["grad_norm"] = event.grad_norm
        self.draw(event.step + 1, "train", scalars)
        if self.clock() - self.reported_s >= REPORT_EVERY_S:
            self.write_report()

    def on_evaluation(self, event: Evaluated) -> None:
        """The metrics are a line and points, and the report is up to date."""
        self.note({"event": "evaluation", "step": event.step, "metrics": dict(event.metrics)})
        self.draw(event.step, "held_out", event.metrics)
        self.write_report()

    def on_trace(self, event: Timed) -> None:
        """The measured step and the simulated one are written beside each other."""
        compiled = self.story.compiled
        assert compiled is not None, "the run has started"
        self.story.measured = event.trace
        self.story.simulated = simulated_beside(compiled, event.trace, event.step)
        replace(self.folder / "trace.json", write_perfetto(event.trace, self.story.simulated))
        self.write_report()

    def on_end(self, event: RunEnd) -> None:
        """The report says how the run ended, and all files are closed."""
        if self.metrics is None or self.events is None:  # it ended before it began, and has written nothing
            return
        self.story.ended, self.story.error = True, described(event.error)
        self.note({"event": "end", "step": event.num_steps, "error": self.story.error})
        self.metrics.close()
        self.events.close()
        self.write_report()

    def note(self, line: Mapping[str, Any]) -> None:
        """The line is in the metrics, whole, and in the report's curves."""
        assert self.metrics is not None, "the run has started"
        self.metrics.write(as_json(line) + "\n")
        self.metrics.flush()
        self.story.recall(line)

    def draw(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """The values are in TensorBoard's curves."""
        assert self.events is not None, "the run has started"
        self.events.scalars(step, {f"{group}/{name}": value for name, value in values.items()})

    def write_report(self) -> None:
        """The report tells what is known by now."""
        replace(self.report, write_story(self.story))
        self.reported_s = self.clock()


def make(folder: Path) -> None:
    """The folder is there.

    Raises:
        PlanError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"the folder {folder} cannot be made: {error.strerror}; give another folder") from None


def require_free(folder: Path) -> None:
    """Check that no run has written to a folder yet.

    Raises:
        PlanError: one has.
    """
    if (folder / METRICS).exists():
        raise PlanError(
            f"the folder {folder} holds a run already; a run keeps its own: give another folder, or resume that run"
        )


def lines_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
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


def replace(path: Path, text: str) -> None:
    """The file has the text; at no moment has it only a part."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
