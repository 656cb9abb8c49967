"""What an instruction is for, as drawings show it: its kind, its colour, its short name.

What events are called in drawings: which microbatch, which of its rank's chunks, on weights of which version.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from counterpoint.program.trace import Trace, TraceEvent

EventKind: TypeAlias = Literal[
    "forward", "recomputation", "backward", "weight part", "update", "communication", "commit", "waiting"
]

KIND_COLOURS: MappingProxyType[EventKind, str] = MappingProxyType(
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

MIN_CONTRAST = 3.2
"""What is drawn lighter still has this contrast to white."""

_COMPUTE_KINDS: MappingProxyType[str, EventKind] = MappingProxyType(
    {"F": "forward", "R": "recomputation", "B": "backward", "U": "update"}
)
_MICROBATCH_PATTERN = re.compile(r"(F|R|B[iw]?)\d+\.\+?(\d+)")


def chunk_shade(kind: EventKind, chunk: int, num_chunks: int) -> str:
    """Return the colour of a kind on one of so many chunks: that of the kind for the first one, lighter ones behind."""
    colour = KIND_COLOURS[kind]
    if not chunk:
        return colour
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    part = chunk / max(1, num_chunks - 1) * _max_white_fraction((red, green, blue))
    mixed = (round(value + part * (255 - value)) for value in (red, green, blue))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _max_white_fraction(colour: tuple[int, int, int]) -> float:
    """Return how much white may be mixed into a colour until its contrast to white is the least."""
    parts = (at / 100 for at in range(100))
    return max(
        (part for part in parts if _contrast(value + part * (255 - value) for value in colour) >= MIN_CONTRAST),
        default=0.0,
    )


def _contrast(colour: Iterable[float]) -> float:
    """Return the contrast of a colour to white, as web pages are judged by."""
    shares = [value / 255 for value in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 1.05 / (sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05)


_SERVER_OPS = ("apply_and_reply", "apply", "elastic_average")
"""With these a server's words begin, whose time on the processor goes into updates."""


def instruction_kind(text: str) -> EventKind:
    """Return the kind of an instruction's text; whatever is neither computing nor a commit is communication."""
    if text.startswith("commit@"):
        return "commit"
    return "weight part" if text.startswith("Bw") else _COMPUTE_KINDS.get(text[:1], "communication")


def event_kind(event: TraceEvent) -> EventKind:
    """Return the kind of an event: a commit is one in every lane, all other waiting is waiting."""
    kind = instruction_kind(event.text)
    if kind == "commit":
        return kind
    match event.lane:
        case "wait":
            return "waiting"
        case "link":
            return "communication"
        case "compute":
            return "update" if event.text.startswith(_SERVER_OPS) else kind


def short_name(text: str) -> str:
    """Return the letter and the microbatch of what has both, ``F3``; of anything else what it begins with."""
    first = text.split(" ", 1)[0]
    found = _MICROBATCH_PATTERN.match(first)
    if found is not None:
        return found[1] + found[2]
    return "U" if instruction_kind(first) == "update" else first.partition("(")[0].partition("@")[0]


_COMPUTE_PATTERN = re.compile(r"(?P<kind>F|R|B[iw]?)(?P<block>\d+)\.\+?(?P<micro>\d+)(?::(?P<version>-\d+))?$")


class _ComputeEvent(NamedTuple):
    """A forward, one that is computed again, or a backward or a part of one."""

    kind: str
    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class EventLabels:
    """The names of the events of one trace.

    A trace knows blocks, not chunks. Two neighbouring blocks of a rank are one chunk if each forward of the first one
    is followed by that of the second, and backwards the other way round; as chunks take turns, this never holds for
    blocks of two.

    Args:
        chunk_of: for a rank with several chunks, and a block, the number of the chunk.
        num_chunks: the most chunks that a rank has.
    """

    chunk_of: Mapping[tuple[int, int], int]
    num_chunks: int

    @staticmethod
    def from_traces(*traces: Trace) -> EventLabels:
        """Return the names of the events of traces of one program."""
        chunk_of: dict[tuple[int, int], int] = {}
        most = 1
        for trace in traces:
            rows: defaultdict[int, list[_ComputeEvent]] = defaultdict(list)
            for event in trace.events:
                if event.lane == "compute":
                    rows[event.rank] += _compute_events(event)
            for rank, row in rows.items():
                found = _group_blocks(row)
                most = max(most, len(found))
                for number, blocks in enumerate(found if len(found) > 1 else ()):
                    chunk_of |= {(rank, block): number for block in blocks}
        return EventLabels(chunk_of, most)

    def chunk(self, event: TraceEvent) -> int | None:
        """Return which chunk of its rank an event belongs to; None where there is one, or it belongs to none."""
        turn = next(_compute_events(event), None)
        return None if turn is None else self.chunk_of.get((event.rank, turn.block))

    def short_label(self, event: TraceEvent) -> str:
        """Return the shortest name: ``F3`` for a forward of microbatch 3, ``F3b`` for that of the second chunk."""
        chunk = self.chunk(event)
        return short_name(event.text) + ("" if chunk is None else chunk_suffix(chunk))

    def full_label(self, event: TraceEvent) -> str:
        """Return the short name with the version of the weights that are read, if they are not the newest."""
        version = weight_version(event)
        return self.short_label(event) + (f":{version}" if version else "")


def chunk_suffix(chunk: int) -> str:
    """Return what stands for a chunk: ``a`` for the first one."""
    return ascii_lowercase[chunk % len(ascii_lowercase)]


def weight_version(event: TraceEvent) -> int:
    """Return how much older than the newest weights those are that an event reads, as a negative number."""
    turn = next(_compute_events(event), None)
    return 0 if turn is None else turn.version


def _compute_events(event: TraceEvent) -> Iterator[_ComputeEvent]:
    for word in event.text.split():
        found = _COMPUTE_PATTERN.match(word)
        if found is not None:
            place = int(found["block"]), int(found["micro"]), int(found["version"] or 0)
            yield _ComputeEvent(found["kind"], *place)


def _group_blocks(row: Sequence[_ComputeEvent]) -> list[list[int]]:
    """Return the blocks of each chunk of a rank that does this."""
    follows: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    ends = [*((turn, behind) for turn, behind in pairwise(row)), *((turn, None) for turn in row[-1:])]
    for turn, behind in ends:
        is_next = behind is not None and behind.kind == turn.kind and behind.micro == turn.micro
        follows[turn.kind, turn.block].add(("same", behind.block) if is_next and behind is not None else ("other", 0))
    chunks: list[list[int]] = []
    for block in sorted({turn.block for turn in row}):
        if chunks and chunks[-1][-1] == block - 1 and _are_always_adjacent(follows, block - 1, block):
            chunks[-1].append(block)
        else:
            chunks.append([block])
    return chunks


def _are_always_adjacent(follows: Mapping[tuple[str, int], set[tuple[str, int]]], first: int, second: int) -> bool:
    """Tell whether two neighbouring blocks always follow one another, both ways."""
    for (kind, block), found in follows.items():
        at, wanted = (first, second) if kind in {"F", "R"} else (second, first)
        if block == at and found != {("same", wanted)}:
            return False
    return True
