"""Mixture of experts: each token goes to the two best of eight experts.

python examples/recipes/mixture_of_experts.py --strategy "pipeline(2)"
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp

NUM_SYMBOLS, LENGTH = 12, 16


class MixtureOfExperts(nn.Module):
    """A residual layer of experts."""

    def __init__(self, dim: int, num_experts: int = 8) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(num_experts)
        )

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the output, and for each sample how unevenly this router and those before choose."""
        x, imbalance = state
        tokens = self.norm(x).flatten(0, 1)
        probabilities = self.router(tokens).softmax(1)
        weights, chosen = probabilities.topk(2)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            output = output.index_add(0, token, weights[token, place, None] * expert(tokens[token]))
        # within each sequence, so that the mean over samples is the same under every plan
        used = F.one_hot(chosen, len(self.experts)).sum(1).to(x.dtype).unflatten(0, x.shape[:2]).mean(1)
        own = (used * probabilities.unflatten(0, x.shape[:2]).mean(1)).sum(1) * len(self.experts)
        return x + output.view_as(x), imbalance + own


class Embed(nn.Embedding):
    """An embedding, the first layer."""

    def forward(self, symbols: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors, and zero for each sample."""
        x = super().forward(symbols)
        return x, x.new_zeros(len(x))


def loss(output: tuple[Tensor, Tensor], symbols: Tensor) -> Tensor:
    """Return the mean of the cross entropy of the next symbols and of the routers' imbalance."""
    logits, imbalance = output
    return F.cross_entropy(logits[..., :NUM_SYMBOLS].flatten(0, 1), symbols.flatten()) + 0.01 * imbalance.mean()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train on sequences that count in fives, and return the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    # the first outputs of the last layer are the logits
    model = nn.Sequential(Embed(NUM_SYMBOLS, 32), *(MixtureOfExperts(32) for _ in range(3)))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    with cp.parallelize(model, optimizer, loss, strategy=options.strategy) as step:
        for _ in range(options.steps):
            symbols = (torch.randint(NUM_SYMBOLS, (32, 1)) + 5 * torch.arange(LENGTH + 1)) % NUM_SYMBOLS
            losses.append(step(symbols[:, :-1], symbols[:, 1:]))
    print(f"{options.strategy}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    return losses


if __name__ == "__main__":
    main()
