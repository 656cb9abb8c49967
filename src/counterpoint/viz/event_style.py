"""Style events of a trace: kind, colour and label.

A label names the microbatch, the chunk of the rank and the version of the weights.
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
"""One colour per kind, in the order of legends; each has a contrast of at least 3 to white and to a dark page."""

MIN_CONTRAST = 3.2
"""Contrast to white that lighter shades of a colour keep."""

_COMPUTE_KINDS: MappingProxyType[str, EventKind] = MappingProxyType(
    {"F": "forward", "R": "recomputation", "B": "backward", "U": "update"}
)
_MICROBATCH_PATTERN = re.compile(r"(F|R|B[iw]?)\d+\.\+?(\d+)")


def chunk_shade(kind: EventKind, chunk: int, num_chunks: int) -> str:
    """Return the colour of a kind on a chunk: its own colour on the first one, lighter shades on later ones."""
    colour = KIND_COLOURS[kind]
    if not chunk:
        return colour
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    white_fraction = chunk / max(1, num_chunks - 1) * _max_white_fraction((red, green, blue))
    mixed = (round(value + white_fraction * (255 - value)) for value in (red, green, blue))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _max_white_fraction(colour: tuple[int, int, int]) -> float:
    """Return how much white may be mixed into a colour until :data:`MIN_CONTRAST` is reached."""
    fractions = (percent / 100 for percent in range(100))
    return max(
        (
            fraction
            for fraction in fractions
            if _contrast(value + fraction * (255 - value) for value in colour) >= MIN_CONTRAST
        ),
        default=0.0,
    )


def _contrast(colour: Iterable[float]) -> float:
    """Return the contrast ratio of a colour to white, as defined by WCAG."""
    shares = [value / 255 for value in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 1.05 / (sum(factor * value for factor, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05)


_SERVER_OPS = ("apply_and_reply", "apply", "elastic_average")
"""Instructions of a server, whose CPU time counts as updates."""


def instruction_kind(text: str) -> EventKind:
    """Return the kind of an instruction's text; what is neither computing nor a commit is communication."""
    if text.startswith("commit@"):
        return "commit"
    return "weight part" if text.startswith("Bw") else _COMPUTE_KINDS.get(text[:1], "communication")


def event_kind(event: TraceEvent) -> EventKind:
    """Return the kind of an event: a commit in every lane, otherwise waiting in the wait lane."""
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
    """Return operation and microbatch, ``F3``, or the name of the instruction where it has no microbatch."""
    first = text.split(" ", 1)[0]
    match = _MICROBATCH_PATTERN.match(first)
    if match is not None:
        return match[1] + match[2]
    return "U" if instruction_kind(first) == "update" else first.partition("(")[0].partition("@")[0]


_COMPUTE_PATTERN = re.compile(r"(?P<kind>F|R|B[iw]?)(?P<block>\d+)\.\+?(?P<micro>\d+)(?::(?P<version>-\d+))?$")


class _ComputeEvent(NamedTuple):
    """A forward, a recomputation, or a backward or a part of one."""

    kind: str
    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class EventLabels:
    """Labels of the events of one trace.

    A trace names blocks, not chunks. Two adjacent blocks of a rank belong to one chunk if each forward of the first is
    followed by that of the second, and each backward of the second by that of the first; as chunks alternate, this
    never holds for blocks of different chunks.

    Args:
        chunk_of: for a rank with several chunks, and a block, the number of the chunk.
        num_chunks: the largest number of chunks of a rank.
    """

    chunk_of: Mapping[tuple[int, int], int]
    num_chunks: int

    @staticmethod
    def from_traces(*traces: Trace) -> EventLabels:
        """Return the labels of the events of traces of one program."""
        chunk_of: dict[tuple[int, int], int] = {}
        max_chunks = 1
        for trace in traces:
            events_of_rank: defaultdict[int, list[_ComputeEvent]] = defaultdict(list)
            for event in trace.events:
                if event.lane == "compute":
                    events_of_rank[event.rank] += _compute_events(event)
            for rank, compute_events in events_of_rank.items():
                chunks = _group_blocks(compute_events)
                max_chunks = max(max_chunks, len(chunks))
                for number, blocks in enumerate(chunks if len(chunks) > 1 else ()):
                    chunk_of |= {(rank, block): number for block in blocks}
        return EventLabels(chunk_of, max_chunks)

    def chunk(self, event: TraceEvent) -> int | None:
        """Return the chunk of its rank that an event belongs to; None if there is only one, or it belongs to none."""
        compute_event = next(_compute_events(event), None)
        return None if compute_event is None else self.chunk_of.get((event.rank, compute_event.block))

    def short_label(self, event: TraceEvent) -> str:
        """Return the shortest label: ``F3`` for a forward of microbatch 3, ``F3b`` for that of the second chunk."""
        chunk = self.chunk(event)
        return short_name(event.text) + ("" if chunk is None else chunk_suffix(chunk))

    def full_label(self, event: TraceEvent) -> str:
        """Return the short label with the version of the weights, if it is not the newest."""
        version = weight_version(event)
        return self.short_label(event) + (f":{version}" if version else "")


def chunk_suffix(chunk: int) -> str:
    """Return the letter of a chunk: ``a`` for the first one."""
    return ascii_lowercase[chunk % len(ascii_lowercase)]


def weight_version(event: TraceEvent) -> int:
    """Return the version of the weights that an event reads, as a non-positive number relative to the newest."""
    compute_event = next(_compute_events(event), None)
    return 0 if compute_event is None else compute_event.version


def _compute_events(event: TraceEvent) -> Iterator[_ComputeEvent]:
    for instruction in event.text.split():
        match = _COMPUTE_PATTERN.match(instruction)
        if match is not None:
            numbers = int(match["block"]), int(match["micro"]), int(match["version"] or 0)
            yield _ComputeEvent(match["kind"], *numbers)


def _group_blocks(events: Sequence[_ComputeEvent]) -> list[list[int]]:
    """Return the blocks of each chunk of a rank with these events, in order."""
    follows: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    ends = [*((event, following) for event, following in pairwise(events)), *((event, None) for event in events[-1:])]
    for event, following in ends:
        is_next = following is not None and following.kind == event.kind and following.micro == event.micro
        follows[event.kind, event.block].add(
            ("same", following.block) if is_next and following is not None else ("other", 0)
        )
    chunks: list[list[int]] = []
    for block in sorted({event.block for event in events}):
        if chunks and chunks[-1][-1] == block - 1 and _are_always_adjacent(follows, block - 1, block):
            chunks[-1].append(block)
        else:
            chunks.append([block])
    return chunks


def _are_always_adjacent(follows: Mapping[tuple[str, int], set[tuple[str, int]]], first: int, second: int) -> bool:
    """Return whether two adjacent blocks always follow each other, in both directions."""
    for (kind, block), followers in follows.items():
        before, after = (first, second) if kind in {"F", "R"} else (second, first)
        if block == before and followers != {("same", after)}:
            return False
    return True
