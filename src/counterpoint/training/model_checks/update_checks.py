"""Checks before the first step that ranks can update parameters as the user's optimizer would update all of them."""

from __future__ import annotations

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError
from counterpoint.optim.low_bit_adam import BlockwiseAdam
from counterpoint.plan.plan import Plan
from counterpoint.program.compression import exchanges_momentum
from counterpoint.program.instruction import ApplyPushes, Update
from counterpoint.program.program import RankProgram
from counterpoint.program.units import compresses_whole_grads
from counterpoint.runtime.optimizer_spec import ELEMENTWISE_OPTIMIZERS, OptimizerSpec
from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.rank_builder import independent_replicas
from counterpoint.runtime.step_effects import StepEffects
from counterpoint.strategies.data import Data
from counterpoint.training.options import TrainingOptions
from counterpoint.world.topology import format_count


def require_known_updates(
    plan: Plan, compiled: CompiledPlan, spec: OptimizerSpec, *, applies_one_gradient: bool
) -> None:
    """Check that a step of the user's own optimizer on a part of the parameters is a part of its step on all of them.

    Raises:
        PlanError: it compares parameters, draws random numbers or changes its options, and ranks update parts; or it
            keeps state that neither checkpoints nor its ``state_dict()`` have by parameter.
    """
    effects, name = spec.step_effects(), " and ".join(spec.list_own_classes())
    if effects.other_state or effects.tensor_options:
        kept = " and ".join(
            [f"state of {', '.join(effects.other_state)}, which is not a parameter"] * bool(effects.other_state)
            + [f"tensors that it changes in the options {', '.join(effects.tensor_options)}"]
            * bool(effects.tensor_options)
        )
        raise PlanError(
            f"{name} keeps {kept}, but ranks step optimizers of their own and exchange state by parameter; keep it in "
            "state[param], as Adam keeps its step"
        )
    actions = describe_effects(effects)
    if actions and not (updates_all_at_once(compiled) and (applies_one_gradient or not effects.options)):
        raise PlanError(
            f"{name}.step {' and '.join(actions)}, but under {plan} a rank updates a part of the parameters, or "
            "several times in a step, so its updates would differ from one-device training; use a plan whose ranks "
            "update the whole model at once (data, tree), or an optimizer that updates each parameter by its own "
            "gradient and state[param] (AdamW, SGD, Muon)"
        )


def describe_effects(effects: StepEffects) -> list[str]:
    """Return in words what makes a step on all parameters differ from steps on some of them."""
    return (
        ["computes the update of a parameter from others, too"] * effects.couples
        + ["draws random numbers"] * effects.draws
        + [f"changes its options {', '.join(effects.options)}"] * bool(effects.options)
    )


def updates_all_at_once(compiled: CompiledPlan) -> bool:
    """Return whether each rank that updates weights updates all of them, whole, in one run of instructions."""
    variant = compiled.step_variants[-1]
    units = [find_updated_units(rank_program) for rank_program in variant.program.rank_programs]
    is_whole = all(update.shard == WHOLE for update in variant.symbolic.updates)
    return is_whole and len({found for found in units if found != ()}) == 1


def find_updated_units(rank_program: RankProgram) -> tuple[object, ...]:
    """Return the units that a rank updates; with their places, if it updates them in several runs.

    Example:
        >>> from counterpoint.program.text import parse_program
        >>> [find_updated_units(rank_program) for rank_program in parse_program("F0.0 B0.0 U0 U1").rank_programs]
        [((0,), (1,))]
    """
    places = [place for place, one in enumerate(rank_program.body) if isinstance(one, Update)]
    pushed = [unit for one in rank_program.body if isinstance(one, ApplyPushes) for unit in one.units]
    if places and places[-1] - places[0] + 1 != len(places):
        return tuple(places)
    return tuple(sorted([*(one.unit for one in rank_program.body if isinstance(one, Update)), *pushed]))


