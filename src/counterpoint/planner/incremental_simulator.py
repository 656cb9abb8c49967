"""Who speaks for whom where only the first of many copies and slices is written down.

What a step takes at least, whatever ranks wait for: what one of them does alone, or one host's card carries.

Simulate one plan after the other, and build and look at only those rows that none before has had.

Rows are made by the strategies themselves, so that nothing is said here about what a strategy does. Three things
save the work. A row of a stage depends on its own blocks and on the shape of the plan, not on how the other stages
are cut: it is kept by these. Copies of all that differ in the numbers of their ranks alone: the first is written
down. What a row says by itself (seconds, bytes, whom it meets) is worked out once. The clock then plays all of it, as
it does for any program, because a change in one row may move every other one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from counterpoint.compiler.overlap import overlap
from counterpoint.compiler.recompute import recompute
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.plan_simulation import StepSummary, has_divisible_backward, summarize_step
from counterpoint.planner.prepare import balance_by_speed, fit_profile, model_for, with_explicit_partition
from counterpoint.planner.program_cache import CachedRankProgram, PlanModelCache
from counterpoint.program.comm_matching import CommMatches, Location, TypeIndices, index_by_type, match_communication
from counterpoint.program.instruction import Collective, Commit, Group
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rank_classes import TopologyKeys, refine_classes
from counterpoint.simulator.contention import SharedResources, topology_keys
from counterpoint.simulator.event_simulator import SymmetryBroken
from counterpoint.simulator.network import P2PInstruction
from counterpoint.simulator.simulate import Representatives, StepBreakdown, compute_breakdown, run_simulator
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.chunks import Chunks
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster

_NOT_STORED = -1


@dataclass(frozen=True, slots=True)
class SymmetricPrograms:
    """Rows that ranks have in common: rank ``(copy * num_seats + seat) * num_slices + slice`` has that of its seat.

    Args:
        rows: of each seat of the first copy, as its first slice has it.
        num_slices: how many ranks are slices of one seat.
        num_ranks: how many ranks there are.
    """

    rows: Sequence[CachedRankProgram]
    num_slices: int
    num_ranks: int

    @property
    def num_stored(self) -> int:
        """How many ranks a copy has, of which the first slices are written down."""
        return len(self.rows) * self.num_slices

    @property
    def num_copies(self) -> int:
        """How many copies there are."""
        return self.num_ranks // self.num_stored

    def row(self, rank: int) -> CachedRankProgram:
        """Return the row of a rank, but for the numbers of ranks and microbatches that it names."""
        return self.rows[rank // self.num_slices % len(self.rows)]

    def instructions(self) -> list[Instructions]:
        """Return the words of every rank, but for those numbers."""
        return [self.row(rank).instructions for rank in range(self.num_ranks)]

    def find_representatives(self, topology: TopologyKeys) -> Representatives | None:
        """Return who meets whom, and who speaks for each rank; None where that is a rank that is not written down.

        Copies and slices do the same things at the same times where all ranks are alike: each meets what is at the same
        place of its own copy and slice, or is alike. Else it is looked at where every rank stands.
        """
        partners = self._match_stored()
        if not topology.groups and len(set(topology.rank_keys)) < 2:
            outlines = [_NOT_STORED] * self.num_stored
            outlines[:: self.num_slices] = [row.signature for row in self.rows]
            first = {rank: group[0] for group in refine_classes(outlines, partners) for rank in group}
            copy = [first[rank - rank % self.num_slices] for rank in range(self.num_stored)]
            return Representatives(partners, copy * self.num_copies)
        everywhere = self._replicate(partners)
        speaker = [0] * self.num_ranks
        for group in refine_classes([self.row(rank).signature for rank in range(self.num_ranks)], everywhere, topology):
            if group[0] >= self.num_stored or group[0] % self.num_slices:
                return None
            for rank in group:
                speaker[rank] = group[0]
        return Representatives(everywhere, speaker)

    def _match_stored(self) -> CommMatches:
        """Return who meets whom among those that are written down."""
        words: list[Instructions] = [()] * self.num_stored
        kinds: list[TypeIndices] = [index_by_type(())] * self.num_stored
        words[:: self.num_slices] = [row.instructions for row in self.rows]
        kinds[:: self.num_slices] = [row.kinds for row in self.rows]
        return match_communication(words, kinds)

    def _replicate(self, partners: CommMatches) -> CommMatches:
        """Return who meets whom among all ranks, given who does among those that are written down."""
        spread = CommMatches()
        for copy, at in product(range(self.num_copies), range(self.num_slices)):
            by = copy * self.num_stored + at
            for (rank, index), (other, there) in partners.producer.items():
                spread.producer[rank + by, index] = (other + by, there)
        sets: dict[Group, list[tuple[Group, list[int]]]] = {}
        for members in partners.participants:
            group, index_of = self._group(members[0]), dict(members)
            if group not in sets:
                sets[group] = list(self._matching_groups(group))
            for ranks, written in sets[group]:
                places = list(zip(ranks, map(index_of.__getitem__, written), strict=True))
                spread.collective_id.update(dict.fromkeys(places, len(spread.participants)))
                spread.participants.append(places)
        return spread

    def _matching_groups(self, group: Group) -> Iterator[tuple[Group, list[int]]]:
        """Yield a group of ranks as each set of copies and slices has it, and who is written down for its ranks."""
        inside = {(rank // self.num_stored, rank % self.num_slices) for rank in group}
        written = [self._stored_rank(rank) for rank in group]
        made: set[tuple[int, int]] = set()
        for copy, at in product(range(self.num_copies), range(self.num_slices)):
            if (copy, at) not in made:
                made |= {(one + copy, other + at) for one, other in inside}
                by = copy * self.num_stored + at
                yield tuple(rank + by for rank in group), written

    def _group(self, location: Location) -> Group:
        word = self.row(location[0]).instructions[location[1]]
        assert isinstance(word, Collective | Commit), "it is a call"
        return word.group

    def _stored_rank(self, rank: int) -> int:
        """Return the rank that is written down for one."""
        inside = rank % self.num_stored
        return inside - inside % self.num_slices


def step_lower_bound_s(programs: SymmetricPrograms, cache: PlanModelCache) -> float:
    """Return what no step of these rows is shorter than, without playing them.

    Args:
        fold: the rows.
        cut: where they are known.
    """
    return max(
        _nic_lower_bound_s(programs, cache), *(cache.instruction_times(row, 0).lower_bound_s for row in programs.rows)
    )


def _nic_lower_bound_s(programs: SymmetricPrograms, cache: PlanModelCache) -> float:
    """Return for how long the busiest card is taken by ranks of one host; 0 where hosts and copies do not line up.

    A group of copies has as many members on a host as the first of them on its own, or fewer: it begins there.
    """
    cluster, slices = cache.cluster, programs.num_slices
    if len(cluster.levels) < 2 or not cluster.levels[1].is_shared:
        return 0.0
    width, written = cluster.levels[0].count, programs.num_stored
    if max(width, written) % min(width, written) or max(width, slices) % min(width, slices):
        return 0.0
    seconds = [
        _shared_link_s(row, seat * slices, cache) for seat, row in enumerate(programs.rows) for _ in range(slices)
    ]
    if written <= width:
        return sum(seconds) * (min(width, programs.num_ranks) // written)
    return max(sum(seconds[at : at + width]) for at in range(0, written, width))


def _shared_link_s(cached: CachedRankProgram, rank: int, cache: PlanModelCache) -> float:
    """Return a rank's part of the seconds in which what it sends is on its host's card, alone."""
    key = cached.signature, cached.rank
    if key not in cache.shared_link_s:
        times = cache.instruction_times(cached, 0)
        seconds: defaultdict[Group, float] = defaultdict(float)
        for word, crossing_s in zip(cached.instructions, times.shared_link_s, strict=True):
            if crossing_s:
                assert isinstance(word, Collective | P2PInstruction), "nothing else crosses"
                seconds[word.group if isinstance(word, Collective) else (rank, word.peer)] += crossing_s
        cache.shared_link_s[key] = sum(
            _nic_fraction(ranks, rank, cache.cluster) * own_s for ranks, own_s in seconds.items()
        )
    return cache.shared_link_s[key]


def _nic_fraction(ranks: Group, rank: int, cluster: Cluster) -> float:
    """Return the part of its host's card that one of some ranks answers for while something between them crosses."""
    together = Counter(map(cluster.host, ranks))[cluster.host(rank)]
    return cluster.link_among(ranks).bytes_per_s / cluster.link_at(1, (rank,)).bytes_per_s / together


