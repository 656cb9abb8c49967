"""Handwritten digits with Horovod's API; only the import differs.

counterpoint run -n 2 examples/horovod_mnist.py
torchrun --nproc-per-node 2 examples/horovod_mnist.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import counterpoint.compat.horovod.torch as hvd
from counterpoint.data.digits import split_digits


def build_model() -> nn.Module:
    """Return a small convolutional network."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(32 * 16, 10))


def loader_of(dataset, batch_size: int) -> DataLoader:
    """Return this rank's part of the data, in batches."""
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=1)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def train(model: nn.Module, optimizer: optim.Optimizer, loader: DataLoader) -> None:
    """Train one epoch on this rank's part; gradients are averaged over all ranks."""
    model.train()
    for images, digits in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), digits).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy on held-out digits, over all ranks."""
    model.eval()
    known = torch.stack([(model(images).argmax(1) == digits).float().mean() for images, digits in loader]).mean()
    return hvd.allreduce(known, name="accuracy").item()


def main(arguments: list[str] | None = None) -> float:
    """Train and return the final accuracy; rank 0 prints one per epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel in half precision")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps by Adasum")
    options = parser.parse_args(arguments)

    hvd.init()
    torch.manual_seed(42 + hvd.rank())
    torch.set_num_threads(1)
    model = build_model()
    optimizer = optim.SGD(model.parameters(), lr=0.02 * (1 if options.use_adasum else hvd.size()), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    op = hvd.Adasum if options.use_adasum else hvd.Average
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, op=op)

    digits, held_out = (loader_of(part, 32) for part in split_digits())
    for epoch in range(options.epochs):
        digits.sampler.set_epoch(epoch)
        train(model, optimizer, digits)
        reached = accuracy(model, held_out)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {100 * reached:.1f} % of the held-out digits")
    return reached


if __name__ == "__main__":
    main()
