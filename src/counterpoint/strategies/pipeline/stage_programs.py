"""When a stage takes what others send it: as late as it can, and no later than it must so that nobody waits for ever.

A send may block until its receive is posted (law 2). A receive right before its use costs no waiting, but where two
stages send to each other, as with several chunks, both may then block. Such a receive is posted earlier: where the
stage stands when the value is sent, if all take equally long; so that it costs no time there either.

What each replica of each stage of a pipeline does, word by word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Recv,
    Send,
    TensorRef,
    Update,
    grad,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import shift_ranks
from counterpoint.strategies.pipeline.chunks import Chunks, StageEdges
from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, PipelineSchedule, StageReplica
from counterpoint.strategies.strategy import RankCost, tp_allreduce_bytes

Item: TypeAlias = PipelineAction | Send | Recv
"""What a seat does: a turn, or a message; its peer is a seat, too."""

Transfer: TypeAlias = tuple[TensorRef, int]
"""What is sent or received, to or from which seat."""

_P2PMessage: TypeAlias = tuple[TensorRef, int, int]
"""What is sent, from which seat to which."""

UNIT_COST = {"F": 1, "B": 2, "Bi": 1, "Bw": 1}
"""How long turns take on the clock by which receives are posted."""


class P2PNeeds(NamedTuple):
    """What a turn takes from other seats, and what it gives them.

    Args:
        taken: for a seat and a turn what it needs first.
        given: for a seat and a turn what it makes.
    """

    inputs: Callable[[int, PipelineAction], Sequence[Transfer]]
    outputs: Callable[[int, PipelineAction], Sequence[Transfer]]


def place_messages(actions: Sequence[Sequence[PipelineAction]], needs: P2PNeeds) -> list[list[Item]]:
    """Return for every seat its turns with the messages between them.

    A value is sent right behind the turn that makes it. Messages from one seat to another are received in the order in
    which they are sent, and no deadlock comes of sends that block.

    Args:
        turns: what each seat does, in order.
        ends: what comes from where, and goes where.
    """
    rows = _place_receives_late(actions, needs)
    board = _BlockingSendSim(rows)
    while True:
        board.advance_all()
        sender = board.first_blocked()
        if sender is None:
            return rows
        board.post_receive_earlier(sender)


def _place_receives_late(actions: Sequence[Sequence[PipelineAction]], needs: P2PNeeds) -> list[list[Item]]:
    """Put receives right before the turns that need them, with what the same sender has sent before."""
    letters: defaultdict[tuple[int, int], list[TensorRef]] = defaultdict(list)
    for seat, row in enumerate(actions):
        for value, peer in (hop for turn in row for hop in needs.outputs(seat, turn)):
            letters[seat, peer].append(value)
    rows: list[list[Item]] = []
    for seat, row in enumerate(actions):
        waiting = {sender: list(reversed(found)) for (sender, to), found in letters.items() if to == seat}
        items: list[Item] = []
        there: set[Transfer] = set()
        for turn in row:
            for needed in needs.inputs(seat, turn):
                sender = needed[1]
                while needed not in there:
                    value = waiting[sender].pop()
                    items.append(Recv(value, sender))
                    there.add((value, sender))
            items.append(turn)
            items += (Send(*made) for made in needs.outputs(seat, turn))
        rows.append(items)
    return rows


class _BlockingSendSim:
    """How far every seat has come when sends block, and when all would happen if they did not."""

    def __init__(self, rows: list[list[Item]]) -> None:
        self.rows = rows
        self.cursor = [0] * len(rows)
        self.posted: set[_P2PMessage] = set()
        self.sent_at, self.starts = _compute_times(rows)

    def advance_all(self) -> None:
        """Move every seat as far as it can go."""
        moved = True
        while moved:
            moved = False
            for seat, row in enumerate(self.rows):
                while self.cursor[seat] < len(row) and self.can_advance(seat, row[self.cursor[seat]]):
                    self.cursor[seat] += 1
                    moved = True

    def can_advance(self, slot: int, item: Item) -> bool:
        """Tell whether a seat can do its next item; one that is sent is posted."""
        match item:
            case Send(value, peer):
                at = self.cursor[peer]
                if Recv(value, slot) not in self.rows[peer][at : self.end_of_messages(peer, at)]:
                    return False
                self.posted.add((value, slot, peer))
                return True
            case Recv(value, peer):
                return (value, peer, slot) in self.posted
            case PipelineAction():
                return True

    def end_of_messages(self, slot: int, at: int) -> int:
        """Return where the messages that stand side by side from an index on end."""
        row = self.rows[slot]
        while at < len(row) and not isinstance(row[at], PipelineAction):
            at += 1
        return at

    def first_blocked(self) -> int | None:
        """Return the seat whose send blocks and would come first; None when all have come to their end."""
        blocked = []
        for seat, row in enumerate(self.rows):
            head = row[self.cursor[seat]] if self.cursor[seat] < len(row) else None
            if isinstance(head, Send):
                blocked.append((self.sent_at[head.tensor, seat, head.peer], seat))
        return min(blocked)[1] if blocked else None

    def post_receive_earlier(self, sender: int) -> None:
        """Move the receive of what a seat sends up to where its peer stands at that time."""
        send = self.rows[sender][self.cursor[sender]]
        assert isinstance(send, Send), "it blocks"
        recv = Recv(send.tensor, sender)
        row, starts = self.rows[send.peer], self.starts[send.peer]
        at = self.end_of_messages(send.peer, self.cursor[send.peer])
        while starts[row[at]] < self.sent_at[send.tensor, sender, send.peer]:
            at = self.end_of_messages(send.peer, at + 1)
        row.remove(recv)
        row.insert(at, recv)


def _compute_times(rows: Sequence[Sequence[Item]]) -> tuple[dict[_P2PMessage, int], list[dict[Item, int]]]:
    """Return when every value is sent, and when every turn starts, if nothing but turns takes time."""
    now, cursor = [0] * len(rows), [0] * len(rows)
    sent_at: dict[_P2PMessage, int] = {}
    starts: list[dict[Item, int]] = [{} for _ in rows]
    moved = True
    while moved:
        moved = False
        for seat, row in enumerate(rows):
            while cursor[seat] < len(row):
                match row[cursor[seat]]:
                    case Recv(value, peer):
                        if (value, peer, seat) not in sent_at:
                            break
                        now[seat] = max(now[seat], sent_at[value, peer, seat])
                    case Send(value, peer):
                        sent_at[value, seat, peer] = now[seat]
                    case PipelineAction() as turn:
                        starts[seat][turn] = now[seat]
                        now[seat] += UNIT_COST[turn.kind]
                cursor[seat] += 1
                moved = True
    return sent_at, starts


ComputeGroups: TypeAlias = Mapping[tuple[type[Instruction], int, int], Instructions]
"""For each block's forward or backward on a microbatch: itself and the words that belong to it."""