ROUNDING = 1e-9
"""Sums of the same seconds in another order differ by less than this part of them."""


@dataclass(frozen=True, slots=True)
class PlanParts:
    """The strategies of a plan whose rows can be kept.

    Args:
        slices: tensor, or nothing.
        stages: the pipeline; None for none.
        copies: data and zero, whose copies are alike.
    """

    tensor: tuple[Strategy, ...]
    pipeline: Pipeline | None
    replicas: tuple[Strategy, ...]

    @property
    def num_slices(self) -> int:
        """How many ranks share each of the other ones' rows but for their slice."""
        return self.tensor[0].degree if self.tensor else 1

    @staticmethod
    def from_plan(plan: Plan) -> PlanParts | None:
        """Return the parts of a plan; None where it has others, or steps that are not all alike."""
        rest = [strategy for strategy in plan.strategies if strategy.degree > 1]
        slices = (rest.pop(0),) if rest and isinstance(rest[0], Tensor) else ()
        first = rest.pop(0) if rest and isinstance(rest[0], Pipeline) else None
        stages = first if isinstance(first, Pipeline) else None
        is_known = (
            all(isinstance(strategy, Data | Zero) for strategy in rest) and len(plan.sync_schedule.step_fractions) == 1
        )
        is_stream = stages is not None and stages.is_async
        is_replayed = is_known and not is_stream and not plan.sync_schedule.staleness
        return PlanParts(slices, stages, tuple(rest)) if is_replayed else None


