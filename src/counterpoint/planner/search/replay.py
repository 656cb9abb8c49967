"""Simulate one plan after the other, and build and look at only those rows that none before has had.

Rows are made by the strategies themselves, so that nothing is said here about what a strategy does. Three things
save the work. A row of a stage depends on its own blocks and on the shape of the plan, not on how the other stages
are cut: it is kept by these. Copies of all that differ in the numbers of their ranks alone: the first is written
down. What a row says by itself (seconds, bytes, whom it meets) is worked out once. The clock then plays all of it, as
it does for any program, because a change in one row may move every other one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from counterpoint.compiler.overlap import overlap
from counterpoint.compiler.recompute import recompute
from counterpoint.errors import ProgramError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.figures import Figures, figures_of
from counterpoint.planner.rank import in_one_block
from counterpoint.planner.search.known import Cut, KnownRow
from counterpoint.program.partners import pair
from counterpoint.program.program import Program, Row
from counterpoint.program.symmetry import refined
from counterpoint.simulator.clock import Clash, Clock, Score
from counterpoint.simulator.spent import spent_in
from counterpoint.strategies.chunks import Chunks
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Parts:
    """The strategies of a plan whose rows can be kept.

    Args:
        slices: tensor, or nothing.
        stages: the pipeline; None for none.
        copies: data and zero, whose copies are alike.
    """

    slices: tuple[Strategy, ...]
    stages: Pipeline | None
    copies: tuple[Strategy, ...]

    @staticmethod
    def of(plan: Plan) -> Parts | None:
        """Return the parts of a plan; None where it has others, or steps that are not all alike."""
        rest = [strategy for strategy in plan.strategies if strategy.degree > 1]
        slices = (rest.pop(0),) if rest and isinstance(rest[0], Tensor) else ()
        first = rest.pop(0) if rest and isinstance(rest[0], Pipeline) else None
        stages = first if isinstance(first, Pipeline) else None
        is_known = all(isinstance(strategy, Data | Zero) for strategy in rest) and len(plan.rhythm.turns) == 1
        is_stream = stages is not None and stages.is_stream
        return Parts(slices, stages, tuple(rest)) if is_known and not is_stream and not plan.rhythm.late else None


class Replay:
    """The figures of plans for one model, cluster and batch, each as :func:`figures_of` would give it.

    Args:
        model: in its finest blocks.
        cluster: where it runs.
        batch_size: samples of one global batch.
    """

    def __init__(self, model: ModelSpec, cluster: Cluster, batch_size: int) -> None:
        self.model, self.cluster, self.batch_size = model, cluster, batch_size
        self.whole = in_one_block(model)
        self.models: dict[Hashable, ModelSpec] = {}
        self.cuts: dict[tuple[int, int], Cut] = {}
        self.chunks: dict[tuple[int, Pipeline], Chunks] = {}

    def figures(self, plan: Plan) -> Figures:
        """Return the figures of a plan with one kind of step.

        Raises:
            PlanError: it cannot be compiled for this model or this batch.
        """
        parts = Parts.of(plan)
        if parts is None or len(set(self.cluster.speeds)) > 1:
            return figures_of(plan, self.model, self.cluster, batch_size=self.batch_size)
        plan.require_batch(self.batch_size)
        cut = self._cut(plan, parts)
        rows = self._rows(plan, parts, cut)
        try:
            return self._played(rows, plan.num_ranks, cut)
        except (Clash, ProgramError):
            return figures_of(plan, self.model, self.cluster, batch_size=self.batch_size)

    def _played(self, rows: list[KnownRow], num_ranks: int, cut: Cut) -> Figures:
        """Return what the clock says of rows that stand there as often as they fill the ranks."""
        times = num_ranks // len(rows)
        partners = pair([row.contacts for row in rows])
        speaker = [0] * len(rows)
        for group in refined([row.outline for row in rows], partners):
            for rank in group:
                speaker[rank] = group[0]
        seconds = {rank: rows[rank].bill.seconds for rank in dict.fromkeys(speaker)}
        every, speakers = [row.words for row in rows] * times, speaker * times
        clock = Clock(Score(every, partners, speakers, seconds, cut.costs))
        clock.run()
        if clock.stuck:
            raise ProgramError("it comes to no end")
        spent = spent_in(every, speakers, clock, [range(len(row.words)) for row in rows])
        return Figures(
            step_s=spent.step_s,
            compute_s=spent.compute_s,
            update_s=spent.update_s,
            sent_bytes=int(max(row.bill.sent_bytes for row in rows)),
            memory_bytes=max(row.bill.memory_bytes for row in rows),
        )

    def _cut(self, plan: Plan, parts: Parts) -> Cut:
        """Return the model with the blocks of a plan; plans with equal blocks and microbatches get the same."""
        key = (plan.need == "none", parts.slices, parts.stages)
        if key not in self.models:
            model = self.whole if plan.need == "none" else self.model
            inner = (*parts.slices, parts.stages) if parts.stages is not None else parts.slices
            for strategy in inner:
                model = strategy.refine(model)
            same = (known for known in self.models.values() if known == model)
            self.models[key] = next(same, model)
        model = self.models[key]
        samples = self.batch_size // plan.num_micros
        if (id(model), samples) not in self.cuts:
            self.cuts[id(model), samples] = Cut(model, self.cluster, samples)
        return self.cuts[id(model), samples]

    def _rows(self, plan: Plan, parts: Parts, cut: Cut) -> list[KnownRow]:
        """Return the rows of the first copy of a plan; those that are not known yet are made."""
        keys = self._keys(plan, parts, cut)
        missing = [seat for seat, own in enumerate(keys) if own[0] not in cut.rows]
        if missing:
            program = self._folded(plan, parts, cut, missing)
            width = len(keys[0])
            for seat in missing:
                made = program.rows[seat * width : (seat + 1) * width]
                cut.rows |= {key: cut.know(row) for key, row in zip(keys[seat], made, strict=True)}
        return [cut.rows[key] for own in keys for key in own]

    def _keys(self, plan: Plan, parts: Parts, cut: Cut) -> list[list[Hashable]]:
        """Return for each seat of the pipeline, and each slice there, what its row depends on."""
        asked = plan.recomputation
        again = cut.recomputed(asked) if asked is not None else frozenset[int]()
        how = (asked.at_once, asked.keeps_next) if asked is not None else None
        shape: Hashable = (plan.num_microbatches, parts.slices, parts.copies, "overlap" in plan.passes, how)
        slices = range(parts.slices[0].degree if parts.slices else 1)
        if parts.stages is None:
            return [[(shape, again, index) for index in slices]]
        chunks = self._chunks(parts.stages, cut)
        stages = replace(parts.stages, balance=(), cuts=(), recompute="never")
        rest = None if cut.is_chain else chunks.runs
        keys: list[list[Hashable]] = []
        for stage, count in enumerate(stages.stage_ranks):
            runs = chunks.on(stage)
            own = again.intersection(block for run in runs for block in run) if again else again
            keys += [
                [(shape, stages, len(keys) + twin, runs, own, rest, index) for index in slices] for twin in range(count)
            ]
        return keys

    def _chunks(self, stages: Pipeline, cut: Cut) -> Chunks:
        key = id(cut.model), stages
        if key not in self.chunks:
            self.chunks[key] = stages.chunks(cut.model)
        return self.chunks[key]

    def _folded(self, plan: Plan, parts: Parts, cut: Cut, seats: list[int]) -> Program:
        """Return the program with the rows of some seats alone, and one copy of what there are many of."""
        program = cut.inner_program(plan.num_microbatches, parts.slices)
        if parts.stages is not None:
            nothing = (Row(()),) * program.num_ranks
            made = parts.stages.seat_rows(program, cut.model, seats)
            rows = [row for seat in range(sum(parts.stages.stage_ranks)) for row in made.get(seat, nothing)]
            program = Program(tuple(rows))
        program = replace(program, folded=1)
        for strategy in parts.copies:
            program = strategy.lower(program, cut.model)
        if "overlap" in plan.passes:
            program = overlap(program)
        asked = plan.recomputation
        return program if asked is None else recompute(program, asked, cut.recomputed(asked))