BACKWARD_PARTS: dict[str, Literal["", "input", "weight"]] = {"B": "", "Bi": "input", "Bw": "weight"}
"""The part of a backward that a turn is."""


@dataclass(frozen=True, slots=True)
class StageGrid:
    """Who runs what: replica t of a stage has a *seat*, counted through all stages.

    Args:
        chunks: which blocks lie where.
        strands: what goes between them.
        replicas: how many replicas each stage has.
        order: in which sequence they take microbatches up.
    """

    chunks: Chunks
    edges: StageEdges
    replicas: tuple[int, ...]
    schedule: PipelineSchedule

    def slot(self, stage: int, replica: int) -> int:
        """Return the seat of a stage's replica."""
        return sum(self.replicas[:stage]) + replica

    def stage_and_replica(self, slot: int) -> tuple[int, int]:
        """Return the stage and the replica of a seat."""
        stage = 0
        while slot >= self.replicas[stage]:
            slot -= self.replicas[stage]
            stage += 1
        return stage, slot

    @property
    def num_slots(self) -> int:
        """How many there are."""
        return sum(self.replicas)

    def build_items(self, micros: Sequence[int]) -> list[list[Item]]:
        """Return the turns and messages of every seat, for the microbatches that enter the pipeline."""
        index_of = {micro: index for index, micro in enumerate(micros)}
        turns = []
        for stage, count in enumerate(self.replicas):
            for twin in range(count):
                place = StageReplica(stage, self.replicas, tuple(micros[twin::count]), self.chunks.count(stage))
                turns.append(list(self.schedule.actions(place)))

        def hops(found: Sequence[tuple[TensorRef, int]], turn: PipelineAction) -> list[Transfer]:
            at = index_of[turn.micro]
            return [(value, self.slot(stage, at % self.replicas[stage])) for value, stage in found]

        def taken(seat: int, turn: PipelineAction) -> list[Transfer]:
            run = self.blocks_of(seat, turn)
            if turn.kind == "F":
                return hops(self.edges.recv_forward(run, turn.micro), turn)
            return hops(self.edges.recv_backward(run, turn.micro), turn) if turn.kind != "Bw" else []

        def given(seat: int, turn: PipelineAction) -> list[Transfer]:
            run = self.blocks_of(seat, turn)
            if turn.kind == "F":
                return hops(self.edges.send_forward(run, turn.micro), turn)
            return hops(self.edges.send_backward(run, turn.micro), turn) if turn.kind != "Bw" else []

        return place_messages(turns, P2PNeeds(taken, given))

    def blocks_of(self, slot: int, action: PipelineAction) -> range:
        """Return the blocks of a turn."""
        stage, _ = self.stage_and_replica(slot)
        return self.chunks.block_ranges[self.chunks.global_index(stage, action.chunk)]


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One seat's row, about to be written out for one inner rank.

    Args:
        stages: who runs what.
        seat: which replica of which stage.
        inner: the inner rank.
        num_inner: how many there are.
    """

    grid: StageGrid
    slot: int
    inner: int
    num_inner: int

    def instructions(self, row: RankProgram, groups: ComputeGroups, items: Sequence[Item]) -> Iterator[Instruction]:
        """Yield what this seat does instead of the inner rank's whole row, whose work is at hand."""
        for item in items:
            match item:
                case PipelineAction():
                    yield from self._action_instructions(item, groups)
                case Send(value, seat):
                    yield Send(value, self._rank_of(seat))
                case Recv(value, seat):
                    yield Recv(value, self._rank_of(seat))
        yield from self._commit_and_update(row.body)

    def _rank_of(self, slot: int) -> int:
        """Return the rank at a seat for the same inner rank."""
        return slot * self.num_inner + self.inner

    def _action_instructions(self, action: PipelineAction, groups: ComputeGroups) -> Iterator[Instruction]:
        run = self.grid.blocks_of(self.slot, action)
        by = self.slot * self.num_inner
        if action.kind == "F":
            for block in run:
                yield from (shift_ranks(word, by) for word in groups[Forward, block, action.micro])
            return
        part = BACKWARD_PARTS[action.kind]
        for block in reversed(run):
            first, *behind = groups[Backward, block, action.micro]
            assert isinstance(first, Backward), "it is kept as one"
            yield replace(first, part=part) if part else first
            yield from (shift_ranks(word, by) for word in behind if part != "weight")

    def _commit_and_update(self, body: Instructions) -> Iterator[Instruction]:
        stages = self.grid
        stage, _ = stages.stage_and_replica(self.slot)
        blocks = set(stages.chunks.blocks_of(stage))
        units = [word.unit for word in body if isinstance(word, Update) and set(word.unit) & blocks]
        for unit in sorted(units, reverse=True):
            holders = tuple(
                self._rank_of(seat)
                for seat in range(stages.num_slots)
                if set(unit) & set(stages.chunks.blocks_of(stages.stage_and_replica(seat)[0]))
            )
            if len(holders) > 1:
                yield Collective("all_reduce", grad(unit), holders)
        yield Commit(tuple(range(self.num_inner * stages.num_slots)))
        yield from (Update(unit) for unit in units)


