"""Slurm's short form of many hosts, and of how many tasks each of them has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from counterpoint.errors import LaunchError

PART = re.compile(r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*|(?:\[[^\[\]]*\][^,\[\]]*)+")
TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def unfolded(text: str) -> list[str]:
    """Return the names that a list of hosts stands for.

    Raises:
        LaunchError: it is no list of hosts.

    Example:
        >>> unfolded("gpu[01-03,7],login")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    parts = PART.findall(text)
    if not parts or ",".join(parts) != text:
        raise LaunchError(f"{text!r} is no list of hosts; Slurm writes them as gpu[01-03,7],login")
    return [name for part in parts for name in _names(part, text)]


def tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks of each node.

    Raises:
        LaunchError: it is no list of numbers.

    Example:
        >>> tasks_of_nodes("2(x3),1")
        [2, 2, 2, 1]
    """
    found = [TASKS.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise LaunchError(f"{text!r} is no list of tasks per node; Slurm writes them as 2(x3),1")
    return [int(match[1]) for match in found if match for _ in range(int(match[2] or 1))]


def _names(part: str, text: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # outside, inside, outside, ...
    choices = [_numbers(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _numbers(inside: str, text: str) -> list[str]:
    """Return the numbers of a bracket, as wide as they are written."""
    found: list[str] = []
    for piece in inside.split(","):
        first, _, last = piece.partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) < int(first):
            raise LaunchError(f"[{inside}] in the list of hosts {text!r} is no range; Slurm writes them as [01-03,7]")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
