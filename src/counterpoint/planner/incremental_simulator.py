"""Simulate many plans, building and analysing only those rank programs that no earlier plan had.

Rank programs are built by the strategies themselves, so that nothing about a strategy is repeated here. Three things
save work:

* The program of a stage depends on its own blocks and on the shape of the plan, not on the partition of other stages;
  it is cached by these.
* Replicas differ only in rank numbers; only the first replica is stored.
* What depends on one rank program only (times, bytes, which ranks it communicates with) is computed once.

The event simulator then runs all of it, as for any program, because a change in one rank may affect every other one.
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
from counterpoint.model.compilation import Compilation
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
    """Rank programs that replicas and tensor-parallel ranks have in common.

    Rank ``(replica * num_slots + slot) * tp_degree + tp_rank`` has the program of its slot.

    Args:
        slots: the programs of the slots of the first replica, as the first tensor-parallel rank has them.
        tp_degree: the tensor-parallel degree.
        num_ranks: the number of ranks.
    """

    slots: Sequence[CachedRankProgram]
    tp_degree: int
    num_ranks: int

    @property
    def num_stored(self) -> int:
        """Ranks of one replica, of which only the first tensor-parallel ranks are stored."""
        return len(self.slots) * self.tp_degree

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.num_ranks // self.num_stored

    def program_of(self, rank: int) -> CachedRankProgram:
        """Return the program of a rank, except for the numbers of ranks and microbatches in it."""
        return self.slots[rank // self.tp_degree % len(self.slots)]

    def instructions(self) -> list[Instructions]:
        """Return the instructions of every rank, except for these numbers."""
        return [self.program_of(rank).instructions for rank in range(self.num_ranks)]

    def find_representatives(self, topology: TopologyKeys) -> Representatives | None:
        """Return matches and representatives; None if a rank that is not stored would represent others.

        On a uniform cluster replicas and tensor-parallel ranks do the same at the same time, so that matching within
        the stored ranks is enough. Otherwise the locations of all ranks matter.
        """
        stored = self._match_stored()
        if not topology.groups and len(set(topology.rank_keys)) < 2:
            signatures = [_NOT_STORED] * self.num_stored
            signatures[:: self.tp_degree] = [cached.signature for cached in self.slots]
            first = {rank: group[0] for group in refine_classes(signatures, stored) for rank in group}
            replica = [first[rank - rank % self.tp_degree] for rank in range(self.num_stored)]
            return Representatives(stored, replica * self.num_replicas)
        matches = self._replicate(stored)
        representative = [0] * self.num_ranks
        for group in refine_classes(
            [self.program_of(rank).signature for rank in range(self.num_ranks)], matches, topology
        ):
            if group[0] >= self.num_stored or group[0] % self.tp_degree:
                return None
            for rank in group:
                representative[rank] = group[0]
        return Representatives(matches, representative)

    def _match_stored(self) -> CommMatches:
        """Return the communication matches among the stored ranks."""
        instructions: list[Instructions] = [()] * self.num_stored
        type_indices: list[TypeIndices] = [index_by_type(())] * self.num_stored
        instructions[:: self.tp_degree] = [cached.instructions for cached in self.slots]
        type_indices[:: self.tp_degree] = [cached.type_indices for cached in self.slots]
        return match_communication(instructions, type_indices)

    def _replicate(self, stored: CommMatches) -> CommMatches:
        """Return the communication matches among all ranks, given those among the stored ranks."""
        matches = CommMatches()
        for replica, tp_rank in product(range(self.num_replicas), range(self.tp_degree)):
            offset = replica * self.num_stored + tp_rank
            for (rank, index), (producer_rank, producer_index) in stored.producer.items():
                matches.producer[rank + offset, index] = (producer_rank + offset, producer_index)
        groups: dict[Group, list[tuple[Group, list[int]]]] = {}
        for members in stored.participants:
            group, index_of = self._group(members[0]), dict(members)
            if group not in groups:
                groups[group] = list(self._matching_groups(group))
            for ranks, stored_ranks in groups[group]:
                locations = list(zip(ranks, map(index_of.__getitem__, stored_ranks), strict=True))
                matches.collective_id.update(dict.fromkeys(locations, len(matches.participants)))
                matches.participants.append(locations)
        return matches

    def _matching_groups(self, group: Group) -> Iterator[tuple[Group, list[int]]]:
        """Yield a group as each replica and tensor-parallel rank has it, with the stored rank of each member."""
        group_offsets = {(rank // self.num_stored, rank % self.tp_degree) for rank in group}
        stored_ranks = [self._stored_rank(rank) for rank in group]
        yielded: set[tuple[int, int]] = set()
        for replica, tp_rank in product(range(self.num_replicas), range(self.tp_degree)):
            if (replica, tp_rank) not in yielded:
                yielded |= {
                    (group_replica + replica, group_tp_rank + tp_rank) for group_replica, group_tp_rank in group_offsets
                }
                offset = replica * self.num_stored + tp_rank
                yield tuple(rank + offset for rank in group), stored_ranks

    def _group(self, location: Location) -> Group:
        instruction = self.program_of(location[0]).instructions[location[1]]
        assert isinstance(instruction, Collective | Commit), "only collectives have groups"
        return instruction.group

    def _stored_rank(self, rank: int) -> int:
        """Return the stored rank that has the program of a rank."""
        rank_in_replica = rank % self.num_stored
        return rank_in_replica - rank_in_replica % self.tp_degree


def step_lower_bound_s(programs: SymmetricPrograms, cache: PlanModelCache) -> float:
    """Return a lower bound of the step, without simulation.

    Args:
        programs: of a plan.
        cache: where they are cached.
    """
    return max(
        _nic_lower_bound_s(programs, cache),
        *(cache.instruction_times(cached, 0).lower_bound_s for cached in programs.slots),
    )


def _nic_lower_bound_s(programs: SymmetricPrograms, cache: PlanModelCache) -> float:
    """Return for how long the busiest network card is used; 0 if hosts and replicas are not aligned.

    A group of replicas has as many members on a host as the first of them on its own host, or fewer: it starts there.
    """
    cluster, tp_degree = cache.cluster, programs.tp_degree
    if len(cluster.levels) < 2 or not cluster.levels[1].is_shared:
        return 0.0
    width, num_stored = cluster.levels[0].count, programs.num_stored
    if max(width, num_stored) % min(width, num_stored) or max(width, tp_degree) % min(width, tp_degree):
        return 0.0
    seconds = [
        _shared_link_s(cached, slot * tp_degree, cache)
        for slot, cached in enumerate(programs.slots)
        for _ in range(tp_degree)
    ]
    if num_stored <= width:
        return sum(seconds) * (min(width, programs.num_ranks) // num_stored)
    return max(sum(seconds[index : index + width]) for index in range(0, num_stored, width))


def _shared_link_s(cached: CachedRankProgram, rank: int, cache: PlanModelCache) -> float:
    """Return a rank's part of the seconds for which its communication uses its host's card, without contention."""
    key = cached.signature, cached.rank
    if key not in cache.shared_link_s:
        times = cache.instruction_times(cached, 0)
        seconds: defaultdict[Group, float] = defaultdict(float)
        for instruction, link_s in zip(cached.instructions, times.shared_link_s, strict=True):
            if link_s:
                assert isinstance(instruction, Collective | P2PInstruction), "nothing else uses links"
                seconds[instruction.group if isinstance(instruction, Collective) else (rank, instruction.peer)] += (
                    link_s
                )
        cache.shared_link_s[key] = sum(
            _nic_fraction(ranks, rank, cache.cluster) * seconds_of_group for ranks, seconds_of_group in seconds.items()
        )
    return cache.shared_link_s[key]


def _nic_fraction(ranks: Group, rank: int, cluster: Cluster) -> float:
    """Return the fraction of its host's card that one rank of a group accounts for."""
    num_on_host = Counter(map(cluster.host, ranks))[cluster.host(rank)]
    return cluster.link_among(ranks).bytes_per_s / cluster.link_at(1, (rank,)).bytes_per_s / num_on_host


