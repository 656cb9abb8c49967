"""Find the pipeline with the fastest simulated step: partitions of the dynamic program, improved by local search.

The dynamic program minimizes the time of the slowest stage; it models neither the schedule, nor waiting for messages,
nor distances between stages, nor memory. So its partitions, under several objectives, are starting points; estimates
select the neighbours worth simulating; and what is simulated is the program that would run.

Source:
    Ours; the starting points are those of :mod:`counterpoint.planner.pipeline.partition`.
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
from counterpoint.strategies.pipeline.schedules.registry import ASYNC_SCHEDULES, SCHEDULES
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
"""Objectives of the dynamic program whose partitions are starting points."""
MAX_INITIAL = 8
"""Improved starting points that are simulated."""
MAX_NEIGHBOURS = 6
"""Neighbours of the best layout that are simulated in each iteration."""
MIN_SIMULATED = 12
"""Simulated layouts below which the search leaves a local optimum, so that it is exhaustive for small models."""
MAX_SIMULATED = 60
"""Simulated layouts in total."""
MAX_CHANGES = 100
"""Iterations of the local search from one starting point."""


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """Simulation of a layout.

    Args:
        layout: the layout.
        step_s: seconds of a step per microbatch.
        memory_bytes: peak memory of the rank that needs most.
        missing_bytes: by how much that exceeds its memory.
    """

    layout: StageLayout
    step_s: float
    memory_bytes: int
    missing_bytes: int

    @property
    def sort_key(self) -> tuple[int, float, StageLayout]:
        """Better layouts come first: those that fit, then those that are fast."""
        return self.missing_bytes, self.step_s, self.layout


def find_pipeline(query: PipelineQuery, starts: Iterable[StageLayout] = ()) -> SimulatedPipeline:
    """Return the layout with the fastest step of all that were simulated; independent of the machine.

    Args:
        query: the pipeline to be found.
        starts: layouts that are simulated in addition to those of the dynamic program.

    Raises:
        PlanError: no numbers of replicas can share the microbatches.
    """
    estimator = LayoutEstimator(query)
    initial = [*starts, *initial_layouts(query)]
    improved = improve_layouts(estimator, initial)
    allowed = (layout for layout in initial if query.is_allowed(layout))
    simulated = {
        layout: simulate_layout(query, layout) for layout in dict.fromkeys((*allowed, *improved[:MAX_INITIAL]))
    }
    if not simulated:
        raise PlanError(
            f"no numbers of replicas on {query.num_ranks} ranks can share {query.num_microbatches} "
            f"microbatches; give a multiple of {query.num_ranks}"
        )
    best = current = min(simulated.values(), key=lambda layout: layout.sort_key)
    visited = set[StageLayout]()
    while len(simulated) < MAX_SIMULATED:
        visited.add(current.layout)
        neighbours = (layout for layout in query.neighbours(current.layout) if layout not in simulated)
        promising = [
            layout for layout in neighbours if best.missing_bytes or estimator.lower_bound_s(layout) < best.step_s
        ]
        candidates = sorted(promising, key=lambda layout: (estimator.estimate(layout), layout))[:MAX_NEIGHBOURS]
        simulated |= {layout: simulate_layout(query, layout) for layout in candidates}
        current = min((simulated[layout] for layout in candidates), key=lambda layout: layout.sort_key, default=best)
        if current.sort_key >= best.sort_key:  # a local optimum
            others = [result for layout, result in simulated.items() if layout not in visited]
            if len(simulated) >= MIN_SIMULATED or not others:
                break
            current = min(others, key=lambda layout: layout.sort_key)
        best = min(best, current, key=lambda layout: layout.sort_key)
    return best


def improve_layouts(estimator: LayoutEstimator, starts: Iterable[StageLayout]) -> list[StageLayout]:
    """Return the results of local searches from starting points, the best first; all of them are allowed."""
    improved = {local_search(estimator, layout) for layout in starts}
    allowed = (layout for layout in improved if estimator.query.is_allowed(layout))
    return sorted(allowed, key=lambda layout: (estimator.estimate(layout), layout))


def local_search(estimator: LayoutEstimator, layout: StageLayout) -> StageLayout:
    """Return the local optimum of the estimate that is reached from a layout.

    A layout that is not allowed is first replaced by its best allowed neighbour, if it has one.
    """
    query, best = estimator.query, layout
    if not query.is_allowed(best):
        best = min(
            query.neighbours(best), key=lambda neighbour: (estimator.estimate(neighbour), neighbour), default=best
        )
    for _ in range(MAX_CHANGES):
        better = min(
            query.neighbours(best), key=lambda neighbour: (estimator.estimate(neighbour), neighbour), default=best
        )
        if estimator.estimate(better) >= estimator.estimate(best):
            break
        best = better
    return best


def initial_layouts(query: PipelineQuery) -> Iterator[StageLayout]:
    """Yield the partitions of the dynamic program under several objectives, by levels and flat, and a single stage."""
    cuts, cluster = _with_updates(query), query.cluster
    flat = {level.link.bytes_per_s for level in cluster.levels} or {cluster.link.bytes_per_s}
    networks = [[PartitionLevel(query.num_ranks, speed)] for speed in sorted(flat)]
    if prod(level.count for level in cluster.levels) == query.num_ranks and len(cluster.levels) > 1:
        networks.insert(0, [PartitionLevel(level.count, level.link.bytes_per_s) for level in cluster.levels])
    for network, objective in product(networks, OBJECTIVES):
        partition = find_partition(cuts, network, objective)
        if partition.slowest_s < inf:
            yield StageLayout.from_partition(partition)
    yield StageLayout((0, cuts.num_cuts - 1), (query.num_ranks,))


def _with_updates(query: PipelineQuery) -> GraphCuts:
    """Return the cuts with the time of updates added to that of backwards."""
    graph, device = query.cuts.graph, query.cluster.device
    nodes = tuple(
        replace(node, backward_s=node.backward_s + update_s(node.weight_bytes, device)) for node in graph.nodes
    )
    return GraphCuts(LayerGraph(nodes, graph.edges), query.cuts.layer_sets)


def simulate_layout(query: PipelineQuery, layout: StageLayout) -> SimulatedPipeline:
    """Return the simulation of a layout with one block per stage."""
    model = stage_model(query, layout)
    plan = plan_for_layout(query, layout, (1,) * layout.num_stages)
    compiled = compile(plan, model, verified=False)
    costs = analytic_costs(compiled.model, query.cluster, message_size_fn(compiled.model, 1))
    (variant,) = compiled.step_variants
    (breakdown,) = simulate_breakdown(variant, [costs], query.cluster)
    memory_bytes = max(peak_memory_bytes(variant.full_program, storage_sizes(compiled.model, 1)))
    missing_bytes = max(0, memory_bytes - query.cluster.device.usable_bytes)
    return SimulatedPipeline(layout, breakdown.step_s / plan.global_num_microbatches, memory_bytes, missing_bytes)


def stage_model(query: PipelineQuery, layout: StageLayout) -> ModelSpec:
    """Return the model with one block per stage."""
    model = model_from_graph(linearize(query.cuts, layout.cuts[1:]), query.cluster)
    return merge_blocks(model, layout.layers_per_stage(query.cuts))


def plan_for_layout(query: PipelineQuery, layout: StageLayout, balance: tuple[int, ...]) -> Plan:
    """Return the plan of a layout, with the number of blocks of each stage; a single stage is data parallelism."""
    num_microbatches, num_replicas = query.step_microbatches(layout), layout.replicas[0]
    if layout.num_stages > 1:
        return Plan((query.pipeline(layout, balance),), num_microbatches)
    strategies: tuple[Strategy, ...] = (Data(num_replicas),) if num_replicas > 1 else ()
    return Plan(strategies, num_microbatches // num_replicas)


DEFAULT_SYNCHRONOUS_SCHEDULES = ("one_f_one_b",)
"""Schedules with a flush for which partitions and replicas are searched by default."""
DEFAULT_SCHEDULES = (*DEFAULT_SYNCHRONOUS_SCHEDULES, "pipedream")
MICROBATCHES_PER_RANK = 4
"""Upper limit of synchronous pipelines; the lower limit is half a microbatch per rank."""
MAX_MICROBATCH_COUNTS = 10
"""Numbers of microbatches that are tried."""
MAX_PLANS_PER_SCHEDULE = 4
"""Maximum number of plans of each schedule that are simulated, the most promising first."""


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
    """Return the most promising pipelines with partitions and replicas by estimate, a few per schedule.

    Args:
        num_ranks: all of them get work.
        model: its blocks are distributed to stages.
        cluster: where it runs.
        batch_size: samples of a global batch, which the microbatches divide.
        schedules: of the pipelines.
        profile: measured times of the model's layers, by which it is partitioned; None to use operation counts.
        deadline: when to end; what was found by then is returned.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> [str(plan) for plan in find_pipeline_plans(1, linear_chain(4), Cluster(), 8)]
        []
    """
    if num_ranks < 2 or model.num_blocks < 2:
        return ()
    plans: dict[Plan, None] = {}
    profile = None if profile is None else profile.match_to(model)
    for schedule in schedules:
        estimates: dict[Plan, LayoutEstimate] = {}
        for samples in (
            _microbatch_sizes(num_ranks, batch_size)
            if schedule not in ASYNC_SCHEDULES
            else [max(1, batch_size // num_ranks)]
        ):
            if deadline.is_past:
                break
            estimates |= _estimate_plans(
                num_ranks, model, cluster, _ScheduleSpec(schedule, batch_size, samples), profile
            )
        plans |= dict.fromkeys(sorted(estimates, key=estimates.__getitem__)[:MAX_PLANS_PER_SCHEDULE])
    return tuple(plans)


def _microbatch_sizes(num_ranks: int, batch_size: int) -> list[int]:
    """Return the samples of a microbatch for some numbers of microbatches."""
    counts = range(max(2, num_ranks // 2), MICROBATCHES_PER_RANK * num_ranks + 1)
    sizes = [batch_size // count for count in counts if batch_size % count == 0]
    return sizes[:: -(-len(sizes) // MAX_MICROBATCH_COUNTS)] if sizes else []


@dataclass(frozen=True, slots=True)
class _ScheduleSpec:
    """A schedule with the samples of a global batch and of a microbatch."""

    name: str
    batch_size: int
    samples: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches that replicas share; of an asynchronous pipeline, where each is a batch, the samples."""
        return self.batch_size if self.name in ASYNC_SCHEDULES else self.batch_size // self.samples


