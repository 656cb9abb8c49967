"""Every plan that fits so many ranks: compositions of up to three strategies, each with its knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.server import Server
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero

MOST_STRATEGIES = 3
ORDERS = ("one_f_one_b", "gpipe")
"""The orders that are always tried; others are where they may win, see :mod:`counterpoint.planner.orders`."""
STREAMS = ("pipedream", "pipedream_2bw")
MICROBATCHES_PER_STAGE = (1, 2, 4)
SERVERS = (1, 2, 4)
SIMPLEST_FIRST: tuple[type[Strategy], ...] = (Data, Zero, Pipeline, Tensor, Server)


def enumerate_plans(num_ranks: int, model: ModelSpec, *, batch_size: int | None = None) -> tuple[Plan, ...]:
    """Return every composition of up to three strategies that needs exactly so many ranks, the simplest first.

    They stand from the inside out: slices of layers, stages, then copies as data, zero of each level, shards inside
    replicas, or workers of a server, which may be groups of replicas. A server that waits is sliced from outside.
    Pipelines are tried with one_f_one_b and gpipe, and with 1, 2 and 4 microbatches per stage; those that never flush
    with as many replicas of each stage as fill the ranks. Stages with replicas in other numbers are found by
    :func:`counterpoint.planner.staged.staged_plans`. Of compositions that differ only in the numbers of the ranks, or
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
        for strategies in _compositions(num_ranks, model.unsliced.num_blocks)
        if len(strategies) <= MOST_STRATEGIES
        for count in _microbatches(strategies)
    )
    fitting = (plan for plan in plans if batch_size is None or batch_size % plan.num_micros == 0)
    return tuple(sorted(fitting, key=_complexity))


def _complexity(plan: Plan) -> tuple[int, tuple[int, ...]]:
    return len(plan.strategies), tuple(SIMPLEST_FIRST.index(type(strategy)) for strategy in plan.strategies)


def _compositions(num_ranks: int, num_blocks: int) -> Iterator[tuple[Strategy, ...]]:
    for slices, stages in product(_divisors(num_ranks), range(1, min(num_ranks, num_blocks) + 1)):
        for inner in _inner(slices, stages):
            for outer in _copies(num_ranks, Plan(inner).num_ranks):
                yield (*inner, *outer)
            if slices == 1:
                yield from ((*inner, *server) for server in _served(num_ranks, Plan(inner).num_ranks))
        yield from ((*_sliced(slices), stream) for stream in _streams(slices, stages, num_ranks))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _sliced(slices: int) -> tuple[Strategy, ...]:
    return (Tensor(slices),) if slices > 1 else ()


def _inner(slices: int, stages: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how one copy of the model may be spread: sliced, staged, both or neither."""
    sliced = _sliced(slices)
    if stages == 1:
        yield sliced
        return
    for order in ORDERS:
        yield (*sliced, Pipeline(stages, order))


def _streams(slices: int, stages: int, num_ranks: int) -> Iterator[Pipeline]:
    """Yield pipelines that never flush, which have all replicas inside; next to slices they have none."""
    copies, rest = divmod(num_ranks, slices * stages)
    if stages == 1 or rest or (slices > 1 and copies > 1):
        return
    for order in STREAMS:
        yield Pipeline(stages, order, (copies,) * stages if copies > 1 else ())


def _copies(num_ranks: int, inner: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how copies of ``inner`` ranks may fill the ranks there are."""
    copies, rest = divmod(num_ranks, inner)
    if rest or not copies:
        return
    if copies == 1:
        yield ()
        return
    yield (Data(copies),)
    yield from ((zero,) for zero in _zeros(copies))
    for shards in _divisors(copies)[1:-1]:
        yield from ((zero, Data(copies // shards)) for zero in _zeros(shards))


def _zeros(degree: int) -> tuple[Zero, ...]:
    return Zero(degree, level=1), Zero(degree, level=2), Zero(degree, level=3)


def _served(num_ranks: int, inner: int) -> Iterator[tuple[Strategy, ...]]:
    """Yield how groups of ``inner`` ranks, their replicas and servers may fill the ranks there are."""
    for slices, servers in product(_divisors(num_ranks), SERVERS):
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
            return sorted({strategy.microbatches(count) for count in wanted})
    return [1]
