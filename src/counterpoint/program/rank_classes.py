"""Which ranks do the same things at the same times, so that one of them speaks for all.

Two ranks are of one class when their words are equal but for a shift of ranks and microbatches, and every word
meets words at the same places of ranks of the same classes. Whatever a word does then depends on equal things in
both rows, so that by induction along any order in which the program can run, both go through the same times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.program.comm_matching import CommMatches, match_communication
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions, Program, RankProgram


@dataclass(frozen=True, slots=True)
class TopologyKeys:
    """What tells ranks apart besides their words: what they are, and whom they are near.

    Args:
        kinds: for each rank what is its own, such as how fast it computes; empty where all are alike.
        groups: for each level of a network the group that each rank is in. Groups of one level are alike when they hold
            as many ranks of each class, and words only when they meet as many from the own group.
    """

    rank_keys: Sequence[Hashable] = ()
    groups: Sequence[Sequence[int]] = ()


UNIFORM_TOPOLOGY = TopologyKeys()


def find_rank_classes(program: Program, rows: Sequence[Instructions] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in classes, each in ascending order, by their first rank.

    Args:
        program: a program that keeps the laws.
        rows: its flat rows, when they are at hand.

    Example:
        >>> from counterpoint.program.text import parse_program
        >>> text = ["F0.0 x1.0>1 B0.0", "x1.0<0 F1.0", "F0.1 x1.1>3 B0.1", "x1.1<2 F1.1"]
        >>> classes(parse_program(chr(10).join(text)))
        ((0, 2), (1, 3))
    """
    flat = program.unroll(1) if rows is None else rows
    return classify_ranks(program, flat, match_communication(flat))


