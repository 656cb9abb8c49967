"""Whether all processes begin with the same model: what differs is named, with the ranks, before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import nn, optim

from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import dtype_name, ranks
from counterpoint.runtime.strewn import tables_of
from counterpoint.training.settings import settings

Facts: TypeAlias = Sequence[Sequence[str]]
"""Pairs of a name and what is true of it, in an order of their own."""

REMEDIES = {
    "the model": "call model.train(), or model.eval(), on all of them alike",
    "the plan": "give the same strategy and num_microbatches on all of them",
}
BUILD_ALIKE = "every rank must build the same one: look for a setting, a file or a random choice that differs"
SORT = "parameters stand in the order in which they are made: sort what a set, os.listdir or glob gives before a loop"


def require_same_model(fabric: Fabric, model: nn.Module, plan: str, optimizer: optim.Optimizer) -> None:
    """Check that all ranks hold the same model, plan and optimizer; all ranks call it together.

    Args:
        fabric: the way to the others.
        model: this rank's.
        plan: as text, with all that belongs to it.
        optimizer: this rank's; every rank updates its part of one model by its options.

    Raises:
        PlanError: they differ; all ranks are told the first difference alike.
    """
    mine = [[["the plan", plan]], *structure(model), [["the model", mode_of(model)]], facts_of(optimizer)]
    found = cast("list[list[Facts]]", fabric.gather_values("model", mine, tuple(range(fabric.num_ranks))))
    difference = next(filter(None, map(first_difference, zip(*found, strict=True))), "")
    if difference:
        raise PlanError(f"the ranks do not train the same model: {difference}")


def structure(model: nn.Module) -> list[list[list[str]]]:
    """Return what is to be the same on all ranks: parameters, buffers, and torch's own modules, in their order."""
    tables = tables_of(model)
    params = [
        [
            name,
            f"{dtype_name(param.dtype)} {tuple(param.shape)} on {param.device.type}"
            f"{'' if param.requires_grad else ', frozen'}{', with sparse gradients' if tables.get(name) else ''}",
        ]
        for name, param in model.named_parameters()
    ]
    buffers = [
        [name, f"{dtype_name(buffer.dtype)} {tuple(buffer.shape)} on {buffer.device.type}, a buffer"]
        for name, buffer in model.named_buffers()
    ]
    leaves = [
        [f"module {path}", f"{type(module).__name__}({module.extra_repr()})"]
        for path, module in model.named_modules()
        if type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    ]
    return [params, buffers, leaves]


def facts_of(optimizer: optim.Optimizer) -> list[list[str]]:
    """Return what an optimizer is, and the options of its groups that are numbers or switches."""
    groups = enumerate(optimizer.param_groups)
    options = [
        [f"{key} of the optimizer's group {index}", str(value)]
        for index, group in groups
        for key, value in settings(group).items()
    ]
    return [["the optimizer", type(optimizer).__name__], *options]


def mode_of(model: nn.Module) -> str:
    """Return in which mode the model is, and which modules inside are in another."""
    if not model.training:
        return "in evaluation mode"
    still = ", ".join(path for path, module in model.named_modules() if not module.training)
    return "in training mode" + (f" but for {still}" if still else "")


def first_difference(found: Sequence[Facts]) -> str:
    """Return the first thing in which ranks differ, who says what of it, and the remedy; empty where there is none.

    Args:
        found: the facts of every rank.

    Example:
        >>> first_difference([[["a", "float32"]], [["a", "float16"]], [["a", "float32"]]])
        'a is float32 on ranks 0, 2, float16 on rank 1; every rank must build the same one: look for a setting, ...'
    """
    for at in range(max(map(len, found))):
        facts = [tuple(one[at]) if at < len(one) else ("", "") for one in found]
        if len(set(facts)) == 1:
            continue
        names = {name for name, _ in facts}
        if len(names) == 1:
            name = names.pop()
            told = parted(facts, lambda fact, who: f"{fact[1]} on {who}")
            return f"{name} is {told}; {REMEDIES.get(name, BUILD_ALIKE)}"
        told = parted(facts, lambda fact, who: f"{who} {'have' if ',' in who else 'has'} {fact[0] or 'no more'}")
        if len({tuple(sorted(map(tuple, one))) for one in found}) == 1:
            return f"they have the same parameters in another order: at place {at} {told}; {SORT}"
        return f"at place {at} {told}; {BUILD_ALIKE}"
    return ""


def parted(facts: Sequence[tuple[str, ...]], tell: Callable[[tuple[str, ...], str], str]) -> str:
    """Return what is told of each fact and the ranks that have it, those of the lowest rank first."""
    return ", ".join(
        tell(fact, ranks([rank for rank, other in enumerate(facts) if other == fact])) for fact in dict.fromkeys(facts)
    )


def share_first_values(fabric: Fabric, model: nn.Module, init: str) -> None:
    """Give all ranks rank 0's parameters and buffers; all ranks call it together.

    Args:
        fabric: the way to the others.
        model: this rank's.
        init: ``rank0`` tells once where a rank had other values, ``same`` refuses them.

    Raises:
        PlanError: a rank had others, and that is refused.
    """
    everyone = tuple(range(fabric.num_ranks))
    differing: list[str] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        mine = tensor.detach()
        values = mine.contiguous() if fabric.rank == 0 else mine.clone(memory_format=torch.contiguous_format)
        fabric.broadcast(f"first {name}", values, everyone, 0).wait()
        if fabric.rank and not torch.equal(values, mine):
            differing.append(name)
            if init != "same":
                mine.copy_(values)
    found = cast("list[list[str]]", fabric.gather_values("first values", differing[:1], everyone))
    others = [rank for rank, names in enumerate(found) if names]
    if not others:
        return
    told = (
        f"{ranks(others)} began with other values than rank 0, the first in {found[others[0]][0]}; all ranks train "
        "one model"
    )
    if init == "same":
        raise PlanError(f"{told}; call torch.manual_seed(0) before the model is built, or load one checkpoint, on all")
    if fabric.rank == 0:
        warnings.warn(
            f"{told}, so that all have rank 0's now; call torch.manual_seed(0) before the model is built, on all, or "
            "pass init='same' to have this refused",
            stacklevel=2,
        )
