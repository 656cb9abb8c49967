"""Where in a file a plan was written, so that whatever is wrong with it later is told with its line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from counterpoint.errors import PlanError, ProgramError

PLAN_KEYS = ("strategy", "num_microbatches", "passes")
TOP_LEVEL_KEYS = ("plan", "num_ranks", "profile")
FORMAT_HELP = "a plan file holds 'plan:' with 'strategy:', 'num_microbatches:' and 'passes:'"


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The lines of a file at which the fields of a plan stand.

    Args:
        file: its name; empty for a text that came from elsewhere.
        lines: ``(field, line)``, counted from 1.
    """

    file: str = ""
    lines: tuple[tuple[str, int], ...] = ()

    def location(self, field: str) -> str:
        """Return where a field stands, or the strategy where it is left out: ``plan.yaml:2``.

        Example:
            >>> PlanSource("plan.yaml", (("strategy", 2),)).location("passes")
            'plan.yaml:2'
        """
        lines = dict(self.lines)
        line = lines.get(field, lines.get("strategy", 1))
        return f"{self.file}:{line}" if self.file else f"line {line} of the plan"

    @contextmanager
    def error_at(self, field: str) -> Iterator[None]:
        """Put the place of a field before what is said of a plan that cannot be carried out, once."""
        try:
            yield
        except (PlanError, ProgramError) as error:
            if not any(str(error).startswith(f"{self.location(name)}: ") for name, _ in self.lines):
                error.args = (f"{self.location(field)}: {error}",)
            raise


@contextmanager
def plan_error_at(source: PlanSource | None, field: str) -> Iterator[None]:
    """Put the place of a field before what is said inside of a plan, if it was read from a file."""
    if source is None:
        yield
        return
    with source.error_at(field):
        yield


def parse_plan_file(text: str, file: str) -> tuple[dict[str, Any], PlanSource]:
    """Return the fields of a plan file with their lines; ``num_ranks`` and ``profile`` among them, if they are there.

    Args:
        text: YAML, as a run's ``plan.yaml`` has it.
        file: its name, for errors.

    Raises:
        PlanError: it is not YAML, or has no plan, or a key that is unknown or stands there twice.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        loaded: Any = yaml.safe_load(text)
    except yaml.YAMLError as wrong:
        mark = getattr(wrong, "problem_mark", None)
        place = f"{file}:{mark.line + 1 if mark is not None else 1}: " if file else ""
        raise PlanError(f"{place}the plan file is not YAML: {wrong}") from None
    fields = loaded.get("plan") if isinstance(loaded, Mapping) else None
    if root is None or not isinstance(fields, dict):
        raise PlanError(f"{file}:1: {FORMAT_HELP}" if file else FORMAT_HELP)
    top = _key_lines(root, file)
    written = PlanSource(file, tuple(top.items()))
    _check_known_keys(written, "a plan file", TOP_LEVEL_KEYS)
    inner = next(value for key, value in root.value if key.value == "plan")
    written = PlanSource(file, tuple(_key_lines(inner, file).items()))
    _check_known_keys(written, "a plan", PLAN_KEYS)
    if "strategy" not in fields:
        raise PlanError(f"{file}:{top['plan']}: {FORMAT_HELP}" if file else FORMAT_HELP)
    outer = [name for name in TOP_LEVEL_KEYS[1:] if name in top]
    fields |= {name: loaded[name] for name in outer}
    return fields, PlanSource(file, (*written.lines, *((name, top[name]) for name in outer)))


def _key_lines(node: yaml.Node, file: str) -> dict[str, int]:
    """Return the line of every key of a mapping.

    Raises:
        PlanError: a key stands there twice.
    """
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            first = PlanSource(file, ((key.value, lines[key.value]),)).location(key.value)
            raise PlanError(f"{first}: {key.value} stands there and in line {line}; give it once")
        lines[str(key.value)] = line
    return lines


def _check_known_keys(source: PlanSource, owner: str, known: tuple[str, ...]) -> None:
    for name, _ in source.lines:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            with source.error_at(name):
                raise PlanError(f"{owner} has no field {name!r}; its fields are {', '.join(known)}{hint}")
