"""Batch normalization with the statistics of all ranks' samples."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.reductions import ReductionOp, ScaledReduction
from counterpoint.compat.horovod.synchronize import wait_tensor
from counterpoint.compat.horovod.world import current_world
from counterpoint.errors import DataError
from counterpoint.runtime.batch_norm.sync import RunningStats, sync_batch_norm


class SyncBatchNorm(_BatchNorm):
    """Batch normalization that trains with the statistics of all ranks' batches, which may differ in size.

    The arguments are those of ``torch.nn.BatchNorm2d``; inputs are ``(sample, channel, ...)``, on any device.

    Promise:
        outputs, running statistics and input gradients are those of ``BatchNorm`` on the union of the batches;
        gradients of weight and bias are this rank's part of them, as for any other parameter.

    Cost:
        one all-gather of ``2 channel + 1`` float64 per rank in forward, one all-reduce of ``2 channel`` in backward.

    Source:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise DataError(
                f"SyncBatchNorm got a tensor with {input.dim()} dims; it needs (sample, channel, ...): reshape it"
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
        if not uses_batch or current_world().fabric.num_ranks == 1:
            mean = self.running_mean if not self.training or self.track_running_stats else None
            var = self.running_var if not self.training or self.track_running_stats else None
            return F.batch_norm(input, mean, var, self.weight, self.bias, uses_batch, momentum, self.eps)
        running = None
        if self.training and self.running_mean is not None and self.running_var is not None:
            running = RunningStats(self.running_mean, self.running_var, momentum)
        reducer = WorldReducer()
        return sync_batch_norm(input, self.weight, self.bias, running=running, eps=self.eps, group=reducer)


class WorldReducer:
    """Reducer of batch norm statistics over all ranks."""

    def gather(self, row: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        world = current_world()
        return wait_tensor(
            collectives.all_gather(world, [row], NamedGroup("the statistics of SyncBatchNorm", world.all_ranks))
        )

    def all_reduce(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over all ranks."""
        world = current_world()
        named_group = NamedGroup("the gradient of SyncBatchNorm", world.all_ranks)
        wait_tensor(collectives.all_reduce(world, [sums], named_group, ScaledReduction(ReductionOp.SUM)))
