"""Simulate one plan after the other, and build and look at only those rows that none before has had.

Rows are made by the strategies themselves, so that nothing is said here about what a strategy does. Three things
save the work. A row of a stage depends on its own blocks and on the shape of the plan, not on how the other stages
are cut: it is kept by these. Copies of all that differ in the numbers of their ranks alone: the first is written
down. What a row says by itself (seconds, bytes, whom it meets) is worked out once. The clock then plays all of it, as
it does for any program, because a change in one row may move every other one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from counterpoint.compiler.overlap import overlap
from counterpoint.compiler.recompute import recompute
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.figures import Figures, figures_of
from counterpoint.planner.given import fitted_to, model_for
from counterpoint.planner.playing import is_divisible
from counterpoint.planner.rows.folded import Fold
from counterpoint.planner.rows.known import Cut, KnownRow
from counterpoint.planner.rows.least import least_s
from counterpoint.planner.settled import settled
from counterpoint.planner.unlike import balanced
from counterpoint.program.program import Program, Row
from counterpoint.program.symmetry import Nearness
from counterpoint.simulator.clock import Clash
from counterpoint.simulator.places import Places, nearness
from counterpoint.simulator.simulate import Cast, run_clock
from counterpoint.simulator.spent import Spent, spent_in
from counterpoint.strategies.chunks import Chunks
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster

ROUNDING = 1e-9
"""Sums of the same seconds in another order differ by less than this part of them."""


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

    @property
    def num_slices(self) -> int:
        """How many ranks share each of the other ones' rows but for their slice."""
        return self.slices[0].degree if self.slices else 1

    @staticmethod
    def of(plan: Plan) -> Parts | None:
        """Return the parts of a plan; None where it has others, or steps that are not all alike."""
        rest = [strategy for strategy in plan.strategies if strategy.degree > 1]
        slices = (rest.pop(0),) if rest and isinstance(rest[0], Tensor) else ()
        first = rest.pop(0) if rest and isinstance(rest[0], Pipeline) else None
        stages = first if isinstance(first, Pipeline) else None
        is_known = all(isinstance(strategy, Data | Zero) for strategy in rest) and len(plan.rhythm.turns) == 1
        is_stream = stages is not None and stages.is_stream
        is_replayed = is_known and not is_stream and not plan.rhythm.late
        return Parts(slices, stages, tuple(rest)) if is_replayed else None


