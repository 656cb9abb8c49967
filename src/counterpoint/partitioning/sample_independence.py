"""Whether what a model gives for a sample depends on the samples beside it: microbatches are then not its batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, num_samples, preserve_state, split_call_args


def modules_with_running_stats(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that keep running statistics of their batches, which no optimizer updates.

    Example:
        >>> list(modules_with_running_stats(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1']
    """
    kinds = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001 - what all that keep running statistics have in common
    for path, module in model.named_modules():
        if isinstance(module, kinds) and module.track_running_stats:
            yield path


def require_sample_independence(model: nn.Module, inputs: Inputs, plan: str, num_microbatches: int) -> None:
    """Check that a model gives the same for a sample whatever samples are beside it, in evaluation mode.

    It is run on one microbatch, and on the first half of it; a lone sample has zeros beside it. Nothing is said of a
    model that draws random numbers in evaluation too, has norms without running statistics, or does not run.

    Args:
        model: the module; it stays as it is.
        inputs: those of a microbatch.
        plan: as text.
        num_micros: into how many microbatches it cuts a batch.

    Raises:
        PlanError: it does not.
    """
    if num_microbatches < 2 or any(map(_uses_batch_statistics, model.modules())):
        return
    samples = max(num_samples(inputs), 2)
    half = samples // 2
    with preserve_state(model, training=False):
        before = torch.get_rng_state()
        try:
            whole, part = (_run_model(model, _resize_batch(inputs, count)) for count in (samples, half))
        except Exception:  # noqa: BLE001 - it is raised again where the model is trained, with the place
            return
        if not torch.equal(torch.get_rng_state(), before):
            return
    pairs = zip(whole, part, strict=False)
    off = max((_relative_error(*pair, half) for pair in pairs if _are_per_sample(*pair, samples, half)), default=0.0)
    if off:
        raise PlanError(
            f"what {type(model).__name__} gives for a sample depends on the samples beside it: it is off by {off:.1e} "
            f"of its largest value when they are left away; {plan} computes a batch as {num_microbatches} microbatches, each "
            "by itself, so that it would train another model than the whole batch does; take means and norms over the "
            "features of one sample, give num_microbatches=1, or pass cross_sample='accept' where each microbatch is meant "
            "to be a batch of its own"
        )


def _uses_batch_statistics(module: nn.Module) -> bool:
    """Tell whether a module is known to look at its whole microbatch."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats  # noqa: SLF001


def _resize_batch(inputs: Inputs, count: int) -> Inputs:
    """Return copies of the first samples, as many as there are, and zeros for one more; a model may change them."""
    samples = num_samples(inputs)

    def resized(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or leaf.shape[0] != samples:
            return leaf.clone()
        return leaf[:count].clone() if count <= samples else torch.cat([leaf, torch.zeros_like(leaf)])

    return tree_map(resized, inputs)


def _run_model(model: nn.Module, inputs: Inputs) -> Sequence[Any]:
    """Return the tensors that the model gives."""
    args, kwargs = split_call_args(inputs)
    return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _are_per_sample(whole: Tensor, part: Tensor, samples: int, half: int) -> bool:
    """Tell whether both are what the model gives for each of its samples."""
    return whole.is_floating_point() and whole.shape[:1] == (samples,) and part.shape == (half, *whole.shape[1:])


def _relative_error(whole: Tensor, part: Tensor, half: int) -> float:
    """Return how far the first samples are off, of the largest value; nothing where that is rounding."""
    largest = float(whole.abs().max()) if whole.numel() else 0.0
    off = float((whole[:half] - part).abs().max()) / (largest or 1.0) if whole.numel() else 0.0
    return off if off > torch.finfo(whole.dtype).eps ** 0.5 else 0.0
