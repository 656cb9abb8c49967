"""Check that all processes start with the same model, and that the user does not change weights between steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from types import CodeType
from typing import Any, TypeAlias, cast

import torch
from torch import nn, optim

from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import dtype_name, format_ranks
from counterpoint.optim.validation import shorten
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.partitioning.partitioned_model import find_embedding_tables
from counterpoint.plan.plan import Plan
from counterpoint.runtime.loss_reduction import LossFunction
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.training.optimizer_state import get_group_options
from counterpoint.training.options import TrainingOptions

NamedFacts: TypeAlias = Sequence[Sequence[str]]
"""Pairs of a name and a description, in order."""

SAME_DATA = "every rank passes the whole data and reads its own samples of them: remove the sharding"
REMEDIES = {
    "the data": SAME_DATA,
    "the dataset": SAME_DATA,
    "the held-out data": SAME_DATA,
    "the first batch": f"{SAME_DATA}, and draw nothing that differs",
    "the order of samples": "give samplers, and their generators, the same seed on all of them",
    "the model": "call model.train(), or model.eval(), on all of them",
    "the loss": "give the same function, with the same code and the same settings, on all of them",
    "the plan": "give the same strategy and num_microbatches on all of them",
}
SAME_OPTION = "give the same value on all of them"
MAX_OPTION = 200
"""Longer texts of options are compared by a digest."""
MAX_COMPARED = 10_000
"""The largest number of elements of a loss's tensor that is compared."""
BUILD_IDENTICALLY = "every rank must build the same one: look for a setting, a file or a random choice that differs"
SORT_HINT = "parameters are in the order of their creation: sort the results of a set, os.listdir or glob before a loop"


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a call was given on this rank, in addition to what the ranks were made with.

    Args:
        arguments: the arguments of the call.
        data: what identifies its data.
    """

    arguments: NamedFacts = ()
    data: NamedFacts = ()

    def require_same(self, fabric: Fabric, own: Sequence[NamedFacts] = ()) -> None:
        """Check that all ranks were given the same; a collective call.

        Args:
            fabric: this rank's fabric.
            own: what this rank was made with, if that is not yet compared.

        Raises:
            PlanError: arguments, or what ranks were made with, differ; all ranks raise the same first difference.
            DataError: the data differ.
        """
        facts = [list(self.arguments), *own, list(self.data)]
        gathered = fabric.gather_values("model", facts, tuple(range(fabric.num_ranks)))
        differences = list(map(first_difference, zip(*cast("list[list[NamedFacts]]", gathered), strict=True)))
        if differences[0]:
            raise PlanError(f"the ranks do not make the same call: {differences[0]}")
        if any(differences[1:-1]):
            raise PlanError(f"the ranks do not train the same model: {next(filter(None, differences))}")
        if differences[-1]:
            raise DataError(f"the ranks were given different data: {differences[-1]}")


def describe_ranks(
    model: nn.Module, plan: str, optimizer: optim.Optimizer, loss: LossFunction, options: TrainingOptions
) -> list[NamedFacts]:
    """Return what ranks are made with, in the order in which it is compared.

    Args:
        model: this rank's model.
        plan: the plan as text, with all that determines its program.
        optimizer: this rank's optimizer; every rank updates its part of one model by its options.
        loss: this rank's loss function; its name and its code are compared.
        options: this rank's options.
    """
    return [
        [["the plan", plan]],
        *describe_structure(model),
        [["the model", describe_mode(model)]],
        describe_optimizer(optimizer),
        describe_options(options),
        [["the loss", describe_function(loss)]],
    ]


def describe_arguments(values: Mapping[str, object]) -> list[list[str]]:
    """Return the arguments of a call by name."""
    return [
        [f"the argument {name}", describe_function(value) if callable(value) else describe_value(value)]
        for name, value in values.items()
    ]


def describe_structure(model: nn.Module) -> list[list[list[str]]]:
    """Return facts that must be equal on all ranks: parameters, buffers, and torch's own modules, in order."""
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
    """Return the type of an optimizer, and its groups' options that are numbers or booleans."""
    groups = enumerate(optimizer.param_groups)
    options = [
        [f"{key} of the optimizer's group {index}", str(value)]
        for index, group in groups
        for key, value in get_group_options(group).items()
    ]
    return [["the optimizer", type(optimizer).__name__], *options]


