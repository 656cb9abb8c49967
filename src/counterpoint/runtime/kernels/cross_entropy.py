"""Cross entropy of scores against classes, with fewer passes over the scores than torch makes.

Torch keeps a matrix of logarithms for the backward, fills another one with zeros for the gradient of what it picks from
the first, and adds up both: six passes over what is, for a language model, the largest matrix of a step. Here a forward
reads the scores once and keeps one number of each row; a backward reads them and writes their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode

from counterpoint.fabric.shm.native import CrossEntropyArgs, LossSum, native
from counterpoint.runtime.kernels.small_batch_linear import dtype_and_device

MIN_LOGITS = 1 << 14
"""For fewer a call costs more than it saves."""


class CrossEntropyCall(NamedTuple):
    """What ``F.cross_entropy`` is called with, as far as this module does it."""

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
    """Return the call; None for one that is torch's own to do."""
    if weight is not None or size_average is not None or reduce is not None or label_smoothing:
        return None
    is_plain = reduction in {"mean", "sum"} and input.dim() == 2 and target.shape == input.shape[:1]
    if not is_plain or (dtype_and_device(input), dtype_and_device(target)) != (
        (torch.float32, "cpu"),
        (torch.int64, "cpu"),
    ):
        return None
    if input.numel() < MIN_LOGITS or not input.requires_grad or not input.is_contiguous():
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
    """The loss of all rows, of which the sums of exponentials and how many count are known."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: CrossEntropyCall, sums: Tensor, loss_sum: LossSum) -> Tensor:  # noqa: ANN401
        """Return the loss."""
        ctx.save_for_backward(logits, call.targets, sums)
        ctx.ignored, ctx.is_mean, ctx.count = call.ignore_index, call.is_mean, loss_sum.count
        if call.is_mean:
            return logits.new_tensor(loss_sum.sum / loss_sum.count if loss_sum.count else torch.nan)
        return logits.new_tensor(loss_sum.sum)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradient of the scores."""
        (above,) = gradients
        scores, targets, sums = ctx.saved_tensors
        if torch.is_grad_enabled():
            reduction = "mean" if ctx.is_mean else "sum"
            own = torch.log_softmax(scores, 1)
            loss = F.nll_loss(own, targets, ignore_index=ctx.ignored, reduction=reduction)
            return (*torch.autograd.grad(loss, scores, above, create_graph=True), None, None, None)
        gradient = torch.empty_like(scores)
        given = _kernel_args(scores, targets, sums, ctx.ignored)
        given.gradient = gradient.data_ptr()
        given.factor = above.item() / max(ctx.count, 1) if ctx.is_mean else above.item()
        library = native().library
        assert library is not None, "it has filled in the sums"
        library.cp_entropy_gradient(byref(given))
        return gradient, None, None, None


def _is_supported() -> bool:
    """Tell whether a call is differentiated backwards, by one thread, and neither traced nor transformed."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and torch.get_num_threads() == 1
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001 - it has no public name
    )


class FusedCrossEntropyMode(TorchFunctionMode):
    """While this is active, cross entropy is :class:`FusedCrossEntropy` where that does it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function, or do what it does."""
        if func is F.cross_entropy and _is_supported():
            call = _parse_call(*args, **(kwargs or {}))
            library = native().library
            if call is not None and library is not None:
                sums, lost = call.logits.new_empty(call.logits.shape[0]), LossSum()
                given = _kernel_args(call.logits, call.targets, sums, call.ignore_index)
                if library.cp_entropy(byref(given), byref(lost)):
                    return FusedCrossEntropy.apply(call.logits, call, sums, lost)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
