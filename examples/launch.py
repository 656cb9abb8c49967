"""Ranks from a function, as in a notebook: without a command or environment variables; results are return values.

The function stands at the top of a file, because the other processes import it. In a notebook, write the file with
``%%writefile`` and import it.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import counterpoint as cp


def train(strategy: str, num_steps: int) -> list[float]:
    """Train a small model on this rank, and return the loss of every step."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    with cp.Trainer(
        model, loss=F.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1), strategy=strategy
    ) as trainer:
        return trainer.fit(data, batch_size=16, epochs=num_steps, max_steps=num_steps).losses


def main() -> None:
    """Start two ranks and print the losses of both."""
    losses = cp.launch(train, ranks=2, args=["zero1", 8])
    for rank, seen in enumerate(losses):
        print(f"rank {rank}: {' '.join(f'{loss:.4f}' for loss in seen)}")


if __name__ == "__main__":
    main()
