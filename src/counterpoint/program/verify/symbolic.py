"""What the ledger writes down: marks, what a rank holds of a unit, commits, updates.

Which microbatches are between forward and backward, on which ranks and in which blocks.

Run a program on symbols: which samples are in each gradient, which version stands in each weight.

Every backward leaves one mark ``(block, microbatch, slice)`` in its rank's gradient. Sums add marks up, shares
cut the range a rank is responsible for, updates consume marks and make a new version, and each knows the commit
that stood before it. What the ledger sees, the laws judge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import GroupInterner, execution_order, format_locations
from counterpoint.program.instruction import (
    UNIT_TENSORS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Group,
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

GradContribution: TypeAlias = tuple[int, int, int]
"""Block, microbatch and slice of one backward."""
GradContributions: TypeAlias = "Counter[GradContribution]"
CompressedContributions: TypeAlias = dict[tuple[Group, Unit], tuple[tuple[int, ...], ...]]
"""For a group and a unit the microbatches whose gradients each member brings into a sum with a code."""
ShardRange: TypeAlias = tuple[Fraction, Fraction]
"""Which part of a unit: from, to, as fractions of the whole."""

FULL_RANGE: ShardRange = (Fraction(0), Fraction(1))
NO_CONTRIBUTIONS: GradContributions = Counter()


@dataclass(slots=True)
class UnitState:
    """What one rank holds of one unit.

    Args:
        home: the part whose weights it keeps when nothing is gathered.
        span: the part whose weights it holds now.
        versions: every version it has held, oldest first.
        whole: marks in the gradient of the whole unit.
        has_buffer: whether the gradient of the whole unit takes memory, be it shared out already.
        part: the part and marks of a gradient that was shared out.
        late: marks in the gradient that was set aside.
        has_late: whether that one takes memory.
        decided: the commit that decided on a gradient which has come back from being set aside.
        drift: the replicas whose updates of their own are in its weights; none where all copies are alike.
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
    """One commit: who decides, and about which microbatches.

    Args:
        group: who takes part.
        micros: the microbatches that its members have gone backward on since the commit before.
        micros_of: the same by member.
        own: by member, whose samples share one mean with its own; only where that is not the whole group.
    """

    group: Group
    micros: set[int] = field(default_factory=set)
    micros_by_member: dict[int, set[int]] = field(default_factory=dict)
    loss_groups: dict[int, Group] = field(default_factory=dict)

    def micros_in_loss_of(self, rank: int) -> set[int]:
        """Return the microbatches whose samples share one mean with those of a member."""
        if rank not in self.loss_groups:
            return self.micros
        return {micro for member in self.loss_groups[rank] for micro in self.micros_by_member.get(member, ())}


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One update.

    Args:
        rank: by whom.
        index: with which word of its row.
        unit: of what.
        span: of which part of it.
        marks: with which gradients.
        staleness: how many updates old the oldest of them was.
        decision: the last commit of the rank that updates or, under a server, of the worker that pushed.
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
        """The ranks that make this update alike, apart from others; empty where all ranks make it."""
        return self.commit.loss_groups.get(self.rank, ()) if self.commit is not None else ()


def add_contribution(contributions: GradContributions, contribution: GradContribution) -> GradContributions:
    """Return the marks and one more, leaving the given ones as they are: other ranks may share them."""
    more: GradContributions = Counter()
    dict.update(more, contributions)  # a Counter counts one by one when it is copied
    more[contribution] += 1
    return more


def average_weights(states: Sequence[UnitState]) -> str:
    """The weights of replicas are their mean, in which each replica counts alike; return what is wrong, if anything."""
    if any(state.available != FULL_RANGE for state in states) or len({state.versions[-1] for state in states}) > 1:
        return "only whole weights after equally many updates are averaged"
    together = frozenset[Group]().union(*(state.diverged_from for state in states))
    if len({len(state.diverged_from) for state in states}) > 1 or len(together) != sum(
        len(state.diverged_from) for state in states
    ):
        return "a mean is over the weights of different replicas, each counted once"
    for state in states:
        state.diverged_from = together
    return ""


