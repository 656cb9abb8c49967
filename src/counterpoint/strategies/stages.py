"""What each replica of each stage of a pipeline does, word by word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, TypeAlias

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Recv,
    Send,
    Update,
    Value,
    grad,
)
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.rewrite import shifted
from counterpoint.strategies.chunks import Chunks
from counterpoint.strategies.orders.order import Order, Place, Turn
from counterpoint.strategies.posting import Ends, Hop, Item, with_messages
from counterpoint.strategies.strands import Strands
from counterpoint.strategies.strategy import RankForecast, sliced_bytes

Work: TypeAlias = Mapping[tuple[type[Instruction], int, int], Words]
"""For each block's forward or backward on a microbatch: itself and the words that belong to it."""

PARTS: dict[str, Literal["", "input", "weight"]] = {"B": "", "Bi": "input", "Bw": "weight"}
"""The part of a backward that a turn is."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Who runs what: replica t of a stage has a *seat*, counted through all stages.

    Args:
        chunks: which blocks lie where.
        strands: what goes between them.
        replicas: how many replicas each stage has.
        order: in which sequence they take microbatches up.
    """

    chunks: Chunks
    strands: Strands
    replicas: tuple[int, ...]
    order: Order

    def seat(self, stage: int, twin: int) -> int:
        """Return the seat of a stage's replica."""
        return sum(self.replicas[:stage]) + twin

    def stage_at(self, seat: int) -> tuple[int, int]:
        """Return the stage and the replica of a seat."""
        stage = 0
        while seat >= self.replicas[stage]:
            seat -= self.replicas[stage]
            stage += 1
        return stage, seat

    @property
    def num_seats(self) -> int:
        """How many there are."""
        return sum(self.replicas)

    def items(self, micros: Sequence[int]) -> list[list[Item]]:
        """Return the turns and messages of every seat, for the microbatches that enter the pipeline."""
        index_of = {micro: index for index, micro in enumerate(micros)}
        turns = []
        for stage, count in enumerate(self.replicas):
            for twin in range(count):
                place = Place(stage, self.replicas, tuple(micros[twin::count]), self.chunks.count(stage))
                turns.append(list(self.order.turns(place)))

        def hops(found: Sequence[tuple[Value, int]], turn: Turn) -> list[Hop]:
            at = index_of[turn.micro]
            return [(value, self.seat(stage, at % self.replicas[stage])) for value, stage in found]

        def taken(seat: int, turn: Turn) -> list[Hop]:
            run = self.run_of(seat, turn)
            if turn.kind == "F":
                return hops(self.strands.taken_forward(run, turn.micro), turn)
            return hops(self.strands.taken_backward(run, turn.micro), turn) if turn.kind != "Bw" else []

        def given(seat: int, turn: Turn) -> list[Hop]:
            run = self.run_of(seat, turn)
            if turn.kind == "F":
                return hops(self.strands.given_forward(run, turn.micro), turn)
            return hops(self.strands.given_backward(run, turn.micro), turn) if turn.kind != "Bw" else []

        return with_messages(turns, Ends(taken, given))

    def run_of(self, seat: int, turn: Turn) -> range:
        """Return the blocks of a turn."""
        stage, _ = self.stage_at(seat)
        return self.chunks.runs[self.chunks.position(stage, turn.chunk)]


@dataclass(frozen=True, slots=True)
class StageRow:
    """One seat's row, about to be written out for one inner rank.

    Args:
        stages: who runs what.
        seat: which replica of which stage.
        inner: the inner rank.
        num_inner: how many there are.
    """

    stages: Stages
    seat: int
    inner: int
    num_inner: int

    def words(self, row: Row, work: Work, items: Sequence[Item]) -> Iterator[Instruction]:
        """Yield what this seat does instead of the inner rank's whole row, whose work is at hand."""
        for item in items:
            match item:
                case Turn():
                    yield from self._turn(item, work)
                case Send(value, seat):
                    yield Send(value, self._rank_of(seat))
                case Recv(value, seat):
                    yield Recv(value, self._rank_of(seat))
        yield from self._finish(row.body)

    def _rank_of(self, seat: int) -> int:
        """Return the rank at a seat for the same inner rank."""
        return seat * self.num_inner + self.inner

    def _turn(self, turn: Turn, work: Work) -> Iterator[Instruction]:
        run = self.stages.run_of(self.seat, turn)
        by = self.seat * self.num_inner
        if turn.kind == "F":
            for block in run:
                yield from (shifted(word, by) for word in work[Forward, block, turn.micro])
            return
        part = PARTS[turn.kind]
        for block in reversed(run):
            first, *behind = work[Backward, block, turn.micro]
            assert isinstance(first, Backward), "it is kept as one"
            yield replace(first, part=part) if part else first
            yield from (shifted(word, by) for word in behind if part != "weight")

    def _finish(self, body: Words) -> Iterator[Instruction]:
        stages = self.stages
        stage, _ = stages.stage_at(self.seat)
        blocks = set(stages.chunks.blocks_of(stage))
        units = [word.unit for word in body if isinstance(word, Update) and set(word.unit) & blocks]
        for unit in sorted(units, reverse=True):
            holders = tuple(
                self._rank_of(seat)
                for seat in range(stages.num_seats)
                if set(unit) & set(stages.chunks.blocks_of(stages.stage_at(seat)[0]))
            )
            if len(holders) > 1:
                yield Collective("all_reduce", grad(unit), holders)
        yield Commit(tuple(range(self.num_inner * stages.num_seats)))
        yield from (Update(unit) for unit in units)


def write_rows(stages: Stages, program: Program, seats: Iterable[int]) -> dict[int, tuple[Row, ...]]:
    """Return the rows of some seats, each for all inner ranks; one whose row is empty has an empty one there."""
    micros = sorted({word.micro for row in program.rows for word in row.body if isinstance(word, Forward)})
    items = stages.items(micros)
    works = [work_of(row.body) for row in program.rows]
    rows: dict[int, tuple[Row, ...]] = {}
    for seat in seats:
        written = [StageRow(stages, seat, rank, program.num_ranks) for rank in range(program.num_ranks)]
        rows[seat] = tuple(
            replace(row, body=tuple(one.words(row, work, items[seat]))) if row.body else row
            for one, row, work in zip(written, program.rows, works, strict=True)
        )
    return rows


def work_of(body: Words) -> Work:
    """Attach to each forward and backward the words that stand right behind it and belong to it."""
    work: dict[tuple[type[Instruction], int, int], Words] = {}
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


def sliced_part(rank: RankForecast, blocks: Sequence[int], model: ModelSpec) -> Fraction:
    """Return what of an inner rank's traffic, which is all about sliced blocks, belongs to a stage."""
    whole = sliced_bytes(model, rank.blocks)
    return rank.sent * Fraction(sliced_bytes(model, blocks), whole) if whole else Fraction(0)
