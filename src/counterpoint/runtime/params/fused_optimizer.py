"""Fused optimizer step: sum the replicas' gradients and update weights in one pass over memory.

State and options stay in torch's optimizer; only the arithmetic of a step runs in the native library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor, optim
from torch.autograd.graph import increment_version

from counterpoint.fabric.shm.native import DTYPES, OptimizerStep, native
from counterpoint.runtime.params.flat_grads import GradRange
from counterpoint.runtime.params.sparse_grads import add_rows

OptimizerOptions = Mapping[str, Any]


class GradSource(Protocol):
    """Callable that returns the ranges a tensor's gradient consists of; none if it has no gradient."""

    def __call__(self, *, as_rows: bool) -> Sequence[GradRange]:
        """Return the ranges; rows of tables may stay rows if ``as_rows``, else they are added up."""


def own_grad(param: Tensor, *, as_rows: bool) -> list[GradRange]:
    """Return a parameter's own gradient as a :class:`GradSource` does, if it has one."""
    return [] if param.grad is None else [GradRange(0, param.numel(), [param.grad])]


def is_param_contiguous(param: Tensor) -> bool:
    """Return whether a parameter and its gradient, if any, are contiguous."""
    tensors = [param] if param.grad is None else [param, param.grad]
    return all(tensor.layout == torch.strided and tensor.is_contiguous() for tensor in tensors)


def supports_fused_update(optimizer: optim.Optimizer) -> bool:
    """Return whether a step of this optimizer, with its current options, can be fused."""
    if native().library is None or type(optimizer) not in FUSED_OPTIMIZERS:
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable"):
            return False
        if any(tensor.dtype not in {torch.float32, torch.float64} or not tensor.is_cpu for tensor in group["params"]):
            return False
    return True


def supports_row_updates(optimizer: optim.Optimizer, options: OptimizerOptions) -> bool:
    """Return whether a step only adds a multiple of the gradient to weights, so that single rows can be updated."""
    return type(optimizer) is optim.SGD and not options["momentum"] and not options["weight_decay"]


def fused_update(optimizer: optim.Optimizer, sources: Mapping[int, GradSource]) -> None:
    """Step all tensors of an optimizer that have a gradient; :func:`supports_fused_update` must be true.

    Args:
        optimizer: has the state, as after its own step.
        sources: the gradient of each tensor, by ``id``.
    """
    for group in optimizer.param_groups:
        as_rows = supports_row_updates(optimizer, group)
        for tensor in group["params"]:
            grad_ranges = sources[id(tensor)](as_rows=as_rows)
            if grad_ranges:
                update_tensor(optimizer, group, tensor, grad_ranges)
                increment_version(tensor)


def update_tensor(
    optimizer: optim.Optimizer, options: OptimizerOptions, weights: Tensor, grad_ranges: Sequence[GradRange]
) -> None:
    """Step one tensor; :func:`supports_fused_update` must be true.

    Args:
        optimizer: has the state, as after its own step.
        options: of the tensor's group.
        weights: the tensor.
        grad_ranges: what its gradient consists of; rows only if :func:`supports_row_updates`.
    """
    library = native().library
    assert library is not None, "supports_fused_update has checked it"
    kind, make_args = FUSED_OPTIMIZERS[type(optimizer)]
    step = make_args(optimizer.state[weights], options, weights)
    step.kind, step.dtype = kind, DTYPES[weights.dtype]
    step.maximize = int(bool(options.get("maximize")))
    state_pointers, begin = [step.state0, step.state1, step.state2], grad_ranges[0].start if grad_ranges else 0
    for grad_range in grad_ranges:
        low, high = grad_range.start - begin, grad_range.stop - begin
        if not grad_range.parts:
            factor = float(options["lr"]) * (1.0 if step.maximize else -1.0)
            add_rows(weights.detach().view(-1)[low:high], grad_range.table_offset, grad_range.row_grads, factor)
            continue
        skipped_bytes = low * weights.element_size()
        step.count, step.weights = high - low, weights.data_ptr() + skipped_bytes
        step.state0, step.state1, step.state2 = (
            None if pointer is None else pointer + skipped_bytes for pointer in state_pointers
        )
        step.num_parts = len(grad_range.parts)
        step.parts = (c_void_p * len(grad_range.parts))(*(part.data_ptr() for part in grad_range.parts))
        library.cp_optimizer_step(byref(step))


def _sgd(state: dict[str, Any], options: OptimizerOptions, weights: Tensor) -> OptimizerStep:
    step = OptimizerStep(
        lr=float(options["lr"]),
        weight_decay=float(options["weight_decay"]),
        beta1=float(options["momentum"]),
        beta2=float(options["dampening"]),
        nesterov=int(bool(options["nesterov"])),
    )
    if options["momentum"]:
        step.is_first = int(state.get("momentum_buffer") is None)
        if step.is_first:
            state["momentum_buffer"] = torch.empty_like(weights)
        step.state0 = state["momentum_buffer"].data_ptr()
    return step


def _adam(state: dict[str, Any], options: OptimizerOptions, weights: Tensor, *, decoupled: bool) -> OptimizerStep:
    if not state:
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if options["amsgrad"] else ())):
            state[name] = torch.zeros_like(weights)
    state["step"] += 1
    beta1, beta2 = (float(beta) for beta in options["betas"])
    return OptimizerStep(
        lr=float(options["lr"]),
        weight_decay=float(options["weight_decay"]),
        beta1=beta1,
        beta2=beta2,
        eps=float(options["eps"]),
        step_number=float(state["step"]),
        decoupled=int(decoupled or bool(options.get("decoupled_weight_decay"))),
        state0=state["exp_avg"].data_ptr(),
        state1=state["exp_avg_sq"].data_ptr(),
        state2=state["max_exp_avg_sq"].data_ptr() if options["amsgrad"] else None,
    )


def _adagrad(state: dict[str, Any], options: OptimizerOptions, weights: Tensor) -> OptimizerStep:
    state["step"] += 1
    decayed = 1 + (float(state["step"]) - 1) * float(options["lr_decay"])
    return OptimizerStep(
        lr=float(options["lr"]) / decayed,
        weight_decay=float(options["weight_decay"]),
        eps=float(options["eps"]),
        state0=state["sum"].data_ptr(),
    )


def _adam_plain(state: dict[str, Any], options: OptimizerOptions, weights: Tensor) -> OptimizerStep:
    return _adam(state, options, weights, decoupled=False)


def _adam_decoupled(state: dict[str, Any], options: OptimizerOptions, weights: Tensor) -> OptimizerStep:
    return _adam(state, options, weights, decoupled=True)


FUSED_OPTIMIZERS: dict[
    type[optim.Optimizer], tuple[int, Callable[[dict[str, Any], OptimizerOptions, Tensor], OptimizerStep]]
] = {
    optim.SGD: (0, _sgd),
    optim.Adam: (1, _adam_plain),
    optim.AdamW: (1, _adam_decoupled),
    optim.Adagrad: (2, _adagrad),
}
"""Optimizers with a fused step: their number in the library, and the function that fills in its arguments."""