def _estimate_plans(
    num_ranks: int, model: ModelSpec, cluster: Cluster, schedule: _ScheduleSpec, profile: ModelProfile | None
) -> dict[Plan, LayoutEstimate]:
    """Return plans with their estimates per sample."""
    cuts = prefix_cuts(graph_from_model(model, cluster, samples=schedule.samples, profile=profile))
    query = PipelineQuery(cuts, cluster, num_ranks, schedule.name, schedule.num_microbatches, min_stages=2)
    estimator = LayoutEstimator(query)
    estimates_by_plan: dict[Plan, LayoutEstimate] = {}
    layouts = improve_layouts(estimator, initial_layouts(query))
    if schedule.name in ASYNC_SCHEDULES and layouts:  # whose estimates are less accurate
        neighbours = sorted(
            query.neighbours(layouts[0]), key=lambda neighbour: (estimator.estimate(neighbour), neighbour)
        )
        layouts = list(dict.fromkeys((*layouts, *neighbours[:MAX_PLANS_PER_SCHEDULE])))
    for layout in layouts:
        if _keeps_units_together(model, layout, is_async=schedule.name in ASYNC_SCHEDULES):
            missing_bytes, seconds = estimator.estimate(layout)
            pipeline = query.pipeline(layout, layout.layers_per_stage(cuts))
            plan = plan_for_layout(
                query, layout, _explicit_balance(pipeline, model) if profile is None else pipeline.balance
            )
            estimates_by_plan[plan] = LayoutEstimate(missing_bytes, seconds / schedule.samples)
    return estimates_by_plan


