"""The two jobs: the same model on different amounts of data; and what every worker does before anything is timed."""

from functools import cache

import torch
from torch.utils.data import TensorDataset

from counterpoint.server.job import Asp, Job
from counterpoint.server.working.portions import Portions, sampler_of

BATCH, TASK_PORTIONS, EPOCH_PORTIONS = 256, 4, 40
EPOCHS = {"long": 4, "short": 2, "first": 1, "second": 1}
TIMED, UNTIMED = ("long", "short"), ("first", "second")


@cache
def portions_of(name):
    """Return the data of a job: random images."""
    draw, size = torch.Generator().manual_seed(len(name)), BATCH * EPOCH_PORTIONS
    data = TensorDataset(torch.randn(size, 784, generator=draw), torch.randint(0, 10, (size,), generator=draw))
    return Portions(data, sampler_of(size, BATCH, Asp()), Asp())


def job_of(name):
    work = portions_of(name).work(EPOCHS[name], task_portions=TASK_PORTIONS)
    return Job(name, Asp(), num_servers=1, work=work, is_logged=False)