ROUNDING = 1e-9
"""Sums of the same seconds in another order differ by less than this fraction."""


@dataclass(frozen=True, slots=True)
class PlanParts:
    """The strategies of a plan whose rank programs can be cached.

    Args:
        tensor: tensor parallelism, or nothing.
        pipeline: the pipeline; None for none.
        replicas: data parallelism and ZeRO, whose replicas are equal.
    """

    tensor: tuple[Strategy, ...]
    pipeline: Pipeline | None
    replicas: tuple[Strategy, ...]

    @property
    def tp_degree(self) -> int:
        """The tensor-parallel degree."""
        return self.tensor[0].degree if self.tensor else 1

    @staticmethod
    def from_plan(plan: Plan) -> PlanParts | None:
        """Return the parts of a plan; None if it has others, several step variants, or passes that move."""
        outer = [strategy for strategy in plan.strategies if strategy.degree > 1]
        tensor = (outer.pop(0),) if outer and isinstance(outer[0], Tensor) else ()
        first = outer.pop(0) if outer and isinstance(outer[0], Pipeline) else None
        pipeline = first if isinstance(first, Pipeline) else None
        has_known_outer = (
            all(isinstance(strategy, Data | Zero) for strategy in outer) and len(plan.sync_schedule.step_fractions) == 1
        )
        is_async = pipeline is not None and pipeline.is_async
        has_moves = plan.partition_selector is not None or plan.prefetch_depth > 0 or plan.offloading is not None
        is_plain = not plan.sync_schedule.staleness and not has_moves
        is_supported = has_known_outer and not is_async and is_plain
        return PlanParts(tensor, pipeline, tuple(outer)) if is_supported else None


