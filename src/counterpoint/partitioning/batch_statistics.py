"""Find the modules whose output depends on statistics of their batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


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


def uses_batch_statistics(module: nn.Module) -> bool:
    """Tell whether a module normalizes by the statistics of its microbatch, in evaluation too."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.track_running_stats  # noqa: SLF001
