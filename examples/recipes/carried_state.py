"""Train an LSTM language model on long texts, chunk by chunk: its state is carried on, its gradient is not.

python examples/recipes/carried_state.py --strategy "data(2)"
"""

import argparse
from pydoc_data.topics import topics  # texts that are part of Python

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import counterpoint as cp

STREAMS, CHUNK, WIDTH, LAYERS = 8, 16, 32, 2


class CharLSTM(nn.Module):
    """Takes bytes ``(stream, time)`` and a state of two tensors ``(layer, stream, width)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(256, WIDTH), nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the prediction of the next bytes, and the state after the last one."""
        values, (hidden, cell) = self.lstm(self.embedding(text), (hidden, cell))
        return self.head(values), hidden, cell


class CarriedState:
    """The state of each stream after the last chunk, of the streams that this process trains on."""

    def __init__(self) -> None:
        self.hidden, self.cell = torch.zeros(2, LAYERS, STREAMS, WIDTH)
        self.is_new = True

    def loss(self, output: tuple[Tensor, Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        """Keep the state, and return the loss of the prediction."""
        (prediction, hidden, cell), (text, streams) = output, targets
        self.hidden = self.hidden.to(hidden).index_copy(1, streams, hidden.detach())
        self.cell = self.cell.to(cell).index_copy(1, streams, cell.detach())
        self.is_new = True
        return F.cross_entropy(prediction.flatten(0, 1), text.flatten())

    def pop(self) -> tuple[Tensor, Tensor]:
        """Return the state for the next chunk."""
        assert self.is_new, "the loss runs in another process, as under a pipeline of several processes"
        self.is_new = False
        return self.hidden, self.cell


def read_streams(num_chunks: int) -> Tensor:
    """Return a part of all texts for each stream, of some chunks and a byte."""
    return torch.tensor(list("".join(topics.values()).encode()[: STREAMS * (CHUNK * num_chunks + 1)])).view(STREAMS, -1)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="data(2)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)  # the same initial weights in every process
    text, model, streams, losses = read_streams(options.steps), CharLSTM(), torch.arange(STREAMS), []
    state, optimizer = CarriedState(), torch.optim.Adam(model.parameters(), lr=3e-3)
    along = {"hidden": 1, "cell": 1}  # the dim of the streams
    with cp.parallelize(model, optimizer, state.loss, strategy=options.strategy, batch_dims=along, clip_norm=1) as step:
        for first in range(0, CHUNK * options.steps, CHUNK):
            inputs, labels = text[:, first : first + CHUNK], text[:, first + 1 : first + CHUNK + 1]
            losses.append(step((inputs, *state.pop()), (labels, streams)))
    print(f"{options.strategy}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")
    return losses


if __name__ == "__main__":
    main()
