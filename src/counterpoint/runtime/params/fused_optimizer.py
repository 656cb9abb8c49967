"""Fused optimizer step: sum the replicas' gradients and update weights in one pass over memory.

State and options stay in torch's optimizer; only the arithmetic of a step runs in the native library, in one call for
all tensors of an option group and with as many threads as torch uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache, partial
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version

from counterpoint.errors import PlanError
from counterpoint.fabric.shm.native import DTYPES, OptimizerStep, native
from counterpoint.fabric.shm.tensor_addresses import Addresses, Counts, make_counts, read_addresses
from counterpoint.runtime.params.flat_grads import GradRange
from counterpoint.runtime.params.grad_check import CollectedGrads
from counterpoint.runtime.params.sparse_grads import add_rows
from counterpoint.tensor_bytes import is_resolved

OptimizerOptions = Mapping[str, Any]
# Attributes of many tensors are read without a Python call for each.
LAYOUT_OF, DTYPE_OF, IS_CPU, GRAD_OF = (
    attrgetter("layout"),
    attrgetter("dtype"),
    attrgetter("is_cpu"),
    attrgetter("grad"),
)
OptimizerStates = Mapping[Tensor, dict[str, Any]]


class GradSource(Protocol):
    """Callable that returns the ranges a tensor's gradient consists of; none if it has no gradient."""

    def __call__(self, *, as_rows: bool) -> Sequence[GradRange]:
        """Return the ranges; rows of tables may stay rows if ``as_rows``, else they are added up."""


