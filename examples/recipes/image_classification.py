"""Image classification: augmentation, mixup, batch norm and an average of the weights, in one's own loop.

python examples/recipes/image_classification.py --strategy "zero3(2)"
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import counterpoint as cp
from counterpoint.data.digits import split_digits


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm, and the input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many channels."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


def build_model() -> nn.Module:
    """Return a small residual network for images of 8 x 8 pixels."""
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, ResidualBlock(16), nn.MaxPool2d(2), ResidualBlock(16), nn.Flatten(), nn.Linear(256, 10))


def augment(images: Tensor) -> Tensor:
    """Move each image by up to one pixel in each direction."""
    padded, moves = F.pad(images, (1, 1, 1, 1)), torch.randint(3, (len(images), 2)).tolist()
    return torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)])


def mixup(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mix each image, and its label, with another one of the batch."""
    weight, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(len(images))
    targets = F.one_hot(labels, 10).to(images.dtype)
    return torch.lerp(images, images[order], weight), torch.lerp(targets, targets[order], weight)


def main(arguments: list[str] | None = None) -> tuple[list[float], float]:
    """Train, and return the losses and the accuracy of the averaged weights on held-out images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)  # the same weights, batches and mixtures in every process
    train, held_out = split_digits()
    model = build_model()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05)
    losses = []
    with cp.parallelize(model, optimizer, F.cross_entropy, strategy=options.strategy, batch_norm="sync") as step:
        schedule = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 5e-3, total_steps=options.epochs * 23)
        for _ in range(options.epochs):
            for images, labels in DataLoader(train, batch_size=64, shuffle=True):
                losses.append(step(*mixup(augment(images), labels)))
                schedule.step()
                with step.full_weights() as trained:
                    average.update_parameters(trained)
    images, labels = held_out.fetch(range(len(held_out)))
    average.eval()
    with torch.no_grad():
        accuracy = float((average(images).argmax(1) == labels).double().mean())
    print(f"{options.strategy}: loss {losses[-1]:.4f}, {accuracy:.1%} of the held-out images")
    return losses, accuracy


if __name__ == "__main__":
    main()
