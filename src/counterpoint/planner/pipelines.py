"""The pipeline whose simulated step is least: from the dynamic program's partitions, changed as long as that helps.

The program knows how fast the slowest stage is, and nothing of the order in which stages take up microbatches, of
messages that wait for each other, of how far stages are from each other, and of what a rank can hold. So its
partitions, as several objectives count, are starts; an estimate says which changes of them are worth simulating; and
what is simulated is the program that would run.

Source: ours; the starts are those of :mod:`counterpoint.planner.partition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

from counterpoint.compiler.compile import compile, sizes_in  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.estimate import Estimates
from counterpoint.planner.given import held_bytes
from counterpoint.planner.graphs import joined, linear, model_of
from counterpoint.planner.objectives import Alone, Objective, Published, Released, Streamed
from counterpoint.planner.partition import Level, partition
from counterpoint.planner.profile import Profile
from counterpoint.planner.staging import Staging, Wanted
from counterpoint.planner.states import States
from counterpoint.simulator.costs import model_costs, update_s
from counterpoint.simulator.memory import peak_bytes
from counterpoint.simulator.spent import spend
from counterpoint.strategies.data import Data
from counterpoint.strategies.strategy import Strategy

OBJECTIVES: tuple[Objective, ...] = (Published(), Released(), Released(compression=1.0), Streamed(), Alone(Streamed()))
"""How the dynamic program counts for the partitions that are starts."""
MOST_AT_FIRST = 8
"""Of what the estimate has made of the starts, so many are simulated."""
MOST_AT_ONCE = 6
"""Of the changes of the best one, so many are simulated before it is decided how to go on."""
MOST_SIMULATED = 60
"""In all."""
MOST_CHANGES = 100
"""A start is changed so often at most by the estimate."""


@dataclass(frozen=True, slots=True)
class Played:
    """What the simulator says about a staging.

    Args:
        staging: which one.
        step_s: seconds of a step for each of its microbatches.
        memory_bytes: what the fullest rank holds at most.
        missing_bytes: by how much that is more than it can hold.
    """

    staging: Staging
    step_s: float
    memory_bytes: int
    missing_bytes: int

    @property
    def place(self) -> tuple[int, float, Staging]:
        """By what the better one comes first: that it fits, then that it is fast."""
        return self.missing_bytes, self.step_s, self.staging


def find_pipeline(wanted: Wanted, starts: Iterable[Staging] = ()) -> Played:
    """Return the staging whose simulated step is least of all that were simulated; the same wherever it is computed.

    Args:
        wanted: what is looked for.
        starts: stagings that are simulated beside those of the dynamic program.

    Raises:
        PlanError: no number of replicas can share the microbatches.
    """
    estimates = Estimates(wanted)
    first = [*starts, *partitions(wanted)]
    settled = settle_all(estimates, first)
    allowed = (one for one in first if wanted.allows(one))
    known = {one: play(wanted, one) for one in dict.fromkeys((*allowed, *settled[:MOST_AT_FIRST]))}
    if not known:
        raise PlanError(
            f"no stages over {wanted.num_ranks} ranks have replicas that can share {wanted.num_microbatches} "
            f"microbatches; give a multiple of {wanted.num_ranks}"
        )
    best = min(known.values(), key=lambda one: one.place)
    while len(known) < MOST_SIMULATED:
        near = (one for one in wanted.near(best.staging) if one not in known)
        hopeful = [one for one in near if best.missing_bytes or estimates.floor_s(one) < best.step_s]
        tried = sorted(hopeful, key=lambda one: (estimates.of(one), one))[:MOST_AT_ONCE]
        known |= {one: play(wanted, one) for one in tried}
        better = min((known[one] for one in tried), key=lambda one: one.place, default=best)
        if better.place >= best.place:
            break
        best = better
    return best


def settle_all(estimates: Estimates, starts: Iterable[Staging]) -> list[Staging]:
    """Return what starts become by changes that the estimate likes, the best first; all of them are allowed."""
    settled = {settle(estimates, one) for one in starts}
    allowed = (one for one in settled if estimates.wanted.allows(one))
    return sorted(allowed, key=lambda one: (estimates.of(one), one))


def settle(estimates: Estimates, staging: Staging) -> Staging:
    """Return what a staging becomes when it is changed as long as the estimate is less by it.

    One that is not allowed becomes the best that is allowed near it, if any is.
    """
    wanted, best = estimates.wanted, staging
    if not wanted.allows(best):
        best = min(wanted.near(best), key=lambda one: (estimates.of(one), one), default=best)
    for _ in range(MOST_CHANGES):
        better = min(wanted.near(best), key=lambda one: (estimates.of(one), one), default=best)
        if estimates.of(better) >= estimates.of(best):
            break
        best = better
    return best


def partitions(wanted: Wanted) -> Iterator[Staging]:
    """Yield the partitions of the dynamic program, as several objectives count, by levels and flat, and one stage."""
    states, cluster = _with_updates(wanted), wanted.cluster
    flat = {level.link.bytes_per_s for level in cluster.levels} or {cluster.link.bytes_per_s}
    networks = [[Level(wanted.num_ranks, speed)] for speed in sorted(flat)]
    if prod(level.count for level in cluster.levels) == wanted.num_ranks and len(cluster.levels) > 1:
        networks.insert(0, [Level(level.count, level.link.bytes_per_s) for level in cluster.levels])
    for network, objective in product(networks, OBJECTIVES):
        found = partition(states, network, objective)
        if found.slowest_s < inf:
            yield Staging.of(found)
    yield Staging((0, states.count - 1), (wanted.num_ranks,))


def _with_updates(wanted: Wanted) -> States:
    """Return the states with the updates of weights as a part of the seconds backward."""
    profile, device = wanted.states.profile, wanted.cluster.device
    layers = tuple(
        replace(layer, backward_s=layer.backward_s + update_s(layer.weight_bytes, device)) for layer in profile.layers
    )
    return States(Profile(layers, profile.edges), wanted.states.held)


def play(wanted: Wanted, staging: Staging) -> Played:
    """Return what the simulator says about a staging, with one block for each stage."""
    model = stage_model(wanted, staging)
    plan = plan_of(wanted, staging, (1,) * staging.num_stages)
    compiled = compile(plan, model, proves=False)
    costs = model_costs(compiled.model, wanted.cluster, sizes_in(compiled.model, 1))
    (turn,) = compiled.turns
    (spent,) = spend(turn, [costs], wanted.cluster)
    memory_bytes = max(peak_bytes(turn.playable, held_bytes(compiled.model, 1)))
    missing = max(0, memory_bytes - wanted.cluster.device.memory_bytes)
    return Played(staging, spent.step_s / plan.num_micros, memory_bytes, missing)


def stage_model(wanted: Wanted, staging: Staging) -> ModelSpec:
    """Return the model with one block for each stage."""
    model = model_of(linear(wanted.states, staging.cuts[1:]), wanted.cluster)
    return joined(model, staging.counts(wanted.states))


def plan_of(wanted: Wanted, staging: Staging, balance: tuple[int, ...]) -> Plan:
    """Return the plan of a staging for a model whose blocks are so many for each stage; one stage alone is data."""
    micros, only = wanted.micros(staging), staging.replicas[0]
    if staging.num_stages > 1:
        return Plan((wanted.pipeline(staging, balance),), micros)
    strategies: tuple[Strategy, ...] = (Data(only),) if only > 1 else ()
    return Plan(strategies, micros // only)
