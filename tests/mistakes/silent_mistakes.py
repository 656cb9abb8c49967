"""Mistakes that raise no error by themselves, as users make them, one function each, for two ranks in processes."""

import contextlib
import io
import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

import counterpoint as cp
import counterpoint.compat.horovod.torch as hvd
from counterpoint.launchers import detect
from counterpoint.training.distributed_world import configure_threads, connected_fabrics
from tests.training.trainers import dataset, mlp

SGD = partial(optim.SGD, lr=0.1)
NUM_RANKS = 2


def rank():
    return int(os.environ["RANK"])


def step_of(model=None, optimizer=SGD, **options):
    return cp.parallelize(mlp() if model is None else model, optimizer, F.cross_entropy, strategy="data(2)", **options)


def more_threads_than_cores():
    """Return the standard error if all ranks compute with all cores, and the number of threads of each afterwards."""
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
    (fabric,) = connected_fabrics(detect())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        configure_threads(fabric, is_placed=False)
    return said.getvalue(), torch.get_num_threads()


def workers_that_are_forked_late():
    """A loader starts its workers when the ranks have met, which takes threads; and again in the second epoch."""
    loader = DataLoader(dataset(24), batch_size=12, num_workers=1, multiprocessing_context="fork")
    with step_of() as step:
        for _ in range(2):
            for inputs, targets in loader:
                step(inputs, targets)


class DrawsForMany(Dataset[tuple[torch.Tensor, int]]):
    """Adds noise to all the samples that it is asked for at once."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        noise = torch.randn(len(indices), 6, dtype=torch.float64)
        return [(noise[at], index % 3) for at, index in enumerate(indices)]


def noise_for_many_samples_at_once():
    cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=SGD, strategy="data(2)", progress="off").fit(
        DrawsForMany(), batch_size=12
    )


def an_optimizer_from_before():
    model = mlp()
    optimizer = SGD(model.parameters())
    model[4] = nn.Linear(8, 3).double()
    step_of(model, optimizer)


def the_same_samples_under_horovod():
    hvd.init()
    model = mlp()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(dataset().tensors[0]), dataset().tensors[1]).backward()
        optimizer.step()


def weights_changed_unseen():
    """Through ``.data``, which torch does not count, on one rank."""
    model = mlp()
    step = step_of(model, share_params_on_host=False)
    step(*dataset(12).tensors)
    if rank() == 1:
        model[2].weight.data.add_(1.0)
    step(*dataset(12).tensors)


def weights_changed_in_place():
    model = mlp()
    step = step_of(model)
    step(*dataset(12).tensors)
    if rank() == 1:
        with torch.no_grad():
            model[2].weight.clamp_(-0.1, 0.1)
    step(*dataset(12).tensors)


def weights_given_other_memory():
    """On all ranks, to which torch's version counters do not react; the second step would train the first values."""
    model = mlp()
    step = step_of(model)
    step(*dataset(12).tensors)
    model[2].weight.data = model[2].weight.data * 0.9
    step(*dataset(12).tensors)


def exported_weights_given_other_memory():
    """After an export, and without an import before the next step."""
    model = mlp()
    step = step_of(model)
    step(*dataset(12).tensors)
    step.export_weights()
    model[2].weight.data = model[2].weight.data * 0.9
    step(*dataset(12).tensors)


def weights_changed_through_data():
    """On all ranks of a host that share one copy, which would be changed twice."""
    model = mlp()
    step = step_of(model)
    step(*dataset(12).tensors)
    model[2].weight.data.mul_(0.9)
    step(*dataset(12).tensors)


def own_weights_changed_through_data():
    """On all ranks, of which each has a copy; return the loss of the next step."""
    model = mlp()
    with step_of(model, share_params_on_host=False) as step:
        step(*dataset(12).tensors)
        model[2].weight.data.mul_(0.9)
        return float(step(*dataset(12).tensors))


def optimizer_state_read_in_a_loop():
    model = mlp()
    with step_of(model, optim.Adam(model.parameters())) as step:
        step(*dataset(12).tensors)
        step.optimizer.state[model[0].weight]["exp_avg"]


CONTINUING_SCRIPTS = (
    more_threads_than_cores, workers_that_are_forked_late, noise_for_many_samples_at_once, an_optimizer_from_before,
    the_same_samples_under_horovod, optimizer_state_read_in_a_loop, own_weights_changed_through_data,
    weights_changed_unseen,
)  # fmt: skip
"""Scripts after which all ranks can continue, and a last one after which they cannot."""
