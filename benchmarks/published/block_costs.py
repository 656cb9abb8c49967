"""Cost model of blocks with known seconds, and the step time with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

from counterpoint.compiler.compile import CompiledPlan, message_size_fn
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param
from counterpoint.program.instruction import Backward, Compute, Forward, Recompute, Update
from counterpoint.simulator.cost_model import CostModel, analytic_costs
from counterpoint.simulator.simulate import simulate_breakdown
from counterpoint.world.cluster import Cluster, Device, Link


@dataclass(frozen=True, slots=True)
class KnownBlockSeconds:
    """Known seconds of every block for one microbatch; other costs are delegated.

    Args:
        forward_s: of each block.
        backward_s: of each block.
        others: cost model of the same model, whose device updates in no time.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    others: CostModel

    def compute_s(self, instruction: Compute | Update, fraction: Fraction) -> float:
        """Return the seconds of a block."""
        match instruction:
            case Forward(block) | Recompute(block):
                return self.forward_s[block]
            case Backward(block):
                return self.backward_s[block] / (2 if instruction.part else 1)
            case Update():
                return self.others.compute_s(instruction, fraction)

    def __getattr__(self, name: str) -> Any:
        """Delegate other costs."""
        return getattr(self.others, name)


def linear_model(names: Sequence[str], weight_bytes: Sequence[float], output_bytes: Sequence[float]) -> ModelSpec:
    """Return a chain of blocks with these bytes of weights, and of outputs per sample."""
    params = tuple(
        Param(f"{name}.weight", (round(size),), item_bytes=1) for name, size in zip(names, weight_bytes, strict=True)
    )
    pieces = (
        LayerSpec(name, (f"{name}.weight",), 1.0, round(size)) for name, size in zip(names, output_bytes, strict=True)
    )
    return ModelSpec(tuple(Block((piece,), index) for index, piece in enumerate(pieces)), params)


def step_s(made: CompiledPlan, forward_s: Sequence[float], backward_s: Sequence[float], bytes_per_s: float) -> float:
    """Return the steady-state step time; every rank has one link of that rate, without latency."""
    cluster = Cluster(Device(memory_bytes_per_s=math.inf), Link(0.0, bytes_per_s))
    others = analytic_costs(made.model, cluster, message_size_fn(made.model, 1))
    costs = cast("CostModel", KnownBlockSeconds(tuple(forward_s), tuple(backward_s), others))
    return simulate_breakdown(made.step_variants[-1], [costs])[0].step_s


def bisect_falling(low: float, high: float, figure: Callable[[float], float], target: float) -> float:
    """Return where a falling function between ``low`` and ``high`` has the target value, to 1/256 of the interval."""
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if figure(middle) > target else (low, middle)
    return (low + high) / 2
