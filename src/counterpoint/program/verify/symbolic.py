"""Symbolic execution: run a program on descriptions of tensors instead of tensors.

Every backward leaves one contribution ``(block, microbatch, shard)`` in its rank's gradient. Collectives add
contributions and split the range of a unit that a rank holds; updates consume them and create a new weight version. The
rules in :mod:`counterpoint.program.verify.updates` then only have to look at the records::

    F0.0 B0.0    grad0 of rank 0 = {(0, 0, 0)}             (1)
    F0.1 B0.1    grad0 of rank 1 = {(0, 1, 0)}
    all_reduce(grad0)@0,1
                 grad0 of both   = {(0, 0, 0), (0, 1, 0)}  (2)
    commit@0,1   both ranks agree about microbatches 0, 1  (3)
    U0           version 0 -> 1, by an update with these   (4)
                 two contributions, staleness 0

The numbers are comments in the code: (1) in :meth:`_SymbolicExecutor.backward`, (2) in ``all_reduce``, (3) a
:class:`CommitRecord` in ``commit``, and (4) an :class:`UpdateRecord` in ``record_update``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from counterpoint.errors import ProgramError
from counterpoint.program.compression import why_not_encoded
from counterpoint.program.execution_order import GroupInterner, execution_order, format_locations
from counterpoint.program.instruction import (
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Group,
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
from counterpoint.program.program import Instructions, Program
from counterpoint.program.text import format_instruction, format_unit
from counterpoint.program.units import Unit, sharded_units, units_by_block
from counterpoint.world.topology import format_count

GradContribution: TypeAlias = tuple[int, int, int]
"""Block, microbatch and tensor-parallel shard of one backward."""
GradContributions: TypeAlias = "Counter[GradContribution]"
CompressedContributions: TypeAlias = dict[tuple[Group, Unit], tuple[tuple[int, ...], ...]]
"""For a group and a unit, the microbatches whose gradients each member adds to a compressed all-reduce."""
ShardRange: TypeAlias = tuple[Fraction, Fraction]
"""A range of a unit's elements: start and end, as fractions of the unit."""

FULL_RANGE: ShardRange = (Fraction(0), Fraction(1))
NO_CONTRIBUTIONS: GradContributions = Counter()


@dataclass(slots=True)
class UnitState:
    """Weights and gradients of one unit on one rank.

    Args:
        local_shard: the range of weights that it holds between steps.
        available: the range of weights that it holds now, gathered ones included.
        versions: every weight version that it has held, oldest first.
        full_grad: contributions in the gradient of the whole unit.
        has_full_grad_buffer: whether the gradient of the whole unit is allocated, even if it was reduce-scattered
            already.
        grad_shard: range and contributions of a reduce-scattered gradient.
        delayed_grad: contributions in the delayed gradient.
        has_delayed_grad: whether the delayed gradient is allocated.
        commit: the commit that decided about a gradient which was delayed and has been swapped back.
        diverged_from: the replicas whose separate updates are in its weights; empty if all copies are equal.
    """

    local_shard: ShardRange = FULL_RANGE
    available: ShardRange = FULL_RANGE
    versions: list[int] = field(default_factory=lambda: [0])
    full_grad: GradContributions = field(default_factory=Counter)
    has_full_grad_buffer: bool = False
    grad_shard: tuple[ShardRange, GradContributions] | None = None
    delayed_grad: GradContributions = field(default_factory=Counter)
    has_delayed_grad: bool = False
    commit: CommitRecord | None = None
    diverged_from: frozenset[Group] = frozenset()


