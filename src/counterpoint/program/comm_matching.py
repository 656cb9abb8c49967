"""Match each send, push and collective call with its counterparts on other ranks, independently of timing.

Messages with one tensor between two ranks arrive in the order in which they were sent, and the members of a group call
its collectives in the same order, so that the counterparts can be read off the program without running it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.program.execution_order import GroupInterner
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Commit,
    Instruction,
    Pull,
    Push,
    Recv,
    Send,
    TensorRef,
)
from counterpoint.program.program import Instructions

Location: TypeAlias = tuple[int, int]
"""A rank, and the index of an instruction of that rank."""
TypeIndices: TypeAlias = defaultdict[type[Instruction], list[int]]
"""The indices of the instructions of each type of one rank."""


@dataclass(slots=True)
class CommMatches:
    """Which instructions communicate with each other.

    Args:
        producer: for each receive, the matching send; for each push and pull, the :class:`ApplyPushes` that answers it;
            for each wait of a collective, its own start.
        slot: for each push and pull, its position in the server's sequence of workers and units.
        collective_id: for each collective, start and commit, the number of the call, which its members share.
        participants: the locations of each call.
    """

    producer: dict[Location, Location] = field(default_factory=dict)
    slot: dict[Location, int] = field(default_factory=dict)
    collective_id: dict[Location, int] = field(default_factory=dict)
    participants: list[list[Location]] = field(default_factory=list)


def match_communication(
    rank_instructions: Sequence[Instructions], type_indices: Sequence[TypeIndices] | None = None
) -> CommMatches:
    """Match the communication of a program that obeys rules 1 to 3.

    Args:
        rank_instructions: unrolled instructions, per rank.
        type_indices: the result of :func:`index_by_type` for each rank, if it is known already.
    """
    matches = CommMatches()
    type_indices = type_indices or [index_by_type(instructions) for instructions in rank_instructions]
    _match_messages(rank_instructions, type_indices, matches)
    _match_collectives(rank_instructions, type_indices, matches)
    _match_servers(rank_instructions, type_indices, matches)
    return matches


def index_by_type(instructions: Instructions) -> TypeIndices:
    """Return the indices of the instructions of each type, so that many local instructions are visited only once."""
    indices_by_type: TypeIndices = defaultdict(list)
    for index, instruction in enumerate(instructions):
        indices_by_type[type(instruction)].append(index)
    return indices_by_type


def _match_messages(
    rank_instructions: Sequence[Instructions], type_indices: Sequence[TypeIndices], matches: CommMatches
) -> None:
    sent: defaultdict[tuple[TensorRef, int, int], deque[int]] = defaultdict(deque)
    for rank, instructions in enumerate(rank_instructions):
        for index in type_indices[rank][Send]:
            instruction = instructions[index]
            assert isinstance(instruction, Send), "indexed by type"
            sent[instruction.tensor, rank, instruction.peer].append(index)
    for rank, instructions in enumerate(rank_instructions):
        for index in type_indices[rank][Recv]:
            instruction = instructions[index]
            assert isinstance(instruction, Recv), "indexed by type"
            matches.producer[rank, index] = (
                instruction.peer,
                sent[instruction.tensor, instruction.peer, rank].popleft(),
            )


def _match_collectives(
    rank_instructions: Sequence[Instructions], type_indices: Sequence[TypeIndices], matches: CommMatches
) -> None:
    groups = GroupInterner()
    calls: defaultdict[int, list[int]] = defaultdict(list)  # of each group
    participants = matches.participants
    for rank, instructions in enumerate(rank_instructions):
        num_calls: defaultdict[int, int] = defaultdict(int)
        started: dict[tuple[int, str, TensorRef], int] = {}
        for index in sorted(type_indices[rank][Collective] + type_indices[rank][Commit]):
            instruction = instructions[index]
            assert isinstance(instruction, Collective | Commit), "indexed by type"
            group = groups.intern(instruction.group)
            if isinstance(instruction, Collective) and instruction.phase:
                if instruction.phase == "wait":
                    matches.producer[rank, index] = (rank, started[group, instruction.op, instruction.tensor])
                    continue
                started[group, instruction.op, instruction.tensor] = index
            collective_ids, call_index = calls[group], num_calls[group]
            if call_index == len(collective_ids):
                collective_ids.append(len(participants))
                participants.append([])
            num_calls[group] = call_index + 1
            collective_id, location = collective_ids[call_index], (rank, index)
            participants[collective_id].append(location)
            matches.collective_id[location] = collective_id


def _match_servers(
    rank_instructions: Sequence[Instructions], type_indices: Sequence[TypeIndices], matches: CommMatches
) -> None:
    slots: defaultdict[tuple[int, int, tuple[int, ...]], deque[tuple[int, int]]] = defaultdict(deque)
    for rank, instructions in enumerate(rank_instructions):
        for index in type_indices[rank][ApplyPushes]:
            instruction = instructions[index]
            assert isinstance(instruction, ApplyPushes), "indexed by type"
            pairs = [(worker, unit) for worker in instruction.workers for unit in instruction.units]
            for slot, (worker, unit) in enumerate(pairs):
                slots[rank, worker, unit].append((index, slot))
    if not slots:
        return
    num_taken: defaultdict[tuple[int, int, tuple[int, ...], type[Instruction]], int] = defaultdict(int)
    for rank, instructions in enumerate(rank_instructions):
        for index in sorted(type_indices[rank][Push] + type_indices[rank][Pull]):
            instruction = instructions[index]
            assert isinstance(instruction, Push | Pull), "indexed by type"
            key = (instruction.peer, rank, instruction.tensor.blocks)
            server_index, slot = slots[key][num_taken[*key, type(instruction)]]
            num_taken[*key, type(instruction)] += 1
            matches.producer[rank, index] = (instruction.peer, server_index)
            matches.slot[rank, index] = slot
