"""What a run of ``counterpoint train`` can be told: the same values as Python, as YAML and as flags.

Unknown keys are refused; a key that was silently ignored would train something else than its author believes.
"""

from __future__ import annotations

import json
from typing import Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field

from counterpoint.world.placement import DEFAULT_BINDING, Binding

JobName: TypeAlias = Literal["text", "digits", "lines"]


class Section(BaseModel):
    """Values that belong together; frozen, and nothing else is let in."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class PlanSection(Section):
    """Who does what."""

    strategy: str = "data"
    """Strategies joined by `*`; a bare name takes the ranks that there are."""
    num_microbatches: int | None = Field(default=None, ge=1)
    """Microbatches of the innermost program; 1, or what a pipeline can use, when left out."""
    passes: tuple[str, ...] | None = Field(default=None, strict=False)
    """What is done to the program afterwards: `overlap` when left out, `[]` for nothing."""
    measure: int | None = Field(default=None, ge=1)
    """Under the strategy `auto`: how many of the best plans are measured for some steps before the first one."""


class TrainingSection(Section):
    """How the model is trained; what is left out is the job's own."""

    batch_size: int | None = Field(default=None, ge=1)
    """Samples of one global batch, over all ranks."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps at most."""
    optimizer: Literal["lars", "lamb"] | None = None
    """In place of the job's own, with a schedule for a batch larger than the job's own."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate; with an optimizer for large batches that of the job's own batch, from which it is scaled."""
    seed: int = Field(default=0, ge=0)
    """Of the first weights, the order of samples and whatever is drawn."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Global norm to which gradients are scaled down."""
    clip_by: Literal["model", "stage"] = "model"
    """Whose norm that is: the whole model's, or each stage's own, for pipelines without a flush."""
    nonfinite: Literal["error", "skip"] = "error"
    """Whether a loss or gradient that is not finite ends the run or leaves the step out."""


class LaunchSection(Section):
    """Where the ranks are."""

    ranks: int | None = Field(default=None, ge=1)
    """How many; as many as the plan needs when left out."""
    local: bool = False
    """Keep all ranks in this process instead of one process for each."""
    threads: int | None = Field(default=None, ge=1)
    """Threads per rank; cores / ranks when left out."""
    bind: Binding = DEFAULT_BINDING
    """On which cores each rank may compute."""
    deadline_s: float = Field(default=60.0, gt=0)
    """The longest that any rank waits for another."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """What joins ranks in processes of their own: memory within a host and sockets between hosts, or one of them."""


class OutputSection(Section):
    """What a run leaves behind and shows."""

    folder: str | None = None
    """The run's folder; runs/NAME-DATE-TIME when left out."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps from one checkpoint to the next; only the last one when left out."""
    save_by: Literal["run", "stage"] = "run"
    """Who saves: all ranks together, or each stage of a pipeline without a flush when it comes there."""
    keep: int | None = Field(default=3, ge=1)
    """How many checkpoints stay; null for all."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps from one measurement of held-out data to the next, beside those after each epoch."""
    progress: Literal["auto", "rich", "plain", "json", "off"] = "auto"
    """What is shown: a bar, lines, JSON lines or nothing; `auto` is a bar on a terminal and lines elsewhere."""
    interval_s: float = Field(default=5.0, ge=0)
    """Seconds from one line of progress to the next."""


class RunConfig(Section):
    """A whole run.

    Example:
        >>> config = RunConfig(job="digits", plan=PlanSection(strategy="zero3"))
        >>> RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config
        True
    """

    job: JobName = "text"
    """What is trained."""
    plan: PlanSection = PlanSection()
    training: TrainingSection = TrainingSection()
    launch: LaunchSection = LaunchSection()
    output: OutputSection = OutputSection()

    def to_yaml(self) -> str:
        """Write all values as the file that gives them back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def schema() -> str:
    """Return the JSON schema of the file, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)