@dataclass(slots=True)
class CommitRecord:
    """One commit: which ranks agree, and about which microbatches.

    Args:
        group: the members.
        micros: the microbatches whose backward the members have run since their previous commit.
        micros_by_member: the same for each member.
        loss_groups: for each member whose loss is not averaged over the whole group, the ranks that it is averaged
            over.
    """

    group: Group
    micros: set[int] = field(default_factory=set)
    micros_by_member: dict[int, set[int]] = field(default_factory=dict)
    loss_groups: dict[int, Group] = field(default_factory=dict)

    def micros_in_loss_of(self, rank: int) -> set[int]:
        """Return the microbatches that are averaged together with those of a member."""
        if rank not in self.loss_groups:
            return self.micros
        return {micro for member in self.loss_groups[rank] for micro in self.micros_by_member.get(member, ())}


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One update.

    Args:
        rank: the rank that runs it.
        index: index of the instruction in the rank's unrolled instructions.
        unit: the updated unit.
        shard: the updated range of it.
        contributions: the contributions in the applied gradient.
        staleness: how many updates ago the oldest of them read the weights.
        commit: the last commit of the rank or, on a parameter server, of the worker that pushed.
    """

    rank: int
    index: int
    unit: Unit
    shard: ShardRange
    contributions: GradContributions
    staleness: int
    commit: CommitRecord | None

    @property
    def replica(self) -> Group:
        """The ranks that apply this update separately from other replicas; empty if all ranks apply it."""
        return self.commit.loss_groups.get(self.rank, ()) if self.commit is not None else ()


def add_contribution(contributions: GradContributions, contribution: GradContribution) -> GradContributions:
    """Return a copy with one more contribution; the original may be shared by other ranks."""
    more: GradContributions = Counter()
    dict.update(more, contributions)  # faster than Counter.copy, which counts one by one
    more[contribution] += 1
    return more


def average_weights(states: Sequence[UnitState]) -> str:
    """Average the weights of replicas, equally weighted; return what is wrong, or ""."""
    if any(state.available != FULL_RANGE for state in states) or len({state.versions[-1] for state in states}) > 1:
        return "only whole weights after the same number of updates can be averaged"
    all_groups = frozenset[Group]().union(*(state.diverged_from for state in states))
    if len({len(state.diverged_from) for state in states}) > 1 or len(all_groups) != sum(
        len(state.diverged_from) for state in states
    ):
        return "an average is over the weights of different replicas, each counted once"
    for state in states:
        state.diverged_from = all_groups
    return ""


def all_gather_weights(states: Sequence[UnitState]) -> tuple[int, str]:
    """Gather the shards of all members on each of them; return the violated rule and what is wrong, or (0, "")."""
    if any(state.available == FULL_RANGE != state.local_shard for state in states):
        return 7, "these weights are gathered already"
    shards = sorted({state.available for state in states})
    tiles = all(low[1] == high[0] for low, high in pairwise(shards))
    versions = {state.versions[-1] for state in states}
    if len({state.diverged_from for state in states}) > 1:
        return 6, "the members hold shards of weights that replicas have updated separately"
    if not tiles or len(versions) > 1 or len(shards) != len(states):
        held = ", ".join(f"{low} to {high}" for low, high in shards)
        return 6, f"the members hold {held} in versions {sorted(versions)}"
    for state in states:
        state.available = (shards[0][0], shards[-1][1])
    return 0, ""


def reduce_scatter_grads(states: Sequence[UnitState]) -> str:
    """Leave on each member the sum of its own shard of a gradient; return what is wrong, or ""."""
    total: GradContributions = Counter()
    for state in states:
        total.update(state.full_grad)
    totals: dict[int, GradContributions] = {}  # members that shared an object before share one afterwards
    for member, state in enumerate(states):
        shard = (Fraction(member, len(states)), Fraction(member + 1, len(states)))
        if state.grad_shard is not None and state.grad_shard[0] != shard:
            return "this gradient was reduce-scattered into other shards before"
        previous = state.grad_shard[1] if state.grad_shard is not None else NO_CONTRIBUTIONS
        if id(previous) not in totals:
            totals[id(previous)] = previous + total
        state.grad_shard, state.full_grad, state.has_full_grad_buffer = (shard, totals[id(previous)]), Counter(), True
    return ""


def free_tensor(state: UnitState, name: str, *, is_end: bool) -> str:
    """Free a gathered weight or a gradient; return what is wrong, or "".

    Args:
        state: of the rank and the unit.
        name: ``delayed_grad``, ``grad`` or ``weight``.
        is_end: whether the epilogue of an asynchronous pipeline has begun.
    """
    if name == "delayed_grad":
        if not state.has_delayed_grad or not is_end:
            return "a delayed gradient may only be dropped in the epilogue of an asynchronous pipeline"
        state.delayed_grad, state.has_delayed_grad = Counter(), False
    elif name == "grad":
        if not state.has_full_grad_buffer:
            return "there is no gradient to free"
        state.full_grad, state.has_full_grad_buffer = Counter(), False
    else:
        if state.available == state.local_shard:
            return "no gathered weight is there to free"
        state.available = state.local_shard
    return ""


def all_reduce_grads(states: Sequence[UnitState]) -> None:
    """Leave on every member the sum of all gradients, or of the one shard that all of them hold."""
    total: GradContributions = Counter()
    for state in states:
        total.update(state.grad_shard[1] if state.grad_shard is not None else state.full_grad)
    for state in states:
        if state.grad_shard is not None:
            state.grad_shard = (state.grad_shard[0], total)
        else:
            state.full_grad, state.has_full_grad_buffer = total, True


def all_reduce_delayed_grads(states: Sequence[UnitState]) -> None:
    """Leave on every member the sum of all delayed gradients."""
    delayed_grads: GradContributions = Counter()
    for state in states:
        delayed_grads.update(state.delayed_grad)
    for state in states:
        state.delayed_grad, state.has_delayed_grad = delayed_grads, True


def contributions_by_member(states: Sequence[UnitState]) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches whose gradients each member adds to a sum."""
    return tuple(tuple(sorted({micro for _, micro, _ in state.full_grad})) for state in states)


