"""Train a small classifier under the strategy of the command line; the page docs/tutorial/tutorial.md walks through it.

python examples/tutorial.py "data(2)"
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import counterpoint as cp


def build_model() -> nn.Sequential:
    """Return a multilayer perceptron of four linear layers."""
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def build_dataset() -> TensorDataset:
    """Return 512 samples of four classes that a linear map separates."""
    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    directions = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, (inputs @ directions).argmax(1))


def main(strategy: str = "solo") -> float:
    """Train for four epochs, and return and print the last loss."""
    torch.manual_seed(0)  # the same initial weights in every process
    trainer = cp.Trainer(
        build_model(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=3e-3),
        strategy=strategy,
        progress="off",
    )
    with trainer:
        history = trainer.fit(build_dataset(), batch_size=64, epochs=4)
    if trainer.rank == 0:
        print(f"{strategy}: loss {history.losses[-1]:.6f}")
    return history.losses[-1]


if __name__ == "__main__":
    main(*sys.argv[1:2])
