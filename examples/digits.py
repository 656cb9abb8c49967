"""Handwritten digits on two ranks; the same script and the same losses under every launcher.

python examples/digits.py                              # both ranks in this process
counterpoint run -n 2 examples/digits.py               # one process each
torchrun --nproc-per-node 2 examples/digits.py         # likewise
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.data.digits import split_digits
from counterpoint.training.callbacks.progress import ProgressCallback


def build_model() -> nn.Module:
    """Return a small convolutional network; the same seed on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, cp.MeanMetric]:
    """Return the accuracy."""
    return {"accuracy": cp.MeanMetric(float((outputs.argmax(1) == labels).sum()), len(labels))}


def main() -> None:
    """Train and print the results on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--print-losses", action="store_true", help="the loss of every step with 9 digits")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as launchers do; with more threads sums are rounded differently

    train, held_out = split_digits()
    trainer = cp.Trainer(
        build_model(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=2e-3),
        strategy=options.strategy,
        callbacks=[ProgressCallback("off" if options.print_losses else "auto", name="digits")],
    )
    with trainer:
        history = trainer.fit(
            train,
            batch_size=64,
            epochs=options.epochs,
            max_steps=options.steps,
            eval_dataset=held_out,
            metrics=accuracy,
        )
        if options.print_losses and trainer.rank == 0:
            print(*(f"{loss:.9g}" for loss in history.losses), sep="\n")


if __name__ == "__main__":
    main()
