"""Count the gradients of one batch by power of two, to see what fp16 would lose of them and which loss scale saves it.

Nothing is trained, and the model is as it was. Gradients are those of the parameters' own dtype, without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.device.select import model_device
from counterpoint.errors import PlanError
from counterpoint.partitioning.compiled_modules import run_eagerly
from counterpoint.partitioning.dry_run import Inputs, assign_values, check_call, preserve_state, split_call_args
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.profiler.exponent_histogram import (
    BF16_ZERO_EXPONENT,
    ExponentHistogram,
    count_values,
    merge_histograms,
    new_bins,
    read_bins,
)
from counterpoint.runtime.loss.loss_parameters import find_loss_module, trainable_loss_params
from counterpoint.runtime.loss.loss_reduction import LossFunction, compute_plain_loss
from counterpoint.runtime.loss.loss_state import LossState, preserve_loss_module
from counterpoint.runtime.microbatches import autocast_as, current_autocasts
from counterpoint.viz.number_format import format_share

Quantity = Literal["activations", "weights"]
"""Of what gradients are counted."""

NEGLIGIBLE_SHARE = 1e-3
"""A share of lost values that a recommendation accepts."""


@dataclass(frozen=True, slots=True)
class GradientProfile:
    """The gradients of one batch, counted by power of two.

    Args:
        model: its class.
        device: where it was run.
        dtypes: of the gradients.
        num_samples: of the batch.
        by_kind: one histogram for the outputs, and one for the parameters, of all modules of a class.
    """

    model: str
    device: str
    dtypes: tuple[str, ...]
    num_samples: int
    by_kind: Mapping[tuple[Quantity, str], ExponentHistogram]

    def total(self, quantity: Quantity | None = None) -> ExponentHistogram:
        """Return the histogram of all gradients, or of those of activations or of weights."""
        return merge_histograms(
            histogram for (own, _), histogram in self.by_kind.items() if quantity is None or own == quantity
        )

    @property
    def loss_scale_exponent(self) -> int | None:
        """The k of the largest loss scale 2^k that leaves all gradients below 2^15; None if all are zero."""
        return self.total().find_loss_scale_exponent()

    @property
    def recommendation(self) -> str:
        """What to train this model with, in one sentence."""
        total, exponent = self.total(), self.loss_scale_exponent
        if total.num_nonfinite:
            return (
                f"{total.num_nonfinite:,} gradients are infinite or nan before any conversion to fp16: find their "
                "cause first, such as the samples of this batch or a function at the edge of its domain"
            )
        if exponent is None:
            return "all gradients are zero, so that they say nothing about fp16: count those of another batch"
        if exponent < 0:
            return (
                f"use bf16: gradients reach 2^{max(total.exponents)}, and fp16 ends at 65504, also without a loss scale"
            )
        lost, left = total.share(total.num_lost()), total.share(total.num_lost(exponent))
        scale = format_scale(exponent)
        if not total.num_lost():
            return f"fp16 loses no gradient of this batch even without a loss scale; {scale} leaves a margin"
        if left > NEGLIGIBLE_SHARE:
            return (
                f"use bf16: in fp16 even {scale}, the largest loss scale without overflow, loses "
                f"{format_share(left)} of the gradients that are not zero"
            )
        saved = "saves all of them" if not left else f"leaves {format_share(left)} of them zero"
        return (
            f'use bf16, or fp16 with loss_scale="dynamic": fp16 without a loss scale loses {format_share(lost)} of the '
            f"gradients that are not zero, and {scale} {saved}"
        )

    @property
    def range_of_bf16(self) -> str:
        """What bf16 loses of the gradients, in one sentence."""
        total = self.total()
        lost = total.num_lost(zero_exponent=BF16_ZERO_EXPONENT)
        if not lost:
            return "has the range of float32, so that no gradient becomes zero without a loss scale"
        return f"loses {format_share(total.share(lost))} of the gradients that are not zero, those of 2^-134 and below"

    def to_dict(self) -> dict[str, object]:
        """Return all figures as values for JSON."""
        exponent = self.loss_scale_exponent
        rows = [(*kind, histogram) for kind, histogram in self.by_kind.items()]
        totals = [(quantity, None, self.total(quantity)) for quantity in self.quantities()]
        return {
            "model": self.model,
            "device": self.device,
            "dtypes": list(self.dtypes),
            "num_samples": self.num_samples,
            "loss_scale": None if exponent is None else 2.0**exponent,
            "recommendation": self.recommendation,
            "gradients": [describe_histogram(*row, exponent or 0) for row in (*rows, *totals)],
        }

    def quantities(self) -> list[Quantity]:
        """Return of what gradients were counted."""
        quantities: tuple[Quantity, ...] = ("activations", "weights")
        return [quantity for quantity in quantities if any(own == quantity for own, _ in self.by_kind)]


def describe_histogram(
    quantity: Quantity, kind: str | None, histogram: ExponentHistogram, scale_exponent: int
) -> dict[str, object]:
    """Return the figures of a histogram for JSON; counts, where a share would be rounded."""
    return {
        "of": quantity,
        "modules": kind,
        "values": histogram.num_values,
        "zeros": histogram.num_zeros,
        "infinite": histogram.num_infinite,
        "nan": histogram.num_nan,
        "fp16": {
            "zero": histogram.num_lost(),
            "subnormal": histogram.num_subnormal(),
            "overflow": histogram.num_overflowing,
            "zero_with_loss_scale": histogram.num_lost(scale_exponent),
            "subnormal_with_loss_scale": histogram.num_subnormal(scale_exponent),
        },
        "bf16": {"zero": histogram.num_lost(zero_exponent=BF16_ZERO_EXPONENT)},
        "exponents": {str(exponent): count for exponent, count in sorted(histogram.exponents.items())},
    }


def format_scale(exponent: int) -> str:
    """Format a loss scale.

    Example:
        >>> format_scale(10)
        'a scale of 2^10 = 1,024'
    """
    return f"a scale of 2^{exponent}" + (f" = {2**exponent:,}" if 0 <= exponent <= 24 else "")


class GradientCounter:
    """Counts the gradients of a backward in bins on their devices.

    Args:
        bins: by quantity, class of the modules and device.
        dtypes: of the gradients.
    """

    def __init__(self) -> None:
        self.bins: dict[tuple[Quantity, str, torch.device], Tensor] = {}
        self.dtypes: set[torch.dtype] = set()
        self._counted: set[tuple[Any, int]] = set()  # outputs of graph nodes

    def add(self, quantity: Quantity, kind: str, grad: Tensor) -> None:
        """Count a gradient, without waiting for its device."""
        key = quantity, kind, grad.device
        if key not in self.bins:
            self.bins[key] = new_bins(grad.device)
        self.dtypes.add(grad.dtype)
        count_values(self.bins[key], grad)

    @contextmanager
    def count_outputs(self, model: nn.Module) -> Iterator[None]:
        """Count the gradients of the outputs of all modules without children, whose forwards run inside.

        The hooks are on the outputs, as they are when their module returns: an operation that changes one in place
        afterwards has a gradient of its own. An output that two modules return, as ``nn.Identity`` does, counts once.
        """
        with ExitStack() as stack:
            for module in model.modules():
                if next(module.children(), None) is None:
                    stack.callback(module.register_forward_hook(self._hook_outputs).remove)
            yield
        self._counted.clear()

    def _hook_outputs(self, module: nn.Module, args: object, output: object) -> None:
        del args
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
                continue
            node = leaf.grad_fn, leaf.output_nr
            if node not in self._counted:
                self._counted.add(node)
                leaf.register_hook(partial(self.add, "activations", type(module).__name__))  # type: ignore[no-untyped-call]

    def read(self) -> dict[tuple[Quantity, str], ExponentHistogram]:
        """Return what was counted, activations first; waits for the devices."""
        counted: dict[tuple[Quantity, str], list[ExponentHistogram]] = {}
        for (quantity, kind, _), bins in sorted(self.bins.items(), key=lambda item: item[0][:2]):
            counted.setdefault((quantity, kind), []).append(read_bins(bins))
        return {key: merge_histograms(histograms) for key, histograms in counted.items()}


def profile_gradients(
    model: nn.Module,
    inputs: Inputs,
    targets: Any = None,  # noqa: ANN401 - whatever the loss takes
    *,
    loss: LossFunction,
    num_samples: int,
) -> GradientProfile:
    """Count the gradients of activations and weights of one batch by power of two; nothing is trained or changed.

    Activations are the outputs of modules without children. The gradients are those of the whole batch's mean loss.

    Args:
        model: as it is trained; where it has been trained for a while, its gradients are smaller.
        inputs: arguments of the model: a tensor, a tuple, or a dict by name.
        targets: the second argument of the loss.
        loss: from output and targets to the mean loss.
        num_samples: in the batch, for the report.

    Raises:
        PlanError: the model does not take the inputs, or there are no gradients.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> counted = profile_gradients(
        ...     model, torch.full((1, 2), 2.0**-30), loss=lambda out, _: out.sum(), num_samples=1
        ... )
        >>> dict(counted.total("weights").exponents), counted.loss_scale_exponent
        ({-30: 2}, 14)

    Cost:
        One forward and backward of the batch, a copy of the parameters, and per gradient some operations on its device.
    """
    device, counter = model_device(model), GradientCounter()
    inputs, targets = (tree_map(partial(copy_to, device=device), values) for values in (inputs, targets))
    owners = parameter_owners(model, loss)
    if not owners:
        raise PlanError("the model has no trainable parameters, so there are no gradients; set requires_grad for some")
    with preserve_training_state(model, loss), counter.count_outputs(model):
        value = run_forward(model, inputs, targets, loss)
        if not value.requires_grad:
            raise PlanError(
                "the loss does not depend on a trainable parameter, so there are no gradients; return the loss with "
                "its graph, without .detach(), .item() or torch.no_grad()"
            )
        for kind, grad in zip(owners.values(), run_backward(value, list(owners)), strict=True):
            if grad is not None:
                counter.add("weights", kind, grad)
    dtypes = tuple(sorted(str(dtype).removeprefix("torch.") for dtype in counter.dtypes))
    return GradientProfile(type(model).__name__, str(device), dtypes, num_samples, counter.read())


def copy_to(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - whatever a batch holds
    """Return a copy of a tensor on a device, and other values unchanged."""
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def parameter_owners(model: nn.Module, loss: LossFunction) -> dict[nn.Parameter, str]:
    """Return the class of the first module that has each trainable parameter of the model and the loss."""
    modules = [*model.modules()]
    loss_module = find_loss_module(loss)
    if loss_module is not None and trainable_loss_params(model, loss):
        modules += loss_module.modules()
    owners: dict[nn.Parameter, str] = {}
    for module in modules:
        for param in module.parameters(recurse=False):
            if param.requires_grad:
                owners.setdefault(param, type(module).__name__)
    return owners


@contextmanager
def preserve_training_state(model: nn.Module, loss: LossFunction) -> Iterator[None]:
    """Restore the values, attributes and gradients of a model and its loss, and all random states, afterwards."""
    state, module = LossState(loss), find_loss_module(loss)
    unique = dict.fromkeys([*model.parameters(), *(() if module is None else module.parameters())])
    saved = [(param, param.detach().clone()) for param in unique]
    with (
        state.preserve_generators({param.device for param in unique}),
        preserve_loss_module(module),
        state.restored(list(range(len(state.slots)))),
        preserve_state(model),
    ):
        try:
            yield
        finally:
            for param, values in saved:
                if not torch.equal(param, values):
                    assign_values(param.detach(), values)


def run_forward(model: nn.Module, inputs: Inputs, targets: Any, loss: LossFunction) -> Tensor:  # noqa: ANN401 - of the loss
    """Return the loss of a batch, in the model's own dtypes."""
    inputs = as_call_args(inputs)
    check_call(model, inputs)
    args, kwargs = split_call_args(inputs)
    plain = tuple((name, False, dtype) for name, _, dtype in current_autocasts())
    with torch.enable_grad(), run_eagerly(model), autocast_as(plain):
        return compute_plain_loss(loss(model(*args, **kwargs), targets))


def run_backward(loss: Tensor, params: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    """Return the gradients of parameters, whose ``.grad`` is not changed.

    Raises:
        PlanError: reentrant checkpointing hides them.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in graph_nodes(loss)):
        raise PlanError(
            "gradients cannot be counted with torch.utils.checkpoint(use_reentrant=True), whose backward only writes "
            "them to .grad; pass use_reentrant=False to it"
        )
    compute: Callable[..., tuple[Tensor | None, ...]] = torch.autograd.grad
    return compute(loss, params, allow_unused=True)


def graph_nodes(value: Tensor) -> set[Any]:
    """Return all nodes of the graph that has computed a tensor."""
    found, pending = set[Any](), [value.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in found:
            found.add(node)
            pending += [inner for inner, _ in node.next_functions]
    return found
