"""Classes of ranks that do the same things at the same times, so that one representative per class can be simulated.

Two ranks are in one class if their instructions are equal up to a shift of ranks and microbatches, and each instruction
communicates with instructions at the same indices of ranks of the same classes. Whatever an instruction does then
depends on the same inputs on both ranks, so that by induction along any execution order both have the same timeline.
The classes are found by partition refinement.
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
    Fetch,
    Forward,
    Free,
    Instruction,
    Offload,
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
    """Differences of ranks other than their instructions: their own properties, and which ranks are close.

    Args:
        rank_keys: for each rank its own properties, such as its speed; empty if all ranks are equal.
        groups: for each level of the network, the group of each rank. Groups of one level are equivalent if they
            contain as many ranks of each class, and instructions only if they communicate with as many ranks of their
            own group.
    """

    rank_keys: Sequence[Hashable] = ()
    groups: Sequence[Sequence[int]] = ()


UNIFORM_TOPOLOGY = TopologyKeys()


def find_rank_classes(
    program: Program, rank_instructions: Sequence[Instructions] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of ranks, each in ascending order, sorted by their first rank.

    Args:
        program: a program that obeys the rules.
        rank_instructions: its unrolled instructions, per rank, if they are known already.

    Example:
        >>> from counterpoint.program.text import parse_program
        >>> text = ["F0.0 x1.0>1 B0.0", "x1.0<0 F1.0", "F0.1 x1.1>3 B0.1", "x1.1<2 F1.1"]
        >>> find_rank_classes(parse_program(chr(10).join(text)))
        ((0, 2), (1, 3))
    """
    flat = program.unroll(1) if rank_instructions is None else rank_instructions
    return classify_ranks(program, flat, match_communication(flat))


