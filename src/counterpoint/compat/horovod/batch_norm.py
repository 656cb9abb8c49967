"""Batch normalization with the mean and the variance of all ranks' samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import Among
from counterpoint.compat.horovod.reductions import Op, Reduce
from counterpoint.compat.horovod.waiting import finish_one
from counterpoint.compat.horovod.world import the_world
from counterpoint.errors import DataError


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose statistics in training are those of the union of all ranks' batches, of any sizes.

    The arguments are those of ``torch.nn.BatchNorm2d``; inputs are ``(sample, channel, ...)``, on any device.

    Promise:
        outputs, running statistics and gradients of inputs are those of ``BatchNorm`` on the union batch; gradients of
        weight and bias are this rank's part of them, as of any other parameter.

    Cost:
        one all-gather of ``2 channel + 1`` float64 per rank forwards, one all-reduce of ``2 channel`` backwards.

    Source:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise DataError(
                f"SyncBatchNorm was given a tensor with {input.dim()} dims; it needs (sample, channel, ...): reshape it"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return the normalized input."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        momentum = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if not uses_batch or the_world().fabric.num_ranks == 1:
            mean = self.running_mean if not self.training or self.track_running_stats else None
            var = self.running_var if not self.training or self.track_running_stats else None
            return F.batch_norm(input, mean, var, self.weight, self.bias, uses_batch, momentum, self.eps)
        result, mean, var, count = _Normalized.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = var * (count / max(count - 1, 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return result  # type: ignore[no-any-return]


class _Normalized(Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        mean, var, count = union_of_batches(values)
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
        ctx.count, ctx.dtype, ctx.has_bias = count, values.dtype, bias is not None
        ctx.mark_non_differentiable(mean, var)
        return result.to(values.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: object) -> Any:  # noqa: ANN401 - torch's own
        normal, scale, weight = ctx.saved_tensors
        wide, shape = normal.dtype, [1, -1, *[1] * (normal.dim() - 2)]
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        given = grad.to(wide)
        sums = torch.cat([given.sum(dims), (given * normal).sum(dims)])
        own_bias, own_weight = sums.clone().chunk(2)
        world = the_world()
        among = Among("the gradient of SyncBatchNorm", world.everybody)
        finish_one(collectives.all_reduce(world, [sums], among, Reduce(Op.SUM)))
        mean_grad, mean_product = (part.view(shape) / ctx.count for part in sums.chunk(2))
        factor = scale.to(wide) if weight is None else scale.to(wide) * weight.to(wide)
        result = (given - mean_grad - normal * mean_product) * factor.view(shape)
        own = None if weight is None else own_weight.to(weight.dtype)
        return result.to(ctx.dtype), own, own_bias.to(ctx.dtype) if ctx.has_bias else None, None


def union_of_batches(values: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and variance by channel, in float64, and the number of values by channel, of all ranks' batches.

    Raises:
        DataError: no rank has a value.
    """
    world = the_world()
    channels = values.shape[1]
    flat = values.detach().transpose(0, 1).reshape(channels, -1).to(torch.promote_types(values.dtype, torch.float32))
    own = torch.zeros(1, 2 * channels + 1, dtype=torch.float64)
    if flat.shape[1]:
        variance, mean = torch.var_mean(flat, dim=1, correction=0)
        own[0] = torch.cat([mean.double(), variance.double(), torch.tensor([flat.shape[1]], dtype=torch.float64)])
    among = Among("the statistics of SyncBatchNorm", world.everybody)
    rows = finish_one(collectives.all_gather(world, [own], among))
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    if not count:
        raise DataError("SyncBatchNorm: no rank has a sample; a batch of all ranks together needs at least one")
    mean = (means * counts).sum(0) / count
    squares = (variances + (means - mean).square()) * counts
    return mean, squares.sum(0) / count, int(count)