def are_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are dense and contiguous, and none is negated lazily."""
    return {*map(LAYOUT_OF, tensors)} <= {torch.strided} and all(map(is_resolved, tensors))


class FusedGroup(NamedTuple):
    """What a fused step knows of the parameters of an option group.

    Args:
        dtypes: of the parameters.
        is_collected: whether where their gradients are is known, of all and of no others.
    """

    dtypes: set[torch.dtype]
    is_collected: bool


def find_fused_groups(optimizer: optim.Optimizer, collected: CollectedGrads | None = None) -> list[FusedGroup] | None:
    """Return what is known of each option group; None if a step with these options is left to the optimizer itself.

    Args:
        optimizer: that would take the step.
        collected: gradients of tensors, if where they are is known; those of parameters have their dtype and device.
    """
    if native().library is None or type(optimizer) not in FUSED_OPTIMIZERS:
        return None
    groups = []
    for options in optimizer.param_groups:
        params = options["params"]
        is_collected = collected is not None and collected.are_of(params)
        dtypes = {collected.dtype} if collected is not None and is_collected else {*map(DTYPE_OF, params)}
        if (
            options.get("differentiable")
            or options.get("capturable")
            or not dtypes <= {torch.float32, torch.float64}
            or not (is_collected or all(map(IS_CPU, params)))
        ):
            return None
        groups.append(FusedGroup(dtypes, is_collected))
    return groups


def require_finite_options(optimizer: optim.Optimizer) -> None:
    """Check the options of all groups of an optimizer with a fused step.

    Raises:
        PlanError: an option is not a finite number.
    """
    for options in optimizer.param_groups:
        native_fields(FUSED_OPTIMIZERS[type(optimizer)], options, 1.0)


def supports_row_updates(optimizer: optim.Optimizer, options: OptimizerOptions) -> bool:
    """Return whether a step only adds a multiple of the gradient to weights, so that single rows can be updated."""
    return type(optimizer) is optim.SGD and not options["momentum"] and not options["weight_decay"]


def fused_update(
    optimizer: optim.Optimizer,
    groups: Sequence[FusedGroup],
    sources: Mapping[int, GradSource],
    collected: CollectedGrads | None = None,
) -> None:
    """Step all tensors of an optimizer that have a gradient.

    Args:
        optimizer: has the state, as after its own step.
        groups: what :func:`find_fused_groups` returned for it and the same ``collected``.
        sources: the gradient of each tensor, by ``id``; that of other tensors is their own, ``tensor.grad``.
        collected: gradients of tensors, if where they are is known.

    Raises:
        PlanError: an option is not a finite number; nothing has changed.
    """
    fused = FUSED_OPTIMIZERS[type(optimizer)]
    require_finite_options(optimizer)  # before any state is changed
    for options, (dtypes, is_collected) in zip(optimizer.param_groups, groups, strict=True):
        as_rows = supports_row_updates(optimizer, options)
        ranges = (
            {id(tensor): sources[id(tensor)](as_rows=as_rows) for tensor in options["params"] if id(tensor) in sources}
            if sources
            else {}
        )
        tensors = (
            options["params"]
            if is_collected
            else [tensor for tensor in options["params"] if tensor.grad is not None or ranges.get(id(tensor))]
        )
        if not tensors:
            continue
        histories = fused.prepare_states(optimizer.state, options, tensors)
        for dtype, history, batch in group_tensors(tensors, dtypes, histories):
            is_first, step_number = history
            step = OptimizerStep(
                kind=fused.kind,
                dtype=DTYPES[dtype],
                is_first=is_first,
                step_number=step_number,
                **native_fields(fused, options, step_number),
            )
            states = [[optimizer.state[tensor][name] for tensor in batch] for name in fused.state_names(options)]
            if ranges:
                update_ranges(step, batch, states, ranges)
            elif is_collected and batch is tensors and collected is not None:
                update_tensors(step, batch, states, collected.addresses, collected=collected)
            else:
                update_tensors(step, batch, states, read_addresses(own_grads(batch)))
        increment_version(tensors)


def group_tensors(
    tensors: list[Tensor], dtypes: set[torch.dtype], histories: Sequence[tuple[bool, float]]
) -> Iterator[tuple[torch.dtype, tuple[bool, float], list[Tensor]]]:
    """Yield the tensors that one call can step: those of one dtype with the same history; usually all of them.

    Args:
        tensors: to step.
        dtypes: that they may have.
        histories: of each tensor whether its momentum buffer is uninitialized, and the number of its step.
    """
    if len(dtypes) == 1 and len({*histories}) == 1:
        yield next(iter(dtypes)), histories[0], tensors
        return
    keys = list(zip(map(DTYPE_OF, tensors), histories, strict=True))
    for key in dict.fromkeys(keys):
        yield *key, [tensor for tensor, other in zip(tensors, keys, strict=True) if other == key]


def native_fields(fused: FusedOptimizer, options: OptimizerOptions, step_number: float) -> dict[str, Any]:
    """Return the fields of :class:`OptimizerStep` for the options of a group, in some step."""
    fields = {
        "lr": as_number(options, "lr"),
        "weight_decay": as_number(options, "weight_decay"),
        "maximize": bool(options.get("maximize")),
    }
    return fields | fused.native_options(options, step_number)


def as_number(options: OptimizerOptions, name: str, index: int | None = None) -> float:
    """Return an option, or one of a pair, as a finite number; raise PlanError if it is not one."""
    value = options[name] if index is None else options[name][index]
    if type(value) in {float, int} and math.isfinite(value):  # usually; Real takes some microseconds
        return float(value)
    is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    number = float(value) if is_number or isinstance(value, Real) else math.nan
    if not math.isfinite(number):
        raise PlanError(f"the optimizer's option {name} is {value!r}; it must be a finite number, or a tensor with one")
    return number


def update_ranges(
    step: OptimizerStep,
    tensors: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    ranges: Mapping[int, Sequence[GradRange]],
) -> None:
    """Step tensors whose gradients consist of ranges, each range as a tensor of its own; add rows of tables.

    Args:
        step: the options.
        tensors: all of one dtype.
        states: for each kind of state, that of each tensor.
        ranges: of each tensor's gradient, by ``id``; none of a tensor that has its own.
    """
    weights: list[Tensor] = []
    parts: list[Tensor] = []
    num_parts: list[int] = []
    range_states: list[list[Tensor]] = [[] for _ in states]
    factor = step.lr if step.maximize else -step.lr
    for index, tensor in enumerate(tensors):
        grad_ranges = ranges.get(id(tensor)) or [GradRange(0, tensor.numel(), own_grads([tensor]))]
        flat, begin = tensor.detach().view(-1), grad_ranges[0].start
        for start, stop, range_parts, row_grads, table_offset in grad_ranges:
            low, high = start - begin, stop - begin
            if not range_parts:
                add_rows(flat[low:high], table_offset, row_grads, factor)
                continue
            weights.append(flat[low:high])
            parts += range_parts
            num_parts.append(len(range_parts))
            for column, state in zip(range_states, states, strict=True):
                column.append(state[index].view(-1)[low:high])
    update_tensors(step, weights, range_states, read_addresses(parts), num_parts)


def update_tensors(
    step: OptimizerStep,
    weights: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    parts: Addresses,
    num_parts: Sequence[int] | None = None,
    collected: CollectedGrads | None = None,
) -> None:
    """Step contiguous tensors in one call of the native library.

    Args:
        step: the options.
        weights: the tensors, all of one dtype.
        states: for each kind of state, that of each tensor.
        parts: where the tensors are whose sums are the gradients, those of one gradient after those of another.
        num_parts: how many of them make up each tensor's gradient; None for one each.
        collected: what is known of these tensors, and of no others.
    """
    library = native().library
    assert library is not None, "find_fused_groups has checked it"
    step.num_tensors, step.max_threads = len(weights), torch.get_num_threads()
    step.counts = make_counts(map(Tensor.numel, weights)) if collected is None else collected.counts
    step.num_parts = _ones(len(weights)) if num_parts is None else make_counts(num_parts)
    known = None if collected is None else collected.weights
    step.parts, step.weights = parts, read_addresses(weights) if known is None else known
    step.state0, step.state1, step.state2 = [*map(read_addresses, states), None, None, None][:3]
    library.cp_optimizer_step(byref(step))


@cache
def _ones(count: int) -> Counts:
    return make_counts([1] * count)


def own_grads(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors' own gradients; all must have one."""
    return [*map(GRAD_OF, tensors)]


