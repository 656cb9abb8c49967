"""What a run of ``counterpoint train`` can be told: the same values as Python, as YAML and as flags.

Unknown keys are refused; a key that was silently ignored would train something else than its author believes.

Where every value of a run comes from: default < job < file < --set < flags, later ones winning, none hidden.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from counterpoint.errors import PlanError
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding

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
    num_measured_plans: int | None = Field(default=None, ge=1)
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
    timeout_s: float = Field(default=60.0, gt=0)
    """The longest that any rank waits for another."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """What joins ranks in processes of their own: memory within a host and sockets between hosts, or one of them."""


class OutputSection(Section):
    """What a run leaves behind and shows."""

    folder: str | None = None
    """The run's folder; runs/NAME-DATE-TIME when left out."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps from one checkpoint to the next; only the last one when left out."""
    checkpoint_mode: Literal["synchronous", "per_stage"] = "synchronous"
    """Who saves: all ranks together, or each stage of a pipeline without a flush when it comes there."""
    keep_last: int | None = Field(default=3, ge=1)
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


def json_schema() -> str:
    """Return the JSON schema of the file, for editors."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)


PRECEDENCE = "default < job < file < --set < flags"
LENGTH_KEYS = frozenset({"training.epochs", "training.max_steps"})


class ConfigYamlLoader(yaml.SafeLoader):
    """Reads 1e-3 as the number that it is since YAML 1.2; PyYAML wants 1.0e-3."""


ConfigYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A value and who gave it.

    Args:
        value: as it was given.
        origin: ``run.yaml:3``, ``--set``, ``--epochs``, ``job digits`` or ``default``.
    """

    value: Any
    origin: str


ConfigLayer: TypeAlias = Mapping[str, SourcedValue]
"""Values by path, ``training.epochs`` for instance."""


def default_layer() -> dict[str, SourcedValue]:
    """Return every key there is, with its default."""
    return {path: SourcedValue(value, "default") for path, value in flatten(RunConfig().model_dump())}


def file_layer(path: Path) -> dict[str, SourcedValue]:
    """Return what a file gives, with the line of each value.

    Raises:
        PlanError: it cannot be read, is not YAML, or has a key that is unknown or stands there twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=ConfigYamlLoader)
        return dict(read_node(root, path, "")) if root is not None else {}
    except OSError as error:
        raise PlanError(f"the file {path} cannot be read: {error.strerror}; give an existing YAML file") from None
    except UnicodeDecodeError:
        raise PlanError(f"the file {path} is not text in UTF-8; give a YAML file") from None
    except yaml.YAMLError as error:
        raise PlanError(f"the file {path} is not YAML: {error}") from None


def read_node(node: yaml.Node, file: Path, prefix: str) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the values below a node of a YAML file."""
    if node.tag == "tag:yaml.org,2002:null":  # a section of which every key is commented out
        return
    if not isinstance(node, yaml.MappingNode):
        raise PlanError(f"{file}:{node.start_mark.line + 1}: {prefix or 'the file'} must be keys with values below it")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        origin = f"{file}:{key_node.start_mark.line + 1}"
        path = f"{prefix}.{key_node.value}".lstrip(".")
        if path in seen:
            raise PlanError(f"{origin}: {path} stands there twice; give it once")
        seen.add(path)
        if is_section(path):
            yield from read_node(value_node, file, path)
        else:
            check_key(path, origin)
            yield path, SourcedValue(yaml.safe_load(yaml.serialize(value_node)), origin)


def set_layer(assignments: Sequence[str]) -> dict[str, SourcedValue]:
    """Return what ``--set a.b=c`` gives; a value is read as YAML reads it.

    Raises:
        PlanError: one is no assignment, or its key is unknown.

    Example:
        >>> set_layer(["training.epochs=3"])["training.epochs"]
        Given(value=3, origin='--set')
    """
    layer: dict[str, SourcedValue] = {}
    for assignment in assignments:
        path, equals, text = (piece.strip() for piece in assignment.partition("="))
        if not equals:
            raise PlanError(f"--set {assignment} is no assignment; write --set KEY=VALUE, as in training.epochs=3")
        check_key(path, "--set")
        try:
            layer[path] = SourcedValue(yaml.load(text, Loader=ConfigYamlLoader), "--set")
        except yaml.YAMLError:
            raise PlanError(f"--set {assignment}: {text!r} is not a YAML value; put quotes around a text") from None
    return layer


