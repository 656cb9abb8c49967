"""Generative adversarial network: two models, two optimizers, and a loss that goes through the other model.

python examples/recipes/gan.py --strategy "zero3(2)"
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp
from counterpoint.data.digits import split_digits

LATENT = 16


def build_models(hidden: int = 128) -> tuple[nn.Module, nn.Module]:
    """Return a generator and a discriminator of images of 64 pixels."""
    generator = nn.Sequential(nn.Linear(LATENT, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                              nn.Linear(hidden, 64))  # fmt: skip
    discriminator = nn.Sequential(nn.Linear(64, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden),
                                  nn.LeakyReLU(0.2), nn.Linear(hidden, 1))  # fmt: skip
    return generator, discriminator


def main(arguments: list[str] | None = None) -> tuple[list[tuple[float, float]], Tensor]:
    """Train both, and return their losses and some images."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)  # the same weights, batches and noise in every process
    train, _ = split_digits(torch.get_default_dtype())
    generator, discriminator = build_models()
    bce, losses = F.binary_cross_entropy_with_logits, []
    real, fake = torch.ones(64, 1), torch.zeros(64, 1)

    def fool(images: Tensor, targets: Tensor) -> Tensor:
        return bce(discriminator(images), targets)

    train_discriminator = cp.parallelize(
        discriminator, torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999)), bce,
        strategy=options.strategy,
    )  # fmt: skip
    train_generator = cp.parallelize(
        generator, torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999)), fool, strategy=options.strategy
    )
    with train_discriminator, train_generator:
        for _ in range(options.steps):
            images = train.fetch(torch.randint(len(train), (64,)))[0].flatten(1)
            with train_generator.full_weights(), torch.no_grad():
                generated = generator(torch.randn(64, LATENT))
            on_both = train_discriminator(torch.cat([images, generated]), torch.cat([real, fake]))
            with train_discriminator.full_weights():  # the loss reads them
                losses.append((on_both, train_generator(torch.randn(64, LATENT), real)))
    images = generator(torch.randn(4, LATENT)).detach()
    print(f"{options.strategy}: losses {losses[-1][0]:.4f} of the discriminator, {losses[-1][1]:.4f} of the generator")
    return losses, images


if __name__ == "__main__":
    main()