def require_elementwise_optimizer(plan: Plan, compiled: CompiledPlan, optimizer_spec: OptimizerSpec) -> None:
    """Check that no parameter is sharded by tensor parallelism if its optimizer needs whole tensors.

    Raises:
        PlanError: one is.
    """
    sharded = [name for block in compiled.model.blocks if block.tp for name, _ in block.tp.sharded_dims]
    names = [
        name
        for name in sharded
        if name in optimizer_spec.group_index and optimizer_spec.class_of(name) not in ELEMENTWISE_OPTIMIZERS
    ]
    if names:
        others = f" and {format_count(len(names) - 1, 'other')}" if len(names) > 1 else ""
        raise PlanError(
            f"{optimizer_spec.class_of(names[0]).__name__} may need whole tensors, but under {plan} a rank "
            f"has only a shard of {names[0]}{others}, so its updates would differ from "
            "one-device training; use an elementwise optimizer (AdamW, SGD) for them, or data, zero or pipeline"
        )


def require_one_state(plan: Plan, compiled: CompiledPlan, optimizer_spec: OptimizerSpec) -> None:
    """Check that no replica has a state of its own if there is no mean of states, which other ranks continue with.

    Raises:
        PlanError: one has.
    """
    classes = {optimizer_spec.class_of(name) for name in optimizer_spec.group_index}
    names = sorted(one.__name__ for one in classes if issubclass(one, BlockwiseAdam))
    if names and independent_replicas(compiled.step_variants[-1]):
        raise PlanError(
            f"{names[0]} keeps codes of 8 bits, which have no mean over replicas, but under {plan} replicas have "
            "states of their own, whose mean a run on other ranks continues with; use AdamWBf16 or AdamW, or a plan "
            "whose ranks update together, such as data without sync_every, zero or pipeline"
        )


def require_one_bit_adam(
    plan: Plan, compiled: CompiledPlan, optimizer_spec: OptimizerSpec, options: TrainingOptions
) -> None:
    """Check that ranks which exchange momenta have 1-bit Adam, and nothing that changes gradients after their sum.

    Raises:
        PlanError: they have not.
    """
    data = next((one for one in plan.strategies if isinstance(one, Data) and exchanges_momentum(one.codec)), None)
    if data is None:
        return
    wanted = f"counterpoint.optim.one_bit_adam.OneBitAdam(..., freeze_step={data.compress_from})"
    others = sorted({optimizer_spec.class_of(name).__name__ for name in optimizer_spec.group_index} - {"OneBitAdam"})
    if others:
        raise PlanError(f"{data} exchanges the momentum of 1-bit Adam, which {others[0]} is not; give {wanted}")
    freeze_steps = {optimizer_spec.options(group)["freeze_step"] for group in optimizer_spec.group_index.values()}
    if freeze_steps != {data.compress_from}:
        raise PlanError(
            f"OneBitAdam has freeze_step={min(freeze_steps)}, but {data} exchanges momenta from step "
            f"{data.compress_from} on; give both the same number"
        )
    given = [name for name in ("clip_norm", "clip_value", "loss_scale") if getattr(options, name) is not None]
    given += ["nonfinite='skip'"] if options.nonfinite == "skip" else []
    given += [f"passes={name}" for name in plan.passes if name.startswith("offload:state")]
    if given:
        raise PlanError(
            f"{data} exchanges momenta in every step from {data.compress_from} on, in memory and before gradients are "
            f"summed, which {given[0]} does not go with; omit it, or write data({data.degree})"
        )
    if compiled.model.sparse_units:
        raise PlanError(f"{data} exchanges whole momenta, but a table has sparse gradients; give it sparse=False")


def require_skippable_params(plan: Plan, compiled: CompiledPlan, *, applies_one_gradient: bool) -> None:
    """Check that a step can leave single parameters as they are.

    Raises:
        PlanError: ranks have gradients of several steps, or compressed ones.
    """
    is_compressed = any(
        compresses_whole_grads(instruction)
        for variant in compiled.step_variants
        for _, instruction in variant.program.instructions()
    )
    if is_compressed or not applies_one_gradient:
        raise PlanError(
            "unused_parameters='skip' leaves a parameter without a gradient in a step as it is, but under "
            f"{plan} ranks or servers apply gradients of several steps, or compressed ones, which are never "
            "without it; use data, zero, pipeline or tensor without staleness and compression, or "
            "unused_parameters='zero'"
        )
