"""The two jobs: the same model on different amounts of data."""

from dataclasses import dataclass
from functools import cache

import torch
from torch.utils.data import TensorDataset

from counterpoint.elastic.data_slices import DataSlices, slice_sampler
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig

SLICES_PER_TASK = 4
TIMED, UNTIMED, QUICK = ("long", "short"), ("first", "second"), ("quick-long", "quick-short")


@dataclass(frozen=True)
class JobSize:
    """How much a job trains on."""

    epochs: int
    slices_per_epoch: int = 40
    batch: int = 256


SIZES = {
    "long": JobSize(4),
    "short": JobSize(2),
    "first": JobSize(1),
    "second": JobSize(1),
    "quick-long": JobSize(2, slices_per_epoch=4, batch=8),
    "quick-short": JobSize(1, slices_per_epoch=4, batch=8),
}
"""By the name of a job."""


@cache
def make_data_slices(name):
    """Return the data of a job: random images."""
    draw, batch = torch.Generator().manual_seed(len(name)), SIZES[name].batch
    size = batch * SIZES[name].slices_per_epoch
    data = TensorDataset(torch.randn(size, 784, generator=draw), torch.randint(0, 10, (size,), generator=draw))
    return DataSlices(data, slice_sampler(size, batch, Asp()), Asp())


def make_job(name):
    work = make_data_slices(name).data_config(SIZES[name].epochs, slices_per_task=SLICES_PER_TASK)
    return JobConfig(name, Asp(), num_servers=1, data=work, is_logged=False)