def describe_options(options: TrainingOptions) -> list[list[str]]:
    """Return all training options by name, long ones as a digest; the profile is part of the plan."""
    values = {
        option.name: repr(getattr(options, option.name)) for option in fields(options) if option.name != "profile"
    }
    return [
        [f"the option {name}", value if len(value) < MAX_OPTION else digest(value)] for name, value in values.items()
    ]


def describe_function(function: object) -> str:
    """Return the name of a function or module, what it was made with, and a digest of its code.

    Example:
        >>> describe_function(lambda output, targets: 1) == describe_function(lambda output, targets: 2)
        False
    """
    if isinstance(function, partial):
        given = [describe_value(value) for value in (*function.args, *sorted(function.keywords.items()))]
        return f"partial of {describe_function(function.func)} with {shorten(', '.join(given))}"
    if isinstance(function, nn.Module):
        name = f"{type(function).__name__}({function.extra_repr()})"
        attributes = [
            (path, key, value)
            for path, module in function.named_modules()
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key != "training"
        ]
        parts = [describe_value(item) for item in (*function.state_dict().items(), *attributes)]
        code: object = getattr(type(function).forward, "__code__", None)
    else:
        name = str(getattr(function, "__qualname__", type(function).__name__))
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        parts = [describe_value(value) for value in (*cells, getattr(function, "__defaults__", None))]
        code = getattr(function, "__code__", None)
    return f"{name}, code {digest(repr((describe_code(code), parts)))}" if isinstance(code, CodeType) else name


def describe_value(value: object) -> str:
    """Return a text that is the same in every process for an equal value; for unknown types only the type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe_value, value))})"
    if isinstance(value, torch.Tensor):
        described = f"{dtype_name(value.dtype)} {tuple(value.shape)}"
        return described + (f" {digest(repr(value.tolist()))}" if value.numel() <= MAX_COMPARED else "")
    return type(value).__qualname__


def describe_code(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object does: the same value in every process that has the same source and Python."""
    constants = [
        describe_code(value) if isinstance(value, CodeType) else sorted(map(repr, value))
        if isinstance(value, frozenset) else repr(value)
        for value in code.co_consts
    ]  # fmt: skip
    return code.co_code.hex(), code.co_names, constants


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return sha256(text.encode()).hexdigest()[:12]


def describe_mode(model: nn.Module) -> str:
    """Return the mode of the model, and the submodules that are in evaluation mode in a training model."""
    if not model.training:
        return "in evaluation mode"
    eval_modules = ", ".join(path for path, module in model.named_modules() if not module.training)
    return "in training mode" + (f" but for {eval_modules}" if eval_modules else "")


def first_difference(facts_by_rank: Sequence[NamedFacts]) -> str:
    """Return the first difference between ranks, with the ranks and the remedy; empty if there is none.

    Args:
        facts_by_rank: the facts of every rank.

    Example:
        >>> first_difference([[["a", "float32"]], [["a", "float16"]], [["a", "float32"]]])
        'a is float32 on ranks 0, 2, float16 on rank 1; every rank must build the same one: look for a setting, ...'
    """
    for index in range(max(map(len, facts_by_rank))):
        facts = [tuple(rank_facts[index]) if index < len(rank_facts) else ("", "") for rank_facts in facts_by_rank]
        if len(set(facts)) == 1:
            continue
        names = {name for name, _ in facts}
        if len(names) == 1:
            name = names.pop()
            groups = group_ranks_by_fact(facts, lambda fact, rank_text: f"{fact[1]} on {rank_text}")
            remedy = REMEDIES.get(
                name, SAME_OPTION if name.startswith(("the option ", "the argument ")) else BUILD_IDENTICALLY
            )
            return f"{name} is {groups}; {remedy}"
        groups = group_ranks_by_fact(
            facts, lambda fact, rank_text: f"{rank_text} {'have' if ',' in rank_text else 'has'} {fact[0] or 'no more'}"
        )
        if len({tuple(sorted(map(tuple, rank_facts))) for rank_facts in facts_by_rank}) == 1:
            return f"they have the same parameters in another order: at index {index} {groups}; {SORT_HINT}"
        return f"at index {index} {groups}; {BUILD_IDENTICALLY}"
    return ""