def merge_layers(layers: Iterable[ConfigLayer]) -> dict[str, SourcedValue]:
    """Return all layers as one; where two give a key, the later one wins.

    Steps and epochs are two ways to say how long: who gives one of them lifts what an earlier layer said by the other.
    """
    found: dict[str, SourcedValue] = {}
    for layer in layers:
        given = LENGTH_KEYS & layer.keys()
        for path in (LENGTH_KEYS - given) if given else ():
            found[path] = SourcedValue(None, next(layer[name].origin for name in given))
        found.update(layer)
    return found


def apply_job_defaults(layer: ConfigLayer, job_values: Mapping[str, Any], origin: str) -> dict[str, SourcedValue]:
    """Return the values with a job's own where nobody gave one; its length only if no other was given."""
    has_length = any(layer[path].value is not None for path in LENGTH_KEYS)
    missing = [path for path in job_values if layer[path].value is None and not (has_length and path in LENGTH_KEYS)]
    return {**layer, **{path: SourcedValue(job_values[path], origin) for path in missing}}


def build_config(layer: ConfigLayer) -> RunConfig:
    """Return the values as a configuration.

    Raises:
        PlanError: a value is of the wrong kind or out of its range; the message says who gave it.
    """
    tree: dict[str, Any] = {}
    for path, given in layer.items():
        section, _, key = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = given.value
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise PlanError("\n".join(explain_error(found, layer) for found in error.errors())) from None


def explain_error(found: Mapping[str, Any], layer: ConfigLayer) -> str:
    """Return what is wrong with a value, and who gave it."""
    parts = [str(part) for part in found["loc"]]
    path = next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in layer)
    rule = str(found["msg"]).replace("Input should be", "it must be", 1)
    near = get_close_matches(str(found["input"]), str(found.get("ctx", {}).get("expected", "")).split("'"), n=1)
    remedy = f"; did you mean {near[0]}?" if near else ""
    return f"{layer[path].origin}: {path} is {found['input']!r}; {rule}{remedy}"


def check_key(path: str, origin: str) -> None:
    """Check that there is such a key.

    Raises:
        PlanError: there is none; the message has the nearest one.
    """
    known = list(default_layer())
    if path in known:
        return
    near = find_closest_key(path, known)
    remedy = f"did you mean {near}?" if near else f"the keys are {', '.join(known)}"
    raise PlanError(f"{origin}: {path} is no key of a run; {remedy}")


def find_closest_key(path: str, known: Sequence[str]) -> str | None:
    """Return the known path that this one was probably meant to be: by its whole, else by its last part alone."""
    whole = get_close_matches(path, known, n=1, cutoff=0.75)
    last = {name.rpartition(".")[2]: name for name in known}
    tail = get_close_matches(path.rpartition(".")[2], last, n=1)
    return whole[0] if whole else last[tail[0]] if tail else None


def is_section(path: str) -> bool:
    """Return whether the path is a group of keys."""
    return any(key.startswith(f"{path}.") for key in default_layer())


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nest of mappings with its path."""
    for key, value in tree.items():
        path = f"{prefix}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        else:
            yield path, value


def format_sources(layer: ConfigLayer, config: BaseModel) -> str:
    """Return every value with its origin, one per line."""
    values = dict(flatten(config.model_dump(mode="json")))
    rows = [(path, format_yaml_value(values[path]), given.origin) for path, given in layer.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{path:{widths[0]}}  {value:{widths[1]}}  {origin}" for path, value, origin in rows]
    return "\n".join([f"# {PRECEDENCE}", *lines])


def format_yaml_value(value: object) -> str:
    """Return a value as it could stand in the file."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