def _explicit_balance(pipeline: Pipeline, model: ModelSpec) -> tuple[int, ...]:
    """Return the balance of a pipeline, empty if it equals the default partition."""
    default = replace(pipeline, balance=())
    is_same = default.split_model(model).blocks == model.blocks and default.blocks_per_chunk(model) == pipeline.balance
    return () if is_same else pipeline.balance


def _keeps_units_together(model: ModelSpec, layout: StageLayout, *, is_async: bool) -> bool:
    """Return whether no unit belongs to two stages, which asynchronous pipelines do not support."""
    stops = layout.cuts[1:]
    return not is_async or all(
        len({next(stage for stage, stop in enumerate(stops) if block < stop) for block in unit}) == 1
        for unit in model.units
    )


@dataclass(frozen=True, slots=True)
class GraphRanking:
    """The plans for a layer graph.

    Args:
        ranking: the plans, whose balances count layers of the graph.
        graphs: for each pipeline the graph in an order in which its stages are contiguous.
    """

    ranking: PlanRanking
    graphs: dict[Plan, LayerGraph]

    def describe(self) -> Iterator[str]:
        """Yield a line for each stage of the best pipeline."""
        best = next(
            (prediction.plan for prediction in self.ranking.predictions if prediction.plan in self.graphs), None
        )
        pipeline = best.strategies[0] if best is not None else None
        if best is None or not isinstance(pipeline, Pipeline):
            return
        yield f"{best} is"
        stops = list(accumulate(pipeline.balance, initial=0))
        first_ranks = list(accumulate(pipeline.stage_ranks, initial=0))
        for stage, (start, stop) in enumerate(pairwise(stops)):
            stage_layers = self.graphs[best].nodes[start:stop]
            ranks = (
                f"{first_ranks[stage]}-{first_ranks[stage + 1] - 1}"
                if pipeline.stage_ranks[stage] > 1
                else f"{first_ranks[stage]}"
            )
            first, last = stage_layers[0], stage_layers[-1]
            yield (
                f"  stage {stage} on rank {ranks}: {first.name} {first.description} to {last.name} {last.description}, "
                f"{format_seconds(sum(layer.seconds for layer in stage_layers))} for a minibatch"
            )


