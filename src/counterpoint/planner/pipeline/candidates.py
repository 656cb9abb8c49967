"""The pipeline whose simulated step is least: from the dynamic program's partitions, changed as long as that helps.

The program knows how fast the slowest stage is, and nothing of the order in which stages take up microbatches, of
messages that wait for each other, of how far stages are from each other, and of what a rank can hold. So its
partitions, as several objectives count, are starts; an estimate says which changes of them are worth simulating; and
what is simulated is the program that would run.

Source: ours; the starts are those of :mod:`counterpoint.planner.pipeline.partition`.

Pipelines with cuts and replicas from the dynamic program, as plans among others: for models and for profiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import inf, prod

from counterpoint.compiler.compile import compile, message_size_fn  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.deadline import NO_DEADLINE, Deadline
from counterpoint.planner.pipeline.graph_models import (
    graph_from_model,
    linearize,
    merge_blocks,
    model_from_graph,
    prefix_cuts,
)
from counterpoint.planner.pipeline.layer_graph import GraphCuts, LayerGraph, find_cuts
from counterpoint.planner.pipeline.partition import (
    AsyncPipelineObjective,
    PartitionLevel,
    PublishedObjective,
    ReleasedObjective,
    StageObjective,
    WithoutReplicas,
    find_partition,
)
from counterpoint.planner.pipeline.stage_layout import LayoutEstimate, LayoutEstimator, PipelineQuery, StageLayout
from counterpoint.planner.prepare import storage_sizes
from counterpoint.planner.ranking import PlanRanking, Prediction, merge_rankings, predict_plan, rank_plans
from counterpoint.simulator.cost_model import analytic_costs, update_s
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.simulate import simulate_breakdown
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.pipedream import ASYNC_SCHEDULES
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.zero import Zero
from counterpoint.viz.number_format import format_seconds
from counterpoint.world.cluster import Cluster

OBJECTIVES: tuple[StageObjective, ...] = (
    PublishedObjective(),
    ReleasedObjective(),
    ReleasedObjective(compression=1.0),
    AsyncPipelineObjective(),
    WithoutReplicas(AsyncPipelineObjective()),
)
"""How the dynamic program counts for the partitions that are starts."""
MAX_INITIAL = 8
"""Of what the estimate has made of the starts, so many are simulated."""
MAX_NEIGHBOURS = 6
"""Of the changes of the best one, so many are simulated before it is decided how to go on."""
MAX_SIMULATED = 60
"""In all."""
MAX_CHANGES = 100
"""A start is changed so often at most by the estimate."""


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """What the simulator says about a staging.

    Args:
        staging: which one.
        step_s: seconds of a step for each of its microbatches.
        memory_bytes: what the fullest rank holds at most.
        missing_bytes: by how much that is more than it can hold.
    """

    layout: StageLayout
    step_s: float
    memory_bytes: int
    missing_bytes: int

    @property
    def sort_key(self) -> tuple[int, float, StageLayout]:
        """By what the better one comes first: that it fits, then that it is fast."""
        return self.missing_bytes, self.step_s, self.layout


def find_pipeline(query: PipelineQuery, starts: Iterable[StageLayout] = ()) -> SimulatedPipeline:
    """Return the staging whose simulated step is least of all that were simulated; the same wherever it is computed.

    Args:
        wanted: what is looked for.
        starts: stagings that are simulated beside those of the dynamic program.

    Raises:
        PlanError: no number of replicas can share the microbatches.
    """
    estimates = LayoutEstimator(query)
    first = [*starts, *initial_layouts(query)]
    settled = improve_layouts(estimates, first)
    allowed = (one for one in first if query.is_allowed(one))
    known = {one: simulate_layout(query, one) for one in dict.fromkeys((*allowed, *settled[:MAX_INITIAL]))}
    if not known:
        raise PlanError(
            f"no stages over {query.num_ranks} ranks have replicas that can share {query.num_microbatches} "
            f"microbatches; give a multiple of {query.num_ranks}"
        )
    best = min(known.values(), key=lambda one: one.sort_key)
    while len(known) < MAX_SIMULATED:
        near = (one for one in query.neighbours(best.layout) if one not in known)
        hopeful = [one for one in near if best.missing_bytes or estimates.lower_bound_s(one) < best.step_s]
        tried = sorted(hopeful, key=lambda one: (estimates.estimate(one), one))[:MAX_NEIGHBOURS]
        known |= {one: simulate_layout(query, one) for one in tried}
        better = min((known[one] for one in tried), key=lambda one: one.sort_key, default=best)
        if better.sort_key >= best.sort_key:
            break
        best = better
    return best


def improve_layouts(estimator: LayoutEstimator, starts: Iterable[StageLayout]) -> list[StageLayout]:
    """Return what starts become by changes that the estimate likes, the best first; all of them are allowed."""
    settled = {local_search(estimator, one) for one in starts}
    allowed = (one for one in settled if estimator.query.is_allowed(one))
    return sorted(allowed, key=lambda one: (estimator.estimate(one), one))


def local_search(estimator: LayoutEstimator, layout: StageLayout) -> StageLayout:
    """Return what a staging becomes when it is changed as long as the estimate is less by it.

    One that is not allowed becomes the best that is allowed near it, if any is.
    """
    wanted, best = estimator.query, layout
    if not wanted.is_allowed(best):
        best = min(wanted.neighbours(best), key=lambda one: (estimator.estimate(one), one), default=best)
    for _ in range(MAX_CHANGES):
        better = min(wanted.neighbours(best), key=lambda one: (estimator.estimate(one), one), default=best)
        if estimator.estimate(better) >= estimator.estimate(best):
            break
        best = better
    return best


def initial_layouts(query: PipelineQuery) -> Iterator[StageLayout]:
    """Yield the partitions of the dynamic program, as several objectives count, by levels and flat, and one stage."""
    states, cluster = _with_updates(query), query.cluster
    flat = {level.link.bytes_per_s for level in cluster.levels} or {cluster.link.bytes_per_s}
    networks = [[PartitionLevel(query.num_ranks, speed)] for speed in sorted(flat)]
    if prod(level.count for level in cluster.levels) == query.num_ranks and len(cluster.levels) > 1:
        networks.insert(0, [PartitionLevel(level.count, level.link.bytes_per_s) for level in cluster.levels])
    for network, objective in product(networks, OBJECTIVES):
        found = find_partition(states, network, objective)
        if found.slowest_s < inf:
            yield StageLayout.from_partition(found)
    yield StageLayout((0, states.num_cuts - 1), (query.num_ranks,))


def _with_updates(query: PipelineQuery) -> GraphCuts:
    """Return the states with the updates of weights as a part of the seconds backward."""
    profile, device = query.cuts.graph, query.cluster.device
    layers = tuple(
        replace(layer, backward_s=layer.backward_s + update_s(layer.weight_bytes, device)) for layer in profile.nodes
    )
    return GraphCuts(LayerGraph(layers, profile.edges), query.cuts.layer_sets)


def simulate_layout(query: PipelineQuery, layout: StageLayout) -> SimulatedPipeline:
    """Return what the simulator says about a staging, with one block for each stage."""
    model = stage_model(query, layout)
    plan = plan_for_layout(query, layout, (1,) * layout.num_stages)
    compiled = compile(plan, model, verified=False)
    costs = analytic_costs(compiled.model, query.cluster, message_size_fn(compiled.model, 1))
    (turn,) = compiled.step_variants
    (spent,) = simulate_breakdown(turn, [costs], query.cluster)
    memory_bytes = max(peak_memory_bytes(turn.full_program, storage_sizes(compiled.model, 1)))
    missing = max(0, memory_bytes - query.cluster.device.memory_bytes)
    return SimulatedPipeline(layout, spent.step_s / plan.global_num_microbatches, memory_bytes, missing)


def stage_model(query: PipelineQuery, layout: StageLayout) -> ModelSpec:
    """Return the model with one block for each stage."""
    model = model_from_graph(linearize(query.cuts, layout.cuts[1:]), query.cluster)
    return merge_blocks(model, layout.layers_per_stage(query.cuts))


def plan_for_layout(query: PipelineQuery, layout: StageLayout, balance: tuple[int, ...]) -> Plan:
    """Return the plan of a staging for a model whose blocks are so many for each stage; one stage alone is data."""
    micros, only = query.step_microbatches(layout), layout.replicas[0]
    if layout.num_stages > 1:
        return Plan((query.pipeline(layout, balance),), micros)
    strategies: tuple[Strategy, ...] = (Data(only),) if only > 1 else ()
    return Plan(strategies, micros // only)


REPLICABLE_SCHEDULES = ("one_f_one_b", "gpipe", "pipedream", "pipedream_2bw")
"""Those in which stages may have replicas."""
SYNCHRONOUS_SCHEDULES = ("one_f_one_b",)
DEFAULT_SCHEDULES = (*SYNCHRONOUS_SCHEDULES, "pipedream")
MICROBATCHES_PER_RANK = 4
"""So many at most under a flush, and at least half of one."""
MAX_MICROBATCH_COUNTS = 10
"""So many numbers of microbatches are tried."""
MAX_PLANS_PER_SCHEDULE = 4
"""Of each order those that promise most are worth a simulation, so many of them."""


def find_pipeline_plans(  # noqa: PLR0913 - what is planned for, and how long
    num_ranks: int,
    model: ModelSpec,
    cluster: Cluster,
    batch_size: int,
    schedules: Sequence[str] = DEFAULT_SCHEDULES,
    *,
    profile: ModelProfile | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[Plan, ...]:
    """Return pipelines with the cuts and replicas that promise most by the estimate, a few for each order.

    Args:
        num_ranks: ranks there are, all of which get work.
        model: its blocks are what is cut.
        cluster: where it runs.
        batch_size: samples of a global batch, which the microbatches divide.
        orders: of the pipelines.
        timing: of the model's pieces, by whose seconds it is then cut; None where their work is only counted.
        limit: when to end; what is found by then is returned.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> [str(plan) for plan in staged_plans(1, chain(4), Cluster(), 8)]
        []
    """
    if num_ranks < 2 or model.num_blocks < 2:
        return ()
    plans: dict[Plan, None] = {}
    profile = None if profile is None else profile.match_to(model)
    for order in schedules:
        hopes: dict[Plan, LayoutEstimate] = {}
        for samples in (
            _microbatch_sizes(num_ranks, batch_size)
            if order not in ASYNC_SCHEDULES
            else [max(1, batch_size // num_ranks)]
        ):
            if deadline.is_past:
                break
            hopes |= _estimate_plans(num_ranks, model, cluster, _ScheduleSpec(order, batch_size, samples), profile)
        plans |= dict.fromkeys(sorted(hopes, key=hopes.__getitem__)[:MAX_PLANS_PER_SCHEDULE])
    return tuple(plans)


def _microbatch_sizes(num_ranks: int, batch_size: int) -> list[int]:
    """Return for some numbers of microbatches, most of them divisible, the samples of each."""
    numbers = range(max(2, num_ranks // 2), MICROBATCHES_PER_RANK * num_ranks + 1)
    found = [batch_size // count for count in numbers if batch_size % count == 0]
    return found[:: -(-len(found) // MAX_MICROBATCH_COUNTS)] if found else []


@dataclass(frozen=True, slots=True)
class _ScheduleSpec:
    """One way to take up microbatches: the order, the samples of a global batch, and those of a microbatch."""

    name: str
    batch_size: int
    samples: int

    @property
    def num_microbatches(self) -> int:
        """How many replicas have to share; in a stream, where each is a batch of its own, what divides the batch."""
        return self.batch_size if self.name in ASYNC_SCHEDULES else self.batch_size // self.samples


def _estimate_plans(
    num_ranks: int, model: ModelSpec, cluster: Cluster, schedule: _ScheduleSpec, profile: ModelProfile | None
) -> dict[Plan, LayoutEstimate]:
    """Return plans with what the estimate says of each, for a sample."""
    states = prefix_cuts(graph_from_model(model, cluster, samples=schedule.samples, profile=profile))
    wanted = PipelineQuery(states, cluster, num_ranks, schedule.name, schedule.num_microbatches, min_stages=2)
    estimates = LayoutEstimator(wanted)
    found: dict[Plan, LayoutEstimate] = {}
    settled = improve_layouts(estimates, initial_layouts(wanted))
    if schedule.name in ASYNC_SCHEDULES and settled:  # of which the estimate knows less
        near = sorted(wanted.neighbours(settled[0]), key=lambda one: (estimates.estimate(one), one))
        settled = list(dict.fromkeys((*settled, *near[:MAX_PLANS_PER_SCHEDULE])))
    for staging in settled:
        if _keeps_units_together(model, staging, is_async=schedule.name in ASYNC_SCHEDULES):
            missing, seconds = estimates.estimate(staging)
            pipeline = wanted.pipeline(staging, staging.layers_per_stage(states))
            plan = plan_for_layout(
                wanted, staging, _explicit_balance(pipeline, model) if profile is None else pipeline.balance
            )
            found[plan] = LayoutEstimate(missing, seconds / schedule.samples)
    return found


def _explicit_balance(pipeline: Pipeline, model: ModelSpec) -> tuple[int, ...]:
    """Return the balance of a pipeline, empty where it would cut the model so by itself."""
    bare = replace(pipeline, balance=())
    is_same = bare.split_model(model).blocks == model.blocks and bare.blocks_per_chunk(model) == pipeline.balance
    return () if is_same else pipeline.balance


def _keeps_units_together(model: ModelSpec, layout: StageLayout, *, is_async: bool) -> bool:
    """Return whether no weights lie in two stages, which those of a stream may not share."""
    stops = layout.cuts[1:]
    return not is_async or all(
        len({next(at for at, stop in enumerate(stops) if block < stop) for block in unit}) == 1 for unit in model.units
    )


@dataclass(frozen=True, slots=True)
class GraphRanking:
    """The plans for a profile.

    Args:
        ranking: the plans, whose balances count layers of the profile.
        profiles: for each pipeline the layers in an order in which its stages are runs.
    """

    ranking: PlanRanking
    profiles: dict[Plan, LayerGraph]

    def describe(self) -> Iterator[str]:
        """Yield what each stage of the best pipeline runs, a line each."""
        best = next((one.plan for one in self.ranking.predictions if one.plan in self.profiles), None)
        pipeline = best.strategies[0] if best is not None else None
        if best is None or not isinstance(pipeline, Pipeline):
            return
        yield f"{best} is"
        stops = list(accumulate(pipeline.balance, initial=0))
        firsts = list(accumulate(pipeline.stage_ranks, initial=0))
        for stage, (start, stop) in enumerate(pairwise(stops)):
            run = self.profiles[best].nodes[start:stop]
            ranks = (
                f"{firsts[stage]}-{firsts[stage + 1] - 1}" if pipeline.stage_ranks[stage] > 1 else f"{firsts[stage]}"
            )
            yield (
                f"  stage {stage} on rank {ranks}: {run[0].name} {run[0].description} to {run[-1].name} {run[-1].description}, "
                f"{format_seconds(sum(layer.seconds for layer in run))} for a minibatch"
            )


def rank_graph(graph: LayerGraph, cluster: Cluster, num_ranks: int, batch_size: int) -> GraphRanking:
    """Return the pipelines of every order whose simulated step is least, the best without replicas, and data and zero.

    Args:
        profile: what is planned for; layers that only load data are left out.
        cluster: where it runs.
        num_ranks: how many ranks it has.
        batch_size: minibatches of the profile in a step; in a pipeline each is a microbatch.

    Raises:
        PlanError: the profile cannot be cut, or no plan can share the minibatches.
    """
    states = find_cuts(graph.without_inputs())
    profiles: dict[Plan, LayerGraph] = {}
    predictions: list[Prediction] = []
    for order in REPLICABLE_SCHEDULES:
        wanted = PipelineQuery(states, cluster, num_ranks, order, batch_size, min_stages=2)
        for staging in _best_layouts(wanted):
            plan = plan_for_layout(wanted, staging, staging.layers_per_stage(states))
            short = plan_for_layout(wanted, staging, (1,) * staging.num_stages)
            found = predict_plan(
                replace(short, num_microbatches=batch_size),
                stage_model(wanted, staging),
                cluster,
                batch_size=batch_size,
            )
            plan = replace(plan, num_microbatches=batch_size)
            profiles[plan] = linearize(states, staging.cuts[1:])
            predictions.append(replace(found, plan=plan))
    only = StageLayout((0, states.num_cuts - 1), (num_ranks,))
    copies = [Plan((Data(num_ranks),)), *(Plan((Zero(num_ranks, level=level),)) for level in (1, 2, 3))]
    model = stage_model(wanted, only)
    rest = rank_plans(copies if num_ranks > 1 else [Plan()], model, cluster, batch_size=batch_size)
    return GraphRanking(merge_rankings(PlanRanking(tuple(predictions), ()), rest), profiles)


def _best_layouts(query: PipelineQuery) -> Iterator[StageLayout]:
    """Yield the best pipeline, and the best of the starts in which no stage has replicas."""
    if query.num_ranks < 2 or query.cuts.num_cuts < 3:
        return
    best = find_pipeline(query).layout
    straight = [one for one in initial_layouts(query) if one.num_stages == query.num_ranks and query.is_allowed(one)]
    yield from dict.fromkeys((best, *straight[:1]))
