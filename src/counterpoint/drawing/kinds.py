"""What an instruction is for, as drawings show it: its kind, its colour, its short name."""

from __future__ import annotations

import re
from collections.abc import Iterable
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

LIGHTEST = 3.2
"""What is drawn lighter still has this contrast to white."""

_COMPUTES: MappingProxyType[str, Kind] = MappingProxyType(
    {"F": "forward", "R": "recomputation", "B": "backward", "U": "update"}
)
_OF_MICROBATCH = re.compile(r"(F|R|B[iw]?)\d+\.\+?(\d+)")


def shade_of(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the colour of a kind on one of so many chunks: that of the kind for the first one, lighter ones behind."""
    colour = COLOURS[kind]
    if not chunk:
        return colour
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    part = chunk / max(1, num_chunks - 1) * _most_white((red, green, blue))
    mixed = (round(value + part * (255 - value)) for value in (red, green, blue))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _most_white(colour: tuple[int, int, int]) -> float:
    """Return how much white may be mixed into a colour until its contrast to white is the least."""
    parts = (at / 100 for at in range(100))
    return max(
        (part for part in parts if _contrast(value + part * (255 - value) for value in colour) >= LIGHTEST), default=0.0
    )


def _contrast(colour: Iterable[float]) -> float:
    """Return the contrast of a colour to white, as web pages are judged by."""
    shares = [value / 255 for value in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 1.05 / (sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05)


_SERVES = ("apply_and_reply", "apply", "elastic_average")
"""With these a server's words begin, whose time on the processor goes into updates."""


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
            return "update" if event.words.startswith(_SERVES) else kind


def short_name(words: str) -> str:
    """Return the letter and the microbatch of what has both, ``F3``; of anything else what it begins with."""
    first = words.split(" ", 1)[0]
    found = _OF_MICROBATCH.match(first)
    if found is not None:
        return found[1] + found[2]
    return "U" if kind_of_word(first) == "update" else first.partition("(")[0].partition("@")[0]