def all_gather_weights(states: Sequence[UnitState]) -> tuple[int, str]:
    """Each member has the weights of which all keep parts; return the law and what is wrong, if anything."""
    if any(state.available == FULL_RANGE != state.local_shard for state in states):
        return 7, "these weights are gathered already"
    spans = sorted({state.available for state in states})
    tiles = all(before[1] == after[0] for before, after in pairwise(spans))
    versions = {state.versions[-1] for state in states}
    if len({state.diverged_from for state in states}) > 1:
        return 6, "the members hold parts of weights that have been updated apart"
    if not tiles or len(versions) > 1 or len(spans) != len(states):
        held = ", ".join(f"{low} to {high}" for low, high in spans)
        return 6, f"the members hold {held} in versions {sorted(versions)}"
    for state in states:
        state.available = (spans[0][0], spans[-1][1])
    return 0, ""


def reduce_scatter_grads(states: Sequence[UnitState]) -> str:
    """Each member has the sum of its own part of a gradient; return what is wrong, if anything."""
    total: GradContributions = Counter()
    for state in states:
        total.update(state.full_grad)
    summed: dict[int, GradContributions] = {}  # members that hold the same marks already go on sharing them
    for at, state in enumerate(states):
        span = (Fraction(at, len(states)), Fraction(at + 1, len(states)))
        if state.grad_shard is not None and state.grad_shard[0] != span:
            return "this gradient was shared out in other parts before"
        before = state.grad_shard[1] if state.grad_shard is not None else NO_CONTRIBUTIONS
        if id(before) not in summed:
            summed[id(before)] = before + total
        state.grad_shard, state.full_grad, state.has_full_grad_buffer = (span, summed[id(before)]), Counter(), True
    return ""


def free_tensor(state: UnitState, name: str, *, is_end: bool) -> str:
    """What was gathered, or a gradient, is forgotten; return what is wrong, if anything.

    Args:
        state: of the rank and the unit.
        name: ``late``, ``grad`` or ``weight``.
        is_end: whether the stream is at its end.
    """
    if name == "delayed_grad":
        if not state.has_delayed_grad or not is_end:
            return "only the end of a stream drops a gradient that was set aside"
        state.delayed_grad, state.has_delayed_grad = Counter(), False
    elif name == "grad":
        if not state.has_full_grad_buffer:
            return "no gradient is there that could be released"
        state.full_grad, state.has_full_grad_buffer = Counter(), False
    else:
        if state.available == state.local_shard:
            return "nothing was gathered that could be released"
        state.available = state.local_shard
    return ""


def all_reduce_grads(states: Sequence[UnitState]) -> None:
    """Every member has the sum of the gradients of all, or of the part that all of them have."""
    total: GradContributions = Counter()
    for state in states:
        total.update(state.grad_shard[1] if state.grad_shard is not None else state.full_grad)
    for state in states:
        if state.grad_shard is not None:
            state.grad_shard = (state.grad_shard[0], total)
        else:
            state.full_grad, state.has_full_grad_buffer = total, True


def all_reduce_delayed_grads(states: Sequence[UnitState]) -> None:
    """Every member has the sum of the gradients that were set aside."""
    late: GradContributions = Counter()
    for state in states:
        late.update(state.delayed_grad)
    for state in states:
        state.delayed_grad, state.has_delayed_grad = late, True


