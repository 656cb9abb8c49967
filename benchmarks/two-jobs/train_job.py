"""A pool worker's part in a job: train until all data is counted, or until it is reassigned."""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from jobs import make_data_slices
from torch import nn, optim

from counterpoint.elastic.ps_worker import PsWorker, SliceTrained
from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.ps.process import join, read_job_file


def train_job(contact, name, must_go):
    """Train, record the number of trained slices next to the job file, and return whether all data is counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    with join(read_job_file(Path(contact)), name) as session:
        copy = RemoteModule(model, session, partial(optim.SGD, lr=0.01))
        worker = PsWorker(copy, make_data_slices(session.job.name), F.cross_entropy, should_stop=must_go)
        trained = sum(isinstance(event, SliceTrained) for event in worker.events())
    Path(contact).with_name(f"trained.{name}.{trained}").touch()
    return not worker.has_left
