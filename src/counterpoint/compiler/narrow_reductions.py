"""Refuse plans that do not sum gradients in such a way that a narrower dtype can be used for it."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import ApplyPushes, Collective
from counterpoint.program.program import Program
from counterpoint.program.units import freed_weights
from counterpoint.strategies.replica_groups import receives_grad
from counterpoint.strategies.strategy import CostEstimate


def require_shards_of_masters(plan: Plan, program: Program, model: ModelSpec) -> None:
    """Check that ranks keep whole weights, if the model's precision asks for master weights of what they update.

    Args:
        plan: that the program was compiled from.
        program: of one kind of step.
        model: says which parameters have master weights.

    Raises:
        PlanError: the plan frees weights, and keeps shards of them in their own dtype anyway.
    """
    if model.has_masters and freed_weights(one for _, one in program.instructions()):
        raise PlanError(
            f"precision with weights=compute is for whole weights, but under {plan} ranks keep shards of the weights "
            "only, in the parameters' own dtype, and gather them in the dtype that modules compute in; drop weights, "
            "or give zero(..., level=2)"
        )


def require_sums_in_narrow_dtype(plan: Plan, program: Program, cost: CostEstimate, model: ModelSpec) -> None:
    """Check that ranks can sum the gradients of a plan in a narrower dtype, if the model's precision asks for it.

    Args:
        plan: that the program was compiled from.
        program: of one kind of step.
        cost: of the program.
        model: with the bytes of an element where ranks sum its gradient.

    Raises:
        PlanError: some gradients would travel otherwise.
    """
    if program.num_ranks == 1 or not model.casts_reductions:
        return
    what = "precision with reduce=bf16 or reduce=fp16 is for gradients that ranks sum in this dtype"
    instructions = [instruction for _, instruction in program.instructions()]
    reductions = (one for one in instructions if isinstance(one, Collective) and one.tensor.name == "grad")
    codec = next((one.codec for one in reductions if one.codec), "")
    if codec:
        raise PlanError(f"{what}, but {plan} reduces them with {codec}; give one of the two")
    updates_at_once = (
        not cost.staleness and not cost.replicas_may_diverge and len(plan.sync_schedule.step_fractions) == 1
    )
    if not updates_at_once or any(isinstance(instruction, ApplyPushes) for instruction in instructions):
        raise PlanError(
            f"{what}, each in its own step, but under {plan} ranks or servers apply gradients of several steps, or "
            "replicas have weights of their own; use data, zero, pipeline or tensor without staleness and "
            "sync_every, or drop reduce"
        )
    if any(map(receives_grad, instructions)):
        raise PlanError(
            f"{what}, but under {plan} ranks send them to a server or along a tree, in their own dtype; use data "
            "or zero, or drop reduce"
        )
    sparse = {param.name for param in model.params if param.has_sparse_grad}
    reduced = (one.tensor.blocks for one in instructions if isinstance(one, Collective) and one.tensor.name == "grad")
    name = next((name for unit in reduced for name in model.units[unit] if name in sparse), None)
    if name is not None:
        raise PlanError(
            f"{what}, but the gradient of {name} is sparse, and its rows travel in their own dtype; use "
            "nn.Embedding(..., sparse=False), or drop reduce"
        )
