"""Check that a model's output for a sample does not depend on other samples, as microbatching assumes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, num_samples, preserve_state, split_call_args


def modules_with_running_stats(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that keep running statistics of their batches.

    Example:
        >>> list(modules_with_running_stats(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        ['1']
    """
    kinds = (nn.modules.batchnorm._NormBase,)  # noqa: SLF001 - their common base class
    for path, module in model.named_modules():
        if isinstance(module, kinds) and module.track_running_stats:
            yield path


def require_sample_independence(model: nn.Module, inputs: Inputs, plan: str, num_microbatches: int) -> None:
    """Check that a model's output for a sample does not depend on the other samples, in evaluation mode.

    The model runs on one microbatch, and on its first half; a single sample is padded with zeros. The check is skipped
    for a model that draws random numbers in evaluation too, has norms without running statistics, or does not run.

    Args:
        model: the module; its state is preserved.
        inputs: those of a microbatch.
        plan: as text, for the message.
        num_microbatches: number of microbatches of a batch.

    Raises:
        PlanError: it does depend on them.
    """
    if num_microbatches < 2 or any(map(_uses_batch_statistics, model.modules())):
        return
    batch_size = max(num_samples(inputs), 2)
    half = batch_size // 2
    with preserve_state(model, training=False):
        rng_state = torch.get_rng_state()
        try:
            full_outputs, half_outputs = (
                _run_model(model, _resize_batch(inputs, count)) for count in (batch_size, half)
            )
        except Exception:  # noqa: BLE001 - training raises it again, with its location
            return
        if not torch.equal(torch.get_rng_state(), rng_state):
            return
    pairs = zip(full_outputs, half_outputs, strict=False)
    error = max(
        (_relative_error(*pair, half) for pair in pairs if _are_per_sample(*pair, batch_size, half)), default=0.0
    )
    if error:
        raise PlanError(
            f"the output of {type(model).__name__} for a sample depends on the other samples of its batch: it changes "
            f"by {error:.1e} of its largest value without them; {plan} computes a batch as {num_microbatches} separate "
            "microbatches, so its gradient would not be that of the whole batch; take means and norms over the "
            "features of one sample, give num_microbatches=1, or pass cross_sample='accept' if each microbatch is "
            "intended to be a batch of its own"
        )


def _uses_batch_statistics(module: nn.Module) -> bool:
    """Tell whether a module normalizes by the statistics of its microbatch, in evaluation too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats  # noqa: SLF001


def _resize_batch(inputs: Inputs, count: int) -> Inputs:
    """Return copies of the first samples, padded with zeros if there are too few; a model may change them."""
    batch_size = num_samples(inputs)

    def resize(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.dim() or leaf.shape[0] != batch_size:
            return leaf.clone()
        return leaf[:count].clone() if count <= batch_size else torch.cat([leaf, torch.zeros_like(leaf)])

    return tree_map(resize, inputs)


def _run_model(model: nn.Module, inputs: Inputs) -> Sequence[Any]:
    """Return the output tensors of the model."""
    args, kwargs = split_call_args(inputs)
    return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _are_per_sample(output: Tensor, half_output: Tensor, batch_size: int, half: int) -> bool:
    """Tell whether both tensors have one entry per sample."""
    return (
        output.is_floating_point()
        and output.shape[:1] == (batch_size,)
        and half_output.shape == (half, *output.shape[1:])
    )


def _relative_error(output: Tensor, half_output: Tensor, half: int) -> float:
    """Return the difference of the first samples, relative to the largest value; 0 if it is rounding."""
    largest = float(output.abs().max()) if output.numel() else 0.0
    error = float((output[:half] - half_output).abs().max()) / (largest or 1.0) if output.numel() else 0.0
    return error if error > torch.finfo(output.dtype).eps ** 0.5 else 0.0
