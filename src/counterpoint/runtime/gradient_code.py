"""Python code that computes gradients: custom autograd functions, and hooks on the gradients of activations.

Gradients of torch's own operations are proportional to those that backward starts from, and those of several samples
are the sum of those of each, if outputs are independent. A plan relies on both: it divides batches, and multiplies the
loss of a part with its share. Code of the user's may do something else, such as clamp or normalize, so it is looked for
while a model or a loss runs, and its gradients are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

COMPUTE_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Not those with 8 bits, of which only factors of products are rounded."""


DETACHING = frozenset({Tensor.detach, torch.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
DETACHED = "a value that it leaves out of the graph (detach(), torch.no_grad())"


class GradientCodeDetector(TorchFunctionMode):
    """Finds what computes gradients in Python while a model runs: custom autograd functions and hooks on gradients.

    Args:
        finds_detached: whether it finds values that are left out of the graph, too.

    Attributes:
        names: what was found, for errors.
        eps: the largest relative rounding error of a dtype in which the model computes.
    """

    def __init__(self, *, finds_detached: bool = False) -> None:
        super().__init__()
        self.finds_detached = finds_detached
        self.names: list[str] = []
        self.eps = 0.0

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - any function of torch
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function."""
        if func is Tensor.register_hook and "a hook on a gradient" not in self.names:
            self.names.append("a hook on a gradient")
        is_detached = func in DETACHING or (func is torch._C._set_grad_enabled and args[:1] == (False,))  # noqa: SLF001
        if self.finds_detached and is_detached and DETACHED not in self.names:
            self.names.append(DETACHED)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in COMPUTE_DTYPES:
            self.eps = max(self.eps, torch.finfo(result.dtype).eps)
        return result

    def find_functions(self, outputs: Sequence[Tensor]) -> None:
        """Find the custom functions that outputs were computed by."""
        nodes: list[Any] = [output.grad_fn for output in outputs]
        seen: set[Any] = {None}
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            nodes += [other for other, _ in node.next_functions]
            if isinstance(node, BackwardCFunction) and not is_own_function(node):
                name = f"the autograd function {type(node).__name__.removesuffix('Backward')}"
                self.names += [name] if name not in self.names else []


def is_own_function(node: BackwardCFunction) -> bool:
    """Tell whether a node of the graph is of an autograd function of this library."""
    function: type = node._forward_cls  # type: ignore[attr-defined]  # noqa: SLF001 - it has no public name
    return function.__module__.startswith("counterpoint.")


def gradient_errors(ones: Sequence[Tensor | None], others: Sequence[Tensor | None], eps: float) -> list[float]:
    """Return for each gradient how it differs from another one, relative to its largest value; 0 for rounding.

    All are 0 if a number is not finite, which is an error of the step itself.

    Args:
        ones: gradients; None where there is none.
        others: in the same order.
        eps: the relative rounding error of a number.
    """
    pairs = [
        (None, None) if one is None or other is None or one.is_sparse or not one.numel() else (one, other)
        for one, other in zip(ones, others, strict=True)
    ]
    largest = [0.0 if one is None else float(one.abs().max()) for one, _ in pairs]
    errors = [0.0 if one is None or other is None else float((one - other).abs().max()) for one, other in pairs]
    if not all(map(math.isfinite, (*largest, *errors))):
        return [0.0] * len(errors)
    eps = max([eps, *(torch.finfo(one.dtype).eps for one, _ in pairs if one is not None)])
    # a gradient that is zero but for rounding, such as that of a key's bias, has the errors of larger ones
    rounding = MAX_ROUNDING * eps * max(largest, default=0.0)
    return [
        0.0 if error <= eps**0.5 * own + rounding else error / (own or 1.0)
        for error, own in zip(errors, largest, strict=True)
    ]


MAX_ROUNDING = 256
"""Rounding errors of a gradient, in those of the largest number among all gradients."""


def explain_other_scale(code: str, what: str) -> str:
    """Return the text of an error about gradients of a model that are not proportional to those of its outputs.

    Args:
        code: computes them.
        what: the samples.
    """
    return (
        f"gradients of the model are not proportional to those of its outputs, because of {code}, such as a clamp, but "
        f"backward starts from a multiple of the loss of {what}: what a mean over tokens or weights, or a sum, is "
        "multiplied with in the whole batch is known after its last microbatch; clip the gradients of parameters "
        "instead (clip_norm=..., clip_value=...), return a mean over the samples, give num_microbatches=1 on one rank, "
        "or pass cross_sample='accept' if each microbatch is intended to be a batch of its own"
    )
