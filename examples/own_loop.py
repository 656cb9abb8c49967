"""A custom training loop: counterpoint runs the plan on the global batch, everything else is yours.

python examples/own_loop.py "zero3(2)"
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp


def main(strategy: str = "pipeline(2)", num_steps: int = 50) -> list[float]:
    """Fit a sine and return the loss of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    losses = []
    with cp.parallelize(model, partial(torch.optim.Adam, lr=1e-2), F.mse_loss, strategy=strategy) as step:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(step.optimizer, num_steps)
        for _ in range(num_steps):
            x = torch.rand(64, 1) * 6 - 3
            losses.append(step(x, torch.sin(x)))
            schedule.step()
    print(f"{strategy}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "pipeline(2)")
