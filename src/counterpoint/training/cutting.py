"""The user's model, cut as finely as a plan needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from counterpoint.cutting.choose import Need, cut_model
from counterpoint.cutting.cut import Cut
from counterpoint.cutting.eager import Inputs
from counterpoint.errors import PlanError
from counterpoint.plan import Plan
from counterpoint.runtime.build import call_form
from counterpoint.training.options import Options


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
