"""Pipelines without a flush: stages that update each for itself, on weights of several versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import inf

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
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
from counterpoint.program.program import Program, Row, Words, moved
from counterpoint.program.rewrite import shifted
from counterpoint.strategies.orders.pipedream import Beat, Course, Rule, one_f_one_b_without_flush
from counterpoint.strategies.stages import Work, sliced_part, work_of
from counterpoint.strategies.strands import Strands
from counterpoint.strategies.strategy import Forecast, RankForecast, ring_share


@dataclass(frozen=True, slots=True)
class Stream:
    """Stages that take up the next global batch before the last one has come back.

    A body finishes one global batch: all stages go backward on its microbatches. Their forwards are ahead, those of
    the first stage by so much that some belong to the next batches. The prologue is as many bodies as the first stage
    is ahead, without what there is none of yet, and as many again, in which versions are not constant yet.

    Args:
        stages: the blocks of each.
        strands: what goes between them.
        replicas: how many replicas each stage has.
        rule: which weights a microbatch meets.
        name: what errors call it.

    Cost:
        Bytes sent per rank and body: the activations and gradients that leave its stage, for each of its microbatches
        and each stage that they go to;
        with r replicas ``2 (r-1)/r`` of its gradient bytes for each update. Memory: weights in as many versions as
        :class:`counterpoint.strategies.orders.pipedream.Course` says.

    Source:
        Narayanan et al., PipeDream, SOSP 2019; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML
        2021.
    """

    stages: tuple[range, ...]
    strands: Strands
    replicas: tuple[int, ...]
    rule: Rule
    name: str

    def course(self, stage: int, num_micros: int) -> Course:
        """Return how a stage goes through the stream."""
        return Course(stage, self.replicas, num_micros, self.rule)

    def lower(self, program: Program) -> Program:
        """Return the stream.

        Raises:
            PlanError: stages have weights in common, or there are fewer microbatches than 2BW needs.
        """
        num_micros = len(program.micros)
        self._require_own_units(program)
        self._require_enough(num_micros)
        rows = []
        for stage, count in enumerate(self.replicas):
            for twin in range(count):
                for rank, row in enumerate(program.rows):
                    drawn = _StreamRow(self, self.course(stage, num_micros), twin, (rank, program.num_ranks))
                    rows.append(drawn.row(row))
        return Program(tuple(rows))

    def _require_own_units(self, program: Program) -> None:
        stage_of = {block: stage for stage, blocks in enumerate(self.stages) for block in blocks}
        units = {word.unit for _, word in program.words() if isinstance(word, Update)}
        for unit in sorted(units):
            found = sorted({stage_of[block] for block in unit})
            if len(found) > 1:
                raise PlanError(
                    f"blocks {' and '.join(map(str, unit))} share weights, but under {self.name} "
                    f"they stand in stages {' and '.join(map(str, found))}, which update at different times; untie "
                    "them, cut so that one stage has them all (balance=...), or take order=one_f_one_b"
                )

    def _require_enough(self, num_micros: int) -> None:
        course = self.course(0, num_micros)
        if len(self.replicas) == 1 and course.steps > course.interval:
            raise PlanError(
                f"{self.name} has one stage, which is never ahead of itself, so that it updates once in a step and has "
                f"{num_micros} microbatches for that, where it takes {course.count}; give "
                f"num_microbatches={course.count}, or take order=one_f_one_b, which updates once in any number"
            )
        needed = course.warmup * course.count
        if self.rule == "double" and num_micros < needed:
            raise PlanError(
                f"{self.name} updates once in {num_micros} microbatches, but its first stage is {needed} ahead, so "
                f"that two versions of the weights are not enough; give num_microbatches={needed} or more"
            )

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast of a body: activations, sums of gradients once per update, old weights."""
        ranks: list[RankForecast] = []
        num_micros = before.num_micros
        courses = [self.course(stage, num_micros) for stage in range(len(self.replicas))]
        for course in courses:
            for twin in range(course.count):
                made = [self._forecast_rank(rank, course, before, model) for rank in before.ranks]
                ranks += [replace(rank, versions=course.versions(twin)) for rank in made]
        staleness = max(course.staleness for course in courses)
        return replace(before, ranks=tuple(ranks), staleness=staleness, room=self._room(courses[0]))

    def _room(self, first: Course) -> int:
        """Return how many messages of one peer may lie before they are received.

        Stages that are further apart than neighbours are ahead of each other by as many microbatches as are in flight.
        """
        if self.strands.are_links:
            return int(max(self.replicas) > 1)
        return (first.warmup + 1) * self.strands.most_between

    def _forecast_rank(self, rank: RankForecast, course: Course, before: Forecast, model: ModelSpec) -> RankForecast:
        blocks = self.stages[course.stage]
        left = self.strands.sent_bytes(course.stage)
        kept = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        trips = 2 * ring_share(course.count) * (course.steps // course.interval)
        return RankForecast(
            blocks=tuple(blocks),
            num_micros=course.steps,
            updates=kept,
            sent=sliced_part(rank, blocks, model) / course.count + left * course.steps * before.samples_per_micro,
            summed=rank.summed + trips * sum(kept.values(), Fraction(0)),
            in_flight=course.warmup + 1,
            heads=(blocks[0],),
        )


@dataclass(frozen=True, slots=True)
class _StreamRow:
    """One replica of one stage, about to be written out for one inner rank.

    Args:
        plan: the stream.
        course: how the stage goes through it.
        twin: which replica of it.
        inner: the inner rank, and how many there are.
    """

    plan: Stream
    course: Course
    twin: int
    inner: tuple[int, int]

    def rank_of(self, stage: int, twin: int) -> int:
        """Return the rank that runs a replica of a stage for the same inner rank."""
        return (sum(self.plan.replicas[:stage]) + twin) * self.inner[1] + self.inner[0]

    def row(self, row: Row) -> Row:
        """Return what this replica does instead of the inner rank's whole row."""
        work, course, ahead = work_of(row.body), self.course, self.course.bodies_ahead
        units = [word.unit for word in row.body if isinstance(word, Update)]

        def words(bodies: range, stop: float = inf) -> Words:
            beats = (beat for body in bodies for beat in one_f_one_b_without_flush(course, self.twin, body, stop))
            return tuple(word for beat in beats for word in self._beat(beat, work, units))

        return replace(
            row,
            prologue=words(range(-ahead, ahead)),
            body=words(range(ahead, ahead + 1)),
            epilogue=words(range(ahead, 2 * ahead), stop=2 * ahead * course.num_micros),
        )

    def _beat(self, beat: Beat, work: Work, units: Sequence[Unit]) -> Iterator[Instruction]:
        strands, blocks, micro = self.plan.strands, self.plan.stages[self.course.stage], beat.micro
        if beat.kind == "F":
            yield from self._messages(Recv, strands.taken_forward(blocks, micro))
            for block in blocks:
                yield from self._moved(work, (Forward, block), beat)
            yield from self._messages(Send, strands.given_forward(blocks, micro))
        elif beat.kind == "B":
            yield from self._messages(Recv, strands.taken_backward(blocks, micro))
            for block in reversed(blocks):
                yield from self._moved(work, (Backward, block), beat)
            yield from self._messages(Send, strands.given_backward(blocks, micro))
        else:
            yield from self._updates([unit for unit in units if set(unit) & set(blocks)])

    def _messages(self, make: type[Send | Recv], hops: Sequence[tuple[Value, int]]) -> Iterator[Instruction]:
        for value, stage in hops:
            assert value.micro is not None, "activations belong to microbatches"
            yield make(value, self.rank_of(stage, value.micro % self.plan.replicas[stage]))

    def _moved(self, work: Work, key: tuple[type[Forward | Backward], int], beat: Beat) -> Iterator[Instruction]:
        kind, block = key
        own = beat.micro % self.course.num_micros
        by = self.rank_of(self.course.stage, self.twin) - self.inner[0]
        for word in map(partial(moved, by=beat.micro - own), work[kind, block, own]):
            if isinstance(word, Forward | Backward):
                yield replace(word, version=beat.version)
            else:
                yield shifted(word, by)

    def _updates(self, units: Sequence[Unit]) -> Iterator[Instruction]:
        stage, count = self.course.stage, self.course.count
        twins = tuple(self.rank_of(stage, twin) for twin in range(count))
        if count > 1:
            yield from (Collective("all_reduce", grad(unit), twins) for unit in sorted(units, reverse=True))
        first = sum(self.plan.replicas[:stage]) * self.inner[1]
        yield Commit(tuple(range(first, first + count * self.inner[1])))
        yield from (Update(unit) for unit in units)
