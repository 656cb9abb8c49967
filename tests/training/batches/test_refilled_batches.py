"""Tensors that a loop, a loader or a dataset fills again for each batch, while batches before it are still needed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

import counterpoint as cp

STREAMED = ["pipedream(2)", "pipeline(2, schedule=pipedream_2bw)"]
NUM_BATCHES, SIZE = 6, 4


class Refilled:
    """Returns each batch in the same memory, or in its own."""

    def __init__(self, *, reuses):
        self.reuses = reuses
        random = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_BATCHES * SIZE, 4, generator=random, dtype=torch.float64)
        self.targets = torch.randn(NUM_BATCHES * SIZE, 3, generator=random, dtype=torch.float64)
        self.memory = torch.empty(SIZE, 4, dtype=torch.float64), torch.empty(SIZE, 3, dtype=torch.float64)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

    def fill(self, values):
        if not self.reuses:
            return values
        return tuple(own[: len(new)].copy_(new) for own, new in zip(self.memory, values, strict=True))

    def collate(self, samples):
        return self.fill(tuple(torch.stack(field) for field in zip(*samples, strict=True)))

    def batches(self):
        for start in range(0, len(self), SIZE):
            yield self.fill(self[start : start + SIZE])


class FetchedAtOnce(Refilled):
    def fetch(self, indices):
        return self.fill(self[torch.tensor(indices)])


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def run_loop(data, strategy):
    model = mlp()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=strategy) as step:
        for batch in data.batches():
            step(batch)
    return nn.utils.parameters_to_vector(model.parameters())


def run_accumulation(data, strategy):
    model = mlp()
    with cp.parallelize(model, optim.SGD(model.parameters(), lr=0.1), F.mse_loss, strategy=strategy) as step:
        for number, batch in enumerate(data.batches()):
            step.accumulate(batch)
            if number % 2:
                step.update()
    return nn.utils.parameters_to_vector(model.parameters())


def fit(data, strategy, **options):
    model = mlp()
    sgd = optim.SGD(model.parameters(), lr=0.1)
    with cp.Trainer(model, loss=F.mse_loss, optimizer=sgd, strategy=strategy, progress="off") as trainer:
        trainer.fit(data, epochs=2, **options)
    return nn.utils.parameters_to_vector(model.parameters())


def fit_stream(data, strategy):
    return fit(data.batches, strategy)


def fit_loader(data, strategy):
    return fit(DataLoader(data, SIZE, collate_fn=data.collate), strategy)


def fit_dataset(data, strategy):
    return fit(data, strategy, batch_size=SIZE)


def find_difference(train: Callable[..., Tensor], strategy: str, kind: type[Refilled] = Refilled) -> float:
    """Return how much weights differ after training on batches in the same memory, and in memory of their own."""
    own, refilled = (train(kind(reuses=reuses), strategy) for reuses in (False, True))
    return (own - refilled).abs().max().item()


@pytest.mark.parametrize("train", [run_loop, fit_stream, fit_loader])
@pytest.mark.parametrize("strategy", STREAMED)
def test_batches_in_flight_keep_their_values(train, strategy):
    assert find_difference(train, strategy) <= 1e-12


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)", *STREAMED])
def test_accumulated_batches_keep_their_values(strategy):
    assert find_difference(run_accumulation, strategy) <= 1e-12


@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2, schedule=gpipe)", *STREAMED])
def test_microbatches_that_a_dataset_reads_at_once_keep_their_values(strategy):
    assert find_difference(fit_dataset, strategy, FetchedAtOnce) <= 1e-12
