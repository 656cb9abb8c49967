"""Configuration of ``counterpoint train``: the values, and the sources that they are merged from.

The same values can be given in Python, in YAML and as flags. Later sources win: default < job < file < --set < flags;
the origin of every value is kept for errors and ``--show-config``. Unknown keys are rejected, because a key that is
silently ignored would train something else than its author believes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterpoint.errors import PlanError
from counterpoint.file_reader import read_regular_text
from counterpoint.optim.validation import MAX_SECONDS, renamed_hint, shorten
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding
from counterpoint.yaml_reader import compose_yaml, construct_value

JobName: TypeAlias = Literal["text", "digits", "lines"]


class Section(BaseModel):
    """A group of values; frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class PlanSection(Section):
    """How training is distributed."""

    strategy: str = "data"
    """Strategies joined by `*`; the degree of a bare name is the number of ranks."""
    num_microbatches: int | None = Field(default=None, ge=1)
    """Microbatches per replica; if omitted, 1, or what a pipeline can use."""
    passes: tuple[str, ...] | None = Field(default=None, strict=False)
    """Passes run on the program; `overlap` if omitted, `[]` for none."""
    num_measured_plans: int | None = Field(default=None, ge=1)
    """With the strategy `auto`: how many of the best plans are measured for some steps before training."""


class TrainingSection(Section):
    """How the model is trained; the job has defaults for what is omitted."""

    batch_size: int | None = Field(default=None, ge=1)
    """Samples of one global batch, over all ranks."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training data."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of steps."""
    optimizer: Literal["lars", "lamb"] | None = None
    """Replaces the job's optimizer, with a learning rate schedule for batches larger than the job's."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate; with `optimizer`, that of the job's batch size, from which it is scaled."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights, the order of samples and all other random numbers."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Maximum gradient norm; larger gradients are scaled down."""
    clip_by: Literal["model", "stage"] = "model"
    """Which norm is clipped: the whole model's, or each stage's own, for asynchronous pipelines."""
    nonfinite: Literal["error", "skip"] = "error"
    """Whether a loss or gradient that is not finite raises an error or skips the step."""
    loss_scale: Annotated[float, Field(gt=0)] | Literal["dynamic"] | None = None
    """Factor of the losses in backward, so that gradients do not underflow in fp16: a number, or `dynamic`."""
    precision: str | None = Field(default=None, max_length=200)
    """What the model computes in: `bf16`, `fp16`, or with options, as `bf16(autocast=true)`; weights stay float32."""
    compile: str | None = Field(default=None, max_length=200)
    """Compile the model by torch.compile: `segments`, `blocks`, or with options, as `segments(mode=max-autotune)`."""
    resume_batch_size: Literal["same", "new"] = "same"
    """Whether a run that is continued has to have the batch size of its checkpoint, or may have a new one."""


class LaunchSection(Section):
    """Where the ranks run."""

    ranks: int | None = Field(default=None, ge=1)
    """Number of ranks; as many as the plan needs if omitted."""
    local: bool = False
    """Run all ranks in this process instead of one process per rank."""
    threads: int | None = Field(default=None, ge=1)
    """Threads per rank; cores / ranks if omitted."""
    bind: Binding = DEFAULT_BINDING
    """To which cores each rank is bound."""
    timeout_s: float = Field(default=60.0, gt=0, le=MAX_SECONDS)
    """Maximum time that any rank waits for another."""
    device: str | None = None
    """What ranks compute on: `cpu`, `cuda` (the GPU of the local rank's number), `cuda:1`, or `auto`, which is `cuda`
    where there is one; the CPU if omitted."""
    transport: Literal["auto", "shm", "gloo", "process_group"] = "auto"
    """Transport between processes: shared memory within a host and gloo between hosts (`auto`), one of them, or c10d
    process groups (NCCL between CUDA devices, else gloo)."""


