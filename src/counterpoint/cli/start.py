"""Start a run: decide where its ranks run, start them, and show their progress."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import typer

from counterpoint.checkpoint.file_ops import is_folder
from counterpoint.cli.config import RunConfig
from counterpoint.cli.echo import echo
from counterpoint.cli.error_handling import SHOW_TRACEBACK
from counterpoint.cli.rank_job import RankJob
from counterpoint.errors import CheckpointError, CounterpointError, LaunchError, PlanError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.local import OutputLine, run_command, write_prefixed
from counterpoint.plan.plan import Plan
from counterpoint.terminal_text import escape_output
from counterpoint.training.callbacks.run_folder import require_unused_folder
from counterpoint.training.reporting.progress_renderers import (
    BarRenderer,
    ProgressRenderer,
    can_redraw,
    make_renderer,
    parse_relayed,
)

AUTO = Path("auto")
"""In place of a folder to continue from: that of the run, if it has been started before."""


def start(config: RunConfig, resume: Path | None, loaded_plan: Plan | None = None) -> None:
    """Run the job in this process, or in one process per rank.

    Args:
        config: all values.
        resume: the run or checkpoint to continue, or ``AUTO``.
        loaded_plan: the plan as read from a file, if any.

    Raises:
        PlanError: the plan does not fit the ranks, or the folder holds another run.
        typer.Exit: a rank failed, which was reported.
    """
    environment = detect()
    ranks = environment.world_size if environment is not None else config.launch.ranks
    if environment is not None and (config.launch.local or config.launch.ranks not in {None, ranks}):
        raise LaunchError(
            f"a launcher has started {ranks} ranks, and this one is asked for {config.launch.ranks or 'all of them'} "
            "itself; omit --ranks and --local, or start the command without a launcher"
        )
    strategy_text = config.plan.strategy.strip()
    is_auto = strategy_text.startswith("auto")
    plan = Plan.parse(strategy_text.replace("auto", "data", 1) if is_auto else strategy_text, num_ranks=ranks or 1)
    source, profile = (None, None) if loaded_plan is None else (loaded_plan.source, loaded_plan.profile)
    plan = replace(plan, source=source)
    if ranks is not None:
        plan.require_ranks(ranks)
    run_folder = Path(config.output.folder) if config.output.folder is not None else find_run_folder(resume)
    if resume == AUTO:
        if run_folder is None:
            raise PlanError("--resume auto continues the run in --folder, if there is one; give --folder as well")
    elif run_folder is None or run_folder != find_run_folder(resume):
        run_folder = run_folder or new_folder(config.job)
        require_unused_folder(run_folder)
    strategy = f"auto({plan.num_ranks})" if is_auto else str(plan)
    job = RankJob(config, strategy, run_folder, find_checkpoints(resume), config.output.progress, source, profile)
    if environment is None and plan.num_ranks > 1 and not config.launch.local:
        start_ranks(job, plan.num_ranks)
    else:
        start_here(job)


def start_here(job: RankJob) -> None:
    """Run the job in this process; add the path of the report to errors."""
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
    return [f"report: {report}"] if os.path.lexists(report) else []


def start_ranks(job: RankJob, num_ranks: int) -> None:
    """Run every rank in a process of its own, and show the first one's progress as if it were this process."""
    launch, output = job.config.launch, job.config.output
    redraws = output.progress == "rich" or (output.progress == "auto" and can_redraw(sys.stdout))
    renderer: ProgressRenderer = (
        BarRenderer(sys.stdout, time.monotonic) if redraws else make_renderer("plain", sys.stdout, time.monotonic)
    )
    if redraws:
        job = replace(job, progress="relay")

    def show(line: OutputLine) -> None:
        if line.rank != 0 or line.stream == "err":
            write_prefixed(line)
        elif (record := parse_relayed(line.text)) is not None:
            renderer.show(record)
        else:
            renderer.write_line(escape_output(line.text))

    with tempfile.TemporaryDirectory(prefix="counterpoint-") as name:
        path = Path(name) / "job.json"
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
            renderer.close()
    if result.exit_code != 0:
        echo("\n".join([result.report, *report_lines(job)]), err=True)
        raise typer.Exit(result.exit_code)


def new_folder(name: str) -> Path:
    """Return the folder of a new run."""
    return Path("runs") / f"{name}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"


def find_run_folder(resume: Path | None) -> Path | None:
    """Return the folder of the run that is continued; None for a single checkpoint, from which a new run starts."""
    if resume is None or resume == AUTO:
        return None
    if resume.name == "checkpoints":
        return resume.parent
    return resume if is_folder(resume / "checkpoints") else None


def find_checkpoints(resume: Path | None) -> Path | None:
    """Return the checkpoints to continue from; ``AUTO`` as it is.

    Raises:
        CheckpointError: there are none.
    """
    if resume == AUTO:
        return resume
    if resume is not None and not is_folder(resume) and not os.path.lexists(resume):
        raise CheckpointError(f"there is nothing at {resume} to resume from; give a run's folder or a checkpoint")
    return resume / "checkpoints" if resume is not None and is_folder(resume / "checkpoints") else resume


def find_config(path: Path | None, *, is_run: bool) -> Path | None:
    """Return the configuration file of a run, by its folder or that of a checkpoint, if there is one."""
    if path is None:
        return None
    for folder in (path,) if is_run else (path, path.parent, path.parent.parent):
        if os.path.lexists(folder / "config.yaml"):
            return folder / "config.yaml"
    return None
