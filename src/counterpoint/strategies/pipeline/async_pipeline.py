"""Asynchronous pipelines: no flush between batches; stages update independently, on several versions of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
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
from counterpoint.strategies.replica_groups import updated_units
from counterpoint.strategies.strategy import CostEstimate, RankCost, ring_fraction


@dataclass(frozen=True, slots=True)
class AsyncPipeline:
    """A pipeline whose stages start the next global batch before the last one has been run backward.

    One body finishes one global batch: all stages run its microbatches backward. The forwards of a body are ahead, on
    the first stage so far that some are of the next batches. The prologue has as many bodies as the first stage is
    ahead, without microbatches that do not exist yet, and as many again, in which versions are not constant yet.

    Args:
        stages: the blocks of each stage.
        edges: the edges between stages.
        replicas: number of replicas of each stage.
        weight_policy: which version of the weights a microbatch uses.
        name: the strategy as the user wrote it, for errors.

    Cost:
        Bytes sent per rank and body: the activations and activation gradients that leave its stage, for each of its
        microbatches and each receiving stage; with r replicas ``2 (r-1)/r`` of its gradient bytes for each update.
        Memory: the versions of its weights in
        :class:`~counterpoint.strategies.pipeline.schedules.pipedream.StageTimeline`.

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
        """Return the timeline of a stage."""
        return StageTimeline(stage, self.replicas, num_micros, self.weight_policy)

    def lower(self, program: Program) -> Program:
        """Return the asynchronous program.

        Raises:
            PlanError: stages share weights, or there are fewer microbatches than 2BW needs.
        """
        num_micros = len(program.micros)
        self._check_no_shared_units(program)
        self._check_num_microbatches(num_micros)
        return Program(
            tuple(
                _AsyncStage(self, self.timeline(stage, num_micros), replica, (rank, program.num_ranks)).build(inner)
                for stage, count in enumerate(self.replicas)
                for replica in range(count)
                for rank, inner in enumerate(program.rank_programs)
            )
        )

    def _check_no_shared_units(self, program: Program) -> None:
        stage_of = {block: stage for stage, blocks in enumerate(self.stages) for block in blocks}
        units = {instruction.unit for _, instruction in program.instructions() if isinstance(instruction, Update)}
        for unit in sorted(units):
            stages = sorted({stage_of[block] for block in unit})
            if len(stages) > 1:
                raise PlanError(
                    f"blocks {' and '.join(map(str, unit))} share weights, but under {self.name} "
                    f"they are in stages {' and '.join(map(str, stages))}, which update at different times; untie "
                    "them, put them on one stage (balance=...), or give schedule=one_f_one_b"
                )

    def _check_num_microbatches(self, num_micros: int) -> None:
        first = self.timeline(0, num_micros)
        if len(self.replicas) == 1 and first.steps > first.interval:
            raise PlanError(
                f"{self.name} has one stage, which updates after every {first.count} microbatches, but a step has "
                f"{num_micros}; give num_microbatches={first.count}, or schedule=one_f_one_b, which updates once per "
                "step"
            )
        needed = first.warmup * first.count
        if self.weight_policy == "double_buffer" and num_micros < needed:
            raise PlanError(
                f"{self.name} updates once in {num_micros} microbatches, but its first stage is {needed} ahead, so "
                f"that two versions of the weights are not enough; give num_microbatches={needed} or more"
            )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost of a body: activations, one all-reduce of gradients per update, several weight versions."""
        ranks: list[RankCost] = []
        timelines = [self.timeline(stage, inner.num_micros) for stage in range(len(self.replicas))]
        for timeline in timelines:
            costs = [self._rank_cost(rank, timeline, inner, model) for rank in inner.ranks]
            for replica in range(timeline.count):
                ranks += [replace(cost, weight_versions=timeline.weight_versions(replica)) for cost in costs]
        staleness = max(timeline.staleness for timeline in timelines)
        depth = self._recv_buffer_depth(timelines[0])
        return replace(inner, ranks=tuple(ranks), staleness=staleness, recv_buffer_depth=depth)

    def _recv_buffer_depth(self, first: StageTimeline) -> int:
        """Return how many messages of one peer must be buffered before they are received.

        Stages that are not adjacent are ahead of each other by as many microbatches as are in flight.
        """
        if self.edges.only_adjacent:
            return int(max(self.replicas) > 1)
        return (first.warmup + 1) * self.edges.max_edges_between

    def _rank_cost(self, rank: RankCost, timeline: StageTimeline, inner: CostEstimate, model: ModelSpec) -> RankCost:
        blocks = self.stages[timeline.stage]
        updates = {unit: size for unit, size in rank.updates.items() if set(unit) & set(blocks)}
        activation_bytes = self.edges.sent_bytes(timeline.stage) * timeline.steps * inner.samples_per_microbatch
        factor = 2 * ring_fraction(timeline.count) * (timeline.steps // timeline.interval)
        return RankCost(
            blocks=tuple(blocks),
            num_micros=timeline.steps,
            updates=updates,
            other_bytes=stage_tp_bytes(rank, blocks, model) / timeline.count + activation_bytes,
            allreduce_bytes=rank.allreduce_bytes + factor * sum(updates.values(), Fraction(0)),
            in_flight=timeline.warmup + 1,
            chunk_starts=(blocks[0],),
        )


@dataclass(frozen=True, slots=True)
class _AsyncStage:
    """Builds the rank program of one stage replica for one inner rank.

    Args:
        pipeline: the asynchronous pipeline.
        timeline: of the stage.
        replica: index of the replica of the stage.
        inner: the inner rank, and the number of inner ranks.
    """

    pipeline: AsyncPipeline
    timeline: StageTimeline
    replica: int
    inner: tuple[int, int]

    def rank_of(self, stage: int, replica: int) -> int:
        """Return the rank of a stage replica for the same inner rank."""
        return (sum(self.pipeline.replicas[:stage]) + replica) * self.inner[1] + self.inner[0]

    def build(self, inner: RankProgram) -> RankProgram:
        """Return the rank program of this stage replica, from that of an inner rank, which runs all blocks."""
        groups, timeline, ahead = group_by_compute(inner.body), self.timeline, self.timeline.lookahead_batches
        units = updated_units(inner.body)

        def build_bodies(bodies: range, stop: float = inf) -> Instructions:
            actions = (
                action for body in bodies for action in one_f_one_b_without_flush(timeline, self.replica, body, stop)
            )
            return tuple(one for action in actions for one in self._action_instructions(action, groups, units))

        return replace(
            inner,
            prologue=build_bodies(range(-ahead, ahead)),
            body=build_bodies(range(ahead, ahead + 1)),
            epilogue=build_bodies(range(ahead, 2 * ahead), stop=2 * ahead * timeline.num_micros),
        )

    def _action_instructions(
        self, action: AsyncAction, groups: ComputeGroups, units: Sequence[Unit]
    ) -> Iterator[Instruction]:
        edges, blocks, micro = self.pipeline.edges, self.pipeline.stages[self.timeline.stage], action.micro
        if action.kind == "F":
            yield from self._messages(Recv, edges.recv_forward(blocks, micro))
            for block in blocks:
                yield from self._compute_instructions(groups, (Forward, block), action)
            yield from self._messages(Send, edges.send_forward(blocks, micro))
        elif action.kind == "B":
            yield from self._messages(Recv, edges.recv_backward(blocks, micro))
            for block in reversed(blocks):
                yield from self._compute_instructions(groups, (Backward, block), action)
            yield from self._messages(Send, edges.send_backward(blocks, micro))
        else:
            yield from self._updates([unit for unit in units if set(unit) & set(blocks)])

    def _messages(self, make: type[Send | Recv], transfers: Sequence[tuple[TensorRef, int]]) -> Iterator[Instruction]:
        for tensor, stage in transfers:
            assert tensor.micro is not None, "activations belong to microbatches"
            yield make(tensor, self.rank_of(stage, tensor.micro % self.pipeline.replicas[stage]))

    def _compute_instructions(
        self, groups: ComputeGroups, key: tuple[type[Forward | Backward], int], action: AsyncAction
    ) -> Iterator[Instruction]:
        kind, block = key
        in_batch = action.micro % self.timeline.num_micros
        shift = self.rank_of(self.timeline.stage, self.replica) - self.inner[0]
        for instruction in groups[kind, block, in_batch]:
            shifted = shift_microbatch(instruction, action.micro - in_batch)
            if isinstance(shifted, Forward | Backward):
                yield replace(shifted, version=action.version)
            else:
                yield shift_ranks(shifted, shift)

    def _updates(self, units: Sequence[Unit]) -> Iterator[Instruction]:
        stage, count = self.timeline.stage, self.timeline.count
        if count > 1:
            group = tuple(self.rank_of(stage, replica) for replica in range(count))
            yield from (Collective("all_reduce", grad(unit), group) for unit in sorted(units, reverse=True))
        first = sum(self.pipeline.replicas[:stage]) * self.inner[1]
        yield Commit(tuple(range(first, first + count * self.inner[1])))
        yield from (Update(unit) for unit in units)