class OutputSection(Section):
    """What a run writes and shows."""

    folder: str | None = None
    """The run's folder; runs/NAME-DATE-TIME if omitted."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; if omitted, only one at the end."""
    checkpoint_mode: Literal["synchronous", "per_stage"] = "synchronous"
    """Who saves: all ranks together, or each stage of a pipeline without a flush when it comes there."""
    keep_last: int | None = Field(default=3, ge=1)
    """Number of checkpoints to keep; null for all."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations on held-out data, in addition to those after each epoch."""
    progress: Literal["auto", "rich", "plain", "json", "off"] = "auto"
    """What is shown: a bar, lines, JSON lines or nothing; `auto` is a bar on a terminal and lines elsewhere."""
    interval_s: float = Field(default=5.0, ge=0)
    """Seconds between lines of progress."""


class RunConfig(Section):
    """The configuration of a run.

    Example:
        >>> config = RunConfig(job="digits", plan=PlanSection(strategy="zero3"))
        >>> RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config
        True
    """

    job: JobName = "text"
    """The job to train."""
    plan: PlanSection = PlanSection()
    training: TrainingSection = TrainingSection()
    launch: LaunchSection = LaunchSection()
    output: OutputSection = OutputSection()

    def to_yaml(self) -> str:
        """Format all values as a YAML file that restores them."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def json_schema() -> str:
    """Return the JSON schema of the file, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)


PRECEDENCE = "default < job < file < --set < flags"
LENGTH_KEYS = frozenset({"training.epochs", "training.max_steps"})
RENAMED_KEYS = {
    "launch.deadline_s": "launch.timeout_s",
    "output.keep": "output.keep_last",
    "output.save_by": "output.checkpoint_mode",
    "plan.measure": "plan.num_measured_plans",
    # values
    "output.checkpoint_mode=run": "output.checkpoint_mode=synchronous",
    "output.checkpoint_mode=stage": "output.checkpoint_mode=per_stage",
}
"""Present names of keys, and of values, by the names that they had before."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and its origin.

    Args:
        value: the value as given.
        origin: ``run.yaml:3``, ``--set``, ``--epochs``, ``job digits`` or ``default``.
    """

    value: Any
    origin: str


ConfigLayer: TypeAlias = Mapping[str, SourcedValue]
"""Values by path, for example ``training.epochs``."""


def default_layer() -> dict[str, SourcedValue]:
    """Return the default of every key."""
    return {path: SourcedValue(value, "default") for path, value in flatten(RunConfig().model_dump())}


def file_layer(path: Path) -> dict[str, SourcedValue]:
    """Return the values of a file, each with its line.

    Raises:
        PlanError: the file cannot be read, is not YAML, or has a key that is unknown or given twice.
    """
    try:
        root = compose_yaml(read_regular_text(path), str(path), "the file")
        return dict(read_node(root, path, "")) if root is not None else {}
    except OSError as error:
        raise PlanError(f"the file {path} cannot be read: {error.strerror}; give an existing YAML file") from None
    except UnicodeDecodeError:
        raise PlanError(f"the file {path} is not text in UTF-8; give a YAML file") from None


def read_node(node: yaml.Node, file: Path, prefix: str) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the values below a node of a YAML file."""
    if node.tag == "tag:yaml.org,2002:null":  # a section whose keys are all commented out
        return
    if not isinstance(node, yaml.MappingNode):
        raise PlanError(
            f"{file}:{node.start_mark.line + 1}: {prefix or 'the file'} must be a mapping of keys to values"
        )
    seen: set[str] = set()
    for key_node, value_node in node.value:
        origin = f"{file}:{key_node.start_mark.line + 1}"
        path = f"{prefix}.{key_node.value}".lstrip(".")
        if path in seen:
            raise PlanError(f"{origin}: {path} is given twice; give it once")
        seen.add(path)
        if is_section(path):
            yield from read_node(value_node, file, path)
        else:
            check_key(path, origin)
            yield path, SourcedValue(construct_value(value_node, str(file)), origin)


def set_layer(assignments: Sequence[str]) -> dict[str, SourcedValue]:
    """Return the values of ``--set a.b=c``, parsed as YAML.

    Raises:
        PlanError: one is not an assignment, or its key is unknown.

    Example:
        >>> set_layer(["training.epochs=3"])["training.epochs"]
        SourcedValue(value=3, origin='--set')
    """
    layer: dict[str, SourcedValue] = {}
    for assignment in assignments:
        path, equals, text = (piece.strip() for piece in assignment.partition("="))
        if not equals:
            raise PlanError(
                f"--set {shorten(assignment)} is not an assignment; write --set KEY=VALUE, as in training.epochs=3"
            )
        check_key(path, "--set")
        try:
            node = compose_yaml(text, "", "the value")
            layer[path] = SourcedValue(None if node is None else construct_value(node, ""), "--set")
        except PlanError as error:
            raise PlanError(f"--set {shorten(assignment)}: {error}") from None
    return layer


def merge_layers(layers: Iterable[ConfigLayer]) -> dict[str, SourcedValue]:
    """Merge layers; if two give a key, the later one wins.

    Steps and epochs are alternatives: a layer that gives one of them resets what an earlier layer gave for the other.
    """
    values: dict[str, SourcedValue] = {}
    for layer in layers:
        sourced = LENGTH_KEYS & layer.keys()
        for path in (LENGTH_KEYS - sourced) if sourced else ():
            values[path] = SourcedValue(None, next(layer[name].origin for name in sourced))
        values.update(layer)
    return values


def apply_job_defaults(layer: ConfigLayer, job_values: Mapping[str, Any], origin: str) -> dict[str, SourcedValue]:
    """Return the values with the job's defaults for those that are None; its length only if no other was given."""
    has_length = any(layer[path].value is not None for path in LENGTH_KEYS)
    missing = [path for path in job_values if layer[path].value is None and not (has_length and path in LENGTH_KEYS)]
    return {**layer, **{path: SourcedValue(job_values[path], origin) for path in missing}}


