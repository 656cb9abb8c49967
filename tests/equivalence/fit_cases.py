"""A case of a stream as a fit, whose stages save each for itself."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from counterpoint.data.sampler import Sampler
from tests.equivalence import async_pipeline_cases
from tests.training.trainers import make_trainer, params_of


@dataclass(frozen=True)
class Fitted(async_pipeline_cases.Case):
    """A fit: the batches are those of its sampler, all of one size; the reference may end before it does."""

    last: int | None = None

    @property
    def segments(self):
        return [(0, self.last)] if self.last else super().segments

    def data(self):
        return TensorDataset(*(torch.cat(parts) for parts in zip(*super().batches(), strict=True)))

    def batches(self):
        sampler, tensors = Sampler(sum(self.sizes), self.sizes[0], 0), self.data().tensors
        drawn = [list(sampler.batch(0, at)) for at in range(len(self.sizes))]
        return [tuple(tensor[indices] for tensor in tensors) for indices in drawn]

    def fit(self, root, *, callbacks=(), **options):
        """Train, each stage saving for itself after every third step; return the parameters."""
        with make_trainer(
            self.plan, self.build(), loss=F.mse_loss, optimizer=async_pipeline_cases.OPTIMIZERS[self.optimizer], progress="off",
            callbacks=callbacks,
        ) as one:  # fmt: skip
            saves = {"checkpoint_dir": root, "save_every": 3, "checkpoint_mode": "per_stage"}
            one.fit(self.data(), batch_size=self.sizes[0], **saves, **options)
            return params_of(one.model)
