"""Random programs of collectives and messages, the same on all ranks, for any transport."""

import math
import random

import numpy as np
import torch

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
SIZES = [0, 1, 2, 7, 63, 64, 65, 300, 20_000, 200_000]
REDUCTIONS = ["sum", "mean", "max", "min"]


class RandomProgram:
    """So many operations over random groups; every rank draws the same.

    Args:
        seed: of everything.
        num_ranks: that it is for.
    """

    def __init__(self, seed, num_ranks):
        self.rng = random.Random(seed)
        self.num_ranks = num_ranks
        everybody = tuple(range(num_ranks))
        groups = [self.some(num_ranks) for _ in range(3)]
        self.steps = [
            RandomStep(self.rng.choice(list(KINDS)), index, self.rng.choice([*groups, everybody]), self.rng.random())
            for index in range(30)
        ]

    def some(self, num_ranks):
        """A group of any size."""
        return tuple(sorted(self.rng.sample(range(num_ranks), self.rng.randint(1, num_ranks))))

    def __call__(self, fabric):
        """Return what this rank holds after every step; up to five collectives are under way at once."""
        actual, under_way = {}, []
        for step in self.steps:
            if fabric.rank in step.group:
                work, result = KINDS[step.kind](step, fabric)
                under_way.append((step.index, work, result))
            for _ in range(len(under_way) - step.ahead):
                index, work, result = under_way.pop(0)
                work.wait()
                actual[index] = plain(result())
        for index, work, result in reversed(under_way):
            work.wait()
            actual[index] = plain(result())
        return actual


def plain(tensor):
    """Dtype and numbers."""
    return str(tensor.dtype), tensor.detach().to(torch.float64).flatten().numpy().copy()


class DoneWork:
    """A work that is over."""

    def wait(self):
        """Return at once."""


class RandomStep:
    """One operation: its numbers are drawn from its own rng, so that all members draw the same."""

    def __init__(self, kind, index, group, seed):
        self.kind, self.index, self.group, self.seed = kind, index, group, seed
        rng = self.rng()
        self.dtype, self.size, self.ahead = rng.choice(DTYPES), rng.choice(SIZES), rng.randint(0, 5)
        self.op = rng.choice(REDUCTIONS if self.dtype.is_floating_point else ["sum", "max", "min"])
        self.cuts = [0, *sorted(rng.randint(0, self.size) for _ in group[1:]), self.size]
        self.counts = [[rng.choice([0, 1, self.size // len(group)]) for _ in group] for _ in group]
        self.root = rng.choice(group)

    def rng(self, more=""):
        """Return the same rng on every rank."""
        return random.Random(f"{self.seed}{more}")

    def value(self, fabric, size):
        """A rank's tensor: in shared memory or not, and with what is not finite, on some ranks."""
        rng = self.rng(fabric.rank)
        numbers = torch.randn(size, generator=torch.Generator().manual_seed(rng.randrange(2**31))) * 100
        own = fabric.empty(size, self.dtype) if rng.random() < 0.6 else torch.empty(size, dtype=self.dtype)
        own.copy_(numbers)
        if size and self.dtype.is_floating_point and rng.random() < 0.3:
            own[rng.randrange(size)] = rng.choice([math.nan, math.inf, -math.inf])
        is_strided = size % 2 == 0 and self.rng("strided").random() < 0.2
        return own.view(2, -1).t() if is_strided else own


def all_reduce(step, fabric):
    own = step.value(fabric, step.size)
    return fabric.all_reduce(f"sum{step.index % 3}", own, step.group, step.op), lambda: own


def broadcast(step, fabric):
    own = step.value(fabric, step.size)
    return fabric.broadcast("root's", own, step.group, step.root), lambda: own


def reduce_scatter(step, fabric):
    own = step.value(fabric, step.size).flatten()
    place = step.group.index(fabric.rank)
    work = fabric.reduce_scatter("shares", own, step.cuts, step.group, step.op)
    return work, lambda: own[step.cuts[place] : step.cuts[place + 1]]


def all_gather(step, fabric):
    own = step.value(fabric, step.size).flatten()
    return fabric.all_gather("ranges", own, step.cuts, step.group), lambda: own


def all_to_all(step, fabric):
    own = step.value(fabric, sum(step.counts[step.group.index(fabric.rank)])).flatten()
    received, work = fabric.all_to_all("tokens", own, step.counts, step.group)
    return work, lambda: received


def many(step, fabric):
    """More small ones than members announce before the others have looked, those in shared memory among them."""
    own = [(fabric.empty if index % 3 else torch.empty)(index % 5, dtype=torch.float32) for index in range(150)]
    works = [
        fabric.all_reduce(f"small{index}", tensor.fill_(index + fabric.rank), step.group)
        for index, tensor in enumerate(own)
    ]
    for work in reversed(works):
        work.wait()
    return DoneWork(), lambda: torch.cat(own)


def values(step, fabric):
    texts = fabric.gather_values("text", "x" * (fabric.rank * step.size % 999), step.group)
    return DoneWork(), lambda: torch.tensor([*map(len, texts)])


def shift(step, fabric):
    """All members send to the next, and receive afterwards."""
    place, count = step.group.index(fabric.rank), len(step.group)
    if count == 1:
        return DoneWork(), lambda: torch.empty(0)
    fabric.send(step.group[(place + 1) % count], f"x{step.index}", [step.value(fabric, step.size)])
    received = fabric.recv(step.group[place - 1], f"x{step.index}")
    return DoneWork(), lambda: received[0]


KINDS = {
    "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, "broadcast": broadcast,
    "all_to_all": all_to_all, "many": many, "values": values, "shift": shift,
}  # fmt: skip


def differing(actual, expected, *, is_exact):
    """The steps of which a rank holds other than it should; sums of floats only nearly where they are not exact."""
    wrong = []
    for index, (dtype, numbers) in expected.items():
        its_dtype, its_numbers = actual[index]
        nearly = 0.0 if is_exact else {"torch.bfloat16": 2e-2, "torch.float16": 2e-3}.get(dtype, 1e-4)
        same = (dtype, numbers.shape) == (its_dtype, its_numbers.shape) and np.allclose(
            numbers, its_numbers, rtol=nearly, atol=100 * nearly, equal_nan=True
        )
        wrong += [] if same else [index]
    return wrong
