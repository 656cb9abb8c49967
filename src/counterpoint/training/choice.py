"""From what a user writes to a plan and options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from counterpoint.cutting.choose import Need, cut_model
from counterpoint.errors import PlanError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.planner.choose import choose_from
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.runtime.build import call_form
from counterpoint.runtime.optimizers import Face
from counterpoint.strategies.tensor import Tensor
from counterpoint.training.options import Options
from counterpoint.training.team import trainable, with_unused
from counterpoint.world.cluster import Cluster

FEW_SAMPLES = 8
"""A model is traced on so many samples at most, to see what it costs."""

_AUTO = re.compile(r"\s*auto\s*(?:\(\s*([1-9]\d*)\s*\)\s*)?")


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
        plan = Plan.parse(_AUTO.sub(r"data", strategy), num_ranks=num_ranks)
    if num_microbatches is not None:
        plan = replace(plan, num_microbatches=num_microbatches)
    if num_ranks > 1:
        plan.require_ranks(num_ranks)
    return replace(plan, passes=tuple(passes) or plan.passes)
