"""Which replicas are on one host, so that they may have one copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from counterpoint.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.strategies.elastic import Elastic
from counterpoint.strategies.server import Server
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tree import Tree
from counterpoint.strategies.zero import Zero
from counterpoint.world.hosts import neighbours


def with_one_copy(plan: Plan, hosts: Sequence[int]) -> Plan:
    """Return the plan in which replicas of one host share their update, and so can have their weights in common.

    Results stay the same, and so do the bytes that the plan sends. Where replicas are spread over hosts, those of each
    host share, and hosts sum what they have shared out. Nothing changes where other strategies share out already, or
    leave the update to one replica, or where gradients are summed in a code, which is about whole ones, or where
    replicas have weights or gradients of their own: where steps are not all alike.

    Args:
        plan: as it was asked for.
        hosts: the host of every rank.

    Example:
        >>> print(with_one_copy(Plan.parse("data(4)"), (0, 0, 0, 0)))
        data(4, update=shared)
        >>> print(with_one_copy(Plan.parse("data(4)"), (0, 0, 1, 1)))
        data(2, update=shared) * data(2)
    """
    if (
        any(isinstance(strategy, Zero | Server | Elastic | Tree) for strategy in plan.strategies)
        or len(plan.rhythm.turns) > 1
    ):
        return plan
    if any(isinstance(strategy, Data) and strategy.code for strategy in plan.strategies):
        return plan
    stride = 1
    for index, strategy in enumerate(plan.strategies):
        if isinstance(strategy, Data) and strategy.degree > 1:
            among = neighbours(strategy.degree, stride, hosts)
            if among == 1 or strategy.update == "shared":
                return plan
            shared: list[Strategy] = [replace(strategy, degree=among, update="shared")]
            across = [replace(strategy, degree=strategy.degree // among)] if among < strategy.degree else []
            strategies = (*plan.strategies[:index], *shared, *across, *plan.strategies[index + 1 :])
            return without_idle_passes(replace(plan, strategies=strategies))
        stride = strategy.num_ranks(stride)
    return plan


def without_idle_passes(plan: Plan) -> Plan:
    """Return the plan without the overlap of communication, where all of it is an announcement."""
    if all(isinstance(strategy, Data) and strategy.update == "shared" for strategy in plan.strategies):
        return replace(plan, passes=tuple(name for name in plan.passes if name != "overlap"))
    return plan
