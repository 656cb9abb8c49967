"""Train a detector on images that have any number of boxes; the loss is the mean over the boxes of the whole batch.

python examples/recipes/detection.py --strategy "zero3(2)"
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

import counterpoint as cp

SIZE, CELLS = 32, 8  # of an image, and of the grid of predictions


def draw_samples(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return images with 1 to 4 bright rectangles, and these as ``(x, y, width, height)``, x and y of their centers."""
    generator, samples = torch.Generator().manual_seed(seed), []
    for index in range(count):
        image = 0.2 * torch.rand(1, SIZE, SIZE, generator=generator)
        corners = torch.randint(0, SIZE - 8, (1 + index % 4, 2), generator=generator)
        sizes = torch.randint(4, 9, (len(corners), 2), generator=generator)
        for (x, y), (width, height) in zip(corners.tolist(), sizes.tolist(), strict=True):
            image[:, y : y + height, x : x + width] += 0.5
        samples.append((image, torch.cat([corners + sizes / 2, sizes], 1) / SIZE))
    return samples


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Return images as one tensor, and a list with the boxes of each."""
    images, boxes = zip(*samples, strict=True)
    return torch.stack(images), list(boxes)


def cells_of(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of the cells in which boxes have their centers."""
    return (boxes[:, [1, 0]] * CELLS).long().clamp(max=CELLS - 1).unbind(1)


def box_loss(output: Tensor, targets: list[Tensor]) -> cp.WeightedMean:
    """Return the loss of all cells and boxes, divided by the number of boxes."""
    total = output.new_zeros(())
    for grid, boxes in zip(output, targets, strict=True):
        rows, columns = cells_of(boxes)
        has_box = torch.zeros_like(grid[0]).index_put((rows, columns), grid.new_ones(()))
        total = total + F.binary_cross_entropy_with_logits(grid[0], has_box, reduction="sum")
        total = total + F.l1_loss(grid[1:, rows, columns].sigmoid(), boxes.T, reduction="sum")
    return cp.WeightedMean(total, sum(map(len, targets)))


def recall(output: Tensor, targets: list[Tensor]) -> dict[str, cp.MeanMetric]:
    """Return the fraction of boxes whose cell is found."""
    found = sum(int((grid[0][cells_of(boxes)] > 0).sum()) for grid, boxes in zip(output, targets, strict=True))
    return {"recall": cp.MeanMetric(found, sum(map(len, targets)))}


def main(arguments: list[str] | None = None) -> float:
    """Train, and return the fraction of held-out boxes that are found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)  # the same initial weights in every process
    layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(32, 5, 1))  # of each cell: has it a box, and which
    with cp.Trainer(model, loss=box_loss, optimizer=partial(Adam, lr=5e-3), strategy=options.strategy) as trainer:
        loader = DataLoader(draw_samples(256, 1), batch_size=16, shuffle=True, collate_fn=collate)
        trainer.fit(loader, epochs=options.epochs)
        result = trainer.evaluate(draw_samples(64, 2), metrics=recall, batch_size=32, collate_fn=collate)
    if trainer.rank == 0:
        print(f"{options.strategy}: {result['recall']:.0%} of the held-out boxes are found")
    return result["recall"]


if __name__ == "__main__":
    main()
