"""Recommendation model (DLRM): embedding tables with sparse gradients, dense features, and their products.

python examples/recipes/dlrm.py --strategy "bsp(2)"
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp

TABLES = (1000, 300, 50, 7)
NUM_DENSE = 5


class DLRM(nn.Module):
    """A table for each categorical feature, and all products of two features."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, dim, sparse=True) for size in TABLES)
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 32), nn.ReLU(), nn.Linear(32, dim))
        self.top = nn.Sequential(nn.Linear(dim + math.comb(len(TABLES) + 1, 2), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return the logit of a click for each sample."""
        dense = self.bottom(dense)
        features = torch.stack([dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = features @ features.transpose(1, 2)
        row, column = torch.triu_indices(len(TABLES) + 1, len(TABLES) + 1, offset=1)
        return self.top(torch.cat([dense, products[:, row, column]], dim=1)).squeeze(1)


def make_clicks(num_samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return dense features, categories and clicks; frequent categories have low numbers."""
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(num_samples, NUM_DENSE, generator=generator)
    draws = torch.rand(num_samples, len(TABLES), generator=generator)
    categories = (torch.tensor(TABLES) * draws.pow(3)).long()
    taste = [torch.randn(size, generator=generator) for size in TABLES]
    score = dense.sum(1) + sum(values[categories[:, i]] for i, values in enumerate(taste))
    return dense, categories, (score > 0).to(dense.dtype)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = DLRM()
    optimizer, losses = torch.optim.Adagrad(model.parameters(), lr=0.05), []
    dense, categories, clicks = make_clicks(128 * 50)
    with cp.parallelize(model, optimizer, F.binary_cross_entropy_with_logits, strategy=options.strategy) as step:
        for number in range(options.steps):
            batch = slice(number % 50 * 128, (number % 50 + 1) * 128)
            losses.append(step((dense[batch], categories[batch]), clicks[batch]))
    print(f"{options.strategy}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    return losses


if __name__ == "__main__":
    main()
