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
    TensorRef,
    Update,
    grad,
)
from counterpoint.program.program import Instructions, Program, RankProgram, shift_microbatch
from counterpoint.program.rewrite import shift_ranks
from counterpoint.strategies.pipeline.chunks import StageEdges
from counterpoint.strategies.pipeline.schedules.pipedream import (
    AsyncAction,
    StageTimeline,
    WeightPolicy,
    one_f_one_b_without_flush,
)
from counterpoint.strategies.pipeline.stage_programs import ComputeGroups, group_by_compute, stage_tp_bytes
from counterpoint.strategies.strategy import CostEstimate, RankCost, ring_fraction


@dataclass(frozen=True, slots=True)
class AsyncPipeline:
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
        :class:`counterpoint.strategies.pipeline.schedules.pipedream.StageTimeline` says.

    Source:
        Narayanan et al., PipeDream, SOSP 2019; Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML
        2021.
    """

    stages: tuple[range, ...]
    edges: StageEdges
    replicas: tuple[int, ...]
    weight_policy: WeightPolicy
    name: str

    def timeline(self, stage: int, num_micros: int) -> StageTimeline:
        """Return how a stage goes through the stream."""
        return StageTimeline(stage, self.replicas, num_micros, self.weight_policy)

    def lower(self, program: Program) -> Program:
        """Return the stream.

        Raises:
            PlanError: stages have weights in common, or there are fewer microbatches than 2BW needs.
        """
        num_micros = len(program.micros)
        self._check_no_shared_units(program)
        self._check_num_microbatches(num_micros)
        rows = []
        for stage, count in enumerate(self.replicas):
            for twin in range(count):
                for rank, row in enumerate(program.rank_programs):
                    drawn = _AsyncStage(self, self.timeline(stage, num_micros), twin, (rank, program.num_ranks))
                    rows.append(drawn.build(row))
        return Program(tuple(rows))

    def _check_no_shared_units(self, program: Program) -> None:
        stage_of = {block: stage for stage, blocks in enumerate(self.stages) for block in blocks}
        units = {word.unit for _, word in program.instructions() if isinstance(word, Update)}
        for unit in sorted(units):
            found = sorted({stage_of[block] for block in unit})
            if len(found) > 1:
                raise PlanError(
                    f"blocks {' and '.join(map(str, unit))} share weights, but under {self.name} "
                    f"they stand in stages {' and '.join(map(str, found))}, which update at different times; untie "
                    "them, cut so that one stage has them all (balance=...), or take schedule=one_f_one_b"
                )

    def _check_num_microbatches(self, num_micros: int) -> None:
        course = self.timeline(0, num_micros)
        if len(self.replicas) == 1 and course.steps > course.interval:
            raise PlanError(
                f"{self.name} has one stage, which is never ahead of itself, so that it updates once in a step and has "
                f"{num_micros} microbatches for that, where it takes {course.count}; give "
                f"num_microbatches={course.count}, or take schedule=one_f_one_b, which updates once in any number"
            )
        needed = course.warmup * course.count
        if self.weight_policy == "double" and num_micros < needed:
            raise PlanError(
                f"{self.name} updates once in {num_micros} microbatches, but its first stage is {needed} ahead, so "
                f"that two versions of the weights are not enough; give num_microbatches={needed} or more"
            )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast of a body: activations, sums of gradients once per update, old weights."""
        ranks: list[RankCost] = []
        num_micros = inner.num_micros
        courses = [self.timeline(stage, num_micros) for stage in range(len(self.replicas))]
        for course in courses:
            for twin in range(course.count):
                made = [self._rank_cost(rank, course, inner, model) for rank in inner.ranks]
                ranks += [replace(rank, weight_versions=course.weight_versions(twin)) for rank in made]
        staleness = max(course.staleness for course in courses)
        return replace(
            inner, ranks=tuple(ranks), staleness=staleness, recv_buffer_depth=self._recv_buffer_depth(courses[0])
        )

    def _recv_buffer_depth(self, first: StageTimeline) -> int:
        """Return how many messages of one peer may lie before they are received.

        Stages that are further apart than neighbours are ahead of each other by as many microbatches as are in flight.
        """
        if self.edges.only_adjacent:
            return int(max(self.replicas) > 1)
        return (first.warmup + 1) * self.edges.max_edges_between

    def _rank_cost(self, rank: RankCost, timeline: StageTimeline, inner: CostEstimate, model: ModelSpec) -> RankCost:
        blocks = self.stages[timeline.stage]
        left = self.edges.sent_bytes(timeline.stage)
        kept = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        trips = 2 * ring_fraction(timeline.count) * (timeline.steps // timeline.interval)
        return RankCost(
            blocks=tuple(blocks),
            num_micros=timeline.steps,
            updates=kept,
            other_bytes=stage_tp_bytes(rank, blocks, model) / timeline.count
            + left * timeline.steps * inner.samples_per_microbatch,
            allreduce_bytes=rank.allreduce_bytes + trips * sum(kept.values(), Fraction(0)),
            in_flight=timeline.warmup + 1,
            chunk_starts=(blocks[0],),
        )


@dataclass(frozen=True, slots=True)
class _AsyncStage:
    """One replica of one stage, about to be written out for one inner rank.

    Args:
        plan: the stream.
        course: how the stage goes through it.
        twin: which replica of it.
        inner: the inner rank, and how many there are.
    """

    pipeline: AsyncPipeline
    timeline: StageTimeline
    replica: int
    inner: tuple[int, int]

    def rank_of(self, stage: int, replica: int) -> int:
        """Return the rank that runs a replica of a stage for the same inner rank."""
        return (sum(self.pipeline.replicas[:stage]) + replica) * self.inner[1] + self.inner[0]

    def build(self, row: RankProgram) -> RankProgram:
        """Return what this replica does instead of the inner rank's whole row."""
        work, course, ahead = group_by_compute(row.body), self.timeline, self.timeline.lookahead_batches
        units = [word.unit for word in row.body if isinstance(word, Update)]

        def words(bodies: range, stop: float = inf) -> Instructions:
            beats = (beat for body in bodies for beat in one_f_one_b_without_flush(course, self.replica, body, stop))
            return tuple(word for beat in beats for word in self._action_instructions(beat, work, units))

        return replace(
            row,
            prologue=words(range(-ahead, ahead)),
            body=words(range(ahead, ahead + 1)),
            epilogue=words(range(ahead, 2 * ahead), stop=2 * ahead * course.num_micros),
        )

    def _action_instructions(
        self, action: AsyncAction, groups: ComputeGroups, units: Sequence[Unit]
    ) -> Iterator[Instruction]:
        strands, blocks, micro = self.pipeline.edges, self.pipeline.stages[self.timeline.stage], action.micro
        if action.kind == "F":
            yield from self._messages(Recv, strands.recv_forward(blocks, micro))
            for block in blocks:
                yield from self._compute_instructions(groups, (Forward, block), action)
            yield from self._messages(Send, strands.send_forward(blocks, micro))
        elif action.kind == "B":
            yield from self._messages(Recv, strands.recv_backward(blocks, micro))
            for block in reversed(blocks):
                yield from self._compute_instructions(groups, (Backward, block), action)
            yield from self._messages(Send, strands.send_backward(blocks, micro))
        else:
            yield from self._updates([unit for unit in units if set(unit) & set(blocks)])

    def _messages(self, make: type[Send | Recv], hops: Sequence[tuple[TensorRef, int]]) -> Iterator[Instruction]:
        for value, stage in hops:
            assert value.micro is not None, "activations belong to microbatches"
            yield make(value, self.rank_of(stage, value.micro % self.pipeline.replicas[stage]))

    def _compute_instructions(
        self, groups: ComputeGroups, key: tuple[type[Forward | Backward], int], action: AsyncAction
    ) -> Iterator[Instruction]:
        kind, block = key
        own = action.micro % self.timeline.num_micros
        by = self.rank_of(self.timeline.stage, self.replica) - self.inner[0]
        for word in map(partial(shift_microbatch, by=action.micro - own), groups[kind, block, own]):
            if isinstance(word, Forward | Backward):
                yield replace(word, version=action.version)
            else:
                yield shift_ranks(word, by)

    def _updates(self, units: Sequence[Unit]) -> Iterator[Instruction]:
        stage, count = self.timeline.stage, self.timeline.count
        twins = tuple(self.rank_of(stage, twin) for twin in range(count))
        if count > 1:
            yield from (Collective("all_reduce", grad(unit), twins) for unit in sorted(units, reverse=True))
        first = sum(self.pipeline.replicas[:stage]) * self.inner[1]
        yield Commit(tuple(range(first, first + count * self.inner[1])))
        yield from (Update(unit) for unit in units)