@dataclass(frozen=True, slots=True)
class PlanSimResult:
    """Result of simulating a plan.

    Args:
        plan: with its partition.
        samples: of one microbatch.
        breakdowns: of a step, on each cluster.
        sent_bytes: sent by the rank that sends most.
        rank_bytes: peak memory of each rank.
    """

    plan: Plan
    samples: int
    breakdowns: tuple[StepBreakdown, ...]
    sent_bytes: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanRankPrograms:
    """The rank programs of a plan.

    Args:
        plan: with its partition.
        cache: of the model, where its rank programs are cached.
        programs: the rank programs.
        lower_bound_s: lower bound of the step.
    """

    plan: Plan
    cache: PlanModelCache
    programs: SymmetricPrograms
    lower_bound_s: float


class StepTooSlow(Exception):  # noqa: N818 - not an error: the caller set the limit
    """The lower bound of a plan's step exceeds the given maximum, so that it is not simulated."""


class IncrementalSimulator:
    """Simulator of plans for one model, clusters and batch; results equal those of separate simulations.

    Args:
        model: in its finest blocks.
        clusters: where it runs; they differ only in their links.
        batch_size: samples of one global batch.
        profile: measured times of the model's layers; None to use operation counts.
    """

    def __init__(
        self, model: ModelSpec, clusters: Sequence[Cluster], batch_size: int, profile: ModelProfile | None = None
    ) -> None:
        self.model, self.clusters, self.batch_size = model, tuple(clusters), batch_size
        self.profile = profile
        self.prepared_models: dict[tuple[str, int], ModelSpec] = {}
        self.models: dict[Hashable, ModelSpec] = {}
        self.caches: dict[tuple[int, int, Compilation | None], PlanModelCache] = {}
        self.topologies: dict[int, TopologyKeys] = {}
        self.chunks: dict[tuple[int, Pipeline], Chunks] = {}
        self.built: dict[Plan, PlanRankPrograms | None] = {}

    def summary(self, plan: Plan) -> StepSummary:
        """Return the predictions for a plan with a single step variant.

        Raises:
            PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
        """
        result = self.simulate(plan)
        if result is None:
            return summarize_step(plan, self.model, self.cluster, batch_size=self.batch_size, profile=self.profile)
        return StepSummary(
            step_s=result.breakdowns[0].step_s,
            compute_s=result.breakdowns[0].compute_s,
            update_s=result.breakdowns[0].update_s,
            sent_bytes=result.sent_bytes,
            memory_bytes=max(result.rank_bytes),
        )

    @property
    def cluster(self) -> Cluster:
        """The first of the clusters."""
        return self.clusters[0]

    def simulate(
        self, plan: Plan, max_step_s: float = math.inf, at: Sequence[int] | None = None
    ) -> PlanSimResult | None:
        """Return the result for a plan; None if its rank programs cannot be cached, or ranks are not symmetric.

        The result is also None if :meth:`lower_bound_s` has found that the plan cannot be executed.

        Args:
            plan: the plan.
            max_step_s: upper limit of a step on the first cluster.
            at: indices of the clusters to simulate; None for all.

        Raises:
            StepTooSlow: the lower bound of a step exceeds ``max_step_s``.
            PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
        """
        built = self.built.pop(plan) if plan in self.built else self._build(plan)
        if built is None:
            return None
        if built.lower_bound_s > max_step_s * (1 + ROUNDING):
            raise StepTooSlow
        return self._simulate(built, range(len(self.clusters)) if at is None else at)

    def lower_bound_s(self, plan: Plan) -> float:
        """Return a lower bound of the step; 0 if nothing is known of the plan, or it cannot be executed.

        The rank programs are kept until the plan is simulated.
        """
        try:
            built = self.built[plan] = self._build(plan)
        except PlanError:
            built = self.built[plan] = None
        return 0.0 if built is None else built.lower_bound_s

    def _build(self, plan: Plan) -> PlanRankPrograms | None:
        """Return the rank programs of a plan; None as for :meth:`simulate`."""
        if self.profile is None and plan.profile is not None:
            return None
        plan.require_batch(self.batch_size)
        prepared = self._prepared_model(plan)
        plan = balance_by_speed(plan, prepared, self.cluster)
        plan = plan if self.profile is None else with_explicit_partition(plan, prepared)
        parts = PlanParts.from_plan(plan)
        if parts is None or prepared.casts_reductions:  # whose plans are checked where they are compiled
            return None
        cache = self._model_cache(plan, parts, prepared)
        if (
            has_divisible_backward(cache.model)
            and "overlap" in plan.passes
            and self.cluster.link_at(0, (0,)).is_shared_memory
        ):
            return (
                None  # reductions in shared memory are not split, and which ranks share memory depends on their hosts
            )
        programs = SymmetricPrograms(self._rank_programs(plan, parts, cache), parts.tp_degree, plan.num_ranks)
        return PlanRankPrograms(plan, cache, programs, step_lower_bound_s(programs, cache))

    def _prepared_model(self, plan: Plan) -> ModelSpec:
        """Return the model as a plan gets it, the same object for plans that get equal ones."""
        samples = self.batch_size // plan.global_num_microbatches
        key = plan.granularity, samples if self.profile is not None else 0
        if key not in self.prepared_models:
            self.prepared_models[key] = model_for(plan, self.model, samples, self.profile)
        return self.prepared_models[key]

    def _simulate(self, built: PlanRankPrograms, at: Sequence[int]) -> PlanSimResult | None:
        """Return the result for built programs; None if a rank that is not stored would represent others."""
        plan, cache, programs = built.plan, built.cache, built.programs
        if plan.num_ranks not in self.topologies:
            self.topologies[plan.num_ranks] = topology_keys(self.cluster, plan.num_ranks)
        representatives = programs.find_representatives(self.topologies[plan.num_ranks])
        try:
            breakdowns = None if representatives is None else _run_clusters(programs, representatives, cache, at)
        except SymmetryBroken:
            return None
        if breakdowns is None:
            return None
        sent_bytes = int(max(cache.footprint(cached).sent_bytes for cached in programs.slots))
        rank_bytes = tuple(cache.footprint(programs.program_of(rank)).memory_bytes for rank in range(plan.num_ranks))
        return PlanSimResult(plan, cache.samples, breakdowns, sent_bytes, rank_bytes)

    def _model_cache(self, plan: Plan, parts: PlanParts, prepared: ModelSpec) -> PlanModelCache:
        """Return the cache of a plan's model; plans with equal blocks and microbatches share it."""
        merging = tuple(one for one in parts.replicas if isinstance(one, Zero) and one.merged_by)
        key = (id(prepared), parts.tensor, parts.pipeline, merging)
        if key not in self.models:
            model = prepared
            inner = (*parts.tensor, parts.pipeline) if parts.pipeline is not None else parts.tensor
            for strategy in (*inner, *merging):
                model = strategy.split_model(model)
            equal_models = (cached for cached in self.models.values() if cached == model)
            self.models[key] = next(equal_models, model)
        model = self.models[key]
        samples = self.batch_size // plan.global_num_microbatches
        cache_key = id(model), samples, plan.compile
        if cache_key not in self.caches:
            profile = fit_profile(plan, self.model, self.profile)
            self.caches[cache_key] = PlanModelCache(
                model, self.clusters, samples, plan.global_num_microbatches, profile
            )
        return self.caches[cache_key]

    def _rank_programs(self, plan: Plan, parts: PlanParts, cache: PlanModelCache) -> list[CachedRankProgram]:
        """Return the programs of all slots of the first replica and tensor-parallel rank, building new ones."""
        recomputation = plan.recomputation
        recomputed = cache.blocks_to_recompute(recomputation) if recomputation is not None else frozenset[int]()
        recompute_options = (
            (recomputation.whole_stage, recomputation.exempts_next_backward) if recomputation is not None else None
        )
        outer_key = (parts.replicas, "overlap" in plan.passes, recompute_options)
        slots = self._slots(plan, parts, cache)
        keys = [
            (key, outer_key, recomputed.intersection(blocks) if recomputed else recomputed) for key, blocks in slots
        ]
        missing = [slot for slot, key in enumerate(keys) if key not in cache.rank_programs]
        if missing:
            self._build_stages(plan, parts, cache, {slot: slots[slot][0] for slot in missing})
            stage_programs = [
                cache.stage_programs[key] if slot in missing else RankProgram(()) for slot, (key, _) in enumerate(slots)
            ]
            rank_programs = self._apply_outer(stage_programs, plan, parts, cache)
            for slot in missing:
                split = cache.split_backward(rank_programs[slot], plan.buckets)
                cache.rank_programs[keys[slot]] = cache.cache_program(
                    rank_programs[slot], slot * parts.tp_degree, split
                )
        return [cache.rank_programs[key] for key in keys]

    def _slots(self, plan: Plan, parts: PlanParts, cache: PlanModelCache) -> list[tuple[Hashable, Collection[int]]]:
        """Return for each slot of the pipeline what its program depends on, and its blocks."""
        if parts.pipeline is None:
            return [((plan.num_microbatches, parts.tensor), range(cache.model.num_blocks))]
        chunks = self._stage_chunks(parts.pipeline, cache)
        shape = (
            plan.num_microbatches,
            parts.tensor,
            replace(parts.pipeline, balance=(), split_points=(), recompute="never"),
        )
        other_stages = None if cache.is_chain else chunks.block_ranges
        slots: list[tuple[Hashable, Collection[int]]] = []
        for stage, count in enumerate(parts.pipeline.stage_ranks):
            slots += [
                ((shape, len(slots) + replica, chunks.chunks_of(stage), other_stages), chunks.blocks_of(stage))
                for replica in range(count)
            ]
        return slots

    def _stage_chunks(self, stages: Pipeline, cache: PlanModelCache) -> Chunks:
        key = id(cache.model), stages
        if key not in self.chunks:
            self.chunks[key] = stages.chunks(cache.model)
        return self.chunks[key]

    def _build_stages(self, plan: Plan, parts: PlanParts, cache: PlanModelCache, keys: Mapping[int, Hashable]) -> None:
        """Build and cache the programs of some slots after tensor parallelism and the pipeline."""
        new = [slot for slot, key in keys.items() if key not in cache.stage_programs]
        inner = cache.inner_program(plan.num_microbatches, parts.tensor)
        if parts.pipeline is None:
            cache.stage_programs |= {keys[slot]: inner.rank_programs[0] for slot in new}
        elif new:
            stage_programs = parts.pipeline.stage_programs(inner, cache.model, new)
            cache.stage_programs |= {keys[slot]: stage_programs[slot][0] for slot in new}

    def _apply_outer(
        self, rank_programs: Sequence[RankProgram], plan: Plan, parts: PlanParts, cache: PlanModelCache
    ) -> list[RankProgram]:
        """Return the programs of all slots, some of which may be empty, after replication and passes."""
        expanded = [
            rank_program if not tp_rank else RankProgram(())
            for rank_program in rank_programs
            for tp_rank in range(parts.tp_degree)
        ]
        program = Program(tuple(expanded), num_identical_copies=1)
        for strategy in parts.replicas:
            program = strategy.lower(program, cache.model)
        if "overlap" in plan.passes:
            program = overlap(program)
        recomputation = plan.recomputation
        if recomputation is not None:
            program = recompute(program, recomputation, cache.blocks_to_recompute(recomputation))
        return list(program.rank_programs[:: parts.tp_degree])


def _run_clusters(
    programs: SymmetricPrograms, representatives: Representatives, cache: PlanModelCache, at: Sequence[int]
) -> tuple[StepBreakdown, ...] | None:
    """Return the breakdowns of programs on some clusters; None if they stall."""
    rank_instructions, resources = (
        programs.instructions(),
        SharedResources(cache.cluster, representatives.representative),
    )
    ranks = list(dict.fromkeys(representatives.representative))
    breakdowns = []
    for cluster in at:
        times = {rank: cache.instruction_times(programs.program_of(rank), cluster) for rank in ranks}
        simulator = run_simulator(rank_instructions, representatives, times, cache.costs[cluster], resources)
        if simulator.stalled_ranks:
            return None
        breakdowns.append(compute_breakdown(rank_instructions, representatives.representative, simulator))
    return tuple(breakdowns)