class InFlightMicrobatches:
    """Microbatches between forward and backward, and how many of them each rank had at most.

    The methods return what is wrong with an instruction, or None.

    Args:
        num_ranks: number of ranks.
        chunk_starts: per rank, the blocks at which microbatches are counted and summed; None to take the maximum over
            blocks.
    """

    def __init__(self, num_ranks: int, chunk_starts: Sequence[Sequence[int]] | None) -> None:
        self.chunk_starts = chunk_starts
        self.in_flight: set[tuple[int, int, int]] = set()
        self.input_grad_done: set[tuple[int, int, int]] = set()
        self.recomputed: set[tuple[int, int, int]] = set()
        self.counts: list[Counter[int]] = [Counter() for _ in range(num_ranks)]
        self.peak = [0] * num_ranks

    def forward(self, rank: int, instruction: Forward) -> str | None:
        """Record a forward."""
        key = (rank, instruction.block, instruction.micro)
        if key in self.in_flight:
            return "the forward of this block and microbatch has run already"
        self.in_flight.add(key)
        counts = self.counts[rank]
        counts[instruction.block] += 1
        num_in_flight = (
            counts[instruction.block]
            if self.chunk_starts is None
            else sum(counts[head] for head in self.chunk_starts[rank])
        )
        self.peak[rank] = max(self.peak[rank], num_in_flight)
        return None

    def recompute(self, rank: int, instruction: Recompute) -> str | None:
        """Record a recomputation."""
        key = (rank, instruction.block, instruction.micro)
        if key not in self.in_flight or key in self.input_grad_done:
            return "a block is recomputed before its backward, on the rank that ran its forward"
        if key in self.recomputed:
            return "this block and microbatch has been recomputed already"
        self.recomputed.add(key)
        return None

    def backward(self, rank: int, instruction: Backward) -> str | None:
        """Record a backward or one half of it."""
        key = (rank, instruction.block, instruction.micro)
        if key not in self.in_flight:
            return "this rank has not run the forward of this block and microbatch"
        if instruction.computes_input_grad == (key in self.input_grad_done):
            return "the weight part of a backward comes once, after its input part"
        if not instruction.computes_weight_grad:
            self.input_grad_done.add(key)
            return None
        self.input_grad_done.discard(key)
        self.recomputed.discard(key)
        self.in_flight.discard(key)
        self.counts[rank][instruction.block] -= 1
        return None