def classify_ranks(
    program: Program,
    rank_instructions: Sequence[Instructions],
    matches: CommMatches,
    topology: TopologyKeys = UNIFORM_TOPOLOGY,
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of ranks whose communication is matched already; see :func:`find_rank_classes`."""
    intern = RankProgramSignatures().intern
    return refine_classes(
        [
            intern(rank_program, instructions)
            for rank_program, instructions in zip(program.rank_programs, rank_instructions, strict=True)
        ],
        matches,
        topology,
    )


def refine_classes(
    signatures: Sequence[Hashable], matches: CommMatches, topology: TopologyKeys = UNIFORM_TOPOLOGY
) -> tuple[tuple[int, ...], ...]:
    """Return the classes of ranks whose communication and signatures are known; see :func:`find_rank_classes`."""
    kinds = topology.rank_keys or [()] * len(signatures)
    colours = _number_distinct(list(zip(signatures, kinds, strict=True)))
    meetings = _CommPatterns(matches, topology.groups)
    while True:
        finer = meetings.refine(colours)
        if max(finer, default=0) == max(colours, default=0):
            break
        colours = finer
    members: dict[int, list[int]] = {}
    for rank, colour in enumerate(colours):
        members.setdefault(colour, []).append(rank)
    return tuple(map(tuple, members.values()))


class _CommPatterns:
    """With which ranks each rank communicates, at which instructions; equal sets of instructions are one pattern."""

    def __init__(self, matches: CommMatches, group_levels: Sequence[Sequence[int]]) -> None:
        self.group_levels = group_levels
        self.patterns: dict[Hashable, int] = {}
        self.peers: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.collectives: list[dict[int, int]] = []
        self._add_messages(matches)
        self._add_collectives(matches)

    def _pattern(self, *key: Hashable) -> int:
        return self.patterns.setdefault(key, len(self.patterns))

    def _add_messages(self, matches: CommMatches) -> None:
        """Add the peers that each rank receives from and, if the topology matters, those that it sends to."""
        messages: defaultdict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for location, (other, peer_index) in matches.producer.items():
            rank, index = location
            messages[rank, other].append((index, peer_index, matches.slot.get(location, 0)))
        for (rank, other), locations in messages.items():
            differs = tuple(groups[rank] != groups[other] for groups in self.group_levels)
            self.peers[rank].append((other, self._pattern("from", differs, tuple(locations))))
            if self.group_levels:
                self.peers[other].append((rank, self._pattern("to", differs, tuple(locations))))

    def _add_collectives(self, matches: CommMatches) -> None:
        indices_of: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for members in matches.participants:
            group = tuple([rank for rank, _ in members])
            indices_by_rank = indices_of.setdefault(group, {})
            for rank, index in members:
                indices_by_rank.setdefault(rank, []).append(index)
        for indices_by_rank in indices_of.values():
            self.collectives.append(
                {rank: self._pattern("call", tuple(indices)) for rank, indices in indices_by_rank.items()}
            )

    def refine(self, colours: Sequence[int]) -> list[int]:
        """Return finer classes: split by own groups, by the classes of peers, and by the classes in each collective."""
        own_group_colours = [_group_values(dict(enumerate(colours)), groups) for groups in self.group_levels]
        call_keys: list[Hashable] = []
        calls: defaultdict[int, list[tuple[int, Hashable]]] = defaultdict(list)
        for number, patterns in enumerate(self.collectives):
            keys = {rank: (colours[rank], pattern) for rank, pattern in patterns.items()}
            grouped_keys = [_group_values(keys, groups) for groups in self.group_levels]
            call_keys.append(
                tuple(tuple(sorted(values_by_group.values())) for values_by_group in grouped_keys)
                or frozenset(keys.values())
            )
            for rank, pattern in patterns.items():
                calls[rank].append((number, (pattern, *self._own_group_values(grouped_keys, rank))))
        call_colours = _number_distinct(call_keys)
        return _number_distinct([
            (
                colour,
                self._own_group_values(own_group_colours, rank),
                frozenset(Counter((colours[other], pattern) for other, pattern in self.peers[rank]).items()),
                frozenset(Counter((call_colours[number], key) for number, key in calls[rank]).items()),
            )
            for rank, colour in enumerate(colours)
        ])  # fmt: skip

    def _own_group_values(self, values_by_group: Sequence[Mapping[int, Hashable]], rank: int) -> tuple[Hashable, ...]:
        """Return the value of a rank's own group at each level."""
        return tuple(values[groups[rank]] for values, groups in zip(values_by_group, self.group_levels, strict=True))


def _group_values(values: Mapping[int, Any], groups: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """Return the sorted values of the ranks of each group."""
    values_by_group: defaultdict[int, list[Any]] = defaultdict(list)
    for rank, value in values.items():
        values_by_group[groups[rank]].append(value)
    return {group: tuple(sorted(members)) for group, members in values_by_group.items()}


def _number_distinct(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


class RankProgramSignatures:
    """Numbers of rank programs without their ranks and with relative microbatches: equal numbers for equal programs.

    Example:
        >>> from counterpoint.program.text import parse_program
        >>> first, second = parse_program("F0.0 x1.0>1" + chr(10) + "F0.3 x1.3>0").rank_programs
        >>> intern = RankProgramSignatures().intern
        >>> intern(first, first.body) == intern(second, second.body)
        True
    """

    def __init__(self) -> None:
        self._instructions: dict[Hashable, int] = {}
        self._rows: dict[Hashable, int] = {}

    def intern(self, rank_program: RankProgram, instructions: Instructions) -> int:
        """Return the number of a rank program."""
        first = next((instruction.micro for instruction in instructions if type(instruction) is Forward), 0)
        known = self._instructions
        signature = tuple(
            [known.setdefault(_instruction_signature(instruction, first), len(known)) for instruction in instructions]
        )
        return self._rows.setdefault((rank_program.tp_degree, signature), len(self._rows))


def _instruction_signature(instruction: Instruction, first: int) -> Hashable:  # noqa: C901, PLR0911, PLR0912 - one case each
    match instruction:
        case Forward():
            return "F", instruction.block, instruction.micro - first, instruction.version
        case Backward():
            return "B", instruction.block, instruction.micro - first, instruction.version, instruction.part
        case Collective():
            return (
                instruction.op,
                instruction.codec,
                _tensor_signature(instruction.tensor, first),
                len(instruction.group),
                instruction.phase,
            )
        case Send() | Recv():
            return type(instruction), instruction.codec, _tensor_signature(instruction.tensor, first)
        case Push():
            return instruction.op_name, _tensor_signature(instruction.tensor, first)
        case Pull() | Free():
            return type(instruction), _tensor_signature(instruction.tensor, first)
        case Fetch() | Offload():
            return type(instruction), _tensor_signature(instruction.tensor, first), instruction.place
        case Recompute():
            return "R", instruction.block, instruction.micro - first, instruction.version
        case Commit(group, own):
            return "commit", len(group), len(own)
        case Update(unit):
            return "U", unit
        case SwapGradBuffers(unit):
            return "swap", unit
        case ApplyPushes(units, workers):
            return instruction.op_name, units, len(workers)


def _tensor_signature(value: TensorRef, first: int) -> Hashable:
    return value.name, value.blocks, None if value.micro is None else value.micro - first
