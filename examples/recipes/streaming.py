"""Train on a stream without a length, and continue it where a run has ended: no sample is read twice.

python examples/recipes/streaming.py --steps 40 && python examples/recipes/streaming.py --steps 80
"""

import argparse
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics  # texts that are part of Python

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import counterpoint as cp

CONTEXT = 16


class NextByte(IterableDataset):
    """Each byte of many texts, after the bytes before it; the position in them is saved with the run."""

    def __init__(self) -> None:
        self.texts = [text.encode() for text in topics.values()]
        self.text, self.byte = 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while self.text < len(self.texts):
            text = self.texts[self.text]
            while self.byte + CONTEXT < len(text):
                window = text[self.byte : self.byte + CONTEXT + 1]
                self.byte += 1
                yield torch.tensor(list(window[:-1])), window[-1]
            self.text, self.byte = self.text + 1, 0
        self.text = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"text": self.text, "byte": self.byte}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self.text, self.byte = state["text"], state["byte"]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train up to a number of steps, from the last checkpoint on if there is one; return the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "streaming"))
    options = parser.parse_args(arguments)

    torch.manual_seed(0)  # the same initial weights in every process
    layers = [nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 128)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(128, 256))
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=optimizer, strategy=options.strategy)
    with trainer:
        history = trainer.fit(
            DataLoader(NextByte(), batch_size=32),
            max_steps=options.steps,
            checkpoint_dir=options.folder,
            save_every=20,
            resume="auto",
        )
    if trainer.rank == 0:
        print(f"{options.strategy}: {len(history.losses)} steps, loss {history.losses[-1]:.4f}")
    return list(history.losses)


if __name__ == "__main__":
    main()
