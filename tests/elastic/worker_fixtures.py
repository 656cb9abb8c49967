"""Small jobs in one thread: data, models, and workers that take turns, come and go."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from counterpoint.elastic.data_slices import DataSlices, slice_sampler
from counterpoint.elastic.ps_worker import PsWorker, SliceTrained, TaskEnded, WorkerEvent
from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.ps.consistency import Consistency
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import JobConfig, RetryPolicy
from counterpoint.ps.shard import PsShard

SGD = partial(torch.optim.SGD, lr=0.3)
NUM_ROWS = 12
TWO_FAILURES = RetryPolicy(max_failures=2)


def make_numeric_data(num_samples: int = 22) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 2, (num_samples,), generator=draw))


def make_lookup_data(num_samples: int = 22) -> TensorDataset:
    """Three rows of a table for each sample, and a class."""
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(0, NUM_ROWS, (num_samples, 3), generator=draw)
    return TensorDataset(rows, torch.randint(0, 2, (num_samples,), generator=draw))


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build().double()


def mlp(dropout: float = 0.0) -> nn.Module:
    return build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)))


def embedding_bag_model(padding: int | None = None) -> nn.Module:
    table = partial(nn.EmbeddingBag, NUM_ROWS, 4, mode="mean", padding_idx=padding)
    return build_seeded(lambda: nn.Sequential(table(), nn.Linear(4, 2)))


def make_slices(
    data: TensorDataset, consistency: Consistency, batch_size: int = 8, minibatches_per_slice: int = 1
) -> DataSlices:
    sampler = slice_sampler(len(data), batch_size, consistency, minibatches_per_slice=minibatches_per_slice)
    return DataSlices(data, sampler, consistency, minibatches_per_slice)


class InterleavedWorkers:
    """Workers of one job, which take turns: each computes a slice, then the next one does."""

    def __init__(
        self,
        slices: DataSlices,
        *,
        epochs: int = 2,
        task_slices: int = 1,
        num_servers: int = 2,
        retry_policy: RetryPolicy = TWO_FAILURES,
    ) -> None:
        self.slices = slices
        work = slices.data_config(epochs, slices_per_task=task_slices)
        job = JobConfig("workers", slices.consistency, num_servers, work, retry_policy)
        self.job = LocalJob(job, is_journaled=True)
        self.event_streams: dict[str, Iterator[WorkerEvent]] = {}
        self.events: list[tuple[str, WorkerEvent]] = []
        self.gone: set[str] = set()
        self.remote_modules: dict[str, RemoteModule] = {}

    def join(self, name, model, optimizer=SGD, *, config=None, loss=F.cross_entropy, **options):
        options = {"key_bytes": 0, **options}
        served = self.remote_modules[name] = RemoteModule(model, self.job.join(name), optimizer, **options)
        worker = PsWorker(served, self.slices, loss, config=config, should_stop=lambda: name in self.gone)
        self.event_streams[name] = worker.events()
        return served

    def run_rounds(self, most: int = 1000) -> None:
        """Every worker takes its turn, until all are done or so many rounds are over."""
        for _ in range(most):
            for name, turns in list(self.event_streams.items()):
                event = next(turns, None)
                if event is None:
                    del self.event_streams[name]
                else:
                    self.events.append((name, event))
            if not self.event_streams:
                return

    @property
    def trained(self) -> list[int]:
        return [event.slice_index for _, event in self.events if isinstance(event, SliceTrained)]

    @property
    def ended(self) -> list[str]:
        return [event.outcome for _, event in self.events if isinstance(event, TaskEnded)]

    @property
    def failures(self) -> list[str]:
        return [event.text for _, event in self.events if isinstance(event, TaskEnded) and event.outcome == "failed"]

    def shard(self, index: int) -> PsShard:
        """A shard as its first keeper has it."""
        shard = self.job.node(f"server-{index}").shard_replicas[index].shard
        assert shard is not None
        return shard

    def model(self) -> nn.Module:
        """The model with the servers' weights, pulled by a worker that has not left."""
        name = next(name for name in self.remote_modules if name not in self.gone)
        return self.remote_modules[name].export_weights(tables=True)


def train_single_process(model, data, slices, optimizer=SGD, epochs=2):
    """The same training by one loop, batch after batch."""
    updates = optimizer(model.parameters())
    for epoch in range(epochs):
        for index in range(slices.sampler.num_batches):
            samples = torch.from_numpy(slices.sampler.batch(epoch, index))
            updates.zero_grad()
            F.cross_entropy(model(data.tensors[0][samples]), data.tensors[1][samples]).backward()
            updates.step()
    return model


def max_relative_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)
