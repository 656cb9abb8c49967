"""Contrastive training of images and texts (CLIP): each pair is compared with all others of the batch.

python examples/recipes/clip.py --strategy "zero3(2)"
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import counterpoint as cp
from counterpoint.data.digits import split_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class TwoTowers(nn.Module):
    """Encodes images of 64 pixels and texts of bytes as vectors of length 1."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.image_tower = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, dim))
        self.embed = nn.Embedding(128, 32)
        self.text_tower = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a vector for each image and for each text."""
        words = (self.embed(texts) * (texts > 0).unsqueeze(2)).sum(1)
        return F.normalize(self.image_tower(images), dim=1), F.normalize(self.text_tower(words), dim=1)


class ContrastiveLoss(nn.Module):
    """The cross entropy of the right text for each image, and the other way round, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, vectors: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        """Return the loss of a batch; texts of the same digit are all right."""
        logits = self.log_scale.exp() * vectors[0] @ vectors[1].T
        right = (labels[:, None] == labels).to(logits.dtype)
        right = right / right.sum(1, keepdim=True)
        return (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2


def spell(labels: Tensor) -> Tensor:
    """Return a text for each digit, as bytes, padded with zeros."""
    texts = [f"a {NAMES[label]}".ljust(8, "\0").encode() for label in labels.tolist()]
    return torch.tensor([list(text) for text in texts])


def main(arguments: list[str] | None = None) -> tuple[list[float], float]:
    """Train, and return the losses and how many held-out images are nearest to the text of their digit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    train, held_out = split_digits()
    model, loss, losses = TwoTowers(), ContrastiveLoss(), []
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=3e-3)
    with cp.parallelize(model, optimizer, loss, strategy=options.strategy, loss_reduction="batch") as step:
        for _ in range(options.epochs):
            for images, labels in DataLoader(train, batch_size=64, shuffle=True, drop_last=True):
                losses.append(step((images.flatten(1), spell(labels)), labels))
    images, labels = held_out.fetch(range(len(held_out)))
    with torch.no_grad():
        vectors = model(images.flatten(1), spell(torch.arange(10)).repeat(36, 1)[: len(images)])
    accuracy = float(((vectors[0] @ vectors[1][:10].T).argmax(1) == labels).double().mean())
    print(f"{options.strategy}: loss {losses[-1]:.4f}, {accuracy:.1%} of the held-out images")
    return losses, accuracy


if __name__ == "__main__":
    main()
