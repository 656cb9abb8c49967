"""Embeddings whose lookups need the whole batch are refused where a forward sees a part of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError

TOKENS, TARGETS = torch.arange(12).view(4, 3) % 7, torch.tensor([0, 1, 2, 0])


class Lookup(nn.Module):
    """A table with rows of limited norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 3, max_norm=1.0), nn.Linear(3, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens).sum(1))


class Bags(nn.Module):
    """Bags by offsets, of the batch or of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(7, 3, mode="sum")

    def forward(self, tokens, offsets=None):
        if offsets is None:
            offsets = torch.arange(0, tokens.numel(), tokens.shape[1])
        return self.table(tokens.reshape(-1), offsets=offsets)


def train(model, inputs, strategy, **options):
    """Return the weights after two steps."""
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=strategy, **options) as step:
        for _ in range(2):
            step(inputs, TARGETS)
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def train_plain(model, *inputs):
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(*inputs), TARGETS).backward()
        optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def test_one_forward_of_the_batch_shortens_rows_as_a_plain_loop_does():
    assert torch.equal(train(Lookup(), TOKENS, "solo"), train_plain(Lookup(), TOKENS))


@pytest.mark.parametrize(
    ("strategy", "micros"),
    [("data(2)", None), ("zero3(2)", None), ("pipeline(2)", 2), ("server(2)", None), ("solo", 2)],
)
def test_max_norm_is_refused_elsewhere(strategy, micros):
    with pytest.raises(
        cp.PlanError, match=r"^module 'table' has max_norm=1.0, .*but under .*weight.renorm\(2, 0, 1.0\)"
    ):
        train(Lookup(), TOKENS, strategy, num_microbatches=micros)


@pytest.mark.parametrize("strategy", ["data(2)", "zero2(2)"])
def test_offsets_of_the_batch_are_refused_where_it_is_divided(strategy):
    inputs = (TOKENS.reshape(-1)[:4], torch.tensor([0, 1, 2, 3]))
    assert torch.equal(train(Bags(), inputs, "solo"), train_plain(Bags(), *inputs))
    with pytest.raises(
        cp.DataError, match=r"^the offsets of module 'table' come with the batch .*; give each sample its"
    ):
        train(Bags(), inputs, strategy)


def test_offsets_that_forward_makes_are_those_of_its_part():
    assert torch.allclose(train(Bags(), TOKENS, "data(2)"), train_plain(Bags(), TOKENS), rtol=1e-5)


class Scaled(nn.Module):
    """Divides the gradient of a row by how often it is looked up."""

    def __init__(self, look_up):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.look_up = nn.Embedding(7, 3), nn.Linear(3, 3), look_up
        self.table.scale_grad_by_freq = look_up is None

    def forward(self, tokens):
        rows = self.table(tokens) if self.look_up is None else self.look_up(tokens, self.table.weight)
        return self.head(rows.sum(1))


LOOKUPS = {
    "module": None,
    "functional": lambda tokens, weight: F.embedding(tokens, weight, scale_grad_by_freq=True),
    "torch": lambda tokens, weight: torch.embedding(weight, tokens, -1, True),
    "bag": lambda tokens, weight: F.embedding_bag(tokens, weight, scale_grad_by_freq=True)[:, None],
}


@pytest.mark.parametrize("kind", LOOKUPS)
@pytest.mark.parametrize(
    ("strategy", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero3(2)", 1), ("pipeline(2)", 2)]
)
def test_gradients_that_are_divided_by_counts_of_the_batch_are_refused_where_it_is_divided(
    kind, strategy, num_microbatches
):
    with pytest.raises(PlanError, match=r"scale_grad_by_freq=True, which divides .* train with one microbatch"):
        train(Scaled(LOOKUPS[kind]), TOKENS, strategy, num_microbatches=num_microbatches)


@pytest.mark.parametrize("kind", LOOKUPS)
@pytest.mark.parametrize("strategy", ["solo", "pipeline(2)"])
def test_gradients_are_divided_by_the_counts_of_an_undivided_batch(kind, strategy):
    trained = train(Scaled(LOOKUPS[kind]), TOKENS, strategy, num_microbatches=1)
    assert torch.allclose(trained, train_plain(Scaled(LOOKUPS[kind]), TOKENS), rtol=1e-5, atol=1e-7)
