"""Every plan that fits so many ranks: compositions of up to three strategies, each with its knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero

MAX_STRATEGIES = 3
SCHEDULES = ("one_f_one_b", "gpipe")
"""The orders that are always tried; others are where they may win, see :mod:`counterpoint.planner.ranking`."""
ASYNC_SCHEDULES = ("pipedream", "pipedream_2bw")
MICROBATCHES_PER_STAGE = (1, 2, 4)
SERVER_COUNTS = (1, 2, 4)
SIMPLEST_FIRST: tuple[type[Strategy], ...] = (Data, Zero, Pipeline, Tensor, Server)


def enumerate_plans(num_ranks: int, model: ModelSpec, *, batch_size: int | None = None) -> tuple[Plan, ...]:
    """Return every composition of up to three strategies that needs exactly so many ranks, the simplest first.

    They stand from the inside out: slices of layers, stages, then copies as data, zero of each level, shards inside
    replicas, or workers of a server, which may be groups of replicas. A server that waits is sliced from outside.
    Pipelines are tried with one_f_one_b and gpipe, and with 1, 2 and 4 microbatches per stage; those that never flush
    with as many replicas of each stage as fill the ranks. Stages with replicas in other numbers are found by
    :func:`counterpoint.planner.pipeline.candidates.find_pipeline_plans`. Of compositions that differ only in the numbers of the ranks, or
    in that one of them sends more, one is returned. Whether a model can be sliced is found out when a plan is compiled.

    Args:
        num_ranks: ranks there are.
        model: its number of blocks bounds the number of stages.
        batch_size: samples of a global batch, which every plan's microbatches must divide; None for any.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> [str(plan) for plan in enumerate_plans(2, chain(1))][:4]
        ['data(2)', 'zero(2, level=1)', 'zero(2, level=2)', 'zero(2, level=3)']
    """
    plans = dict.fromkeys(
        Plan(strategies, count)
        for strategies in _compositions(num_ranks, model.without_tp.num_blocks)
        if len(strategies) <= MAX_STRATEGIES
        for count in _microbatches(strategies)
    )
    fitting = (plan for plan in plans if batch_size is None or batch_size % plan.global_num_microbatches == 0)
    return tuple(sorted(fitting, key=_complexity))


def _complexity(plan: Plan) -> tuple[int, tuple[int, ...]]:
    return len(plan.strategies), tuple(SIMPLEST_FIRST.index(type(strategy)) for strategy in plan.strategies)


def _compositions(num_ranks: int, num_blocks: int) -> Iterator[tuple[Strategy, ...]]:
    for slices, stages in product(_divisors(num_ranks), range(1, min(num_ranks, num_blocks) + 1)):
        for inner in _model_parallel(slices, stages):
            for outer in _replica_strategies(num_ranks, Plan(inner).num_ranks):
                yield (*inner, *outer)
            if slices == 1:
                yield from ((*inner, *server) for server in _server_strategies(num_ranks, Plan(inner).num_ranks))
        yield from ((*_tensor_parallel(slices), stream) for stream in _async_pipelines(slices, stages, num_ranks))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _tensor_parallel(slices: int) -> tuple[Strategy, ...]:
    return (Tensor(slices),) if slices > 1 else ()


def _model_parallel(slices: int, stages: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how one copy of the model may be spread: sliced, staged, both or neither."""
    sliced = _tensor_parallel(slices)
    if stages == 1:
        yield sliced
        return
    for order in SCHEDULES:
        yield (*sliced, Pipeline(stages, order))


def _async_pipelines(slices: int, stages: int, num_ranks: int) -> Iterator[Pipeline]:
    """Yield pipelines that never flush, which have all replicas inside; next to slices they have none."""
    copies, rest = divmod(num_ranks, slices * stages)
    if stages == 1 or rest or (slices > 1 and copies > 1):
        return
    for order in ASYNC_SCHEDULES:
        yield Pipeline(stages, order, (copies,) * stages if copies > 1 else ())


def _replica_strategies(num_ranks: int, inner: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how copies of ``inner`` ranks may fill the ranks there are."""
    copies, rest = divmod(num_ranks, inner)
    if rest or not copies:
        return
    if copies == 1:
        yield ()
        return
    yield (Data(copies),)
    yield from ((zero,) for zero in _zero_levels(copies))
    for shards in _divisors(copies)[1:-1]:
        yield from ((zero, Data(copies // shards)) for zero in _zero_levels(shards))


def _zero_levels(degree: int) -> tuple[Zero, ...]:
    return Zero(degree, level=1), Zero(degree, level=2), Zero(degree, level=3)


def _server_strategies(num_ranks: int, inner: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how groups of ``inner`` ranks, their replicas and servers may fill the ranks there are."""
    for slices, servers in product(_divisors(num_ranks), SERVER_COUNTS):
        workers, rest = divmod(num_ranks // slices - servers, inner)
        if rest or workers < max(2, servers):
            continue
        for replicas in _divisors(workers)[:-1]:
            group: tuple[Strategy, ...] = (Data(replicas),) if replicas > 1 else ()
            if slices > 1:
                yield (*group, Server(workers // replicas, servers), Tensor(slices))
            else:
                yield (*group, Server(workers // replicas, servers))
                yield (*group, Server(workers // replicas, servers, "asp"))


def _microbatches(strategies: Sequence[Strategy]) -> list[int]:
    """Return the numbers of microbatches of the innermost program that are worth a try."""
    for strategy in strategies:
        if isinstance(strategy, Pipeline):
            wanted = (times * strategy.degree for times in MICROBATCHES_PER_STAGE)
            return sorted({strategy.usable_microbatches(count) for count in wanted})
    return [1]