def contributions_by_member(states: Sequence[UnitState]) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches whose gradients each member brings into a sum."""
    return tuple(tuple(sorted({micro for _, micro, _ in state.full_grad})) for state in states)


class InFlightMicrobatches:
    """What has gone forward and not yet backward, and the most of it that a rank had at once.

    Args:
        num_ranks: how many ranks there are.
        heads: per rank the blocks at which microbatches are counted and summed; None for the block where most are.
    """

    def __init__(self, num_ranks: int, chunk_starts: Sequence[Sequence[int]] | None) -> None:
        self.chunk_starts = chunk_starts
        self.in_flight: set[tuple[int, int, int]] = set()
        self.input_grad_done: set[tuple[int, int, int]] = set()
        self.recomputed: set[tuple[int, int, int]] = set()
        self.counts: list[Counter[int]] = [Counter() for _ in range(num_ranks)]
        self.peak = [0] * num_ranks

    def forward(self, rank: int, word: Forward) -> str | None:
        """Note a forward; return what is wrong with it, if anything is."""
        key = (rank, word.block, word.micro)
        if key in self.in_flight:
            return "this microbatch has gone forward through this block already"
        self.in_flight.add(key)
        counts = self.counts[rank]
        counts[word.block] += 1
        now = counts[word.block] if self.chunk_starts is None else sum(counts[head] for head in self.chunk_starts[rank])
        self.peak[rank] = max(self.peak[rank], now)
        return None

    def recompute(self, rank: int, word: Recompute) -> str | None:
        """Note a forward that is computed again; return what is wrong with it, if anything is."""
        key = (rank, word.block, word.micro)
        if key not in self.in_flight or key in self.input_grad_done:
            return "a block is recomputed for a backward that is still to come, on the rank that ran it forward"
        if key in self.recomputed:
            return "this microbatch has been recomputed in this block already"
        self.recomputed.add(key)
        return None

    def backward(self, rank: int, word: Backward) -> str | None:
        """Note a backward or a part of one; return what is wrong with it, if anything is."""
        key = (rank, word.block, word.micro)
        if key not in self.in_flight:
            return "this microbatch did not go forward through this block on this rank"
        if word.computes_input_grad == (key in self.input_grad_done):
            return "the weight part of a backward comes once, behind its input part"
        if not word.computes_weight_grad:
            self.input_grad_done.add(key)
            return None
        self.input_grad_done.discard(key)
        self.recomputed.discard(key)
        self.in_flight.discard(key)
        self.counts[rank][word.block] -= 1
        return None


@dataclass(slots=True)
class SymbolicResult:
    """What came of a program: the updates, what was held at its end, what entered coded sums, what its end dropped."""

    updates: list[UpdateRecord] = field(default_factory=list)
    unit_states: dict[tuple[int, Unit], UnitState] = field(default_factory=dict)
    peak_in_flight: list[int] = field(default_factory=list)
    compressed_contributions: CompressedContributions = field(default_factory=dict)
    dropped: dict[Unit, set[GradContribution]] = field(default_factory=dict)


def execute_symbolically(
    program: Program, rows: Sequence[Instructions], chunk_starts: Sequence[Sequence[int]] | None = None
) -> SymbolicResult:
    """Run the flat rows on symbols.

    Args:
        program: whose rows they are.
        rows: the flat rows.
        heads: per rank the blocks at which microbatches in flight are counted; None for the one where most are.

    Raises:
        ProgramError: laws 4 to 7, wherever a word cannot do what it says.
    """
    book = _SymbolicExecutor(program, rows, chunk_starts)
    for rank, index in execution_order(rows):
        book.execute(rank, index)
    return SymbolicResult(
        book.updates, dict(book.unit_states), book.in_flight.peak, book.compressed_contributions, dict(book.dropped)
    )


class _SymbolicExecutor:
    def __init__(
        self, program: Program, rows: Sequence[Instructions], chunk_starts: Sequence[Sequence[int]] | None
    ) -> None:
        self.rows = rows
        self.tp_ranks = [(row.tp_rank, row.tp_degree) for row in program.rank_programs]
        self.units_of = units_by_block(rows)
        self.unit_states: defaultdict[tuple[int, Unit], UnitState] = defaultdict(UnitState)
        self.updates: list[UpdateRecord] = []
        self.versions_read: dict[tuple[GradContribution, Unit], int] = {}
        self.in_flight = InFlightMicrobatches(len(rows), chunk_starts)
        self.in_transit: defaultdict[
            tuple[TensorRef, int, int], list[tuple[GradContributions, int, frozenset[Group]]]
        ] = defaultdict(list)
        self.groups = GroupInterner()
        self.arrived: defaultdict[tuple[int, TensorRef], list[int]] = defaultdict(list)
        self.pushes: defaultdict[tuple[int, Unit], list[tuple[CommitRecord | None, GradContributions]]] = defaultdict(
            list
        )
        self.answered: set[tuple[int, Unit]] = set()
        self.uncommitted, self.last_commits = [set[int]() for _ in rows], list[CommitRecord | None]([None] * len(rows))
        self.open_commits: dict[int, CommitRecord] = {}
        self.oldest_versions: dict[tuple[int, Unit], tuple[GradContributions, int]] = {}
        self.compressed_contributions: CompressedContributions = {}
        self.epilogue_starts = [
            len(row) - len(given.epilogue) for row, given in zip(rows, program.rank_programs, strict=True)
        ]
        self.dropped: defaultdict[Unit, set[GradContribution]] = defaultdict(set)
        for rank, row in enumerate(rows):
            for unit, group in sharded_units(row, self.units_of):
                size, at = len(group), group.index(rank)
                state = self.unit_states[rank, unit]
                state.local_shard = state.available = (Fraction(at, size), Fraction(at + 1, size))

    def violation(self, rule: int, rank: int, index: int, fact: str) -> ProgramError:
        """Return the error for a word that breaks a law, with the place shown."""
        text = format_instruction(self.rows[rank][index])
        return ProgramError(f"rank {rank}, {text}: {fact}\n{format_locations(self.rows, {rank: index}, 'here')}", rule)

    def execute(self, rank: int, index: int) -> None:  # noqa: C901, PLR0912 - one case for each instruction
        """A word has been carried out on symbols; a ProgramError says which law it breaks and where."""
        word = self.rows[rank][index]
        match word:
            case Forward():
                self.forward(rank, index, word)
            case Recompute():
                self.recompute(rank, index, word)
            case Backward():
                self.backward(rank, index, word)
            case Update(unit):
                self.update(rank, index, unit)
            case SwapGradBuffers(unit):
                self.swap_grad_buffers(rank, index, unit)
            case Collective(phase="" | "start"):
                self.collective(rank, index, word)
            case Send(value, peer):
                self.send(rank, value, peer)
            case Recv(value, peer):
                self.receive(rank, value, peer)
            case Push(TensorRef("grad", unit), peer):
                self.pushes[peer, unit].append((self.last_commits[rank], self.take_grad(rank, unit)))
            case ApplyPushes(units):
                self.apply_pushes(rank, index, units)
            case Pull(value, peer) if (peer, value.blocks) in self.answered:
                self.unit_states[rank, value.blocks].versions.append(self.unit_states[peer, value.blocks].versions[-1])
            case Free(value):
                self.free(rank, index, value)
            case Commit():
                self.commit(rank, index, word)
            case Collective() | Push() | Pull():
                pass  # weights that are drawn together are of no version that others have

    def commit(self, rank: int, index: int, word: Commit) -> None:
        """The members of a commit come one after the other; the last one closes it."""
        group = self.groups.intern(word.group)
        decision = self.open_commits.setdefault(group, CommitRecord(word.group))
        decision.micros |= self.uncommitted[rank]
        if word.loss_group:
            decision.micros_by_member[rank] = self.uncommitted[rank]
            decision.loss_groups[rank] = word.loss_group
            earlier = [member for member in word.loss_group if member < rank]
            if rank not in word.loss_group or any(
                decision.loss_groups.get(member) != word.loss_group for member in earlier
            ):
                raise self.violation(6, rank, index, "those whose samples share one mean must all say the same of it")
        self.uncommitted[rank] = set()
        self.last_commits[rank] = decision
        if rank == word.group[-1]:
            del self.open_commits[group]

    def forward(self, rank: int, index: int, word: Forward) -> None:
        """The block has read the weights of its units, and in which versions is noted."""
        if fact := self.in_flight.forward(rank, word):
            raise self.violation(4, rank, index, fact)
        for unit in self.units_of[word.block]:
            self.versions_read[(word.block, word.micro, self.tp_ranks[rank][0]), unit] = self.read_version(
                rank, index, unit, word.version
            )

    def recompute(self, rank: int, index: int, word: Recompute) -> None:
        """The block has been computed once more, from the versions that its forward read."""
        if fact := self.in_flight.recompute(rank, word):
            raise self.violation(4, rank, index, fact)
        self.check_same_version(rank, index, word)

    def backward(self, rank: int, index: int, word: Backward) -> None:
        """The gradients of the block's units have its mark, from the versions that its forward read."""
        if fact := self.in_flight.backward(rank, word):
            raise self.violation(4, rank, index, fact)
        if word.computes_input_grad:
            self.check_same_version(rank, index, word)
        if word.computes_weight_grad:
            for unit in self.units_of[word.block]:
                state = self.unit_states[rank, unit]
                state.full_grad = add_contribution(state.full_grad, (word.block, word.micro, self.tp_ranks[rank][0]))
                state.has_full_grad_buffer = True
            self.uncommitted[rank].add(word.micro)

    def check_same_version(self, rank: int, index: int, word: Recompute | Backward) -> None:
        """A block reads the versions again that its forward has read (law 5)."""
        for unit in self.units_of[word.block]:
            before = self.versions_read[(word.block, word.micro, self.tp_ranks[rank][0]), unit]
            if (version := self.read_version(rank, index, unit, word.version)) != before:
                fact = f"forward used version {before} of weight{format_unit(unit)}"
                reader = "backward" if isinstance(word, Backward) else "recomputation"
                raise self.violation(5, rank, index, f"{fact}, {reader} {version}; both must use the same")

    def read_version(self, rank: int, index: int, unit: Unit, version: int) -> int:
        """Return the number of a version, which is kept (law 5) and of which all parts are here (law 7)."""
        state = self.unit_states[rank, unit]
        if state.available != FULL_RANGE:
            low, high = state.available
            raise self.violation(7, rank, index, f"weight{format_unit(unit)} is here only from {low} to {high} of it")
        if len(state.versions) < 1 - version:
            raise self.violation(5, rank, index, f"no version {version} of weight{format_unit(unit)} was kept")
        return state.versions[version - 1]

    def update(self, rank: int, index: int, unit: Unit) -> None:
        """The gradient is used up and written down as an entry, and the weight has one version more."""
        state = self.unit_states[rank, unit]
        if state.grad_shard is not None and state.full_grad:
            raise self.violation(6, rank, index, "one gradient was shared out, another one was not")
        if state.available != state.local_shard:
            raise self.violation(7, rank, index, f"the gathered weight{format_unit(unit)} has not been released")
        span, marks = state.grad_shard if state.grad_shard is not None else (FULL_RANGE, state.full_grad)
        decision = state.commit or self.last_commits[rank]
        self.record_update((rank, index), unit, (span, marks), decision)
        state.grad_shard, state.full_grad, state.has_full_grad_buffer, state.commit = None, Counter(), False, None
        if decision is not None and rank in decision.loss_groups:
            state.diverged_from = frozenset({decision.loss_groups[rank]})
        state.available = span
        state.versions.append(state.versions[-1] + 1)

    def record_update(
        self,
        location: tuple[int, int],
        unit: Unit,
        gradient: tuple[ShardRange, GradContributions],
        commit: CommitRecord | None,
    ) -> None:
        """One entry more is written down, with how many updates old its oldest mark is."""
        now = self.unit_states[location[0], unit].versions[-1]
        staleness = now - self.oldest_version(gradient[1], unit, now)
        self.updates.append(UpdateRecord(*location, unit, *gradient, staleness, commit))

    def oldest_version(self, contributions: GradContributions, unit: Unit, now: int) -> int:
        """Return the oldest version that any mark was computed with; found once for marks that ranks share."""
        key = (id(contributions), unit)
        if (
            key not in self.oldest_versions
        ):  # the marks are kept beside their age, so that no other object gets their id
            self.oldest_versions[key] = (
                contributions,
                min((self.versions_read[mark, unit] for mark in contributions), default=now),
            )
        return self.oldest_versions[key][1] if contributions else now

    def swap_grad_buffers(self, rank: int, index: int, unit: Unit) -> None:
        """What comes back was decided on by the last commit, which stood behind its backwards."""
        state = self.unit_states[rank, unit]
        if state.grad_shard is not None:
            raise self.violation(6, rank, index, "a gradient that was shared out cannot be set aside")
        state.full_grad, state.delayed_grad = state.delayed_grad, state.full_grad
        state.has_full_grad_buffer, state.has_delayed_grad = state.has_delayed_grad, state.has_full_grad_buffer
        state.commit = self.last_commits[rank]

    def take_grad(self, rank: int, unit: Unit) -> GradContributions:
        """Return the marks of a gradient, which has none afterwards."""
        state = self.unit_states[rank, unit]
        marks, state.full_grad, state.has_full_grad_buffer = state.full_grad, Counter(), False
        return marks

    def collective(self, rank: int, index: int, word: Collective) -> None:
        """A collective of gradients or weights has taken place once its last member is here."""
        if word.codec and (word.op, word.tensor.name) != ("all_reduce", "grad"):
            raise self.violation(6, rank, index, "only sums of gradients have a code")
        if word.tensor.name in {"y", "dx"}:
            return
        key = (self.groups.intern(word.group), word.tensor)
        arrived = self.arrived[key]
        arrived.append(rank)
        if len(arrived) == len(word.group):
            del self.arrived[key]
            if word.tensor.name == "weight":
                self.combine_weights(rank, index, word)
            elif word.op == "reduce_scatter" and word.tensor.name == "grad":
                self.reduce_scatter(rank, index, word)
            elif word.op == "all_reduce":
                self.all_reduce(rank, index, word)
            else:
                raise self.violation(6, rank, index, "gradients are summed or shared out, never gathered or copied")

    def combine_weights(self, rank: int, index: int, word: Collective) -> None:
        """The members have the weights that were copied, averaged or gathered."""
        states = [self.unit_states[member, word.tensor.blocks] for member in word.group]
        if word.op == "broadcast":
            for state in states[1:]:
                state.versions.append(states[0].versions[-1])
                state.diverged_from = states[0].diverged_from
            return
        if word.op not in {"all_reduce_mean", "all_gather"}:
            raise self.violation(6, rank, index, "weights are gathered, copied or averaged, never summed or shared out")
        law, fact = (6, average_weights(states)) if word.op == "all_reduce_mean" else all_gather_weights(states)
        if fact:
            raise self.violation(law, rank, index, fact)

    def reduce_scatter(self, rank: int, index: int, word: Collective) -> None:
        """Each member has the sum of its own part of the gradient."""
        fact = reduce_scatter_grads([self.unit_states[member, word.tensor.blocks] for member in word.group])
        if fact:
            raise self.violation(6, rank, index, fact)

    def all_reduce(self, rank: int, index: int, word: Collective) -> None:
        """All members have the sum of their gradients, whole or of the one part that they share."""
        states = [self.unit_states[member, word.tensor.blocks] for member in word.group]
        if word.tensor.name == "delayed_grad":
            all_reduce_delayed_grads(states)
            return
        spans = {state.grad_shard[0] if state.grad_shard is not None else FULL_RANGE for state in states}
        if len(spans) > 1:
            raise self.violation(6, rank, index, "the members hold different parts of this gradient")
        if word.codec:
            if any(state.grad_shard is not None for state in states):
                raise self.violation(6, rank, index, "this gradient was shared out; only whole ones have a code")
            self.compressed_contributions[word.group, word.tensor.blocks] = contributions_by_member(states)
        all_reduce_grads(states)

    def send(self, rank: int, value: TensorRef, peer: int) -> None:
        """A gradient has gone to a peer, marks and all; or the version of a weight, which stays here, too."""
        if value.name == "grad":
            self.in_transit[value, rank, peer].append((self.take_grad(rank, value.blocks), 0, frozenset()))
        elif value.name == "weight":
            state = self.unit_states[rank, value.blocks]
            self.in_transit[value, rank, peer].append((Counter(), state.versions[-1], state.diverged_from))

    def receive(self, rank: int, value: TensorRef, peer: int) -> None:
        """A gradient that came is added to the one that is here; a weight that came is the newest version."""
        if value.name == "grad":
            marks, _, _ = self.in_transit[value, peer, rank].pop(0)
            state = self.unit_states[rank, value.blocks]
            state.full_grad, state.has_full_grad_buffer = state.full_grad + marks, True
        elif value.name == "weight":
            state = self.unit_states[rank, value.blocks]
            _, version, state.diverged_from = self.in_transit[value, peer, rank].pop(0)
            state.versions.append(version)

    def apply_pushes(self, rank: int, index: int, units: Sequence[Unit]) -> None:
        """A server has made an update of each push, in the order in which they came."""
        for unit in units:
            self.answered.add((rank, unit))
            for decision, marks in self.pushes.pop((rank, unit), []):
                self.record_update((rank, index), unit, (FULL_RANGE, marks), decision)
                self.unit_states[rank, unit].versions.append(self.unit_states[rank, unit].versions[-1] + 1)

    def free(self, rank: int, index: int, value: TensorRef) -> None:
        """What was gathered, or a gradient, is forgotten; what the end of a stream dropped is noted."""
        if value.name not in UNIT_TENSORS:
            return
        state = self.unit_states[rank, value.blocks]
        late = state.delayed_grad if value.name == "delayed_grad" else ()
        if fact := free_tensor(state, value.name, is_end=index >= self.epilogue_starts[rank]):
            raise self.violation(6 if value.name == "delayed_grad" else 7, rank, index, fact)
        self.dropped[value.blocks].update(late)
