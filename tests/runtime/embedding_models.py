"""Models with embedding tables of more than 64 KiB, and how the tests train them."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp

NUM_ROWS, WIDTH = 1500, 7  # more than 64 KiB in float64
SGD = partial(optim.SGD, lr=0.5)
MOMENTUM = partial(optim.SGD, lr=0.5, momentum=0.9)
ADAGRAD = partial(optim.Adagrad, lr=0.1)
ADAM = partial(optim.Adam, lr=0.1)
SPARSE_ADAM = partial(optim.SparseAdam, lr=0.1)


class EmbeddingNet(nn.Module):
    """A table, followed by a linear layer."""

    def __init__(self, table):
        super().__init__()
        self.table, self.head = table, nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        result = self.table(tokens)
        return self.head(torch.tanh(result.sum(1) if result.dim() == 3 else result))


class RawEmbeddingNet(nn.Module):
    """A table only, for optimizers that need sparse gradients."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, tokens):
        return self.table(tokens).sum(1)


class TiedEmbeddingNet(nn.Module):
    """A table that is also the output layer."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, tokens):
        return F.linear(torch.tanh(self.table(tokens).sum(1)), self.table.weight)[:, :3]


class DeepTiedEmbeddingNet(nn.Module):
    """Layers between a table and the output layer, which has the table as its weight."""

    def __init__(self, table):
        super().__init__()
        self.table, self.head = table, nn.Linear(WIDTH, NUM_ROWS, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head.weight = table.weight

    def forward(self, tokens):
        hidden = self.table(tokens).sum(1)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)[:, :3]


class EmbeddingBagNet(nn.Module):
    """Bags of several lengths, one of them empty, given by their offsets."""

    def __init__(self, table):
        super().__init__()
        self.table, self.head = table, nn.Linear(WIDTH, 3)

    def forward(self, tokens):
        begins = torch.arange(len(tokens)) * 4 + torch.arange(len(tokens)) % 2 * 4
        last = torch.full((int(self.table.include_last_offset),), tokens.numel())
        offsets = torch.cat([begins.clamp(max=tokens.numel()), last])
        return self.head(self.table(tokens.reshape(-1), offsets))


def batches(num_steps=4):
    """Rows occur on several ranks and several times on one; the third batch leaves some ranks without samples."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, NUM_ROWS, (num_steps, 8, 4), generator=random)
    tokens[:, ::2], tokens[:, :, 1], tokens[:, :3, 3] = tokens[:, 1::2].clone(), tokens[:, :, 2].clone(), 2
    targets = torch.randint(0, 3, (num_steps, 8), generator=random)
    return [
        (tokens[index, : 1 if index == 2 else 8], targets[index, : 1 if index == 2 else 8])
        for index in range(num_steps)
    ]


def dataset():
    """The batches with all their samples, for a trainer."""
    full = [*batches(5)[:2], *batches(5)[3:]]
    return TensorDataset(*(torch.cat(parts) for parts in zip(*full, strict=True)))


def build_seeded(build, table):
    """Return the same model every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build(table()).double()


def trained(strategy, build, table, optimizer, *, loss=F.cross_entropy, left_out=None, **options):
    """Return all weights, trained under a strategy."""
    model = build_seeded(build, table)
    with cp.parallelize(model, optimizer, loss, strategy=strategy, **options) as step:
        for index, (tokens, targets) in enumerate(batches()):
            if index != left_out:
                step(tokens, targets)
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def max_difference(strategy, build, table, optimizer, **options):
    """Return the relative difference to single-process training."""
    weights, solo = (trained(plan, build, table, optimizer, **options) for plan in (strategy, "solo"))
    return float((weights - solo).norm() / solo.norm())


def train_cases(cases):
    """Return the weights of each case, in one process of a launch."""
    return [trained("data(2)", *CASES[case]) for case in cases]


def rows(**how):
    """Return how a table of single rows is made."""
    return partial(nn.Embedding, NUM_ROWS, how.pop("width", WIDTH), **how)


def bags(**how):
    """Return how a table of bags is made."""
    return partial(nn.EmbeddingBag, NUM_ROWS, WIDTH, **how)


CASES: dict[str, Any] = {
    "sgd": (EmbeddingNet, bags(sparse=True), SGD),
    "dense": (EmbeddingNet, bags(), SGD),
    "momentum": (EmbeddingNet, rows(sparse=True), MOMENTUM),
    "adagrad": (EmbeddingNet, rows(sparse=True), ADAGRAD),
    "adam": (EmbeddingNet, rows(), ADAM),
    "sparse adam": (RawEmbeddingNet, rows(sparse=True, width=6), SPARSE_ADAM),
}
