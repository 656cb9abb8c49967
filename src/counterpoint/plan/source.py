"""Plan files: their keys, and the line of each key, so that every later error about a plan names its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from counterpoint.errors import PlanError, ProgramError
from counterpoint.optim.validation import renamed_hint, shorten
from counterpoint.strategies.renamed import RENAMED
from counterpoint.yaml_reader import compose_yaml, construct_value

PLAN_KEYS = ("strategy", "num_microbatches", "passes", "precision", "compile")
TOP_LEVEL_KEYS = ("plan", "num_ranks", "profile")
FORMAT_HELP = "a plan file has 'plan:' with 'strategy:', 'num_microbatches:' and 'passes:'"


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The lines of a file that have the keys of a plan.

    Args:
        file: its name; empty for a text from elsewhere.
        lines: ``(key, line)``, counted from 1.
    """

    file: str = ""
    lines: tuple[tuple[str, int], ...] = ()

    def location(self, field: str) -> str:
        """Return the location of a key, or of the strategy if the key is missing: ``plan.yaml:2``.

        Example:
            >>> PlanSource("plan.yaml", (("strategy", 2),)).location("passes")
            'plan.yaml:2'
        """
        lines = dict(self.lines)
        line = lines.get(field, lines.get("strategy", 1))
        return f"{self.file}:{line}" if self.file else f"line {line} of the plan"

    @contextmanager
    def error_at(self, field: str) -> Iterator[None]:
        """Prefix errors that are raised inside with the location of a key, unless they have a location already."""
        try:
            yield
        except (PlanError, ProgramError) as error:
            if not any(str(error).startswith(f"{self.location(name)}: ") for name, _ in self.lines):
                error.args = (f"{self.location(field)}: {error}",)
            raise


@contextmanager
def plan_error_at(source: PlanSource | None, field: str) -> Iterator[None]:
    """Prefix errors that are raised inside with the location of a key, if the plan was read from a file."""
    if source is None:
        yield
        return
    with source.error_at(field):
        yield


def parse_plan_file(text: str, file: str) -> tuple[dict[str, Any], PlanSource]:
    """Return the values of a plan file, ``num_ranks`` and ``profile`` among them if present, and their lines.

    Args:
        text: YAML, as in a run's ``plan.yaml``.
        file: its name, for errors.

    Raises:
        PlanError: it is not YAML, has no plan, or has an unknown or duplicate key.
    """
    root = compose_yaml(text, file, "the plan file")
    loaded: Any = None if root is None else construct_value(root, file)
    fields = loaded.get("plan") if isinstance(loaded, Mapping) else None
    if root is None or not isinstance(fields, dict):
        raise PlanError(f"{file}:1: {FORMAT_HELP}" if file else FORMAT_HELP)
    top = _key_lines(root, file)
    _check_known_keys(PlanSource(file, tuple(top.items())), "a plan file", TOP_LEVEL_KEYS)
    inner = next(value for key, value in root.value if key.value == "plan")
    source = PlanSource(file, tuple(_key_lines(inner, file).items()))
    _check_known_keys(source, "a plan", PLAN_KEYS)
    if "strategy" not in fields:
        raise PlanError(f"{file}:{top['plan']}: {FORMAT_HELP}" if file else FORMAT_HELP)
    outer = [name for name in TOP_LEVEL_KEYS[1:] if name in top]
    fields |= {name: loaded[name] for name in outer}
    return fields, PlanSource(file, (*source.lines, *((name, top[name]) for name in outer)))


def _key_lines(node: yaml.Node, file: str) -> dict[str, int]:
    """Return the line of every key of a mapping.

    Raises:
        PlanError: a key is there twice.
    """
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            first = PlanSource(file, ((key.value, lines[key.value]),)).location(key.value)
            raise PlanError(f"{first}: {key.value} is given here and in line {line}; give it once")
        lines[str(key.value)] = line
    return lines


def _check_known_keys(source: PlanSource, owner: str, known: tuple[str, ...]) -> None:
    for name, _ in source.lines:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = renamed_hint(name, RENAMED) or (f"; did you mean {near[0]}?" if near else "")
            with source.error_at(name):
                raise PlanError(f"{owner} has no key {shorten(name)!r}; its keys are {', '.join(known)}{hint}")