def build_config(layer: ConfigLayer) -> RunConfig:
    """Return the values as a configuration.

    Raises:
        PlanError: a value has the wrong type or is out of range; the message has its origin.
    """
    tree: dict[str, Any] = {}
    for path, sourced in layer.items():
        section, _, key = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = sourced.value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise PlanError("\n".join(explain_error(values, layer) for values in error.errors())) from None


def explain_error(values: Mapping[str, Any], layer: ConfigLayer) -> str:
    """Return what is wrong with a value, and its origin."""
    parts = [str(part) for part in values["loc"]]
    path = next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in layer)
    rule = str(values["msg"]).replace("Input should be", "it must be", 1)
    suggestion = get_close_matches(str(values["input"]), str(values.get("ctx", {}).get("expected", "")).split("'"), n=1)
    remedy = f"; did you mean {suggestion[0]}?" if suggestion else ""
    remedy = renamed_hint(f"{path}={values['input']}", RENAMED_KEYS) or remedy
    return f"{layer[path].origin}: {path} is {shorten(repr(values['input']))}; {rule}{remedy}"


def check_key(path: str, origin: str) -> None:
    """Check that a key exists.

    Raises:
        PlanError: it does not; the message suggests the closest one.
    """
    known = list(default_layer())
    if path in known:
        return
    suggestion = find_closest_key(path, known)
    remedy = f"; did you mean {suggestion}?" if suggestion else f"; the keys are {', '.join(known)}"
    raise PlanError(f"{origin}: {shorten(path)} is not a key of a run{renamed_hint(path, RENAMED_KEYS) or remedy}")


def find_closest_key(path: str, known: Sequence[str]) -> str | None:
    """Return the known path that was probably intended: the closest one, or else one with a close last part."""
    by_path = get_close_matches(path, known, n=1, cutoff=0.75)
    last = {name.rpartition(".")[2]: name for name in known}
    by_last_part = get_close_matches(path.rpartition(".")[2], last, n=1)
    return by_path[0] if by_path else last[by_last_part[0]] if by_last_part else None


def is_section(path: str) -> bool:
    """Return whether the path is a group of keys."""
    return any(key.startswith(f"{path}.") for key in default_layer())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its path."""
    for key, value in tree.items():
        path = f"{prefix}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value


def format_sources(layer: ConfigLayer, config: BaseModel) -> str:
    """Format every value with its origin, one per line."""
    values = dict(flatten(config.model_dump(mode="json")))
    rows = [(path, format_yaml_value(values[path]), sourced.origin) for path, sourced in layer.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{path:{widths[0]}}  {value:{widths[1]}}  {origin}" for path, value, origin in rows]
    return "\n".join([f"# {PRECEDENCE}", *lines])


def format_yaml_value(value: object) -> str:
    """Format a value as it could be written in the file."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
