"""What events are called in drawings: which microbatch, which of its rank's chunks, on weights of which version."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase
from typing import NamedTuple

from counterpoint.drawing.kinds import short_name
from counterpoint.program.trace import Event, Trace

_WORD = re.compile(r"(?P<kind>F|R|B[iw]?)(?P<block>\d+)\.\+?(?P<micro>\d+)(?::(?P<version>-\d+))?$")


class _Turn(NamedTuple):
    """A forward, one that is computed again, or a backward or a part of one."""

    kind: str
    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Naming:
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
    def of(*traces: Trace) -> Naming:
        """Return the names of the events of traces of one program."""
        chunk_of: dict[tuple[int, int], int] = {}
        most = 1
        for trace in traces:
            rows: defaultdict[int, list[_Turn]] = defaultdict(list)
            for event in trace.events:
                if event.lane == "compute":
                    rows[event.rank] += _turns(event)
            for rank, row in rows.items():
                found = _chunks(row)
                most = max(most, len(found))
                for number, blocks in enumerate(found if len(found) > 1 else ()):
                    chunk_of |= {(rank, block): number for block in blocks}
        return Naming(chunk_of, most)

    def chunk(self, event: Event) -> int | None:
        """Return which chunk of its rank an event belongs to; None where there is one, or it belongs to none."""
        turn = next(_turns(event), None)
        return None if turn is None else self.chunk_of.get((event.rank, turn.block))

    def short(self, event: Event) -> str:
        """Return the shortest name: ``F3`` for a forward of microbatch 3, ``F3b`` for that of the second chunk."""
        chunk = self.chunk(event)
        return short_name(event.words) + ("" if chunk is None else letter_of(chunk))

    def full(self, event: Event) -> str:
        """Return the short name with the version of the weights that are read, if they are not the newest."""
        version = version_of(event)
        return self.short(event) + (f":{version}" if version else "")


def letter_of(chunk: int) -> str:
    """Return what stands for a chunk: ``a`` for the first one."""
    return ascii_lowercase[chunk % len(ascii_lowercase)]


def version_of(event: Event) -> int:
    """Return how much older than the newest weights those are that an event reads, as a negative number."""
    turn = next(_turns(event), None)
    return 0 if turn is None else turn.version


def _turns(event: Event) -> Iterator[_Turn]:
    for word in event.words.split():
        found = _WORD.match(word)
        if found is not None:
            place = int(found["block"]), int(found["micro"]), int(found["version"] or 0)
            yield _Turn(found["kind"], *place)


def _chunks(row: Sequence[_Turn]) -> list[list[int]]:
    """Return the blocks of each chunk of a rank that does this."""
    follows: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    ends = [*((turn, behind) for turn, behind in pairwise(row)), *((turn, None) for turn in row[-1:])]
    for turn, behind in ends:
        is_next = behind is not None and behind.kind == turn.kind and behind.micro == turn.micro
        follows[turn.kind, turn.block].add(("same", behind.block) if is_next and behind is not None else ("other", 0))
    chunks: list[list[int]] = []
    for block in sorted({turn.block for turn in row}):
        if chunks and chunks[-1][-1] == block - 1 and _are_one(follows, block - 1, block):
            chunks[-1].append(block)
        else:
            chunks.append([block])
    return chunks


def _are_one(follows: Mapping[tuple[str, int], set[tuple[str, int]]], first: int, second: int) -> bool:
    """Tell whether two neighbouring blocks always follow one another, both ways."""
    for (kind, block), found in follows.items():
        at, wanted = (first, second) if kind in {"F", "R"} else (second, first)
        if block == at and found != {("same", wanted)}:
            return False
    return True
