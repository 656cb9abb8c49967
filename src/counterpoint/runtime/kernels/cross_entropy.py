"""Cross entropy of logits against class indices, with fewer passes over the logits than torch's.

Torch keeps a matrix of log-probabilities for backward, fills another with zeros for the gradient of the selected ones,
and adds both: six passes over what is, in a language model, the largest matrix of a step. Here forward reads the logits
once and keeps one number per row; backward reads them and writes their gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from counterpoint.fabric.shm.native import CrossEntropyArgs, LossSum, native
from counterpoint.runtime.kernels.function_mode import TorchFunction
from counterpoint.runtime.kernels.small_batch_linear import dtype_and_device

MIN_LOGITS = 1 << 14
"""With fewer logits, the overhead of the call exceeds the savings."""
PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
"""Classes of tensors that have memory of their own; those of others may be traced, or consist of several tensors."""


class CrossEntropyCall(NamedTuple):
    """Arguments of ``F.cross_entropy`` that the fused kernel supports."""

    logits: Tensor
    targets: Tensor
    ignore_index: int
    is_mean: bool


def _parse_call(  # noqa: PLR0913 - torch's signature
    input: Tensor,  # noqa: A002 - torch's signature
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001 - torch's signature
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001 - torch's signature
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> CrossEntropyCall | None:
    """Return the call; None if it has to be torch's."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    is_plain = reduction in {"mean", "sum"} and input.dim() == 2 and target.shape == input.shape[:1]
    if not is_plain or (dtype_and_device(input), dtype_and_device(target)) != (
        (torch.float32, "cpu"),
        (torch.int64, "cpu"),
    ):
        return None
    if not {type(input), type(target)} <= PLAIN_TENSORS:  # others may have no memory
        return None
    if input.numel() < MIN_LOGITS or not input.is_contiguous() or (torch.is_grad_enabled() and not input.requires_grad):
        return None
    if unpack_dual(input).tangent is not None:  # type: ignore[no-untyped-call]
        return None
    return CrossEntropyCall(input, target.contiguous(), ignore_index, reduction == "mean")


def _kernel_args(logits: Tensor, targets: Tensor, sums: Tensor, ignore_index: int) -> CrossEntropyArgs:
    return CrossEntropyArgs(
        scores=logits.data_ptr(),
        targets=targets.data_ptr(),
        sums=sums.data_ptr(),
        rows=logits.shape[0],
        classes=logits.shape[1],
        ignored=ignore_index,
    )


class FusedCrossEntropy(torch.autograd.Function):
    """The loss over all rows, given each row's sum of exponentials and the number of rows that are not ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: CrossEntropyCall, sums: Tensor, loss_sum: LossSum) -> Tensor:  # noqa: ANN401
        """Return the loss."""
        ctx.save_for_backward(logits, call.targets, sums)
        ctx.ignore_index, ctx.is_mean, ctx.count = call.ignore_index, call.is_mean, loss_sum.count
        if call.is_mean:
            return logits.new_tensor(loss_sum.sum / loss_sum.count if loss_sum.count else torch.nan)
        return logits.new_tensor(loss_sum.sum)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradient of the logits."""
        (grad_output,) = gradients
        logits, targets, sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            reduction = "mean" if ctx.is_mean else "sum"
            log_probs = torch.log_softmax(logits, 1)
            loss = F.nll_loss(log_probs, targets, ignore_index=ctx.ignore_index, reduction=reduction)
            return (*torch.autograd.grad(loss, logits, grad_output, create_graph=True), None, None, None)
        grad = torch.empty_like(logits)
        kernel_args = _kernel_args(logits, targets, sums, ctx.ignore_index)
        kernel_args.gradient = grad.data_ptr()
        kernel_args.factor = grad_output.item() / max(ctx.count, 1) if ctx.is_mean else grad_output.item()
        library = native().library
        assert library is not None, "forward has used it"
        library.cp_cross_entropy_backward(byref(kernel_args))
        return grad, None, None, None


def _is_supported() -> bool:
    """Return whether a call is computed by one thread, and neither traced nor transformed."""
    return (
        not torch.compiler.is_compiling()
        and torch.get_num_threads() == 1
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - it has no public name
    )


def fused_cross_entropy(func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Call :class:`FusedCrossEntropy` instead of ``F.cross_entropy`` where it supports the call, else the function."""
    if func is F.cross_entropy and _is_supported():
        call = _parse_call(*args, **kwargs)
        library = native().library
        if call is not None and library is not None:
            sums, loss_sum = call.logits.new_empty(call.logits.shape[0]), LossSum()
            kernel_args = _kernel_args(call.logits, call.targets, sums, call.ignore_index)
            if library.cp_cross_entropy(byref(kernel_args), byref(loss_sum)):
                return FusedCrossEntropy.apply(call.logits, call, sums, loss_sum)  # type: ignore[no-untyped-call]
    return func(*args, **kwargs)
