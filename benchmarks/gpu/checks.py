"""What a part reports: one check for each line of the table, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["PASS", "FAIL", "SKIP", "-"]
"""``-`` for a figure without a threshold."""


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Args:
        name: what was checked.
        verdict: the result.
        measured: value, as text.
        reason: the threshold, or why there is no result.
        figures: all that was measured, as JSON values.
    """

    name: str
    verdict: Verdict
    measured: str = ""
    reason: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


def passes_if(holds: bool) -> Verdict:  # noqa: FBT001 - the only argument
    return "PASS" if holds else "FAIL"


def skip(name: str, reason: str) -> Check:
    return Check(name, "SKIP", reason=reason)


def part_verdict(checks: Sequence[Check]) -> Verdict:
    """Return that of a part: FAIL if anything failed, SKIP if nothing was checked."""
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in ("FAIL", "PASS", "SKIP") if verdict in verdicts), "-")


def write_part(path: Path, facts: Mapping[str, Any], checks: Iterable[Check]) -> None:
    """Write what a part has measured so far; a part that is killed keeps it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**facts, "checks": [asdict(check) for check in checks]}, indent=1) + "\n")
    Path(temporary).replace(path)


def read_checks(path: Path) -> list[Check]:
    """Return the checks of a part; none if it has written nothing."""
    if not path.is_file():
        return []
    return [Check(**check) for check in json.loads(path.read_text())["checks"]]


def format_table(parts: Mapping[str, Sequence[Check]], seconds: Mapping[str, float]) -> str:
    """Return the table: the verdict of each part, and its checks."""
    rows = [("part", "verdict", "measured", "threshold, or reason")]
    for name, checks in parts.items():
        rows.append((name, part_verdict(checks), f"{seconds[name]:.0f} s", ""))
        rows += [(f"  {one.name}", one.verdict, one.measured, shorten(one.reason)) for one in checks]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    padded = [[cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)] for row in rows]
    lines = [" | ".join(cells).rstrip() for cells in padded]
    lines.insert(1, "-|-".join(["-" * width for width in widths] + ["-" * 20]))
    return "\n".join(lines)


def shorten(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
