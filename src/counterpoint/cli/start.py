"""From settled values to ranks that run: where they are, what they are told, and how their end is told."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import typer

from counterpoint.cli.config import RunConfig
from counterpoint.cli.error_handling import SHOW_TRACEBACK
from counterpoint.cli.rank_job import RankJob
from counterpoint.errors import CheckpointError, CounterpointError, LaunchError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.local import OutputLine, run_command, write_prefixed
from counterpoint.plan.plan import Plan
from counterpoint.training.callbacks.run_folder import require_unused_folder
from counterpoint.training.reporting.progress_renderers import (
    BarRenderer,
    ProgressRenderer,
    can_redraw,
    make_renderer,
    parse_relayed,
)


def start(config: RunConfig, resume: Path | None, loaded_plan: Plan | None = None) -> None:
    """The run has ended: in this process, or in one process for each rank.

    Args:
        config: all values.
        resume: the run or checkpoint to go on from.
        read: the plan as it was read from a file, if it was.

    Raises:
        PlanError: the plan does not fit the ranks, or the folder holds another run.
        typer.Exit: a rank failed, and that was told.
    """
    environment = detect()
    ranks = environment.world_size if environment is not None else config.launch.ranks
    if environment is not None and (config.launch.local or config.launch.ranks not in {None, ranks}):
        raise LaunchError(
            f"a launcher has started {ranks} ranks, and this one is asked for {config.launch.ranks or 'all of them'} "
            "itself; leave --ranks and --local away, or start the command without a launcher"
        )
    text = config.plan.strategy.strip()
    is_open = text.startswith("auto")
    plan = Plan.parse(text.replace("auto", "data", 1) if is_open else text, num_ranks=ranks or 1)
    written, timing = (None, None) if loaded_plan is None else (loaded_plan.source, loaded_plan.profile)
    plan = replace(plan, source=written)
    if ranks is not None:
        plan.require_ranks(ranks)
    run_folder = Path(config.output.folder) if config.output.folder is not None else find_run_folder(resume)
    if run_folder is None or run_folder != find_run_folder(resume):
        run_folder = run_folder or new_folder(config.job)
        require_unused_folder(run_folder)
    strategy = f"auto({plan.num_ranks})" if is_open else str(plan)
    order = RankJob(config, strategy, run_folder, find_checkpoints(resume), config.output.progress, written, timing)
    if environment is None and plan.num_ranks > 1 and not config.launch.local:
        start_ranks(order, plan.num_ranks)
    else:
        start_here(order)


def start_here(job: RankJob) -> None:
    """The run has ended in this process; an error that ended it knows where the report is."""
    from counterpoint.cli.rank_main import run_job

    try:
        run_job(job)
    except (CounterpointError, KeyboardInterrupt) as error:
        for line in report_lines(job):
            error.add_note(line)
        raise


def report_lines(job: RankJob) -> list[str]:
    """Return where the report is, if there is one."""
    report = job.folder / "report.html"
    return [f"report: {report}"] if report.exists() else []


def start_ranks(job: RankJob, num_ranks: int) -> None:
    """Every rank has run in a process of its own, and the first one was shown as if it were this process."""
    launch, output = job.config.launch, job.config.output
    draws = output.progress == "rich" or (output.progress == "auto" and can_redraw(sys.stdout))
    view: ProgressRenderer = (
        BarRenderer(sys.stdout, time.monotonic) if draws else make_renderer("plain", sys.stdout, time.monotonic)
    )
    if draws:
        job = replace(job, progress="relay")

    def show(line: OutputLine) -> None:
        if line.rank != 0 or line.stream == "err":
            write_prefixed(line)
        elif (record := parse_relayed(line.text)) is not None:
            view.show(record)
        else:
            view.write_line(line.text)

    with tempfile.TemporaryDirectory(prefix="counterpoint-") as name:
        path = Path(name) / "order.json"
        path.write_text(job.to_json(), encoding="utf-8")
        command = [sys.executable, "-m", "counterpoint.cli.rank_main", str(path)]
        command += ["--traceback"] if SHOW_TRACEBACK.get() else []
        try:
            result = run_command(
                command,
                num_ranks,
                threads_per_rank=launch.threads,
                bind=launch.bind,
                timeout_s=launch.timeout_s,
                transport=launch.transport,
                on_line=show,
            )
        finally:
            view.close()
    if result.exit_code != 0:
        typer.echo("\n".join([result.report, *report_lines(job)]), err=True)
        raise typer.Exit(result.exit_code)


def new_folder(name: str) -> Path:
    """Return the folder of a run that starts now."""
    return Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def find_run_folder(resume: Path | None) -> Path | None:
    """Return the folder of the run that goes on; None for a single checkpoint, from which another run starts."""
    if resume is None:
        return None
    if resume.name == "checkpoints":
        return resume.parent
    return resume if (resume / "checkpoints").is_dir() else None


def find_checkpoints(resume: Path | None) -> Path | None:
    """Return where the state to go on from is.

    Raises:
        CheckpointError: there is nothing.
    """
    if resume is not None and not resume.exists():
        raise CheckpointError(f"there is nothing at {resume} to resume from; give a run's folder or a checkpoint")
    return resume / "checkpoints" if resume is not None and (resume / "checkpoints").is_dir() else resume


def find_config(resume: Path | None) -> Path | None:
    """Return the values of the run that goes on or was saved, if they were kept."""
    for folder in () if resume is None else (resume, resume.parent, resume.parent.parent):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None