@dataclass(frozen=True, slots=True)
class PlanSimResult:
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
    breakdowns: tuple[StepBreakdown, ...]
    sent_bytes: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanRankPrograms:
    """The rows of a plan.

    Args:
        plan: as it runs, with its cut.
        cut: of the model, where its rows are known.
        fold: the rows.
        least_s: what no step of theirs is shorter than.
    """

    plan: Plan
    cache: PlanModelCache
    programs: SymmetricPrograms
    lower_bound_s: float


class StepTooSlow(Exception):  # noqa: N818 - not an error: that much was asked
    """What ranks of a plan do by themselves takes longer than a step of it may, so that it is not played."""


class IncrementalSimulator:
    """What plans for one model, clusters and batch take, each as a simulation of it alone would say.

    Args:
        model: in its finest blocks.
        clusters: where it runs; on others than the first, links are others, and ranks are where they are on it.
        batch_size: samples of one global batch.
        timing: of the model's pieces; None where their work is only counted.
    """

    def __init__(
        self, model: ModelSpec, clusters: Sequence[Cluster], batch_size: int, profile: ModelProfile | None = None
    ) -> None:
        self.model, self.clusters, self.batch_size = model, tuple(clusters), batch_size
        self.profile = profile
        self.prepared_models: dict[tuple[str, int], ModelSpec] = {}
        self.models: dict[Hashable, ModelSpec] = {}
        self.caches: dict[tuple[int, int], PlanModelCache] = {}
        self.topologies: dict[int, TopologyKeys] = {}
        self.chunks: dict[tuple[int, Pipeline], Chunks] = {}
        self.built: dict[Plan, PlanRankPrograms | None] = {}

    def summary(self, plan: Plan) -> StepSummary:
        """Return the figures of a plan with one kind of step.

        Raises:
            PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
        """
        played = self.simulate(plan)
        if played is None:
            return summarize_step(plan, self.model, self.cluster, batch_size=self.batch_size, profile=self.profile)
        return StepSummary(
            step_s=played.breakdowns[0].step_s,
            compute_s=played.breakdowns[0].compute_s,
            update_s=played.breakdowns[0].update_s,
            sent_bytes=played.sent_bytes,
            memory_bytes=max(played.rank_bytes),
        )

    @property
    def cluster(self) -> Cluster:
        """The first of the clusters."""
        return self.clusters[0]

    def simulate(
        self, plan: Plan, max_step_s: float = math.inf, at: Sequence[int] | None = None
    ) -> PlanSimResult | None:
        """Return what a plan takes; None for one that has rows which are not kept, or not its clusters' alone to say.

        None is also for one of which :meth:`step_lower_bound_s` has found that it cannot be carried out.

        Args:
            plan: which one.
            most_s: what a step may take on the first of the clusters.
            at: on which of the clusters it is played; None for all.

        Raises:
            Slower: what its ranks do by themselves takes longer.
            PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
        """
        written = self.built.pop(plan) if plan in self.built else self._build(plan)
        if written is None:
            return None
        if written.lower_bound_s > max_step_s * (1 + ROUNDING):
            raise StepTooSlow
        return self._simulate(written, range(len(self.clusters)) if at is None else at)

    def lower_bound_s(self, plan: Plan) -> float:
        """Return what a step of a plan takes at least; 0 where nothing is known of it, or it cannot be carried out.

        What has been found out is kept until the plan is played.
        """
        try:
            written = self.built[plan] = self._build(plan)
        except PlanError:
            written = self.built[plan] = None
        return 0.0 if written is None else written.lower_bound_s

    def _build(self, plan: Plan) -> PlanRankPrograms | None:
        """Return the rows of a plan; None for what :meth:`played` returns None for."""
        if self.profile is None and plan.profile is not None:
            return None
        plan.require_batch(self.batch_size)
        given = self._prepared_model(plan)
        plan = balance_by_speed(plan, given, self.cluster)
        plan = plan if self.profile is None else with_explicit_partition(plan, given)
        parts = PlanParts.from_plan(plan)
        if parts is None:
            return None
        cut = self._model_cache(plan, parts, given)
        if (
            has_divisible_backward(cut.model)
            and "overlap" in plan.passes
            and self.cluster.link_at(0, (0,)).is_shared_memory
        ):
            return None  # sums in memory that members see stay whole, and who sees whose depends on where each stands
        fold = SymmetricPrograms(self._rank_programs(plan, parts, cut), parts.num_slices, plan.num_ranks)
        return PlanRankPrograms(plan, cut, fold, step_lower_bound_s(fold, cut))

    def _prepared_model(self, plan: Plan) -> ModelSpec:
        """Return the model as a plan gets it; plans that get the same get one and the same."""
        samples = self.batch_size // plan.global_num_microbatches
        key = plan.granularity, samples if self.profile is not None else 0
        if key not in self.prepared_models:
            self.prepared_models[key] = model_for(plan, self.model, samples, self.profile)
        return self.prepared_models[key]

    def _simulate(self, built: PlanRankPrograms, at: Sequence[int]) -> PlanSimResult | None:
        """Return what rows that are known say; None where not all ranks are of the classes of those written down."""
        plan, cut, fold = built.plan, built.cache, built.programs
        if plan.num_ranks not in self.topologies:
            self.topologies[plan.num_ranks] = topology_keys(self.cluster, plan.num_ranks)
        cast = fold.find_representatives(self.topologies[plan.num_ranks])
        try:
            spent = None if cast is None else _run_clusters(fold, cast, cut, at)
        except SymmetryBroken:
            return None
        if spent is None:
            return None
        sent_bytes = int(max(cut.footprint(row).sent_bytes for row in fold.rows))
        rank_bytes = tuple(cut.footprint(fold.row(rank)).memory_bytes for rank in range(plan.num_ranks))
        return PlanSimResult(plan, cut.samples, spent, sent_bytes, rank_bytes)

    def _model_cache(self, plan: Plan, parts: PlanParts, given: ModelSpec) -> PlanModelCache:
        """Return the model with the blocks of a plan; plans with equal blocks and microbatches get the same."""
        key = (id(given), parts.tensor, parts.pipeline)
        if key not in self.models:
            model = given
            inner = (*parts.tensor, parts.pipeline) if parts.pipeline is not None else parts.tensor
            for strategy in inner:
                model = strategy.split_model(model)
            same = (known for known in self.models.values() if known == model)
            self.models[key] = next(same, model)
        model = self.models[key]
        samples = self.batch_size // plan.global_num_microbatches
        if (id(model), samples) not in self.caches:
            timing = fit_profile(plan, self.model, self.profile)
            self.caches[id(model), samples] = PlanModelCache(
                model, self.clusters, samples, plan.global_num_microbatches, timing
            )
        return self.caches[id(model), samples]

    def _rank_programs(self, plan: Plan, parts: PlanParts, cache: PlanModelCache) -> list[CachedRankProgram]:
        """Return the rows of all seats, those of the first slice and copy; those that are not known yet are made."""
        asked = plan.recomputation
        again = cache.blocks_to_recompute(asked) if asked is not None else frozenset[int]()
        how = (asked.whole_stage, asked.exempts_next_backward) if asked is not None else None
        around = (parts.replicas, "overlap" in plan.passes, how)
        seats = self._slots(plan, parts, cache)
        keys = [(key, around, again.intersection(blocks) if again else again) for key, blocks in seats]
        missing = [seat for seat, key in enumerate(keys) if key not in cache.rank_programs]
        if missing:
            self._build_stages(plan, parts, cache, {seat: seats[seat][0] for seat in missing})
            written = [
                cache.stage_programs[key] if seat in missing else RankProgram(()) for seat, (key, _) in enumerate(seats)
            ]
            made = self._apply_outer(written, plan, parts, cache)
            for seat in missing:
                finer = cache.split_backward(made[seat], plan.buckets)
                cache.rank_programs[keys[seat]] = cache.cache_program(made[seat], seat * parts.num_slices, finer)
        return [cache.rank_programs[key] for key in keys]

    def _slots(self, plan: Plan, parts: PlanParts, cache: PlanModelCache) -> list[tuple[Hashable, Collection[int]]]:
        """Return for each seat of the pipeline on what its row depends, and its blocks."""
        if parts.pipeline is None:
            return [((plan.num_microbatches, parts.tensor), range(cache.model.num_blocks))]
        chunks = self._stage_chunks(parts.pipeline, cache)
        shape = (
            plan.num_microbatches,
            parts.tensor,
            replace(parts.pipeline, balance=(), split_points=(), recompute="never"),
        )
        rest = None if cache.is_chain else chunks.block_ranges
        seats: list[tuple[Hashable, Collection[int]]] = []
        for stage, count in enumerate(parts.pipeline.stage_ranks):
            seats += [
                ((shape, len(seats) + twin, chunks.chunks_of(stage), rest), chunks.blocks_of(stage))
                for twin in range(count)
            ]
        return seats

    def _stage_chunks(self, stages: Pipeline, cache: PlanModelCache) -> Chunks:
        key = id(cache.model), stages
        if key not in self.chunks:
            self.chunks[key] = stages.chunks(cache.model)
        return self.chunks[key]

    def _build_stages(self, plan: Plan, parts: PlanParts, cache: PlanModelCache, keys: Mapping[int, Hashable]) -> None:
        """Write the rows of some seats as slices and stages leave them, by their keys."""
        new = [seat for seat, key in keys.items() if key not in cache.stage_programs]
        inner = cache.inner_program(plan.num_microbatches, parts.tensor)
        if parts.pipeline is None:
            cache.stage_programs |= {keys[seat]: inner.rank_programs[0] for seat in new}
        elif new:
            rows = parts.pipeline.stage_programs(inner, cache.model, new)
            cache.stage_programs |= {keys[seat]: rows[seat][0] for seat in new}

    def _apply_outer(
        self, rank_programs: Sequence[RankProgram], plan: Plan, parts: PlanParts, cache: PlanModelCache
    ) -> list[RankProgram]:
        """Return what copies and passes make of the rows of all seats, of which some may be empty."""
        spread = [row if not at else RankProgram(()) for row in rank_programs for at in range(parts.num_slices)]
        program = Program(tuple(spread), num_identical_copies=1)
        for strategy in parts.replicas:
            program = strategy.lower(program, cache.model)
        if "overlap" in plan.passes:
            program = overlap(program)
        asked = plan.recomputation
        if asked is not None:
            program = recompute(program, asked, cache.blocks_to_recompute(asked))
        return list(program.rank_programs[:: parts.num_slices])


def _run_clusters(
    programs: SymmetricPrograms, representatives: Representatives, cache: PlanModelCache, at: Sequence[int]
) -> tuple[StepBreakdown, ...] | None:
    """Return what the clock says of rows that ranks have in common, on some clusters; None where they never end."""
    every, places = programs.instructions(), SharedResources(cache.cluster, representatives.representative)
    speakers = list(dict.fromkeys(representatives.representative))
    found = []
    for cluster in at:
        times = {rank: cache.instruction_times(programs.row(rank), cluster) for rank in speakers}
        clock = run_simulator(every, representatives, times, cache.costs[cluster], places)
        if clock.stalled_ranks:
            return None
        found.append(compute_breakdown(every, representatives.representative, clock))
    return tuple(found)