@dataclass(slots=True, repr=False)
class SymbolicResult:
    """Records of a symbolic execution, printed as a summary of a few lines.

    Args:
        updates: all updates.
        unit_states: what each rank holds of each unit at the end.
        peak_in_flight: per rank, the maximum number of microbatches in flight.
        compressed_contributions: what was added to each compressed all-reduce.
        dropped: contributions in delayed gradients that the end of an asynchronous pipeline frees without an update.
        rules: the rules of :mod:`counterpoint.program.verify.verifier` that the program was found to obey.
        num_micros: the number of microbatches of a step.

    Example:
        >>> print(SymbolicResult(peak_in_flight=[2, 1], rules=(1, 2, 3, 4, 5, 6, 7), num_micros=2))
        2 ranks, 0 units, 2 microbatches, at most 2 in flight on a rank; rules 1 to 7 hold
        0 updates
        in flight on each rank: 2, 1
    """

    updates: list[UpdateRecord] = field(default_factory=list)
    unit_states: dict[tuple[int, Unit], UnitState] = field(default_factory=dict)
    peak_in_flight: list[int] = field(default_factory=list)
    compressed_contributions: CompressedContributions = field(default_factory=dict)
    dropped: dict[Unit, set[GradContribution]] = field(default_factory=dict)
    rules: tuple[int, ...] = ()
    num_micros: int = 0

    def __str__(self) -> str:
        """Return what was found, then how many updates there are and what ranks hold."""
        lines = [self.finding, _format_updates(self.updates)]
        if any(self.peak_in_flight):
            lines.append(f"in flight on each rank: {', '.join(map(str, self.peak_in_flight))}")
        diverged = sorted({unit for (_, unit), state in self.unit_states.items() if state.diverged_from})
        if diverged:
            lines.append(f"replicas end with different weights of {', '.join(map(format_unit, diverged))}")
        num_dropped = sum(map(len, self.dropped.values()))
        if num_dropped:
            lines.append(f"freed without an update: {format_count(num_dropped, 'gradient')}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        """Return the first line, for a session of Python."""
        return f"<{type(self).__name__}: {self.finding}>"

    @property
    def finding(self) -> str:
        """The size of the program and the rules that hold, in one line."""
        units = {unit for _, unit in self.unit_states} | {update.unit for update in self.updates}
        text = (
            f"{format_count(len(self.peak_in_flight), 'rank')}, {format_count(len(units), 'unit')}, "
            f"{self.num_micros} microbatch{'es' if self.num_micros != 1 else ''}, "
            f"at most {max(self.peak_in_flight, default=0)} in flight on a rank"
        )
        return f"{text}; rules {self.rules[0]} to {self.rules[-1]} hold" if self.rules else text


def _format_updates(updates: Sequence[UpdateRecord]) -> str:
    """Return how many updates there are, and how late their gradients."""
    if not updates:
        return "0 updates"
    staleness = max(update.staleness for update in updates)
    late = f", by gradients at most {format_count(staleness, 'update')} late" if staleness else ""
    return f"{format_count(len(updates), 'update')} on {format_count(len({u.rank for u in updates}), 'rank')}{late}"


def execute_symbolically(
    program: Program, rank_instructions: Sequence[Instructions], chunk_starts: Sequence[Sequence[int]] | None = None
) -> SymbolicResult:
    """Execute a program symbolically.

    Args:
        program: the program.
        rank_instructions: its unrolled instructions, per rank.
        chunk_starts: per rank, the blocks at which microbatches in flight are counted; None to take the maximum over
            blocks.

    Raises:
        ProgramError: an instruction violates one of the rules 2 to 7.
    """
    executor = _SymbolicExecutor(program, rank_instructions, chunk_starts)
    for rank, index in execution_order(rank_instructions):
        executor.execute(rank, index)
    return SymbolicResult(
        executor.updates,
        dict(executor.unit_states),
        executor.in_flight.peak,
        executor.compressed_contributions,
        dict(executor.dropped),
        num_micros=len(program.micros),
    )


class _SymbolicExecutor:
    """State of a symbolic execution; there is one method for each instruction."""

    def __init__(
        self, program: Program, rank_instructions: Sequence[Instructions], chunk_starts: Sequence[Sequence[int]] | None
    ) -> None:
        self.rank_instructions = rank_instructions
        self.tp_ranks = [(rank_program.tp_rank, rank_program.tp_degree) for rank_program in program.rank_programs]
        self.units_of = units_by_block(rank_instructions)
        self.unit_states: defaultdict[tuple[int, Unit], UnitState] = defaultdict(UnitState)
        self.updates: list[UpdateRecord] = []
        self.versions_read: dict[tuple[GradContribution, Unit], int] = {}
        self.in_flight = InFlightMicrobatches(len(rank_instructions), chunk_starts)
        self.in_transit: defaultdict[
            tuple[TensorRef, int, int], list[tuple[GradContributions, int, frozenset[Group]]]
        ] = defaultdict(list)
        self.groups = GroupInterner()
        self.arrived: defaultdict[tuple[int, TensorRef], list[int]] = defaultdict(list)
        self.pushes: defaultdict[tuple[int, Unit], list[tuple[CommitRecord | None, GradContributions]]] = defaultdict(
            list
        )
        self.answered: set[tuple[int, Unit]] = set()
        self.uncommitted, self.last_commits = (
            [set[int]() for _ in rank_instructions],
            list[CommitRecord | None]([None] * len(rank_instructions)),
        )
        self.open_commits: dict[int, CommitRecord] = {}
        self.oldest_versions: dict[tuple[int, Unit], tuple[GradContributions, int]] = {}
        self.compressed_contributions: CompressedContributions = {}
        self.epilogue_starts = [
            len(instructions) - len(rank_program.epilogue)
            for instructions, rank_program in zip(rank_instructions, program.rank_programs, strict=True)
        ]
        self.dropped: defaultdict[Unit, set[GradContribution]] = defaultdict(set)
        for rank, instructions in enumerate(rank_instructions):
            for unit, group in sharded_units(instructions, self.units_of):
                size, member = len(group), group.index(rank)
                state = self.unit_states[rank, unit]
                state.local_shard = state.available = (Fraction(member, size), Fraction(member + 1, size))

    def violation(self, rule: int, rank: int, index: int, fact: str) -> ProgramError:
        text = format_instruction(self.rank_instructions[rank][index])
        return ProgramError(
            f"rank {rank}, {text}: {fact}\n{format_locations(self.rank_instructions, {rank: index}, 'here')}", rule
        )

    def execute(self, rank: int, index: int) -> None:  # noqa: C901, PLR0912 - one case for each instruction
        instruction = self.rank_instructions[rank][index]
        match instruction:
            case Forward():
                self.forward(rank, index, instruction)
            case Recompute():
                self.recompute(rank, index, instruction)
            case Backward():
                self.backward(rank, index, instruction)
            case Update(unit):
                self.update(rank, index, unit)
            case SwapGradBuffers(unit):
                self.swap_grad_buffers(rank, index, unit)
            case Collective(phase="" | "start"):
                self.collective(rank, index, instruction)
            case Send(tensor, peer):
                self.send(rank, tensor, peer)
            case Recv(tensor, peer):
                self.receive(rank, tensor, peer)
            case Push(TensorRef("grad", unit), peer):
                self.pushes[peer, unit].append((self.last_commits[rank], self.take_grad(rank, unit)))
            case ApplyPushes(units):
                self.apply_pushes(rank, index, units)
            case Pull(tensor, peer) if (peer, tensor.blocks) in self.answered:
                self.unit_states[rank, tensor.blocks].versions.append(
                    self.unit_states[peer, tensor.blocks].versions[-1]
                )
            case Free(tensor):
                self.free(rank, index, tensor)
            case Commit():
                self.commit(rank, index, instruction)
            case Collective() | Push() | Pull():
                pass  # elastic averaging creates no weight version
            case Fetch() | Offload():
                pass  # checked along each rank's instructions, by check_offloads

    def commit(self, rank: int, index: int, instruction: Commit) -> None:
        """Enter one member into its group's open commit; the last member closes it."""
        group = self.groups.intern(instruction.group)
        commit = self.open_commits.setdefault(group, CommitRecord(instruction.group))
        commit.micros |= self.uncommitted[rank]
        if instruction.loss_group:
            commit.micros_by_member[rank] = self.uncommitted[rank]
            commit.loss_groups[rank] = instruction.loss_group
            earlier = [member for member in instruction.loss_group if member < rank]
            if rank not in instruction.loss_group or any(
                commit.loss_groups.get(member) != instruction.loss_group for member in earlier
            ):
                raise self.violation(6, rank, index, "all ranks of one loss group must state the same loss group")
        self.uncommitted[rank] = set()
        self.last_commits[rank] = commit  # (3)
        if rank == instruction.group[-1]:
            del self.open_commits[group]

    def forward(self, rank: int, index: int, instruction: Forward) -> None:
        """Record which weight versions the block reads."""
        if fact := self.in_flight.forward(rank, instruction):
            raise self.violation(4, rank, index, fact)
        for unit in self.units_of[instruction.block]:
            self.versions_read[(instruction.block, instruction.micro, self.tp_ranks[rank][0]), unit] = (
                self.read_version(rank, index, unit, instruction.version)
            )

    def recompute(self, rank: int, index: int, instruction: Recompute) -> None:
        if fact := self.in_flight.recompute(rank, instruction):
            raise self.violation(4, rank, index, fact)
        self.check_same_version(rank, index, instruction)

    def backward(self, rank: int, index: int, instruction: Backward) -> None:
        """Add one contribution to the gradient of each unit of the block."""
        if fact := self.in_flight.backward(rank, instruction):
            raise self.violation(4, rank, index, fact)
        if instruction.computes_input_grad:
            self.check_same_version(rank, index, instruction)
        if instruction.computes_weight_grad:
            for unit in self.units_of[instruction.block]:
                state = self.unit_states[rank, unit]  # (1)
                state.full_grad = add_contribution(
                    state.full_grad, (instruction.block, instruction.micro, self.tp_ranks[rank][0])
                )
                state.has_full_grad_buffer = True
            self.uncommitted[rank].add(instruction.micro)

    def check_same_version(self, rank: int, index: int, instruction: Recompute | Backward) -> None:
        """Check that a block reads the weight versions that its forward read (rule 5)."""
        for unit in self.units_of[instruction.block]:
            forward_version = self.versions_read[(instruction.block, instruction.micro, self.tp_ranks[rank][0]), unit]
            if (version := self.read_version(rank, index, unit, instruction.version)) != forward_version:
                fact = f"forward used version {forward_version} of weight{format_unit(unit)}"
                reader = "backward" if isinstance(instruction, Backward) else "recomputation"
                raise self.violation(5, rank, index, f"{fact}, {reader} {version}; both must use the same")

    def read_version(self, rank: int, index: int, unit: Unit, version: int) -> int:
        """Return the number of a weight version, which must be held (rule 5) and completely gathered (rule 7)."""
        state = self.unit_states[rank, unit]
        if state.available != FULL_RANGE:
            low, high = state.available
            raise self.violation(
                7, rank, index, f"weight{format_unit(unit)} is available only from {low} to {high} of it"
            )
        if len(state.versions) < 1 - version:
            raise self.violation(5, rank, index, f"no version {version} of weight{format_unit(unit)} is held")
        return state.versions[version - 1]

    def update(self, rank: int, index: int, unit: Unit) -> None:
        """Consume the gradient, record the update and create a new weight version."""
        state = self.unit_states[rank, unit]
        if state.grad_shard is not None and state.full_grad:
            raise self.violation(6, rank, index, "one gradient was reduce-scattered, another one was not")
        if state.available != state.local_shard:
            raise self.violation(7, rank, index, f"the gathered weight{format_unit(unit)} has not been freed")
        shard, contributions = state.grad_shard if state.grad_shard is not None else (FULL_RANGE, state.full_grad)
        commit = state.commit or self.last_commits[rank]
        self.record_update((rank, index), unit, (shard, contributions), commit)
        state.grad_shard, state.full_grad, state.has_full_grad_buffer, state.commit = None, Counter(), False, None
        if commit is not None and rank in commit.loss_groups:
            state.diverged_from = frozenset({commit.loss_groups[rank]})
        state.available = shard
        state.versions.append(state.versions[-1] + 1)

    def record_update(
        self,
        location: tuple[int, int],
        unit: Unit,
        gradient: tuple[ShardRange, GradContributions],
        commit: CommitRecord | None,
    ) -> None:
        newest = self.unit_states[location[0], unit].versions[-1]
        staleness = newest - self.oldest_version(gradient[1], unit, newest)
        self.updates.append(UpdateRecord(*location, unit, *gradient, staleness, commit))  # (4)

    def oldest_version(self, contributions: GradContributions, unit: Unit, newest: int) -> int:
        """Return the oldest weight version that a contribution was computed with.

        Ranks that share a gradient share the contributions as an object, so that the result is cached by identity.
        """
        key = (id(contributions), unit)
        if key not in self.oldest_versions:  # the contributions are stored too, so that no other object gets their id
            self.oldest_versions[key] = (
                contributions,
                min((self.versions_read[contribution, unit] for contribution in contributions), default=newest),
            )
        return self.oldest_versions[key][1] if contributions else newest

    def swap_grad_buffers(self, rank: int, index: int, unit: Unit) -> None:
        """Swap gradient and delayed gradient; the last commit has decided about the one that is swapped back."""
        state = self.unit_states[rank, unit]
        if state.grad_shard is not None:
            raise self.violation(6, rank, index, "a reduce-scattered gradient cannot be delayed")
        state.full_grad, state.delayed_grad = state.delayed_grad, state.full_grad
        state.has_full_grad_buffer, state.has_delayed_grad = state.has_delayed_grad, state.has_full_grad_buffer
        state.commit = self.last_commits[rank]

    def take_grad(self, rank: int, unit: Unit) -> GradContributions:
        """Remove and return the contributions of a gradient."""
        state = self.unit_states[rank, unit]
        contributions, state.full_grad, state.has_full_grad_buffer = state.full_grad, Counter(), False
        return contributions

    def collective(self, rank: int, index: int, instruction: Collective) -> None:
        """Execute a collective when its last member arrives."""
        if instruction.codec and (fact := why_not_encoded(instruction.op, instruction.tensor.name, instruction.codec)):
            raise self.violation(6, rank, index, fact)
        if instruction.tensor.name == "out":  # the loss may have parameters, which are in the last block's units
            for unit in self.units_of[instruction.tensor.blocks[0]]:
                self.read_version(rank, index, unit, 0)
        if instruction.tensor.name in {"y", "dx", "out", "x"}:
            return
        key = (self.groups.intern(instruction.group), instruction.tensor)
        arrived = self.arrived[key]
        arrived.append(rank)
        if len(arrived) == len(instruction.group):
            del self.arrived[key]
            if instruction.tensor.name == "weight":
                self.combine_weights(rank, index, instruction)
            elif instruction.op == "reduce_scatter" and instruction.tensor.name == "grad":
                self.reduce_scatter(rank, index, instruction)
            elif instruction.op == "all_reduce":
                self.all_reduce(rank, index, instruction)
            else:
                raise self.violation(
                    6, rank, index, "gradients can be all-reduced or reduce-scattered, but not gathered or broadcast"
                )

    def combine_weights(self, rank: int, index: int, instruction: Collective) -> None:
        """Broadcast, average or gather weights."""
        states = [self.unit_states[member, instruction.tensor.blocks] for member in instruction.group]
        if instruction.op == "broadcast":
            for state in states[1:]:
                state.versions.append(states[0].versions[-1])
                state.diverged_from = states[0].diverged_from
            return
        if instruction.op not in {"all_reduce_mean", "all_gather"}:
            raise self.violation(
                6, rank, index, "weights can be gathered, broadcast or averaged, but not summed or reduce-scattered"
            )
        rule, fact = (6, average_weights(states)) if instruction.op == "all_reduce_mean" else all_gather_weights(states)
        if fact:
            raise self.violation(rule, rank, index, fact)

    def reduce_scatter(self, rank: int, index: int, instruction: Collective) -> None:
        fact = reduce_scatter_grads(
            [self.unit_states[member, instruction.tensor.blocks] for member in instruction.group]
        )
        if fact:
            raise self.violation(6, rank, index, fact)

    def all_reduce(self, rank: int, index: int, instruction: Collective) -> None:
        """Sum gradients, which are whole on all members or the same shard on all of them."""
        states = [self.unit_states[member, instruction.tensor.blocks] for member in instruction.group]
        if instruction.tensor.name == "delayed_grad":
            all_reduce_delayed_grads(states)
            return
        shards = {state.grad_shard[0] if state.grad_shard is not None else FULL_RANGE for state in states}
        if len(shards) > 1:
            raise self.violation(6, rank, index, "the members hold different shards of this gradient")
        if instruction.codec:
            if any(state.grad_shard is not None for state in states):
                raise self.violation(
                    6, rank, index, "this gradient was reduce-scattered; only whole gradients can be compressed"
                )
            self.compressed_contributions[instruction.group, instruction.tensor.blocks] = contributions_by_member(
                states
            )
        all_reduce_grads(states)  # (2)

    def send(self, rank: int, tensor: TensorRef, peer: int) -> None:
        """Move a gradient, or copy the version of a weight, into the channel to a peer."""
        if tensor.name == "grad":
            self.in_transit[tensor, rank, peer].append((self.take_grad(rank, tensor.blocks), 0, frozenset()))
        elif tensor.name == "weight":
            state = self.unit_states[rank, tensor.blocks]
            self.in_transit[tensor, rank, peer].append((Counter(), state.versions[-1], state.diverged_from))

    def receive(self, rank: int, tensor: TensorRef, peer: int) -> None:
        """Add a received gradient to the local one, or make a received weight the newest version."""
        if tensor.name == "grad":
            contributions, _, _ = self.in_transit[tensor, peer, rank].pop(0)
            state = self.unit_states[rank, tensor.blocks]
            state.full_grad, state.has_full_grad_buffer = state.full_grad + contributions, True
        elif tensor.name == "weight":
            state = self.unit_states[rank, tensor.blocks]
            _, version, state.diverged_from = self.in_transit[tensor, peer, rank].pop(0)
            state.versions.append(version)

    def apply_pushes(self, rank: int, index: int, units: Sequence[Unit]) -> None:
        """Make one update of each push, in order of arrival."""
        for unit in units:
            self.answered.add((rank, unit))
            for commit, contributions in self.pushes.pop((rank, unit), []):
                self.record_update((rank, index), unit, (FULL_RANGE, contributions), commit)
                self.unit_states[rank, unit].versions.append(self.unit_states[rank, unit].versions[-1] + 1)

    def free(self, rank: int, index: int, tensor: TensorRef) -> None:
        if tensor.name not in UNIT_TENSORS:
            return
        state = self.unit_states[rank, tensor.blocks]
        delayed_grads = state.delayed_grad if tensor.name == "delayed_grad" else ()
        if fact := free_tensor(state, tensor.name, is_end=index >= self.epilogue_starts[rank]):
            raise self.violation(6 if tensor.name == "delayed_grad" else 7, rank, index, fact)
        self.dropped[tensor.blocks].update(delayed_grads)
