"""From what a user writes to a plan and options."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from counterpoint.errors import PlanError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.plan import Plan
from counterpoint.training.options import Options


def make_options(options: dict[str, Any]) -> Options:
    """Return the options.

    Raises:
        PlanError: a name is none; the message suggests the nearest one.
    """
    known = list(Options.__dataclass_fields__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PlanError(f"there is no option {name!r}; {hint}the options are {', '.join(known)}")
    return Options(**options)


def make_plan(
    strategy: str | Plan, environment: RankEnvironment | None, num_microbatches: int | None, passes: Sequence[str]
) -> Plan:
    """Return the plan for the ranks that were started, or for this process alone."""
    num_ranks = environment.world_size if environment is not None else 1
    if isinstance(strategy, Plan):
        plan = strategy
    else:
        plan = Plan.parse(strategy, num_ranks=num_ranks)
    if num_microbatches is not None:
        plan = replace(plan, num_microbatches=num_microbatches)
    if num_ranks > 1:
        plan.require_ranks(num_ranks)
    return replace(plan, passes=tuple(passes) or plan.passes)
