"""Enumerate plans for a number of ranks: compositions of up to three strategies with their options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.registry import ASYNC_SCHEDULES, SCHEDULES
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero

MAX_STRATEGIES = 3
MICROBATCHES_PER_STAGE = (1, 2, 4)
SERVER_COUNTS = (1, 2, 4)
SIMPLEST_FIRST: tuple[type[Strategy], ...] = (Data, Zero, Pipeline, Tensor, Server)


def enumerate_plans(num_ranks: int, model: ModelSpec, *, batch_size: int | None = None) -> tuple[Plan, ...]:
    """Return every composition of up to three strategies that needs exactly ``num_ranks`` ranks, the simplest first.

    From the inside out: tensor parallelism, pipeline stages, then replicas as data parallelism, ZeRO of each level
    (level 3 also with ``reshard_after_forward=off``, where ranks run several blocks or gather casts), ZeRO shards
    inside replicas, or workers of a parameter server, which may be groups of replicas. A synchronous server may have
    tensor parallelism outside. Pipelines are enumerated with one_f_one_b and gpipe, and with 1, 2 and 4 microbatches
    per stage; asynchronous ones with as many replicas of each stage as fill the ranks. Other numbers of replicas per
    stage are found by :func:`counterpoint.planner.pipeline.candidates.find_pipeline_plans`. Of compositions that differ
    only in the numbering of ranks, or of which one sends more, one is returned. Whether a model supports tensor
    parallelism is found out when a plan is compiled.

    Args:
        num_ranks: number of ranks.
        model: its number of blocks bounds the number of stages.
        batch_size: samples of a global batch, which every plan's microbatches must divide; None for any.

    Example:
        >>> from counterpoint.model.spec import linear_chain
        >>> [str(plan) for plan in enumerate_plans(2, linear_chain(1))][:4]
        ['data(2)', 'zero(2, level=1)', 'zero(2, level=2)', 'zero(2, level=3)']
    """
    plans = dict.fromkeys(
        Plan(strategies, count)
        for strategies in _compositions(num_ranks, model.without_tp)
        if len(strategies) <= MAX_STRATEGIES
        for count in _microbatches(strategies)
    )
    fitting = (plan for plan in plans if batch_size is None or batch_size % plan.global_num_microbatches == 0)
    return tuple(sorted(fitting, key=_complexity))


def _complexity(plan: Plan) -> tuple[int, tuple[int, ...]]:
    return len(plan.strategies), tuple(SIMPLEST_FIRST.index(type(strategy)) for strategy in plan.strategies)


def _compositions(num_ranks: int, model: ModelSpec) -> Iterator[tuple[Strategy, ...]]:
    num_blocks, gathers_casts = model.num_blocks, any(param.gathers_cast for param in model.params)
    for tp_degree, stages in product(_divisors(num_ranks), range(1, min(num_ranks, num_blocks) + 1)):
        for inner in _model_parallel(tp_degree, stages):
            levels = _zero_levels(gathers_once=gathers_casts or num_blocks > stages)
            for outer in _replica_strategies(num_ranks, Plan(inner).num_ranks, levels):
                yield (*inner, *outer)
            if tp_degree == 1:
                yield from ((*inner, *server) for server in _server_strategies(num_ranks, Plan(inner).num_ranks))
        yield from (
            (*_tensor_parallel(tp_degree), pipeline) for pipeline in _async_pipelines(tp_degree, stages, num_ranks)
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _tensor_parallel(slices: int) -> tuple[Strategy, ...]:
    return (Tensor(slices),) if slices > 1 else ()


def _model_parallel(slices: int, stages: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how one replica of the model may be split: by tensor parallelism, stages, both or neither."""
    tensor = _tensor_parallel(slices)
    if stages == 1:
        yield tensor
        return
    for schedule in SCHEDULES:  # others are tried if they may win, see counterpoint.planner.ranking
        if schedule.is_enumerated:
            yield (*tensor, Pipeline(stages, schedule.name, chunks_per_stage=schedule.min_chunks))


def _async_pipelines(slices: int, stages: int, num_ranks: int) -> Iterator[Pipeline]:
    """Yield asynchronous pipelines, which have all replicas inside; with tensor parallelism they have none."""
    num_replicas, remainder = divmod(num_ranks, slices * stages)
    if stages == 1 or remainder or (slices > 1 and num_replicas > 1):
        return
    for schedule in ASYNC_SCHEDULES:
        yield Pipeline(stages, schedule, (num_replicas,) * stages if num_replicas > 1 else ())


def _replica_strategies(num_ranks: int, inner: int, levels: Sequence[Zero]) -> Iterator[tuple[Strategy, ...]]:
    """Yield how replicas of ``inner`` ranks may fill the ranks."""
    num_replicas, remainder = divmod(num_ranks, inner)
    if remainder or not num_replicas:
        return
    if num_replicas == 1:
        yield ()
        return
    yield (Data(num_replicas),)
    for shards in _divisors(num_replicas)[1:]:
        replicas = (Data(num_replicas // shards),) if shards < num_replicas else ()
        yield from ((replace(level, degree=shards), *replicas) for level in levels)


def _zero_levels(*, gathers_once: bool) -> tuple[Zero, ...]:
    """Return ZeRO of each level, if asked also level 3 that gathers weights once in a step.

    That sends less than level 3, and holds more where a rank runs several blocks. Of a single block it holds as much,
    but level 2 then holds less and sends no more than either, unless casts are gathered.
    """
    once = (Zero(1, level=3, reshard_after_forward="off"),) if gathers_once else ()
    return Zero(1, level=1), Zero(1, level=2), Zero(1, level=3), *once


def _server_strategies(num_ranks: int, inner: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how groups of ``inner`` ranks, their replicas and servers may fill the ranks."""
    for tp_degree, servers in product(_divisors(num_ranks), SERVER_COUNTS):
        workers, remainder = divmod(num_ranks // tp_degree - servers, inner)
        if remainder or workers < max(2, servers):
            continue
        for replicas in _divisors(workers)[:-1]:
            group: tuple[Strategy, ...] = (Data(replicas),) if replicas > 1 else ()
            if tp_degree > 1:
                yield (*group, Server(workers // replicas, servers), Tensor(tp_degree))
            else:
                yield (*group, Server(workers // replicas, servers))
                yield (*group, Server(workers // replicas, servers, "asp"))


def _microbatches(strategies: Sequence[Strategy]) -> list[int]:
    """Return the numbers of microbatches of the innermost program that are worth trying."""
    for strategy in strategies:
        if isinstance(strategy, Pipeline):
            counts = (factor * strategy.degree for factor in MICROBATCHES_PER_STAGE)
            return sorted({strategy.usable_microbatches(count) for count in counts})
    return [1]
