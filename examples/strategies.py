"""Many parallel strategies, one result: each is compared with training on one rank.

All ranks run in this process, so that eight of them fit on a laptop.
"""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import counterpoint as cp

STRATEGIES = (
    "data(4)",
    "zero(4, level=3)",
    "pipeline(3, schedule=gpipe)",
    "pipeline(2) * data(2)",
    "tensor(2) * zero(2, level=1)",
    "bsp(2)",
)


def train(model: nn.Module, strategy: str) -> dict[str, torch.Tensor]:
    """Return the parameters after three steps on the same batches."""
    data = TensorDataset(*torch.randn(2, 48, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    trainer = cp.Trainer(
        model, loss=F.mse_loss, optimizer=partial(torch.optim.AdamW, lr=1e-2), strategy=strategy, num_microbatches=4
    )
    with trainer:
        trainer.fit(data, batch_size=16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two models, relative to the size of the parameter."""
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one)


def main() -> dict[str, float]:
    """Print and return the difference of each strategy from one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8)).double()
    alone = train(copy.deepcopy(model), "solo")
    found = {strategy: difference(alone, train(copy.deepcopy(model), strategy)) for strategy in STRATEGIES}
    for strategy, value in found.items():
        print(f"{strategy:30} differs from one rank by {value:.1e}")
    return found


if __name__ == "__main__":
    main()
