"""The two jobs: the same model on different amounts of data."""

from functools import cache

import torch
from torch.utils.data import TensorDataset

from counterpoint.elastic.data_slices import DataSlices, slice_sampler
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig

BATCH, SLICES_PER_TASK, SLICES_PER_EPOCH = 256, 4, 40
EPOCHS = {"long": 4, "short": 2, "first": 1, "second": 1}
TIMED, UNTIMED = ("long", "short"), ("first", "second")


@cache
def make_data_slices(name):
    """Return the data of a job: random images."""
    draw, size = torch.Generator().manual_seed(len(name)), BATCH * SLICES_PER_EPOCH
    data = TensorDataset(torch.randn(size, 784, generator=draw), torch.randint(0, 10, (size,), generator=draw))
    return DataSlices(data, slice_sampler(size, BATCH, Asp()), Asp())


def make_job(name):
    work = make_data_slices(name).data_config(EPOCHS[name], slices_per_task=SLICES_PER_TASK)
    return JobConfig(name, Asp(), num_servers=1, data=work, is_logged=False)
