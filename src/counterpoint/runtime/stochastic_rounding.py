"""Update bf16 weights in float32, and round them stochastically: up or down at random, on average to the exact value.

bf16 has 8 significant bits. With rounding to the nearest, an update below 2^-9 of its weight is lost, and training
stops early. With stochastic rounding the weight changes by 2^-8 in a fraction of the steps, so that its mean is exact::

    float32   s eeeeeeee mmmmmmm llllllllllllllll      l: the 16 bits that bf16 leaves out
    random  +                    rrrrrrrrrrrrrrrr      carries into the rest with probability l / 2^16
    bf16    = s eeeeeeee mmmmmmm

The random bits of an element depend on the run's seed, the step, the parameter's name and the element's place in it,
and on nothing else: any number of ranks rounds in the same way.

Source:
    Gupta et al., Deep Learning with Limited Numerical Precision, ICML 2015; Zamirai et al., Revisiting BFloat16
    Training, 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor

from counterpoint.runtime.kernels.philox import philox_words
from counterpoint.runtime.params.flat_layout import ParamRange
from counterpoint.runtime.rng.sample_rng import hash_seed

ROW = 4096
"""Elements of a parameter that are one sample of the generator."""
LEFT_OUT = 0xFFFF
"""The bits of float32 that bf16 leaves out."""


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """Return float32 values in bf16, each one of its two neighbours; those that are not finite stay so.

    Args:
        values: float32.
        random: of the same shape, int64, uniform in their 16 lower bits.

    Example:
        >>> third = torch.full((60_000,), 1 / 3)
        >>> rounded = round_stochastically(third, torch.randint(1 << 16, (60_000,)))
        >>> sorted(set(rounded.tolist())), round(rounded.double().mean().item(), 4)
        ([0.33203125, 0.333984375], 0.3333)
    """
    bits = values.view(torch.int32) + (random & LEFT_OUT).to(torch.int32)
    rounded = (bits & ~LEFT_OUT).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


class StochasticRounding:
    """Rounds the updated weights of one rank.

    Args:
        seed: of the run.
        tp_rank: of the rank, whose slices of parameters have random numbers of their own.
    """

    def __init__(self, seed: int, tp_rank: int = 0) -> None:
        self.seed, self.tp_rank = seed, tp_rank

    @contextmanager
    def widen(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        ranges: Sequence[Sequence[ParamRange]],
        step: int,
    ) -> Iterator[None]:
        """Let tensors in bf16 be float32 inside, with their gradients; round what they have become, unless by an error.

        Args:
            tensors: what an optimizer updates; those in other dtypes get their gradients only.
            grads: of each; None for one that is not updated.
            ranges: of each, the parameters that it consists of.
            step: the number of the step.
        """
        narrow, before = [tensor.data for tensor in tensors], [tensor.grad for tensor in tensors]
        rounds = [tensor.dtype == torch.bfloat16 for tensor in tensors]
        try:
            for tensor, grad, is_rounded in zip(tensors, grads, rounds, strict=True):
                tensor.grad = None
                if is_rounded:
                    tensor.data = tensor.data.float()
                tensor.grad = None if grad is None else grad.to(tensor.dtype)
            yield
            for tensor, grad, values, own in zip(tensors, grads, narrow, ranges, strict=True):
                if values.dtype == torch.bfloat16 and grad is not None:
                    self.round_into(values.view(-1), tensor.data.view(-1), own, step)
        finally:
            for tensor, values, grad in zip(tensors, narrow, before, strict=True):
                tensor.grad = None
                tensor.data = values
                tensor.grad = grad

    def round_into(self, out: Tensor, values: Tensor, ranges: Sequence[ParamRange], step: int) -> None:
        """Write rounded values of some parameters into a flat tensor."""
        for name, first, start, stop in ranges:
            key = hash_seed(self.seed, step, crc32(name.encode()), self.tp_rank)
            random = element_words(key, first, first + stop - start, values.device)
            out[start:stop] = round_stochastically(values[start:stop], random)


def element_words(key: int, first: int, stop: int, device: torch.device) -> Tensor:
    """Return random numbers of 32 bits for elements of a parameter, each by its place.

    Args:
        key: of 64 bits.
        first: the first element.
        stop: one past the last.
        device: of the result.
    """
    row = first // ROW
    words = philox_words(key, row, -(-stop // ROW) - row, ROW, device).view(-1)
    return words[first - row * ROW : stop - row * ROW]
