"""Batch norm whose mean and variance are those of several ranks' samples together, forwards and backwards."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from counterpoint.errors import DataError

Figures = TypeVar("Figures", Tensor, np.ndarray[tuple[int, ...], np.dtype[np.float64]])


class Union(Protocol):
    """Those whose samples are normalized together."""

    def gather(self, row: Tensor) -> Tensor:
        """Return everybody's row of float64, this rank's ``(1, number)`` among them, as ``(rank, number)``."""

    def add(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over everybody."""


class Running(NamedTuple):
    """What a module keeps of the statistics of its batches; it is changed in place.

    Args:
        mean: by channel.
        var: by channel.
        momentum: the part of the newest batch.
    """

    mean: Tensor
    var: Tensor
    momentum: float


def normalize(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    running: Running | None,
    eps: float,
    union: Union,
) -> Tensor:
    """Return values ``(sample, channel, ...)`` normalized as batch norm in training does for all members' samples.

    The gradient of the values is that of the sum of all members' losses; those of weight and bias are this rank's part
    of theirs, as of any other parameter.

    Args:
        values: this rank's; any number of samples, also none.
        weight: by channel, or None.
        bias: by channel, or None.
        running: what is kept; the same afterwards on all members, if it was before.
        eps: added to the variance.
        union: the members; all of them call this together, and go backward together.

    Raises:
        DataError: no member has a value.
        ValueError: there is one value by channel in all, in the words of torch's own batch norm.

    Cost:
        one all-gather of ``2 channel + 1`` float64 per rank forwards, one sum of ``2 channel`` backwards.

    Source:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    result, mean, var, count = _Normalized.apply(values, weight, bias, eps, union)  # type: ignore[no-untyped-call]
    if running is not None:
        with torch.no_grad():
            unbiased = var * (count / max(count - 1, 1))
            running.mean.lerp_(mean.to(running.mean.dtype), running.momentum)
            running.var.lerp_(unbiased.to(running.var.dtype), running.momentum)
    return result  # type: ignore[no-any-return]


class _Normalized(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        union: Union,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return the normalized values, and the mean, variance and number of all members' values.

        Args:
            ctx: what is kept for backward.
            values: ``(sample, channel, ...)``; the result has their shape and dtype.
            weight: ``(channel,)``, or None.
            bias: ``(channel,)``, or None.
            eps: added to the variance.
            union: the members. Mean and variance are ``(channel,)`` and have no gradient.
        """
        mean, var, count = statistics(values, union)
        shape = [1, -1, *[1] * (values.dim() - 2)]
        wide = torch.promote_types(values.dtype, torch.float32)
        scale = (var + eps).rsqrt()
        normal = (values.to(wide) - mean.to(wide).view(shape)) * scale.to(wide).view(shape)
        result = normal
        if weight is not None:
            result = result * weight.to(wide).view(shape)
        if bias is not None:
            result = result + bias.to(wide).view(shape)
        ctx.save_for_backward(normal, scale, weight)
        ctx.count, ctx.dtype, ctx.has_bias, ctx.union = count, values.dtype, bias is not None, union
        ctx.mark_non_differentiable(mean, var)
        return result.to(values.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: object) -> Any:  # noqa: ANN401 - torch's own
        """Return the gradients of values, of all members' losses, and this rank's part of those of weight and bias."""
        normal, scale, weight = ctx.saved_tensors
        wide, shape = normal.dtype, [1, -1, *[1] * (normal.dim() - 2)]
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        given = grad.to(wide)
        sums = torch.cat([given.sum(dims), (given * normal).sum(dims)])
        own_bias, own_weight = sums.clone().chunk(2)
        ctx.union.add(sums)
        mean_grad, mean_product = (part.view(shape) / ctx.count for part in sums.chunk(2))
        factor = scale.to(wide) if weight is None else scale.to(wide) * weight.to(wide)
        result = (given - mean_grad - normal * mean_product) * factor.view(shape)
        own = None if weight is None else own_weight.to(weight.dtype)
        return result.to(ctx.dtype), own, own_bias.to(ctx.dtype) if ctx.has_bias else None, None, None


def statistics(values: Tensor, union: Union) -> tuple[Tensor, Tensor, int]:
    """Return mean and variance by channel, in float64, and the number of values by channel, of all members' samples.

    Raises:
        DataError: no member has a value.
        ValueError: there is one value by channel in all.
    """
    channels = values.shape[1]
    flat = values.detach().transpose(0, 1).reshape(channels, -1).to(torch.promote_types(values.dtype, torch.float32))
    own = torch.zeros(1, 2 * channels + 1, dtype=torch.float64)
    if flat.shape[1]:
        variance, mean = torch.var_mean(flat, dim=1, correction=0)
        own[0] = torch.cat([mean.double(), variance.double(), torch.tensor([flat.shape[1]], dtype=torch.float64)])
    rows = union.gather(own)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = int(counts.sum())
    if not count:
        raise DataError("SyncBatchNorm: no rank has a sample; a batch of all ranks together needs at least one")
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {values.size()} on one rank alone"
        )
    return *pooled(means, variances, counts, counts.sum()), count


def pooled(means: Figures, variances: Figures, counts: Figures, total: Figures) -> tuple[Figures, Figures]:
    """Return mean and variance by channel of all values, from those of parts ``(part, channel)``.

    Args:
        means: of each part; of one without values anything finite.
        variances: over ``count``, not ``count - 1``.
        counts: values by channel of each part, ``(part, 1)`` or ``(part, channel)``.
        total: of all parts; not 0.
    """
    mean = (means * counts).sum(0) / total
    beyond = means - mean
    return mean, ((variances + beyond * beyond) * counts).sum(0) / total
