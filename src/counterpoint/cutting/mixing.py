"""Whether what a model gives for a sample depends on the samples beside it: microbatches are then not its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.cutting.eager import Inputs, call_of, num_samples, unmarked
from counterpoint.errors import PlanError


def require_apart(model: nn.Module, inputs: Inputs, plan: str, num_micros: int) -> None:
    """Check that a model gives the same for a sample whatever samples are beside it, in evaluation mode.

    It is run on one microbatch, and on the first half of it. Nothing is said of a lone sample, of a model that draws
    random numbers in evaluation too, of norms that keep no running statistics, and of one that does not run.

    Args:
        model: the module; it stays as it is.
        inputs: those of a microbatch.
        plan: as text.
        num_micros: into how many microbatches it cuts a batch.

    Raises:
        PlanError: it does not.
    """
    samples = num_samples(inputs)
    half = (samples + 1) // 2
    if num_micros < 2 or samples < 2 or any(map(_normalizes_batches, model.modules())):
        return
    with unmarked(model, training=False):
        before = torch.get_rng_state()
        try:
            whole, part = (_run(model, inputs, samples, count) for count in (samples, half))
        except Exception:  # noqa: BLE001 - it is raised again where the model is trained, with the place
            return
        if not torch.equal(torch.get_rng_state(), before):
            return
    off = max(
        (_difference(*pair, half) for pair in zip(whole, part, strict=False) if _belong(*pair, samples, half)),
        default=0.0,
    )
    if off:
        raise PlanError(
            f"what {type(model).__name__} gives for the first {half} of {samples} samples depends on the others: it is "
            f"off by {off:.1e} of its largest value when these are left away; {plan} computes a batch as {num_micros} "
            "microbatches, each by itself, so that it would train another model than the whole batch does; take means "
            "and norms over the features of one sample, give num_microbatches=1, or pass mixing='accept' where each "
            "microbatch is meant to be a batch of its own"
        )


def _normalizes_batches(module: nn.Module) -> bool:
    """Tell whether a module is known to look at its whole microbatch."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats  # noqa: SLF001


def _run(model: nn.Module, inputs: Inputs, samples: int, count: int) -> Sequence[Any]:
    """Return the tensors that the model gives for the first samples."""

    def first(leaf: Any) -> Any:  # noqa: ANN401
        has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples
        return leaf[:count] if has_samples else leaf

    args, kwargs = tree_map(first, call_of(inputs))
    return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _belong(whole: Tensor, part: Tensor, samples: int, half: int) -> bool:
    """Tell whether both are what the model gives for each of its samples."""
    return whole.is_floating_point() and whole.shape[:1] == (samples,) and part.shape == (half, *whole.shape[1:])


def _difference(whole: Tensor, part: Tensor, half: int) -> float:
    """Return how far the first samples are off, of the largest value; nothing where that is rounding."""
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    off = float((whole[:half] - part).abs().max()) / (largest or 1.0) if whole.numel() else 0.0
    return off if off > torch.finfo(whole.dtype).eps ** 0.5 else 0.0
