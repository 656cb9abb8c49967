"""How much memory a plan takes at least, before anything is compiled: what is too large is not simulated."""

from __future__ import annotations

from math import prod

from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan
from counterpoint.simulator.memory import ADAM_STATES
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.strategies.server import Server
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero


def least_bytes(plan: Plan, model: ModelSpec) -> int:
    """Return bytes that the fullest rank of a plan holds at least: of weights, gradients and states, and on average.

    Args:
        plan: any plan; of strategies that are not known here nothing is counted.
        model: whose parameters they are.

    Example:
        >>> from counterpoint.model.spec import chain
        >>> [
        ...     least_bytes(Plan.parse(text), chain(4, width=16))
        ...     for text in ("data(2)", "pipeline(2)", "zero(2, level=3)")
        ... ]
        [16384, 8192, 6144]
    """
    known = (Data, Zero, Pipeline, Tensor, Server)
    if not all(isinstance(strategy, known) for strategy in plan.strategies):
        return 0
    used = {name for names in model.units.values() for name in names}
    whole = sum(param.num_bytes for param in model.params if param.name in used)
    own = whole / prod(one.degree for one in plan.strategies if isinstance(one, Pipeline | Tensor))
    weights = gradients = 1.0
    states = float(ADAM_STATES)
    for strategy in plan.strategies:
        if isinstance(strategy, Server):
            states = 0.0
        elif isinstance(strategy, Zero):
            states /= strategy.degree
            weights /= strategy.degree if strategy.level == 3 else 1
            gradients = 0.0 if strategy.level > 1 else gradients
        elif isinstance(strategy, Data) and strategy.update == "shared":
            states /= strategy.degree
    return int(own * (weights + gradients + states))
