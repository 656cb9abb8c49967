"""The two jobs: the same model on different amounts of data."""

import torch
from torch.utils.data import TensorDataset

from counterpoint.server.job import Asp, Job
from counterpoint.server.working.portions import Portions, sampler_of

BATCH, TASK_PORTIONS = 256, 4
PORTIONS = {"long": 240, "short": 120}
"""Over all epochs."""


def portions_of(name):
    """Return the data of a job: random images, of which there are few, seen again and again."""
    draw = torch.Generator().manual_seed(len(name))
    images, classes = torch.randn(BATCH * 8, 784, generator=draw), torch.randint(0, 10, (BATCH * 8,), generator=draw)
    data = TensorDataset(images, classes)
    return Portions(data, sampler_of(len(data), BATCH, Asp()), Asp())


def job_of(name):
    portions = portions_of(name)
    work = portions.work(PORTIONS[name] // portions.num_portions, task_portions=TASK_PORTIONS)
    return Job(name, Asp(), num_servers=1, work=work, is_logged=False)