def build_stage_programs(grid: StageGrid, program: Program, slots: Iterable[int]) -> dict[int, tuple[RankProgram, ...]]:
    """Return the rows of some seats, each for all inner ranks; one whose row is empty has an empty one there."""
    micros = sorted({word.micro for row in program.rank_programs for word in row.body if isinstance(word, Forward)})
    items = grid.build_items(micros)
    works = [group_by_compute(row.body) for row in program.rank_programs]
    rows: dict[int, tuple[RankProgram, ...]] = {}
    for seat in slots:
        written = [StageProgram(grid, seat, rank, program.num_ranks) for rank in range(program.num_ranks)]
        rows[seat] = tuple(
            replace(row, body=tuple(one.instructions(row, work, items[seat]))) if row.body else row
            for one, row, work in zip(written, program.rank_programs, works, strict=True)
        )
    return rows


def group_by_compute(body: Instructions) -> ComputeGroups:
    """Attach to each forward and backward the words that stand right behind it and belong to it."""
    work: dict[tuple[type[Instruction], int, int], Instructions] = {}
    key = None
    for word in body:
        match word:
            case Forward(block, micro) | Backward(block, micro):
                key = (type(word), block, micro)
                work[key] = (word,)
            case Collective() if key is not None:
                work[key] += (word,)
            case _:
                key = None
    return work


def stage_tp_bytes(rank: RankCost, blocks: Sequence[int], model: ModelSpec) -> Fraction:
    """Return what of an inner rank's traffic, which is all about sliced blocks, belongs to a stage."""
    whole = tp_allreduce_bytes(model, rank.blocks)
    return rank.other_bytes * Fraction(tp_allreduce_bytes(model, blocks), whole) if whole else Fraction(0)
