"""The user's model, cut as finely as a plan needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from torch import nn

from counterpoint.cutting.choose import Need, cut_model
from counterpoint.cutting.cut import Cut
from counterpoint.cutting.eager import Inputs
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.model.timing_file import write_timing
from counterpoint.plan import Plan
from counterpoint.planner.settled import settled
from counterpoint.runtime.build import call_form
from counterpoint.runtime.optimizers import Face
from counterpoint.strategies.written import blamed
from counterpoint.training.options import Options
from counterpoint.training.trained import trainable, with_unused


def cut_for(plan: Plan, model: nn.Module, inputs: Any, options: Options) -> Cut:  # noqa: ANN401 - whatever it takes
    """Return the model cut as finely as the plan needs; a wish for a finer cut may stay one.

    Raises:
        PlanError: it cannot be cut so.
    """
    form, need = call_form(inputs), plan.need
    if need != "wish":
        try:
            return cut_model(model, form, need=need, dims=options.dims, cuts=plan.cut_modules)
        except PlanError as error:
            if plan.recomputation is None or replace(plan, passes=()).need not in {"none", "wish"}:
                raise
            raise PlanError(f"recompute needs a model in blocks: {error}; or leave out the pass recompute") from error
    try:
        return cut_model(model, form, need="chain", dims=options.dims)
    except PlanError:
        return cut_model(model, form, need="none", dims=options.dims)


def finest_cut(
    model: nn.Module, inputs: Inputs, needs: Sequence[Need], dims: Mapping[str, tuple[str, str]] | None = None
) -> Cut:
    """Return the model cut in the first of these ways in which it can be, or as it is.

    Raises:
        PlanError: it cannot even be called with these inputs.
    """
    for need in needs:
        try:
            return cut_model(model, inputs, need=need, dims=dims)
        except PlanError:
            continue
    return cut_model(model, inputs, need="none", dims=dims)


def with_timing_of(plan: Plan, options: Options) -> Options:
    """Return the options with the timing that a plan came with, where they have none of their own."""
    return options if options.timing is not None or plan.timing is None else replace(options, timing=plan.timing)


def as_cut(plan: Plan, spec: ModelSpec, timing: Timing | None) -> Plan:
    """Return the plan that is compiled for a model: with the cut in it that a timing gives it, and the timing."""
    return plan if timing is None else replace(settled(plan, spec), timing=timing)


def described(cut: Cut, face: Face, plan: Plan, timing: Timing | None, samples: int) -> ModelSpec:
    """Return what of a cut model is trained; with a timing, its pieces cost what they take in seconds.

    Args:
        cut: the model.
        face: the user's optimizer.
        plan: whose file is named where a timing is of another model that it came with.
        timing: of the model; None where counted operations say what pieces cost.
        samples: in a microbatch.

    Raises:
        PlanError: the timing is of another model.
    """
    spec = with_unused(trainable(cut.spec, face))
    if timing is None:
        return spec
    with blamed(plan.written if timing is plan.timing else None, "timing"):
        return timing.weigh(spec, samples)


def plan_in_words(plan: Plan, timing: Timing | None) -> str:
    """Return a plan with all that makes its program what it is, the same words for the same program."""
    words = f"{plan} with {plan.num_microbatches} microbatch{'es' if plan.num_microbatches > 1 else ''}"
    if timing is None:
        return words
    return f"{words}, cut by the timing {sha256(write_timing(timing).encode()).hexdigest()[:12]}"
