"""Where every value of a run comes from: default < job < file < --set < flags, later ones winning, none hidden."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ValidationError

from counterpoint.cli.config import RunConfig
from counterpoint.errors import PlanError

PRECEDENCE = "default < job < file < --set < flags"
LENGTHS = frozenset({"training.epochs", "training.max_steps"})


class Loader(yaml.SafeLoader):
    """Reads 1e-3 as the number that it is since YAML 1.2; PyYAML wants 1.0e-3."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Given:
    """A value and who gave it.

    Args:
        value: as it was given.
        origin: ``run.yaml:3``, ``--set``, ``--epochs``, ``job digits`` or ``default``.
    """

    value: Any
    origin: str


Layer: TypeAlias = Mapping[str, Given]
"""Values by path, ``training.epochs`` for instance."""


def default_layer() -> dict[str, Given]:
    """Return every key there is, with its default."""
    return {path: Given(value, "default") for path, value in leaves(RunConfig().model_dump())}


def file_layer(path: Path) -> dict[str, Given]:
    """Return what a file gives, with the line of each value.

    Raises:
        PlanError: it cannot be read, is not YAML, or has a key that is unknown or stands there twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=Loader)
        return dict(read_node(root, path, "")) if root is not None else {}
    except OSError as error:
        raise PlanError(f"the file {path} cannot be read: {error.strerror}; give an existing YAML file") from None
    except UnicodeDecodeError:
        raise PlanError(f"the file {path} is not text in UTF-8; give a YAML file") from None
    except yaml.YAMLError as error:
        raise PlanError(f"the file {path} is not YAML: {error}") from None


def read_node(node: yaml.Node, file: Path, prefix: str) -> Iterator[tuple[str, Given]]:
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
            require_key(path, origin)
            yield path, Given(yaml.safe_load(yaml.serialize(value_node)), origin)


def set_layer(assignments: Sequence[str]) -> dict[str, Given]:
    """Return what ``--set a.b=c`` gives; a value is read as YAML reads it.

    Raises:
        PlanError: one is no assignment, or its key is unknown.

    Example:
        >>> set_layer(["training.epochs=3"])["training.epochs"]
        Given(value=3, origin='--set')
    """
    layer: dict[str, Given] = {}
    for assignment in assignments:
        path, equals, text = (piece.strip() for piece in assignment.partition("="))
        if not equals:
            raise PlanError(f"--set {assignment} is no assignment; write --set KEY=VALUE, as in training.epochs=3")
        require_key(path, "--set")
        try:
            layer[path] = Given(yaml.load(text, Loader=Loader), "--set")
        except yaml.YAMLError:
            raise PlanError(f"--set {assignment}: {text!r} is not a YAML value; put quotes around a text") from None
    return layer


def merged(layers: Iterable[Layer]) -> dict[str, Given]:
    """Return all layers as one; where two give a key, the later one wins.

    Steps and epochs are two ways to say how long: who gives one of them lifts what an earlier layer said by the other.
    """
    found: dict[str, Given] = {}
    for layer in layers:
        given = LENGTHS & layer.keys()
        for path in (LENGTHS - given) if given else ():
            found[path] = Given(None, next(layer[name].origin for name in given))
        found.update(layer)
    return found


def filled(layer: Layer, own: Mapping[str, Any], origin: str) -> dict[str, Given]:
    """Return the values with a job's own where nobody gave one; its length only if no other was given."""
    has_length = any(layer[path].value is not None for path in LENGTHS)
    missing = [path for path in own if layer[path].value is None and not (has_length and path in LENGTHS)]
    return {**layer, **{path: Given(own[path], origin) for path in missing}}


def validated(layer: Layer) -> RunConfig:
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
        raise PlanError("\n".join(explained(found, layer) for found in error.errors())) from None


def explained(found: Mapping[str, Any], layer: Layer) -> str:
    """Return what is wrong with a value, and who gave it."""
    parts = [str(part) for part in found["loc"]]
    path = next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in layer)
    rule = str(found["msg"]).replace("Input should be", "it must be", 1)
    near = get_close_matches(str(found["input"]), str(found.get("ctx", {}).get("expected", "")).split("'"), n=1)
    remedy = f"; did you mean {near[0]}?" if near else ""
    return f"{layer[path].origin}: {path} is {found['input']!r}; {rule}{remedy}"


def require_key(path: str, origin: str) -> None:
    """Check that there is such a key.

    Raises:
        PlanError: there is none; the message has the nearest one.
    """
    known = list(default_layer())
    if path in known:
        return
    near = nearest(path, known)
    remedy = f"did you mean {near}?" if near else f"the keys are {', '.join(known)}"
    raise PlanError(f"{origin}: {path} is no key of a run; {remedy}")


def nearest(path: str, known: Sequence[str]) -> str | None:
    """Return the known path that this one was probably meant to be: by its whole, else by its last part alone."""
    whole = get_close_matches(path, known, n=1, cutoff=0.75)
    last = {name.rpartition(".")[2]: name for name in known}
    tail = get_close_matches(path.rpartition(".")[2], last, n=1)
    return whole[0] if whole else last[tail[0]] if tail else None


def is_section(path: str) -> bool:
    """Return whether the path is a group of keys."""
    return any(key.startswith(f"{path}.") for key in default_layer())


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a nest of mappings with its path."""
    for key, value in tree.items():
        path = f"{prefix}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from leaves(value, path)
        else:
            yield path, value


def shown(layer: Layer, config: BaseModel) -> str:
    """Return every value with its origin, one per line."""
    values = dict(leaves(config.model_dump(mode="json")))
    rows = [(path, yaml_word(values[path]), given.origin) for path, given in layer.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{path:{widths[0]}}  {value:{widths[1]}}  {origin}" for path, value, origin in rows]
    return "\n".join([f"# {PRECEDENCE}", *lines])


def yaml_word(value: object) -> str:
    """Return a value as it could stand in the file."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