@dataclass(frozen=True)
class FusedOptimizer:
    """How the native library steps one of torch's optimizers.

    Args:
        kind: its number in the library.
        state_names: the state's tensors that the library reads and writes, under some options.
        prepare_states: creates the missing state of tensors and counts the step, as the optimizer's own step does;
            returns for each whether its momentum buffer is uninitialized, and the number of its step.
        native_options: further fields of :class:`OptimizerStep` under some options, in some step.
    """

    kind: int
    state_names: Callable[[OptimizerOptions], tuple[str, ...]]
    prepare_states: Callable[[OptimizerStates, OptimizerOptions, Sequence[Tensor]], list[tuple[bool, float]]]
    native_options: Callable[[OptimizerOptions, float], dict[str, Any]]


def _prepare_sgd(
    states: OptimizerStates, options: OptimizerOptions, tensors: Sequence[Tensor]
) -> list[tuple[bool, float]]:
    if not options["momentum"]:
        return [(False, 0.0)] * len(tensors)
    uninitialized = [states[tensor].get("momentum_buffer") is None for tensor in tensors]
    for tensor, is_first in zip(tensors, uninitialized, strict=True):
        if is_first:
            states[tensor]["momentum_buffer"] = torch.empty_like(tensor)
    return [(is_first, 0.0) for is_first in uninitialized]


def _sgd_options(options: OptimizerOptions, step_number: float) -> dict[str, Any]:
    return {
        "beta1": as_number(options, "momentum"),
        "beta2": as_number(options, "dampening"),
        "nesterov": bool(options["nesterov"]),
    }


def _prepare_adam(
    states: OptimizerStates, options: OptimizerOptions, tensors: Sequence[Tensor]
) -> list[tuple[bool, float]]:
    for tensor in tensors:
        state = states[tensor]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _adam_state_names(options):
                state[name] = torch.zeros_like(tensor)
    return _count_step(states, tensors)


def _count_step(states: OptimizerStates, tensors: Sequence[Tensor]) -> list[tuple[bool, float]]:
    steps = [states[tensor]["step"] for tensor in tensors]
    torch._foreach_add_(steps, 1)
    return [(False, float(step)) for step in steps]


def _adam_state_names(options: OptimizerOptions) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ()))


def _adam_options(options: OptimizerOptions, step_number: float, *, decoupled: bool) -> dict[str, Any]:
    return {
        "beta1": as_number(options, "betas", 0),
        "beta2": as_number(options, "betas", 1),
        "eps": as_number(options, "eps"),
        "decoupled": decoupled or bool(options.get("decoupled_weight_decay")),
    }


def _prepare_adagrad(
    states: OptimizerStates, _: OptimizerOptions, tensors: Sequence[Tensor]
) -> list[tuple[bool, float]]:
    return _count_step(states, tensors)


def _adagrad_options(options: OptimizerOptions, step_number: float) -> dict[str, Any]:
    decay = 1 + (step_number - 1) * as_number(options, "lr_decay")
    return {"lr": as_number(options, "lr") / decay, "eps": as_number(options, "eps")}


FUSED_OPTIMIZERS: dict[type[optim.Optimizer], FusedOptimizer] = {
    optim.SGD: FusedOptimizer(
        0, lambda options: ("momentum_buffer",) if options["momentum"] else (), _prepare_sgd, _sgd_options
    ),
    optim.Adam: FusedOptimizer(1, _adam_state_names, _prepare_adam, partial(_adam_options, decoupled=False)),
    optim.AdamW: FusedOptimizer(1, _adam_state_names, _prepare_adam, partial(_adam_options, decoupled=True)),
    optim.Adagrad: FusedOptimizer(2, lambda _: ("sum",), _prepare_adagrad, _adagrad_options),
}
"""Optimizers with a fused step."""
