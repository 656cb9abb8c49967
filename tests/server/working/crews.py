"""Small jobs in one thread: data, models, and workers that take turns, come and go."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from counterpoint.server.job import Budget, Consistency, Job
from counterpoint.server.local import LocalJob
from counterpoint.server.shard import Shard
from counterpoint.server.working.loop import Ended, Event, Trained, Worker
from counterpoint.server.working.portions import Portions, sampler_of
from counterpoint.server.working.served import Served

SGD = partial(torch.optim.SGD, lr=0.3)
NUM_ROWS = 12
TWO = Budget(failures=2)


def numbers(num_samples: int = 22) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(num_samples, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 2, (num_samples,), generator=draw))


def words(num_samples: int = 22) -> TensorDataset:
    """Three rows of a table for each sample, and a class."""
    draw = torch.Generator().manual_seed(5)
    rows = torch.randint(0, NUM_ROWS, (num_samples, 3), generator=draw)
    return TensorDataset(rows, torch.randint(0, 2, (num_samples,), generator=draw))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return build().double()


def mlp(dropout: float = 0.0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)))


def bags(padding: int | None = None) -> nn.Module:
    table = partial(nn.EmbeddingBag, NUM_ROWS, 4, mode="mean", padding_idx=padding)
    return seeded(lambda: nn.Sequential(table(), nn.Linear(4, 2)))


def portions_of(data: TensorDataset, consistency: Consistency, batch_size: int = 8, minibatches: int = 1) -> Portions:
    sampler = sampler_of(len(data), batch_size, consistency, minibatches=minibatches)
    return Portions(data, sampler, consistency, minibatches)


class Crew:
    """Workers of one job, which take turns: each computes a portion, then the next one does."""

    def __init__(
        self, portions: Portions, *, epochs: int = 2, task_portions: int = 1, num_servers: int = 2, budget: Budget = TWO
    ) -> None:
        self.portions = portions
        work = portions.work(epochs, task_portions=task_portions)
        job = Job("crew", portions.consistency, num_servers, work, budget)
        self.job = LocalJob(job, is_journaled=True)
        self.turns: dict[str, Iterator[Event]] = {}
        self.events: list[tuple[str, Event]] = []
        self.gone: set[str] = set()
        self.served: dict[str, Served] = {}

    def join(self, name, model, optimizer=SGD, *, habits=None, loss=F.cross_entropy, **options):
        options = {"key_bytes": 0, **options}
        served = self.served[name] = Served(model, self.job.join(name), optimizer, **options)
        worker = Worker(served, self.portions, loss, habits=habits, must_go=lambda: name in self.gone)
        self.turns[name] = worker.events()
        return served

    def take_turns(self, most: int = 1000) -> None:
        """Every worker takes its turn, until all are done or so many rounds are over."""
        for _ in range(most):
            for name, turns in list(self.turns.items()):
                event = next(turns, None)
                if event is None:
                    del self.turns[name]
                else:
                    self.events.append((name, event))
            if not self.turns:
                return

    @property
    def trained(self) -> list[int]:
        return [event.portion for _, event in self.events if isinstance(event, Trained)]

    @property
    def ended(self) -> list[str]:
        return [event.outcome for _, event in self.events if isinstance(event, Ended)]

    @property
    def failures(self) -> list[str]:
        return [event.text for _, event in self.events if isinstance(event, Ended) and event.outcome == "failed"]

    def shard(self, index: int) -> Shard:
        """A shard as its first keeper has it."""
        shard = self.job.node(f"server-{index}").holdings[index].shard
        assert shard is not None
        return shard

    def model(self) -> nn.Module:
        """The model as the servers have it, told by a worker that is still there."""
        name = next(name for name in self.served if name not in self.gone)
        return self.served[name].give_back(tables=True)


def solo(model, data, portions, optimizer=SGD, epochs=2):
    """The same training by one loop, batch after batch."""
    updates = optimizer(model.parameters())
    for epoch in range(epochs):
        for index in range(portions.sampler.num_batches):
            samples = torch.from_numpy(portions.sampler.batch(epoch, index))
            updates.zero_grad()
            F.cross_entropy(model(data.tensors[0][samples]), data.tensors[1][samples]).backward()
            updates.step()
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)
