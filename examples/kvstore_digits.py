"""Handwritten digits with MXNet's KVStore API: gradients are pushed, weights are pulled.

counterpoint run -n 2 examples/kvstore_digits.py                      # launch.py -n 2 -s 1 python train.py
counterpoint run -n 2 examples/kvstore_digits.py --kv-store dist_async
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.compat import kvstore
from counterpoint.data.digits import split_digits


def build_model() -> nn.Module:
    """Return a small convolutional network."""
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10))


def batches(dataset, batch_size: int, kv):
    """Yield this worker's part of the data, in batches."""
    own = torch.utils.data.Subset(dataset, range(kv.rank, len(dataset), kv.num_workers))
    yield from torch.utils.data.DataLoader(own, batch_size=batch_size, drop_last=True)


def train(model: nn.Module, kv, images: torch.Tensor, digits: torch.Tensor) -> None:
    """Take one step: pushed gradients are summed, so each worker divides its loss by their number."""
    model.zero_grad()
    share = kv.num_workers if "async" not in kv.type else 1
    (F.cross_entropy(model(images), digits) / share).backward()
    for index, param in enumerate(model.parameters()):
        kv.push(index, param.grad, priority=-index)
    for index, param in enumerate(model.parameters()):
        kv.pull(index, out=param, priority=-index)


@torch.no_grad()
def accuracy(model: nn.Module, dataset) -> float:
    """Return the accuracy on held-out digits."""
    loader = torch.utils.data.DataLoader(dataset, batch_size=64)
    known = sum(int((model(images).argmax(1) == digits).sum()) for images, digits in loader)
    return known / len(dataset)


def main(arguments: list[str] | None = None) -> float:
    """Train and return the accuracy; rank 0 prints it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gc-type", choices=["none", "1bit", "2bit"], default="none", help="gradient compression")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    model = build_model()
    train_set, held_out = split_digits()
    with kvstore.create(options.kv_store) as kv:
        if options.gc_type != "none":
            kv.set_gradient_compression({"type": options.gc_type, "threshold": 0.05})
        kv.set_optimizer(partial(torch.optim.SGD, lr=0.05, momentum=0.9))
        params = list(model.parameters())
        kv.init(list(range(len(params))), params)
        kv.pull(list(range(len(params))), out=params)
        for _ in range(options.epochs):
            for images, digits in batches(train_set, 16, kv):
                train(model, kv, images, digits)
        reached = accuracy(model, held_out)
        if kv.rank == 0:
            print(f"{kv.type} with {kv.num_workers} workers: {reached:.1%} of the held-out digits")
    return reached


if __name__ == "__main__":
    main()
