"""Whether all processes begin with the same model: what differs is named, with the ranks, before the first step.

Whether the user changed weights of which ranks train copies: under another plan, that would be another training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, cast

import torch
from torch import nn, optim

from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import dtype_name, format_ranks
from counterpoint.plan.plan import Plan
from counterpoint.runtime.params.sparse_grads import find_embedding_tables
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.training.optimizer_state import get_group_options

NamedFacts: TypeAlias = Sequence[Sequence[str]]
"""Pairs of a name and what is true of it, in an order of their own."""

REMEDIES = {
    "the model": "call model.train(), or model.eval(), on all of them alike",
    "the plan": "give the same strategy and num_microbatches on all of them",
}
BUILD_IDENTICALLY = "every rank must build the same one: look for a setting, a file or a random choice that differs"
SORT_HINT = (
    "parameters stand in the order in which they are made: sort what a set, os.listdir or glob gives before a loop"
)


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
    mine = [
        [["the plan", plan]],
        *describe_structure(model),
        [["the model", describe_mode(model)]],
        describe_optimizer(optimizer),
    ]
    found = cast("list[list[Facts]]", fabric.gather_values("model", mine, tuple(range(fabric.num_ranks))))
    difference = next(filter(None, map(first_difference, zip(*found, strict=True))), "")
    if difference:
        raise PlanError(f"the ranks do not train the same model: {difference}")


def describe_structure(model: nn.Module) -> list[list[list[str]]]:
    """Return what is to be the same on all ranks: parameters, buffers, and torch's own modules, in their order."""
    tables = find_embedding_tables(model)
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


def describe_optimizer(optimizer: optim.Optimizer) -> list[list[str]]:
    """Return what an optimizer is, and the options of its groups that are numbers or switches."""
    groups = enumerate(optimizer.param_groups)
    options = [
        [f"{key} of the optimizer's group {index}", str(value)]
        for index, group in groups
        for key, value in get_group_options(group).items()
    ]
    return [["the optimizer", type(optimizer).__name__], *options]


def describe_mode(model: nn.Module) -> str:
    """Return in which mode the model is, and which modules inside are in another."""
    if not model.training:
        return "in evaluation mode"
    still = ", ".join(path for path, module in model.named_modules() if not module.training)
    return "in training mode" + (f" but for {still}" if still else "")


def first_difference(facts_by_rank: Sequence[NamedFacts]) -> str:
    """Return the first thing in which ranks differ, who says what of it, and the remedy; empty where there is none.

    Args:
        found: the facts of every rank.

    Example:
        >>> first_difference([[["a", "float32"]], [["a", "float16"]], [["a", "float32"]]])
        'a is float32 on ranks 0, 2, float16 on rank 1; every rank must build the same one: look for a setting, ...'
    """
    for at in range(max(map(len, facts_by_rank))):
        facts = [tuple(one[at]) if at < len(one) else ("", "") for one in facts_by_rank]
        if len(set(facts)) == 1:
            continue
        names = {name for name, _ in facts}
        if len(names) == 1:
            name = names.pop()
            told = group_ranks_by_fact(facts, lambda fact, who: f"{fact[1]} on {who}")
            return f"{name} is {told}; {REMEDIES.get(name, BUILD_IDENTICALLY)}"
        told = group_ranks_by_fact(
            facts, lambda fact, who: f"{who} {'have' if ',' in who else 'has'} {fact[0] or 'no more'}"
        )
        if len({tuple(sorted(map(tuple, one))) for one in facts_by_rank}) == 1:
            return f"they have the same parameters in another order: at place {at} {told}; {SORT_HINT}"
        return f"at place {at} {told}; {BUILD_IDENTICALLY}"
    return ""


def group_ranks_by_fact(facts: Sequence[tuple[str, ...]], format_group: Callable[[tuple[str, ...], str], str]) -> str:
    """Return what is told of each fact and the ranks that have it, those of the lowest rank first."""
    return ", ".join(
        format_group(fact, format_ranks([rank for rank, other in enumerate(facts) if other == fact]))
        for fact in dict.fromkeys(facts)
    )


def broadcast_initial_values(fabric: Fabric, model: nn.Module, init_sync: str) -> None:
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
            if init_sync != "verify":
                mine.copy_(values)
    found = cast("list[list[str]]", fabric.gather_values("first values", differing[:1], everyone))
    others = [rank for rank, names in enumerate(found) if names]
    if not others:
        return
    told = (
        f"{format_ranks(others)} began with other values than rank 0, the first in {found[others[0]][0]}; all ranks train "
        "one model"
    )
    if init_sync == "verify":
        raise PlanError(f"{told}; call torch.manual_seed(0) before the model is built, or load one checkpoint, on all")
    if fabric.rank == 0:
        warnings.warn(
            f"{told}, so that all have rank 0's now; call torch.manual_seed(0) before the model is built, on all, or "
            "pass init_sync='verify' to have this refused",
            stacklevel=2,
        )


class ParameterMutationCheck:
    """Sees changes in place, which torch counts; those through ``.data`` it does not.

    Args:
        model: the user's.
        ranks: those of this process.
        num_ranks: of the whole plan.
    """

    def __init__(self, model: nn.Module, ranks: Collection[RankRuntime], num_ranks: int) -> None:
        stores = [rank.interpreter.store for rank in ranks]
        units = [unit for store in stores for unit in store.units.values() if not unit.flat_params]
        own = {id(param) for unit in units for param in unit.params.values()}  # an optimizer changes these in place
        if num_ranks == 1:
            own |= {id(param) for param in stores[0].params.values()}
        self.params = [(name, param) for name, param in model.named_parameters() if id(param) not in own]
        self.stores = stores
        self.trainable = [(name, param, param.requires_grad) for name, param in model.named_parameters()]
        self.versions: list[int] = []
        self.record_versions()

    def version_counters(self) -> list[int]:
        """Return how often each watched parameter was changed in place."""
        return [param._version for _, param in self.params]  # noqa: SLF001 - there is no other way to see it

    def record_versions(self) -> None:
        """The weights are as the ranks know them."""
        self.versions = self.version_counters()

    def require_unchanged(self, plan: Plan, where: str) -> None:
        """Check that nobody has changed the model's weights since the ranks got them, or which of them are trained.

        Args:
            plan: of the ranks.
            where: in which process, for the error.

        Raises:
            DataError: somebody has.
        """
        changed = next(((name, was) for name, param, was in self.trainable if param.requires_grad is not was), None)
        if changed is not None:
            became = "frozen" if changed[1] else "made trainable"
            raise DataError(
                f"{changed[0]} of the model was {became} {where}between two steps, but what is trained is settled in "
                "the first one; freeze before it, or close() and call parallelize(...) again (a trainer: make another)"
            )
        if not self.params:
            return
        found = self.version_counters()
        if found == self.versions:
            return
        pairs = zip(self.versions, found, strict=True)
        names = [name for (name, _), (old, new) in zip(self.params, pairs, strict=True) if old != new]
        is_common = any(arena.shared is not None for store in self.stores for arena in store.flat_params())
        common = "the ranks train one copy in memory that they share, so that all of them may have computed with either"
        held = common if is_common else "the ranks train copies, of which this changed one at most"
        raise DataError(
            f"{names[0]}{f' and {len(names) - 1} other parameters' if names[1:] else ''} of the model changed {where}"
            f"between two steps, but under {plan} {held}; in a loop of your own call step.export_weights() before the "
            "change and step.import_weights() after it; around a trainer change weights before fit(), or between two calls of it"
        )