@dataclass(frozen=True, slots=True)
class Played:
    """What was found out about a plan.

    Args:
        plan: as it runs, with its cut.
        samples: of one microbatch.
        spent: on each cluster.
        sent_bytes: what the busiest rank sends.
        rank_bytes: what each rank holds at most.
    """

    plan: Plan
    samples: int
    spent: tuple[Spent, ...]
    sent_bytes: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The rows of a plan.

    Args:
        plan: as it runs, with its cut.
        cut: of the model, where its rows are known.
        fold: the rows.
        least_s: what no step of theirs is shorter than.
    """

    plan: Plan
    cut: Cut
    fold: Fold
    least_s: float


class Slower(Exception):  # noqa: N818 - not an error: that much was asked
    """What ranks of a plan do by themselves takes longer than a step of it may, so that it is not played."""


class Replay:
    """What plans for one model, clusters and batch take, each as a simulation of it alone would say.

    Args:
        model: in its finest blocks.
        clusters: where it runs; on others than the first, links are others, and ranks are where they are on it.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
    """

    def __init__(
        self, model: ModelSpec, clusters: Sequence[Cluster], batch_size: int, timing: Timing | None = None
    ) -> None:
        self.model, self.clusters, self.batch_size = model, tuple(clusters), batch_size
        self.timing = timing
        self.given: dict[tuple[str, int], ModelSpec] = {}
        self.models: dict[Hashable, ModelSpec] = {}
        self.cuts: dict[tuple[int, int], Cut] = {}
        self.near: dict[int, Nearness] = {}
        self.chunks: dict[tuple[int, Pipeline], Chunks] = {}
        self.looked: dict[Plan, Written | None] = {}

    def figures(self, plan: Plan) -> Figures:
        """Return the figures of a plan with one kind of step.

        Raises:
            PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
        """
        played = self.played(plan)
        if played is None:
            return figures_of(plan, self.model, self.cluster, batch_size=self.batch_size, timing=self.timing)
        return Figures(
            step_s=played.spent[0].step_s,
            compute_s=played.spent[0].compute_s,
            update_s=played.spent[0].update_s,
            sent_bytes=played.sent_bytes,
            memory_bytes=max(played.rank_bytes),
        )

    @property
    def cluster(self) -> Cluster:
        """The first of the clusters."""
        return self.clusters[0]

    def played(self, plan: Plan, most_s: float = math.inf, at: Sequence[int] | None = None) -> Played | None:
        """Return what a plan takes; None for one that has rows which are not kept, or not its clusters' alone to say.

        None is also for one of which :meth:`least_s` has found that it cannot be carried out.

        Args:
            plan: which one.
            most_s: what a step may take on the first of the clusters.
            at: on which of the clusters it is played; None for all.

        Raises:
            Slower: what its ranks do by themselves takes longer.
            PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
        """
        written = self.looked.pop(plan) if plan in self.looked else self._written(plan)
        if written is None:
            return None
        if written.least_s > most_s * (1 + ROUNDING):
            raise Slower
        return self._folded(written, range(len(self.clusters)) if at is None else at)

    def least_s(self, plan: Plan) -> float:
        """Return what a step of a plan takes at least; 0 where nothing is known of it, or it cannot be carried out.

        What has been found out is kept until the plan is played.
        """
        try:
            written = self.looked[plan] = self._written(plan)
        except PlanError:
            written = self.looked[plan] = None
        return 0.0 if written is None else written.least_s

    def _written(self, plan: Plan) -> Written | None:
        """Return the rows of a plan; None for what :meth:`played` returns None for."""
        if self.timing is None and plan.timing is not None:
            return None
        plan.require_batch(self.batch_size)
        given = self._model(plan)
        plan = balanced(plan, given, self.cluster)
        plan = plan if self.timing is None else settled(plan, given)
        parts = Parts.of(plan)
        if parts is None:
            return None
        cut = self._cut(plan, parts, given)
        if is_divisible(cut.model) and "overlap" in plan.passes and self.cluster.link_at(0, (0,)).is_copied:
            return None  # sums in memory that members see stay whole, and who sees whose depends on where each stands
        fold = Fold(self._rows(plan, parts, cut), parts.num_slices, plan.num_ranks)
        return Written(plan, cut, fold, least_s(fold, cut))

    def _model(self, plan: Plan) -> ModelSpec:
        """Return the model as a plan gets it; plans that get the same get one and the same."""
        samples = self.batch_size // plan.num_micros
        key = plan.need, samples if self.timing is not None else 0
        if key not in self.given:
            self.given[key] = model_for(plan, self.model, samples, self.timing)
        return self.given[key]

    def _folded(self, written: Written, at: Sequence[int]) -> Played | None:
        """Return what rows that are known say; None where not all ranks are of the classes of those written down."""
        plan, cut, fold = written.plan, written.cut, written.fold
        if plan.num_ranks not in self.near:
            self.near[plan.num_ranks] = nearness(self.cluster, plan.num_ranks)
        cast = fold.cast(self.near[plan.num_ranks])
        try:
            spent = None if cast is None else _spent(fold, cast, cut, at)
        except Clash:
            return None
        if spent is None:
            return None
        sent_bytes = int(max(cut.bill(row).sent_bytes for row in fold.rows))
        rank_bytes = tuple(cut.bill(fold.row(rank)).memory_bytes for rank in range(plan.num_ranks))
        return Played(plan, cut.samples, spent, sent_bytes, rank_bytes)

    def _cut(self, plan: Plan, parts: Parts, given: ModelSpec) -> Cut:
        """Return the model with the blocks of a plan; plans with equal blocks and microbatches get the same."""
        key = (id(given), parts.slices, parts.stages)
        if key not in self.models:
            model = given
            inner = (*parts.slices, parts.stages) if parts.stages is not None else parts.slices
            for strategy in inner:
                model = strategy.refine(model)
            same = (known for known in self.models.values() if known == model)
            self.models[key] = next(same, model)
        model = self.models[key]
        samples = self.batch_size // plan.num_micros
        if (id(model), samples) not in self.cuts:
            timing = fitted_to(plan, self.model, self.timing)
            self.cuts[id(model), samples] = Cut(model, self.clusters, samples, plan.num_micros, timing)
        return self.cuts[id(model), samples]

    def _rows(self, plan: Plan, parts: Parts, cut: Cut) -> list[KnownRow]:
        """Return the rows of all seats, those of the first slice and copy; those that are not known yet are made."""
        asked = plan.recomputation
        again = cut.recomputed(asked) if asked is not None else frozenset[int]()
        how = (asked.at_once, asked.keeps_next) if asked is not None else None
        around = (parts.copies, "overlap" in plan.passes, how)
        seats = self._seats(plan, parts, cut)
        keys = [(key, around, again.intersection(blocks) if again else again) for key, blocks in seats]
        missing = [seat for seat, key in enumerate(keys) if key not in cut.rows]
        if missing:
            self._write_stages(plan, parts, cut, {seat: seats[seat][0] for seat in missing})
            written = [cut.stages[key] if seat in missing else Row(()) for seat, (key, _) in enumerate(seats)]
            made = self._finished(written, plan, parts, cut)
            for seat in missing:
                finer = cut.finer(made[seat], plan.buckets)
                cut.rows[keys[seat]] = cut.know(made[seat], seat * parts.num_slices, finer)
        return [cut.rows[key] for key in keys]

    def _seats(self, plan: Plan, parts: Parts, cut: Cut) -> list[tuple[Hashable, Collection[int]]]:
        """Return for each seat of the pipeline on what its row depends, and its blocks."""
        if parts.stages is None:
            return [((plan.num_microbatches, parts.slices), range(cut.model.num_blocks))]
        chunks = self._chunks(parts.stages, cut)
        shape = (plan.num_microbatches, parts.slices, replace(parts.stages, balance=(), cuts=(), recompute="never"))
        rest = None if cut.is_chain else chunks.runs
        seats: list[tuple[Hashable, Collection[int]]] = []
        for stage, count in enumerate(parts.stages.stage_ranks):
            seats += [
                ((shape, len(seats) + twin, chunks.on(stage), rest), chunks.blocks_of(stage)) for twin in range(count)
            ]
        return seats

    def _chunks(self, stages: Pipeline, cut: Cut) -> Chunks:
        key = id(cut.model), stages
        if key not in self.chunks:
            self.chunks[key] = stages.chunks(cut.model)
        return self.chunks[key]

    def _write_stages(self, plan: Plan, parts: Parts, cut: Cut, keys: Mapping[int, Hashable]) -> None:
        """Write the rows of some seats as slices and stages leave them, by their keys."""
        new = [seat for seat, key in keys.items() if key not in cut.stages]
        inner = cut.inner_program(plan.num_microbatches, parts.slices)
        if parts.stages is None:
            cut.stages |= {keys[seat]: inner.rows[0] for seat in new}
        elif new:
            rows = parts.stages.seat_rows(inner, cut.model, new)
            cut.stages |= {keys[seat]: rows[seat][0] for seat in new}

    def _finished(self, rows: Sequence[Row], plan: Plan, parts: Parts, cut: Cut) -> list[Row]:
        """Return what copies and passes make of the rows of all seats, of which some may be empty."""
        spread = [row if not at else Row(()) for row in rows for at in range(parts.num_slices)]
        program = Program(tuple(spread), folded=1)
        for strategy in parts.copies:
            program = strategy.lower(program, cut.model)
        if "overlap" in plan.passes:
            program = overlap(program)
        asked = plan.recomputation
        if asked is not None:
            program = recompute(program, asked, cut.recomputed(asked))
        return list(program.rows[:: parts.num_slices])


def _spent(fold: Fold, cast: Cast, cut: Cut, at: Sequence[int]) -> tuple[Spent, ...] | None:
    """Return what the clock says of rows that ranks have in common, on some clusters; None where they never end."""
    every, places = fold.words(), Places(cut.cluster, cast.speaker)
    speakers = list(dict.fromkeys(cast.speaker))
    found = []
    for cluster in at:
        times = {rank: cut.time(fold.row(rank), cluster) for rank in speakers}
        clock = run_clock(every, cast, times, cut.costs[cluster], places)
        if clock.stuck:
            return None
        found.append(spent_in(every, cast.speaker, clock))
    return tuple(found)
