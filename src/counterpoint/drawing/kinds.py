"""What an instruction is for, as drawings show it: its kind, its colour, its short name."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Literal, TypeAlias

from counterpoint.program.trace import Event

Kind: TypeAlias = Literal[
    "forward", "recomputation", "backward", "weight part", "update", "communication", "commit", "waiting"
]

COLOURS: MappingProxyType[Kind, str] = MappingProxyType(
    {
        "forward": "#2b6cb0",
        "recomputation": "#5a67d8",
        "backward": "#23794b",
        "weight part": "#0e7490",
        "update": "#b45309",
        "communication": "#7c4dbe",
        "commit": "#b83280",
        "waiting": "#8a939e",
    }
)
"""One colour per kind, in the order of legends; each has a contrast of 3 and more to white and to a dark page."""


_COMPUTES: MappingProxyType[str, Kind] = MappingProxyType(
    {"F": "forward", "R": "recomputation", "B": "backward", "U": "update"}
)
_OF_MICROBATCH = re.compile(r"(F|R|B[iw]?)\d+\.\+?(\d+)")


def kind_of_word(word: str) -> Kind:
    """Return the kind of an instruction's text; whatever is neither computing nor a commit is communication."""
    if word.startswith("commit@"):
        return "commit"
    return "weight part" if word.startswith("Bw") else _COMPUTES.get(word[:1], "communication")


def kind_of(event: Event) -> Kind:
    """Return the kind of an event: a commit is one in every lane, all other waiting is waiting."""
    kind = kind_of_word(event.words)
    if kind == "commit":
        return kind
    match event.lane:
        case "wait":
            return "waiting"
        case "link":
            return "communication"
        case "compute":
            return "update" if event.words.startswith("serve(") else kind


def short_name(words: str) -> str:
    """Return the letter and the microbatch of what has both, ``F3``; of anything else what it begins with."""
    first = words.split(" ", 1)[0]
    found = _OF_MICROBATCH.match(first)
    if found is not None:
        return found[1] + found[2]
    return "U" if kind_of_word(first) == "update" else first.partition("(")[0].partition("@")[0]
