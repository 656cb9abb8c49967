"""Denoising diffusion: times and noise are drawn in the forward, and images are sampled with the trained weights.

python examples/recipes/diffusion.py --strategy "zero3(2)"
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import counterpoint as cp
from counterpoint.data.digits import split_digits

NUM_TIMES = 50


class Diffusion(nn.Module):
    """Predicts the noise in images of 8 x 8 pixels."""

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TIMES, hidden)
        self.first, self.second, self.last = nn.Linear(64, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 64)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, NUM_TIMES), 0))  # of the signal

    def predict_noise(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the noise in images ``(batch, 64)`` at ``times``."""
        h = nn.functional.silu(self.first(images) + self.embed(times))
        return self.last(nn.functional.silu(h + self.second(h)))

    def forward(self, images: Tensor) -> Tensor:
        """Return the squared error of the predicted noise for each image, at a random time."""
        times = torch.randint(NUM_TIMES, (len(images),), device=images.device)
        noise, kept = torch.randn_like(images), self.kept[times][:, None]
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        return (self.predict_noise(noisy, times) - noise).square().mean(1)


@torch.no_grad()
def sample(model: Diffusion, num_images: int) -> Tensor:
    """Return images made of noise, by the steps of DDPM backwards."""
    images = torch.randn(num_images, 64)
    kept_before = torch.cat([torch.ones(1), model.kept[:-1]])
    for time in reversed(range(NUM_TIMES)):
        ratio = model.kept[time] / kept_before[time]
        noise = model.predict_noise(images, torch.full((num_images,), time))
        images = (images - (1 - ratio) / (1 - model.kept[time]).sqrt() * noise) / ratio.sqrt()
        images += (1 - ratio).sqrt() * torch.randn_like(images) if time else 0
    return images


def main(arguments: list[str] | None = None) -> tuple[list[float], Tensor]:
    """Train, and return the loss of every step and some images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    train, _ = split_digits()
    model = Diffusion()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    with cp.parallelize(model, optimizer, lambda errors, _: errors.mean(), strategy=options.strategy) as step:
        for _ in range(options.epochs):
            loader = DataLoader(train, batch_size=64, shuffle=True)
            losses += [step(images.flatten(1), labels) for images, labels in loader]
    images = sample(model, 4)
    print(f"{options.strategy}: loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
    return losses, images


if __name__ == "__main__":
    main()
