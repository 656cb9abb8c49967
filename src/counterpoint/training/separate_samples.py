"""Run a model in training so that only its own code can let the output for a sample depend on other samples.

Dropout and batch norm depend on the batch by definition: random numbers are drawn for it, and its statistics are used.
Here random numbers belong to samples, as those of the ranks do, and batch norms use their running statistics, or the
mean 0 and the variance 1 if they have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.partitioning.seed_hooks import SeedHooks
from counterpoint.runtime.batch_norm.mode import BATCH_NORM_FNS, run_batch_norm
from counterpoint.runtime.draw_sites import DrawSites
from counterpoint.runtime.kernels.function_mode import InterceptFunctions, TorchFunction
from counterpoint.runtime.rng import SampleRange, SampleRNG


@contextmanager
def separate_samples(model: nn.Module, draw_sites: DrawSites, first: int, num_samples: int) -> Iterator[None]:
    """Let a model draw by sample, and its batch norms not mix samples.

    Args:
        model: in training; the caller restores its training flags and the random state.
        draw_sites: where it draws, all of them known.
        first: the number of the first sample of its call.
        num_samples: how many there are.
    """
    rng = SampleRNG(0, sites=draw_sites)
    rng.begin_microbatch(0, 0, SampleRange(first, num_samples, num_samples))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:  # noqa: SLF001
            module.training = False
    hooks = SeedHooks(model, rng)
    try:
        with InterceptFunctions({**rng.functions, **dict.fromkeys(BATCH_NORM_FNS, normalize_by_constants)}):
            yield
    finally:
        hooks.remove()


def normalize_by_constants(func: TorchFunction, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Normalize by running statistics, also in training; by the mean 0 and the variance 1 if there are none."""
    call = BATCH_NORM_FNS[func](*args, **kwargs)
    mean, variance = call.running_mean, call.running_var
    if mean is None or variance is None:
        like = call.values if call.weight is None else call.weight
        mean, variance = (
            torch.full((call.values.shape[1],), value, dtype=like.dtype, device=like.device) for value in (0.0, 1.0)
        )
    return run_batch_norm(call._replace(running_mean=mean, running_var=variance, training=False))