def group_ranks_by_fact(facts: Sequence[tuple[str, ...]], format_group: Callable[[tuple[str, ...], str], str]) -> str:
    """Format each distinct fact with the ranks that have it, in order of their lowest rank."""
    return ", ".join(
        format_group(fact, format_ranks([rank for rank, rank_fact in enumerate(facts) if rank_fact == fact]))
        for fact in dict.fromkeys(facts)
    )


def broadcast_initial_values(fabric: Fabric, model: nn.Module, init_sync: str) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks; a collective call.

    Args:
        fabric: this rank's fabric.
        model: this rank's model.
        init_sync: ``broadcast`` warns if a rank had other values, ``verify`` raises.

    Raises:
        PlanError: a rank had other values, and ``init_sync`` is ``verify``.
    """
    everyone = tuple(range(fabric.num_ranks))
    differing: list[str] = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        local = tensor.detach()
        values = local.contiguous() if fabric.rank == 0 else local.clone(memory_format=torch.contiguous_format)
        fabric.broadcast(f"first {name}", values, everyone, 0).wait()
        if fabric.rank and not torch.equal(values, local):
            differing.append(name)
            if init_sync != "verify":
                assign_values(local, values)
    names_by_rank = cast("list[list[str]]", fabric.gather_values("first values", differing[:1], everyone))
    differing_ranks = [rank for rank, names in enumerate(names_by_rank) if names]
    if not differing_ranks:
        return
    message = (
        f"{format_ranks(differing_ranks)} started with other values than rank 0, the first in "
        f"{names_by_rank[differing_ranks[0]][0]}; all ranks train one model"
    )
    if init_sync == "verify":
        raise PlanError(
            f"{message}; call torch.manual_seed(0) before the model is built, or load one checkpoint, on all"
        )
    if fabric.rank == 0:
        warnings.warn(
            f"{message} and now have rank 0's values; call torch.manual_seed(0) before the model is built, on all "
            "ranks, or pass init_sync='verify' to make this an error",
            stacklevel=2,
        )


class ParameterMutationCheck:
    """Detects in-place changes of the user's parameters by torch's version counters; ``.data`` does not count.

    Args:
        model: the user's model.
        ranks: the ranks of this process.
        num_ranks: the ranks of the whole plan.
    """

    def __init__(self, model: nn.Module, ranks: Collection[RankRuntime], num_ranks: int) -> None:
        stores = [rank.interpreter.store for rank in ranks]
        units = [unit for store in stores for unit in store.units.values() if not unit.flat_params]
        updated_in_place = {
            id(param) for unit in units for param in unit.params.values()
        }  # the optimizer itself changes these
        if num_ranks == 1:
            updated_in_place |= {id(param) for param in stores[0].params.values()}
        self.params = [(name, param) for name, param in model.named_parameters() if id(param) not in updated_in_place]
        self.stores = stores
        self.trainable = [(name, param, param.requires_grad) for name, param in model.named_parameters()]
        self.versions: list[int] = []
        self.record_versions()

    def version_counters(self) -> list[int]:
        """Return the version counter of each checked parameter."""
        return [param._version for _, param in self.params]  # noqa: SLF001 - there is no other way to see it

    def record_versions(self) -> None:
        """Accept the current values as those that the ranks have."""
        self.versions = self.version_counters()

    def require_unchanged(self, plan: Plan, location: str) -> None:
        """Check that the model's weights, and which of them are trained, were not changed since the ranks got them.

        Args:
            plan: the plan of the ranks.
            location: the process, for the error.

        Raises:
            DataError: they were changed.
        """
        changed = next(
            (
                (name, was_trainable)
                for name, param, was_trainable in self.trainable
                if param.requires_grad is not was_trainable
            ),
            None,
        )
        if changed is not None:
            became = "frozen" if changed[1] else "made trainable"
            raise DataError(
                f"{changed[0]} of the model was {became} {location}between two steps, but trainable parameters are "
                "fixed in the first step; freeze before it, or close() and call parallelize(...) again (or make a new "
                "Trainer)"
            )
        if not self.params:
            return
        versions = self.version_counters()
        if versions == self.versions:
            return
        pairs = zip(self.versions, versions, strict=True)
        names = [name for (name, _), (old, new) in zip(self.params, pairs, strict=True) if old != new]
        is_shared = any(flat_params.grads.is_shared for store in self.stores for flat_params in store.flat_params())
        shared_note = "the ranks train one copy in shared memory, so any of them may have used old or new values"
        note = shared_note if is_shared else "the ranks train copies, and at most one of them was changed"
        raise DataError(
            f"{names[0]}{f' and {len(names) - 1} other parameters' if names[1:] else ''} of the model changed "
            f"{location}between two steps, but under {plan} {note}; in a loop of your own call step.export_weights() "
            "before the change and step.import_weights() after it; with a Trainer, change weights before fit() or "
            "between two calls"
        )


class AttributeCheck:
    """Detects changes of the model's plain attributes between steps, such as a temperature or the rate of a dropout.

    Ranks that run copies of the model, or a trace of it, have the values of the first step. Attributes that the model's
    own forward changes, which user code may call between steps, are left out; of torch's modules only floats are
    compared.
    """

    def __init__(self) -> None:
        self.watched: list[tuple[str, dict[str, Any], str, object]] = []

    def watch(self, model: nn.Module) -> None:
        """Compare the attributes of a model with their present values from now on."""
        self.watched = [(name, attributes, key, attributes[key]) for name, attributes, key in _plain_attributes(model)]

    def require_unchanged(self, plan: Plan, run_forward: Callable[[], object]) -> None:
        """Check that the attributes have the values of the first step.

        Args:
            plan: of the ranks, for the error.
            run_forward: runs the model once.

        Raises:
            DataError: one has another value, and a forward does not change it.
        """
        if not self._find_changed():
            return
        self._leave_out_changed_by(run_forward)
        for name, value, current in self._find_changed():
            raise DataError(
                f"{name} of the model was changed from {value!r} to {current!r} between two steps, but under {plan} "
                "ranks run the model as it was in the first step; give the value to forward as an input, which may "
                "differ in every step, or close() and call parallelize(...) again (or make a new Trainer)"
            )

    def _find_changed(self) -> list[tuple[str, object, object]]:
        return [
            (name, value, attributes.get(key))
            for name, attributes, key, value in self.watched
            if attributes.get(key) is not value and attributes.get(key) != value
        ]

    def _leave_out_changed_by(self, run_forward: Callable[[], object]) -> None:
        before = [attributes.get(key) for _, attributes, key, _ in self.watched]
        with suppress(Exception):  # the step fails likewise, with its location
            run_forward()
        kept = []
        for entry, value in zip(self.watched, before, strict=True):
            _, attributes, key, _ = entry
            if attributes.get(key) == value:
                kept.append(entry)
            else:
                attributes[key] = value
        self.watched = kept


def _plain_attributes(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the full name, the dictionary and the key of attributes that are numbers, texts or None."""
    for path, module in model.named_modules():
        kinds = (float,) if type(module).__module__.startswith("torch.nn.") else (bool, int, float, str, type(None))
        for key, value in vars(module).items():
            if isinstance(value, kinds) and key != "training" and not key.startswith("_"):
                yield f"{path}.{key}".lstrip("."), vars(module), key
