"""``counterpoint train``: train a built-in job, and print where its report is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.config import (
    ConfigLayer,
    SourcedValue,
    apply_job_defaults,
    build_config,
    default_layer,
    file_layer,
    format_sources,
    json_schema,
    merge_layers,
    set_layer,
)
from counterpoint.cli.echo import echo
from counterpoint.cli.start import AUTO, find_config, start
from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan

FLAGS = {
    "job": "NAME",
    "launch.ranks": "--ranks",
    "plan.strategy": "--strategy",
    "plan.num_microbatches": "--microbatches",
    "plan.num_measured_plans": "--measure",
    "training.epochs": "--epochs",
    "training.max_steps": "--steps",
    "training.batch_size": "--batch-size",
    "training.optimizer": "--optimizer",
    "training.lr": "--lr",
    "training.seed": "--seed",
    "training.clip_norm": "--clip-norm",
    "output.folder": "--folder",
    "output.save_every": "--save-every",
    "output.progress": "--progress",
    "launch.local": "--local",
    "launch.bind": "--bind",
    "launch.device": "--device",
}


def train(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A built-in job: text, digits, lines.")] = None,
    *,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Number of ranks; what the plan needs if omitted.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="The plan, as 'zero3' or 'pipeline(2) * data(2)'.")] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="The plan, as `counterpoint plan --out` writes it.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per replica.")] = None,
    measure: Annotated[int | None, typer.Option(help="With auto: number of plans to measure first.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Maximum number of steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one global batch, over all ranks.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="lars or lamb, with a schedule for large batches.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, sample order and dropout.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Maximum gradient norm.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The run's folder; runs/NAME-DATE-TIME if omitted.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run, or a checkpoint, to continue from; auto: --folder.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    progress: Annotated[str | None, typer.Option(help="auto, rich, plain, json or off.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Configuration file with these values and more.")
    ] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set one value.")] = None,
    bind: Annotated[str | None, typer.Option(help="Binding to cores: none, core, numa, compact, spread.")] = None,
    device: Annotated[str | None, typer.Option(help="What ranks compute on: cpu, cuda, cuda:1, auto.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Run all ranks in this process.")] = False,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print every value and its origin.")] = False,
    config_schema: Annotated[bool, typer.Option("--config-schema", help="Print the file's JSON schema.")] = False,
) -> None:
    """Train a built-in job on real data and write a report.

    Values come from the job, then FILE.yaml, then --set, then the other options; later ones win.
    """
    if config_schema:
        echo(json_schema())
        return
    flag_values = (
        *(name, ranks, strategy, microbatches, measure, epochs, steps, batch_size, optimizer, lr, seed, clip_norm),
        *(None if folder is None else str(folder), save_every, progress, local or None, bind, device),
    )
    if plan is not None and strategy is not None:
        raise PlanError(f"--plan {plan} has a strategy, and --strategy is {strategy}; give one of the two")
    loaded_plan = Plan.from_file(plan) if plan is not None else None
    flags = {path: SourcedValue(value, flag) for (path, flag), value in zip(FLAGS.items(), flag_values, strict=True)}
    layer = merge_layers(
        [
            default_layer(),
            file_layer(config) if config is not None else saved_layer(folder if resume == AUTO else resume, resume),
            set_layer(assignments or []),
            plan_layer(loaded_plan) if loaded_plan is not None else {},
            {path: value for path, value in flags.items() if value.value is not None},
        ]
    )
    if show_config:
        echo(format_config(layer))
    else:
        start(build_config(layer), resume, loaded_plan)


def plan_layer(plan: Plan) -> ConfigLayer:
    """Return the values of a plan that was read from a file, each with its line."""
    assert plan.source is not None, "read from a file"
    values = {"strategy": str(plan), "num_microbatches": plan.num_microbatches, "passes": list(plan.passes)}
    return {f"plan.{key}": SourcedValue(value, plan.source.location(key)) for key, value in values.items()}


NOT_KEPT = frozenset({"output.folder", "training.resume_batch_size"})
"""Values of a run that are not those of the run that continues it."""


def saved_layer(run: Path | None, resume: Path | None) -> ConfigLayer:
    """Return the values of the run that is continued, except its folder, which may have moved, and how it continued."""
    file = find_config(run, is_run=resume == AUTO)
    layer = file_layer(file) if file is not None else {}
    return {path: flag_values for path, flag_values in layer.items() if path not in NOT_KEPT}


def format_config(layer: ConfigLayer) -> str:
    """Return every value and its origin, with the job's defaults."""
    from counterpoint.cli.rank_main import job_defaults
    from counterpoint.jobs.registry import find_job

    config = build_config(layer)
    complete = apply_job_defaults(
        layer, job_defaults(find_job(config.job), config.training.optimizer), f"job {config.job}"
    )
    return format_sources(complete, build_config(complete))
