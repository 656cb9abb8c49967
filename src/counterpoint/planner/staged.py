"""Pipelines with cuts and replicas from the dynamic program, as plans among others: for models and for profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from counterpoint.drawing.scale import format_seconds
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.plan import Plan
from counterpoint.planner.estimate import Estimate, Estimates
from counterpoint.planner.graphs import linear, prefixes, profile_of
from counterpoint.planner.limit import ENDLESS, Limit
from counterpoint.planner.pipelines import find_pipeline, partitions, plan_of, settle_all, stage_model
from counterpoint.planner.profile import Profile
from counterpoint.planner.rank import Prediction, Ranking, merged, predict, rank_plans
from counterpoint.planner.staging import Staging, Wanted
from counterpoint.planner.states import find_states
from counterpoint.strategies.data import Data
from counterpoint.strategies.orders.pipedream import STREAMS
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.zero import Zero
from counterpoint.world.cluster import Cluster

ORDERS = ("one_f_one_b", "gpipe", "pipedream", "pipedream_2bw")
"""Those in which stages may have replicas."""
EXACT_ORDERS = ("one_f_one_b",)
TRIED_ORDERS = (*EXACT_ORDERS, "pipedream")
MICROBATCHES_PER_RANK = 4
"""So many at most under a flush, and at least half of one."""
MOST_NUMBERS = 10
"""So many numbers of microbatches are tried."""
MOST_PLANS = 4
"""Of each order those that promise most are worth a simulation, so many of them."""


def staged_plans(  # noqa: PLR0913 - what is planned for, and how long
    num_ranks: int,
    model: ModelSpec,
    cluster: Cluster,
    batch_size: int,
    orders: Sequence[str] = TRIED_ORDERS,
    *,
    timing: Timing | None = None,
    limit: Limit = ENDLESS,
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
    timing = None if timing is None else timing.fitted(model)
    for order in orders:
        hopes: dict[Plan, Estimate] = {}
        for samples in _samples(num_ranks, batch_size) if order not in STREAMS else [max(1, batch_size // num_ranks)]:
            if limit.is_over:
                break
            hopes |= _hopes(num_ranks, model, cluster, _Order(order, batch_size, samples), timing)
        plans |= dict.fromkeys(sorted(hopes, key=hopes.__getitem__)[:MOST_PLANS])
    return tuple(plans)


def _samples(num_ranks: int, batch_size: int) -> list[int]:
    """Return for some numbers of microbatches, most of them divisible, the samples of each."""
    numbers = range(max(2, num_ranks // 2), MICROBATCHES_PER_RANK * num_ranks + 1)
    found = [batch_size // count for count in numbers if batch_size % count == 0]
    return found[:: -(-len(found) // MOST_NUMBERS)] if found else []


@dataclass(frozen=True, slots=True)
class _Order:
    """One way to take up microbatches: the order, the samples of a global batch, and those of a microbatch."""

    name: str
    batch_size: int
    samples: int

    @property
    def num_microbatches(self) -> int:
        """How many replicas have to share; in a stream, where each is a batch of its own, what divides the batch."""
        return self.batch_size if self.name in STREAMS else self.batch_size // self.samples


def _hopes(
    num_ranks: int, model: ModelSpec, cluster: Cluster, order: _Order, timing: Timing | None
) -> dict[Plan, Estimate]:
    """Return plans with what the estimate says of each, for a sample."""
    states = prefixes(profile_of(model, cluster, samples=order.samples, timing=timing))
    wanted = Wanted(states, cluster, num_ranks, order.name, order.num_microbatches, least_stages=2)
    estimates = Estimates(wanted)
    found: dict[Plan, Estimate] = {}
    settled = settle_all(estimates, partitions(wanted))
    if order.name in STREAMS and settled:  # of which the estimate knows less
        near = sorted(wanted.near(settled[0]), key=lambda one: (estimates.of(one), one))
        settled = list(dict.fromkeys((*settled, *near[:MOST_PLANS])))
    for staging in settled:
        if _is_apart(model, staging, is_stream=order.name in STREAMS):
            missing, seconds = estimates.of(staging)
            pipeline = wanted.pipeline(staging, staging.counts(states))
            plan = plan_of(wanted, staging, _told(pipeline, model) if timing is None else pipeline.balance)
            found[plan] = Estimate(missing, seconds / order.samples)
    return found


def _told(pipeline: Pipeline, model: ModelSpec) -> tuple[int, ...]:
    """Return the balance of a pipeline, empty where it would cut the model so by itself."""
    bare = replace(pipeline, balance=())
    is_same = bare.refine(model).blocks == model.blocks and bare.counts(model) == pipeline.balance
    return () if is_same else pipeline.balance


def _is_apart(model: ModelSpec, staging: Staging, *, is_stream: bool) -> bool:
    """Return whether no weights lie in two stages, which those of a stream may not share."""
    stops = staging.cuts[1:]
    return not is_stream or all(
        len({next(at for at, stop in enumerate(stops) if block < stop) for block in unit}) == 1 for unit in model.units
    )


@dataclass(frozen=True, slots=True)
class GraphRanking:
    """The plans for a profile.

    Args:
        ranking: the plans, whose balances count layers of the profile.
        profiles: for each pipeline the layers in an order in which its stages are runs.
    """

    ranking: Ranking
    profiles: dict[Plan, Profile]

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
            run = self.profiles[best].layers[start:stop]
            ranks = (
                f"{firsts[stage]}-{firsts[stage + 1] - 1}" if pipeline.stage_ranks[stage] > 1 else f"{firsts[stage]}"
            )
            yield (
                f"  stage {stage} on rank {ranks}: {run[0].name} {run[0].text} to {run[-1].name} {run[-1].text}, "
                f"{format_seconds(sum(layer.seconds for layer in run))} for a minibatch"
            )


def rank_graph(profile: Profile, cluster: Cluster, num_ranks: int, batch_size: int) -> GraphRanking:
    """Return the pipelines of every order whose simulated step is least, the best without replicas, and data and zero.

    Args:
        profile: what is planned for; layers that only load data are left out.
        cluster: where it runs.
        num_ranks: how many ranks it has.
        batch_size: minibatches of the profile in a step; in a pipeline each is a microbatch.

    Raises:
        PlanError: the profile cannot be cut, or no plan can share the minibatches.
    """
    states = find_states(profile.without_inputs())
    profiles: dict[Plan, Profile] = {}
    predictions: list[Prediction] = []
    for order in ORDERS:
        wanted = Wanted(states, cluster, num_ranks, order, batch_size, least_stages=2)
        for staging in _best(wanted):
            plan = plan_of(wanted, staging, staging.counts(states))
            short = plan_of(wanted, staging, (1,) * staging.num_stages)
            found = predict(
                replace(short, num_microbatches=batch_size),
                stage_model(wanted, staging),
                cluster,
                batch_size=batch_size,
            )
            plan = replace(plan, num_microbatches=batch_size)
            profiles[plan] = linear(states, staging.cuts[1:])
            predictions.append(replace(found, plan=plan))
    only = Staging((0, states.count - 1), (num_ranks,))
    copies = [Plan((Data(num_ranks),)), *(Plan((Zero(num_ranks, level=level),)) for level in (1, 2, 3))]
    model = stage_model(wanted, only)
    rest = rank_plans(copies if num_ranks > 1 else [Plan()], model, cluster, batch_size=batch_size)
    return GraphRanking(merged(Ranking(tuple(predictions), ()), rest), profiles)


def _best(wanted: Wanted) -> Iterator[Staging]:
    """Yield the best pipeline, and the best of the starts in which no stage has replicas."""
    if wanted.num_ranks < 2 or wanted.states.count < 3:
        return
    best = find_pipeline(wanted).staging
    straight = [one for one in partitions(wanted) if one.num_stages == wanted.num_ranks and wanted.allows(one)]
    yield from dict.fromkeys((best, *straight[:1]))