def rank_graph(graph: LayerGraph, cluster: Cluster, num_ranks: int, batch_size: int) -> GraphRanking:
    """Return the fastest pipeline of every schedule, the best without replicas, data parallelism and ZeRO, ranked.

    Args:
        graph: layers with times; nodes that only load data are skipped.
        cluster: where it runs.
        num_ranks: number of ranks.
        batch_size: minibatches of the graph in a step; in a pipeline each is a microbatch.

    Raises:
        PlanError: the graph cannot be cut, or no plan can share the minibatches.
    """
    cuts = find_cuts(graph.without_inputs())
    graphs: dict[Plan, LayerGraph] = {}
    predictions: list[Prediction] = []
    synchronous = [schedule.name for schedule in SCHEDULES if schedule.is_enumerated]
    for schedule in (*synchronous, *ASYNC_SCHEDULES):
        query = PipelineQuery(cuts, cluster, num_ranks, schedule, batch_size, min_stages=2)
        for layout in _best_layouts(query):
            plan = plan_for_layout(query, layout, layout.layers_per_stage(cuts))
            stage_plan = plan_for_layout(query, layout, (1,) * layout.num_stages)
            prediction = predict_plan(
                replace(stage_plan, num_microbatches=batch_size),
                stage_model(query, layout),
                cluster,
                batch_size=batch_size,
            )
            plan = replace(plan, num_microbatches=batch_size)
            graphs[plan] = linearize(cuts, layout.cuts[1:])
            predictions.append(replace(prediction, plan=plan))
    single_stage = StageLayout((0, cuts.num_cuts - 1), (num_ranks,))
    replicated = [Plan((Data(num_ranks),)), *(Plan((Zero(num_ranks, level=level),)) for level in (1, 2, 3))]
    model = stage_model(query, single_stage)
    other_ranking = rank_plans(replicated if num_ranks > 1 else [Plan()], model, cluster, batch_size=batch_size)
    return GraphRanking(merge_rankings(PlanRanking(tuple(predictions), ()), other_ranking), graphs)


def _best_layouts(query: PipelineQuery) -> Iterator[StageLayout]:
    """Yield the best pipeline, and the best starting point in which no stage has replicas."""
    if query.num_ranks < 2 or query.cuts.num_cuts < 3:
        return
    best = find_pipeline(query).layout
    unreplicated = [
        layout for layout in initial_layouts(query) if layout.num_stages == query.num_ranks and query.is_allowed(layout)
    ]
    yield from dict.fromkeys((best, *unreplicated[:1]))
