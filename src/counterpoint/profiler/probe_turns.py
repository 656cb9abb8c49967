"""How fast ranks of one host are that take turns with short pieces of work, and what a message costs between these.

The work is a step of a small model, since what others leave in the caches of a core, and in its tables of branches,
costs the many short calls of a model far more than one long product.
"""

from __future__ import annotations

import time
from statistics import mean, median

import torch
from torch import nn

from counterpoint.fabric.fabric import Fabric
from counterpoint.profiler.effort import Effort

PIECE_S, FEWEST = 2.5e-3, 3
"""A piece may last so long on average if there are to be as many as an effort has time for; there are no fewer."""
WARM_UP, SAMPLES, WIDTH = 5, 16, 16


class Piece:
    """A short piece of work: a forward and a backward of a small model."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3)]
        self._model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(WIDTH))
        self._inputs = torch.ones(SAMPLES, 1, WIDTH, WIDTH)
        for _ in range(WARM_UP):
            self.compute()

    def compute(self) -> float:
        """Return how long it has computed."""
        began = time.thread_time()
        self._model.zero_grad()
        self._model(self._inputs).sum().backward()
        return time.thread_time() - began


def turn_parts(fabric: Fabric, per_host: int, effort: Effort) -> list[float]:
    """Return how fast each of 1, 2, ... ranks of this host is in its turn, on average, known to its first rank.

    As a part of how fast one is that is alone. All ranks call it together.
    """
    first = fabric.rank - fabric.rank % per_host
    here, piece, took = tuple(range(first, first + per_host)), Piece(), []
    for count in range(1, per_host + 1):
        fabric.barrier(here)
        own_s = _in_turns(fabric, here[:count], piece, effort) if fabric.rank - first < count else 0.0
        heard = fabric.gather_values("seconds", own_s, here)
        took.append(mean(seconds for seconds in heard[:count] if isinstance(seconds, float)))
    return [took[0] / seconds for seconds in took]


def turns_in(effort: Effort) -> int:
    """Return how many pieces are done one after the other, or messages sent."""
    return max(FEWEST, round(effort.span_s / PIECE_S))


def _in_turns(fabric: Fabric, members: tuple[int, ...], piece: Piece, effort: Effort) -> float:
    """Return the seconds of a piece, each of which is followed by a wait for all members."""
    found = []
    for _ in range(turns_in(effort)):
        found.append(piece.compute())
        fabric.barrier(members)
    return median(found)


def message_s(fabric: Fabric, peer: int, effort: Effort) -> float:
    """Return for how long a small message keeps both ranks of a pair, each of which comes to it from other work.

    The lower rank sends, and the other one begins to receive when the message is there; both call it with each other,
    and the lower one knows the answer.
    """
    piece, message, found = Piece(), torch.zeros(8, dtype=torch.uint8), []
    for _ in range(turns_in(effort)):
        fabric.barrier((min(fabric.rank, peer), max(fabric.rank, peer)))
        piece.compute()
        if fabric.rank > peer:
            piece.compute()  # meanwhile the other one has sent
        began = time.thread_time()
        if fabric.rank < peer:
            fabric.send(peer, "from work to work", [message])
        else:
            fabric.recv(peer, "from work to work")
        found.append(time.thread_time() - began)
    own_s = median(found)
    if fabric.rank > peer:
        fabric.send(peer, "seconds", [torch.tensor([own_s], dtype=torch.float64)])
        return own_s
    (others,) = fabric.recv(peer, "seconds")
    return own_s + float(others.item())
