"""One rank of ``counterpoint train``; with ``python -m``, the process that the command starts for it."""

from __future__ import annotations

import math
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Literal

from counterpoint.cli.config import RunConfig, SourcedValue, apply_job_defaults, build_config, flatten
from counterpoint.cli.echo import echo
from counterpoint.cli.error_handling import FAILED, INTERRUPTED
from counterpoint.cli.rank_job import RankJob
from counterpoint.errors import CounterpointError, StoppedBySignal
from counterpoint.jobs.job import BuildOptimizer, BuildSchedule, TrainingJob
from counterpoint.jobs.registry import find_job
from counterpoint.launchers.rank_main import answer_stack_requests, delay_secondary_error, report_error
from counterpoint.launchers.signals import ignore_stop_signals
from counterpoint.training.callbacks.callback import History
from counterpoint.training.callbacks.progress import ProgressCallback
from counterpoint.training.callbacks.run_folder import RunFolder
from counterpoint.training.trainer import Trainer


def run_job(rank_job: RankJob) -> None:
    """Train and evaluate the job; the first rank prints the result."""
    config = fill_from_job(rank_job.config)
    training, output = config.training, config.output
    job = find_job(config.job)
    assert training.batch_size is not None, "the job has a default"
    data, held_out = job.build_data()
    folder = RunFolder(rank_job.folder, title=f"counterpoint train {config.job}", config=config.to_yaml())
    trainer = Trainer(
        job.build_model(training.seed),
        loss=job.loss,
        optimizer=with_lr(choose_optimizer(job, training.optimizer), training.lr),
        lr_scheduler=choose_schedule(job, config, len(data)),
        strategy=rank_job.plan,
        num_microbatches=config.plan.num_microbatches,
        passes=config.plan.passes,
        callbacks=[ProgressCallback(rank_job.progress, name=config.job, interval_s=output.interval_s)],
        seed=training.seed,
        clip_norm=training.clip_norm,
        clip_by=training.clip_by,
        nonfinite=training.nonfinite,
        loss_scale=training.loss_scale,
        precision=training.precision,
        compile=training.compile,
        device=config.launch.device,
        timeout_s=config.launch.timeout_s,
        batch_norm="deferred",
        num_measured_plans=config.plan.num_measured_plans or 0,
    )
    with trainer:
        history = trainer.fit(
            data,
            batch_size=training.batch_size,
            epochs=num_epochs(config, len(data)),
            max_steps=training.max_steps,
            eval_dataset=held_out,
            metrics=job.metrics,
            evaluate_every=output.evaluate_every,
            run_dir=folder,
            save_every=output.save_every,
            checkpoint_mode=output.checkpoint_mode,
            keep_last=output.keep_last,
            resume=None if rank_job.resume is None else str(rank_job.resume),
            resume_batch_size=training.resume_batch_size,
        )
        if trainer.rank == 0 and rank_job.progress != "json":
            echo(format_final_metric(job, history))
            echo(f"report: {folder.report_path}")


def choose_optimizer(job: TrainingJob, name: str | None) -> BuildOptimizer:
    """Return the job's own optimizer, or the one with that name."""
    return job.optimizer if name is None else job.for_large_batches(name).optimizer


def choose_schedule(job: TrainingJob, config: RunConfig, num_samples: int) -> BuildSchedule | None:
    """Return the learning rate schedule of an optimizer for large batches; None with the job's own optimizer."""
    training = config.training
    if training.optimizer is None:
        return None
    assert training.batch_size is not None, "the job has a default"
    return job.for_large_batches(training.optimizer).schedule(
        batch_size=training.batch_size,
        own_batch_size=job.batch_size,
        num_samples=num_samples,
        epochs=num_epochs(config, num_samples),
    )


def job_defaults(job: TrainingJob, optimizer: str | None = None) -> dict[str, Any]:
    """Return the defaults of a job, with its own optimizer or the named one."""
    build = choose_optimizer(job, optimizer)
    lr = build.keywords["lr"] if isinstance(build, partial) else None
    values = {"batch_size": job.batch_size, "epochs": job.epochs, "max_steps": job.max_steps, "lr": lr}
    return {f"training.{key}": value for key, value in values.items()}


def with_lr(build: BuildOptimizer, lr: float | None) -> BuildOptimizer:
    """Return the optimizer with another learning rate, if it takes one."""
    return partial(build.func, *build.args, **{**build.keywords, "lr": lr}) if isinstance(build, partial) else build


def fill_from_job(config: RunConfig) -> RunConfig:
    """Return the configuration with the job's defaults for values that are None."""
    layer = {path: SourcedValue(value, "") for path, value in flatten(config.model_dump())}
    return build_config(apply_job_defaults(layer, job_defaults(find_job(config.job), config.training.optimizer), ""))


def num_epochs(config: RunConfig, num_samples: int) -> int:
    """Return the configured epochs, or those that the steps need."""
    training = config.training
    if training.epochs is not None:
        return training.epochs
    assert training.max_steps is not None, "one of the two is given"
    assert training.batch_size is not None, "the job has a default"
    return math.ceil(training.max_steps / math.ceil(num_samples / training.batch_size))


def format_final_metric(job: TrainingJob, history: History) -> str:
    """Return the final metric of the job next to its target."""
    target = job.target
    value = history.evaluations[-1].metrics[target.metric]
    side = "at least" if target.better == "higher" else "at most"
    reached = "reached" if target.is_reached(value) else "not reached"
    return f"held-out {target.metric.replace('_', ' ')} {value:.4f}, target {side} {target.threshold}: {reached}"


def main(path: str, errors: Literal["reported", "raised"] = "reported") -> int:
    """Run the job at the path; return the exit code. The process that started this rank reports errors."""
    answer_stack_requests()
    try:
        run_job(RankJob.from_json(Path(path).read_text(encoding="utf-8")))
    except KeyboardInterrupt:
        return INTERRUPTED
    except StoppedBySignal as stop:
        ignore_stop_signals()
        report_error(stop)
        raise
    except CounterpointError as error:
        report_error(error)
        if errors == "raised":
            delay_secondary_error(error)
            traceback.print_exc()
        return FAILED
    except Exception as error:  # noqa: BLE001 - any error ends this rank and is reported
        report_error(error)
        delay_secondary_error(error)
        traceback.print_exc()
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "raised" if "--traceback" in sys.argv[2:] else "reported"))
