"""Write a run's folder: plan, program, metrics, trace and report, in files that each can be read alone.

Every file is complete at any time: texts are renamed into place, and lines are written in one piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import IO, Any

from counterpoint.checkpoint.file_ops import is_folder
from counterpoint.checkpoint.folder_lock import FolderLock, lock_folder
from counterpoint.errors import PlanError
from counterpoint.file_reader import find_file_kind, open_regular_file
from counterpoint.file_writer import append_whole, encode_text, replace_file
from counterpoint.json_reader import parse_json
from counterpoint.model.model_profile import format_profile, profile_path_for
from counterpoint.plan.plan import Plan
from counterpoint.program.text import format_program
from counterpoint.terminal_text import warn
from counterpoint.training.callbacks.callback import (
    Callback,
    CheckpointFailed,
    EvaluationEnd,
    RunEnd,
    RunStart,
    SlowRank,
    StepEnd,
    TraceRecorded,
)
from counterpoint.training.callbacks.progress import format_error
from counterpoint.training.reporting.calibration import simulate_calibrated
from counterpoint.training.reporting.progress_renderers import format_json
from counterpoint.training.reporting.run_report import RunSummary, render_report
from counterpoint.training.reporting.tensorboard import TensorBoardWriter
from counterpoint.viz.perfetto import format_perfetto

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LINE_MAX_BYTES = 2**20
"""The longest line of the metrics; a longer one is damaged."""
REPORT_EVERY_S = 30.0
"""The largest age of the report during a run: a killed run leaves a report of its last half minute."""


def now_s() -> float:
    """Return the seconds since 1970."""
    return datetime.now(UTC).timestamp()


class RunFolder(Callback):
    """Writes one folder for a run.

    ``plan.yaml``, with ``plan.profile.json`` next to it if its stages were balanced by a profile, and ``program.txt``
    are written before the first step; ``metrics.jsonl`` and TensorBoard's events grow with every step; ``trace.json``
    (open it in ui.perfetto.dev) is written with every traced step; ``report.html`` is rewritten regularly, and at
    the end, early or not. ``checkpoints/`` is the place for checkpoints.

    Args:
        folder: is created; one that holds another run is an error, unless this run continues it.
        title: of the report.
        config: YAML text to keep as ``config.yaml``.
        clock: seconds since 1970.

    Raises:
        PlanError: at the start, if the folder holds a run that this one does not continue.
        CheckpointError: at the start, if another process continues that run.
    """

    def __init__(
        self, folder: str | Path, *, title: str = "", config: str = "", clock: Callable[[], float] = now_s
    ) -> None:
        self.folder = Path(folder)
        self.title = title
        self.config = config
        self.clock = clock
        self.summary = RunSummary(title or self.folder.name)
        self.metrics: IO[bytes] | None = None
        self.num_failed_writes = 0
        self.events: TensorBoardWriter | None = None
        self.reported_s = 0.0
        self.lock: FolderLock | None = None

    @property
    def report_path(self) -> Path:
        """The path of the report."""
        return self.folder / "report.html"

    def on_start(self, event: RunStart) -> None:
        """Write plan and program; drop metrics of later steps that an earlier part of this run wrote."""
        if event.first_step == 0 and event.resume_path is None:
            require_unused_folder(self.folder)
        make_folder(self.folder)
        with explained(self.folder):
            self.lock = lock_folder(self.folder, "", "give another run_dir")
            self.open_files(event)

    def open_files(self, event: RunStart) -> None:
        """Write what is known before the first step, and open what grows."""
        from counterpoint.planner.choice_report import build_comparison

        title = self.title or self.folder.name
        comparison = build_comparison(event.choice) if event.choice is not None else None
        self.summary = RunSummary(title, event.compiled, event.num_steps, event.batch_size, self.config, comparison)
        lines = list(read_lines_until(self.folder / METRICS, event.first_step))
        replace_file(self.folder / METRICS, "".join(f"{json.dumps(line)}\n" for line in lines))
        for line in lines:
            with suppress(AttributeError, KeyError, TypeError):  # a damaged line is kept, and not in the report
                self.summary.load(line)
        self.write_plan(event.compiled.plan)
        replace_file(self.folder / "program.txt", format_program(event.compiled.program) + "\n")
        if self.config:
            replace_file(self.folder / "config.yaml", self.config)
        self.metrics = (self.folder / METRICS).open("ab", buffering=0)
        self.events = TensorBoardWriter(self.folder, self.clock, event.first_step)
        self.write_build(event.first_step)

    def write_plan(self, plan: Plan) -> None:
        """Write the plan, and the profile that balanced its stages next to it, so that predictions can be repeated."""
        file = self.folder / "plan.yaml"
        profile_file = profile_path_for(file)
        if plan.profile is not None:
            replace_file(profile_file, format_profile(plan.profile))
        replace_file(file, plan.to_yaml("" if plan.profile is None else profile_file.name))

    def write_build(self, step: int) -> None:
        """Write what this process, which has rank 0, computes with from a step on."""
        from counterpoint.profiler.torch_build import find_speed_costs, read_torch_build  # imports torch

        build = read_torch_build()
        costs = [{**asdict(cost), "text": str(cost)} for cost in find_speed_costs(build)]
        line = {"event": "build", "step": step, "text": str(build), "build": asdict(build), "speed_costs": costs}
        self.write_metrics(line)

    def on_step(self, event: StepEnd) -> None:
        """Write the step as a line of metrics and to TensorBoard."""
        line = {
            "event": "step",
            "step": event.step + 1,
            "epoch": event.epoch,
            "loss": event.loss,
            **({"loss_parts": dict(event.loss_parts)} if event.loss_parts else {}),
            "num_samples": event.num_samples,
            "seconds": event.seconds,
            "grad_norm": event.grad_norm,
            "skip_reason": event.skip_reason,
            **({"loss_scale": event.loss_scale} if event.loss_scale != 1.0 else {}),
            **event.options,
        }
        if len(event.busy_s) > 1:
            line["busy_s"] = {str(rank): round(seconds, 6) for rank, seconds in event.busy_s.items()}
        self.write_metrics(line)
        rate = event.num_samples / event.seconds if event.seconds else 0.0
        parts = {f"loss/{name}": value for name, value in event.loss_parts.items()}
        scalars = {"loss": event.loss, **parts, "samples_per_s": rate, **event.options}
        if len(event.busy_s) > 1:
            scalars |= {"busy_s_max": max(event.busy_s.values()), "busy_s_median": median(event.busy_s.values())}
        if math.isfinite(event.grad_norm):
            scalars["grad_norm"] = event.grad_norm
        if event.loss_scale != 1.0:
            scalars["loss_scale"] = event.loss_scale
        self.write_scalars(event.step + 1, "train", scalars)
        if self.clock() - self.reported_s >= REPORT_EVERY_S:
            self.write_report()

    def on_slow_rank(self, event: SlowRank) -> None:
        """Write which rank is slow and since when, and update the report."""
        line = {"event": "slow_rank", "step": self.summary.step, **asdict(event), "text": str(event)}
        self.write_metrics(line)
        self.write_report()

    def on_evaluation(self, event: EvaluationEnd) -> None:
        """Write the metrics of an evaluation, and update the report."""
        self.write_metrics({"event": "evaluation", "step": event.step, "metrics": dict(event.metrics)})
        self.write_scalars(event.step, "held_out", event.metrics)
        self.write_report()

    def on_trace(self, event: TraceRecorded) -> None:
        """Write the traced step and a simulated one to one file."""
        compiled = self.summary.compiled
        assert compiled is not None, "the run has started"
        simulated = simulate_calibrated(compiled, event.trace, event.step)
        self.summary.add_trace(event.trace, simulated)
        with self.counting_failures():
            replace_file(self.folder / "trace.json", format_perfetto(event.trace, simulated))
        self.write_report()

    def on_checkpoint_failed(self, event: CheckpointFailed) -> None:
        """Write why a checkpoint could not be written."""
        self.write_metrics({"event": "save_failed", **asdict(event)})

    def on_end(self, event: RunEnd) -> None:
        """Write how the run ended to the report, and close all files."""
        if self.lock is not None:
            self.lock.release()
        if self.metrics is None or self.events is None:  # the run failed before all files were open
            if self.metrics is not None:
                self.metrics.close()
            return
        self.summary.end(format_error(event.error))
        self.write_metrics({"event": "end", "step": event.num_steps, "error": self.summary.error})
        self.metrics.close()
        self.events.close()
        self.write_report()
        if self.num_failed_writes > 1:
            text = f"{self.num_failed_writes} records of the run could not be written to {self.folder}"
            warn(text, RuntimeWarning, stacklevel=2)

    def write_metrics(self, line: Mapping[str, Any]) -> None:
        """Append a line to the metrics, and add it to the report's curves."""
        assert self.metrics is not None, "the run has started"
        with self.counting_failures():
            append_whole(self.metrics.fileno(), encode_text(format_json(line) + "\n"))
        self.summary.load(line)

    def write_scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        """Write values to TensorBoard."""
        assert self.events is not None, "the run has started"
        with self.counting_failures():
            self.events.write_scalars(step, {f"{group}/{name}": value for name, value in values.items()})

    def write_report(self) -> None:
        """Write the report of what is known."""
        with self.counting_failures():
            replace_file(self.report_path, render_report(self.summary))
        self.reported_s = self.clock()

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count what the disk does not take, and warn of the first time; training continues."""
        try:
            yield
        except OSError as error:
            self.num_failed_writes += 1
            if self.num_failed_writes == 1:
                warn(
                    f"a record of the run could not be written to {self.folder}: {error.strerror or error}; training "
                    "continues, and so do the records as soon as the disk has space",
                    RuntimeWarning,
                    stacklevel=2,
                )


def find_checkpoints(folder: Path) -> Path:
    """Return the folder of checkpoints in a run's folder; a folder without one is returned unchanged.

    Raises:
        CheckpointError: it cannot be read.
    """
    return folder / CHECKPOINTS if is_folder(folder / CHECKPOINTS) else folder


def make_folder(folder: Path) -> None:
    """Create a folder.

    Raises:
        PlanError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"the folder {folder} cannot be created: {error.strerror}; give another folder") from None


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn an ``OSError`` into an error with a remedy.

    Raises:
        PlanError: the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise PlanError(
            f"the folder {folder} cannot be written: {error.strerror or error}; give another folder, or give this user "
            "the right to write there"
        ) from None


def require_unused_folder(folder: Path) -> None:
    """Check that no run has written to a folder.

    Raises:
        PlanError: one has, or the folder cannot be read.
    """
    try:
        is_used = find_file_kind(folder / METRICS) != "nothing"
    except OSError as error:
        raise PlanError(f"the folder {folder} cannot be read: {error.strerror}; give another folder") from None
    if is_used:
        raise PlanError(
            f"the folder {folder} already holds a run; each run needs its own: give another folder, or resume that run"
        )


def read_lines_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield the lines about steps up to one; incomplete lines of a crash are skipped."""
    try:
        with open_regular_file(path, links="refused") as file:
            while text := file.readline(LINE_MAX_BYTES):
                try:
                    line = parse_json(text)
                except ValueError:
                    continue
                match line:
                    case {"step": int(at), "event": str(event)} if at <= step and event != "end":
                        yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; give another folder, or remove it") from None