def classify_ranks(
    program: Program, rows: Sequence[Instructions], matches: CommMatches, topology: TopologyKeys = UNIFORM_TOPOLOGY
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of rows whose partners are known, on ranks that may differ; see :func:`classes`."""
    number_of = RankProgramSignatures().intern
    return refine_classes(
        [number_of(row, words) for row, words in zip(program.rank_programs, rows, strict=True)], matches, topology
    )


def refine_classes(
    signatures: Sequence[Hashable], matches: CommMatches, topology: TopologyKeys = UNIFORM_TOPOLOGY
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of rows whose partners and outlines are known; see :func:`classes`."""
    kinds = topology.rank_keys or [()] * len(signatures)
    colours = _number_distinct(list(zip(signatures, kinds, strict=True)))
    meetings = _CommPatterns(matches, topology.groups)
    while True:
        finer = meetings.refine(colours)
        if max(finer, default=0) == max(colours, default=0):
            break
        colours = finer
    together: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        together.setdefault(colour, []).append(rank)
    return tuple(map(tuple, together.values()))


class _CommPatterns:
    """Whom each rank meets at which words; all words that it shares with one rank, or one group, are one pattern."""

    def __init__(self, matches: CommMatches, group_levels: Sequence[Sequence[int]]) -> None:
        self.group_levels = group_levels
        self.patterns: dict[Hashable, int] = {}
        self.peers: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.collectives: list[dict[int, int]] = []
        self._add_messages(matches)
        self._add_collectives(matches)

    def _pattern(self, *what: Hashable) -> int:
        return self.patterns.setdefault(what, len(self.patterns))

    def _add_messages(self, matches: CommMatches) -> None:
        """A rank sees whom it hears; where places count, also who hears it."""
        met: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for place, (other, at) in matches.producer.items():
            rank, index = place
            met[rank, other].append((index, at, matches.slot.get(place, 0)))
        for (rank, other), places in met.items():
            apart = tuple(groups[rank] != groups[other] for groups in self.group_levels)
            self.peers[rank].append((other, self._pattern("from", apart, tuple(places))))
            if self.group_levels:
                self.peers[other].append((rank, self._pattern("to", apart, tuple(places))))

    def _add_collectives(self, matches: CommMatches) -> None:
        indices: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for members in matches.participants:
            group = tuple([rank for rank, _ in members])
            found = indices.setdefault(group, {})
            for rank, index in members:
                found.setdefault(rank, []).append(index)
        for places in indices.values():
            self.collectives.append({rank: self._pattern("call", tuple(at)) for rank, at in places.items()})

    def refine(self, colours: Sequence[int]) -> list[int]:
        """Return finer colours: by those of the own groups, of whom each rank meets, and of whom calls join."""
        homes = [_group_values(dict(enumerate(colours)), groups) for groups in self.group_levels]
        joined: list[Hashable] = []
        calls: defaultdict[int, list[tuple[int, Hashable]]] = defaultdict(list)
        for number, patterns in enumerate(self.collectives):
            seats = {rank: (colours[rank], pattern) for rank, pattern in patterns.items()}
            inside = [_group_values(seats, groups) for groups in self.group_levels]
            joined.append(tuple(tuple(sorted(found.values())) for found in inside) or frozenset(seats.values()))
            for rank, pattern in patterns.items():
                calls[rank].append((number, (pattern, *self._own_group_values(inside, rank))))
        joins = _number_distinct(joined)
        return _number_distinct([
            (
                colour,
                self._own_group_values(homes, rank),
                frozenset(Counter((colours[other], pattern) for other, pattern in self.peers[rank]).items()),
                frozenset(Counter((joins[number], seat) for number, seat in calls[rank]).items()),
            )
            for rank, colour in enumerate(colours)
        ])  # fmt: skip

    def _own_group_values(self, found: Sequence[Mapping[int, Hashable]], rank: int) -> tuple[Hashable, ...]:
        """Return what is found in a rank's own group of each level."""
        return tuple(here[groups[rank]] for here, groups in zip(found, self.group_levels, strict=True))


def _group_values(values: Mapping[int, Any], groups: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """Return for each group what its ranks have, in order."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    for rank, thing in values.items():
        found[groups[rank]].append(thing)
    return {group: tuple(sorted(here)) for group, here in found.items()}


def _number_distinct(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in values]


class RankProgramSignatures:
    """Numbers for rows without their ranks, and with microbatches counted from the first one: equal for equal ones.

    Example:
        >>> from counterpoint.program.text import parse_program
        >>> first, second = parse_program("F0.0 x1.0>1" + chr(10) + "F0.3 x1.3>0").rows
        >>> number_of = Outlines().number
        >>> number_of(first, first.body) == number_of(second, second.body)
        True
    """

    def __init__(self) -> None:
        self._instructions: dict[Hashable, int] = {}
        self._rows: dict[Hashable, int] = {}

    def intern(self, row: RankProgram, words: Instructions) -> int:
        """Return the number of a row's words."""
        first = next((word.micro for word in words if type(word) is Forward), 0)
        known = self._instructions
        plain = tuple([known.setdefault(_instruction_signature(word, first), len(known)) for word in words])
        return self._rows.setdefault((row.tp_degree, plain), len(self._rows))


def _instruction_signature(word: Instruction, first: int) -> Hashable:  # noqa: C901, PLR0911, PLR0912 - one case each
    match word:
        case Forward():
            return "F", word.block, word.micro - first, word.version
        case Backward():
            return "B", word.block, word.micro - first, word.version, word.part
        case Collective():
            return word.op, word.codec, _tensor_signature(word.tensor, first), len(word.group), word.phase
        case Send() | Recv():
            return type(word), word.codec, _tensor_signature(word.tensor, first)
        case Push():
            return word.op_name, _tensor_signature(word.tensor, first)
        case Pull() | Free():
            return type(word), _tensor_signature(word.tensor, first)
        case Recompute():
            return "R", word.block, word.micro - first, word.version
        case Commit(group, own):
            return "commit", len(group), len(own)
        case Update(unit):
            return "U", unit
        case SwapGradBuffers(unit):
            return "swap", unit
        case ApplyPushes(units, workers):
            return word.op_name, units, len(workers)


def _tensor_signature(value: TensorRef, first: int) -> Hashable:
    return value.name, value.blocks, None if value.micro is None else value.micro - first
