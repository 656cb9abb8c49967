"""Variational autoencoder: the noise of the latent variables is drawn in the forward.

python examples/recipes/vae.py --strategy "pipeline(2)"
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import counterpoint as cp
from counterpoint.data.digits import split_digits


class VAE(nn.Module):
    """Encoder and decoder of images of 8 x 8 pixels."""

    def __init__(self, latent: int = 8, hidden: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return decoded images, and the mean and the logarithm of the variance of their latent variables."""
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        latent = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        return self.decoder(latent), mean, log_variance


def negative_elbo(output: tuple[Tensor, Tensor, Tensor], images: Tensor) -> Tensor:
    """Return the mean over samples of the reconstruction error and the divergence from the prior."""
    decoded, mean, log_variance = output
    error = (decoded - images.flatten(1)).square().sum(1) / 2
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (error + divergence).mean()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    train, _ = split_digits()
    model = VAE()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=2e-3), []
    with cp.parallelize(model, optimizer, negative_elbo, strategy=options.strategy) as step:
        for _ in range(options.epochs):
            losses += [step(images, images) for images, _ in DataLoader(train, batch_size=64, shuffle=True)]
    print(f"{options.strategy}: loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
    return losses


if __name__ == "__main__":
    main()
