"""How much a probe measures: how large, how long, how often.

How fast a rank computes and goes through its memory: products of matrices and sums of long vectors, timed warm.

How fast ranks of one host are while several do the same at once.

How fast ranks of one host are that take turns with short pieces of work, and what a message costs between these.

The work is a step of a small model, since what others leave in the caches of a core, and in its tables of branches,
costs the many short calls of a model far more than one long product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from counterpoint.fabric.fabric import Fabric


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """What a probe measures, and how long it takes over it.

    Args:
        rows: of the square matrices that are multiplied.
        layer: samples, inputs and outputs of the layer that ranks compute at the same time; its weights and their
            gradient are more than a core's own caches hold, as those of most models are.
        vector_bytes: of the vectors that are added up; more than caches hold.
        messages: bytes of each, from small to large.
        span_s: so long one figure is measured, though at least three times.
        rounds: how often a crowd computes.
    """

    matrix_sizes: tuple[int, ...] = (256, 512, 1024)
    layer_shape: tuple[int, int, int] = (32, 1024, 4096)
    vector_bytes: int = 64 << 20
    message_bytes: tuple[int, ...] = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    duration_s: float = 0.1
    num_rounds: int = 5


TimedWork: TypeAlias = Callable[[], list[float]]
"""Does a piece of work after the other for a while; returns when it began, and when each was done, by the clock."""

MIN_REPEATS = 3
"""So often a figure is measured at least."""


def measure_flops_by_size(config: ProbeConfig) -> dict[int, float]:
    """Return floating point operations per second by rows of the matrices, with the threads that torch has now."""
    return {rows: 2.0 * rows**3 / _median_s(_matmul(rows), config.duration_s) for rows in config.matrix_sizes}


def measure_flops_by_threads(counts: Sequence[int], config: ProbeConfig) -> dict[int, dict[int, float]]:
    """Return what :func:`measure_flops_by_size` does with each of these numbers of threads; torch has as many as before."""
    found = {}
    for count in counts:
        with _with_threads(count):
            found[count] = measure_flops_by_size(config)
    return found


def layer_work(config: ProbeConfig) -> TimedWork:
    """Return what goes through a layer, forward and backward, again and again for the span of the effort."""
    samples, inputs, outputs = config.layer_shape
    weights, gradient = (torch.ones(outputs, inputs) for _ in range(2))
    arrived, left = torch.ones(samples, inputs), torch.ones(samples, outputs)

    def work() -> None:
        torch.mm(arrived, weights.t(), out=left)
        torch.mm(left.t(), arrived, out=gradient)
        torch.mm(left, weights, out=arrived)
        arrived.fill_(1.0)  # else they grow beyond all numbers

    return _timed_work(work, config.duration_s)


def memory_work(config: ProbeConfig) -> TimedWork:
    """Return what adds one long vector to another again and again for the span of the effort; see :func:`vector_sum_bytes`.

    Both have been written, as zeros that nobody has written lie in one page.
    """
    total, more = (torch.ones(config.vector_bytes // 4) for _ in range(2))
    return _timed_work(lambda: total.add_(more), config.duration_s)


def vector_sum_bytes(config: ProbeConfig) -> int:
    """Return how many bytes such a sum reads and writes."""
    return 3 * config.vector_bytes


def thread_counts(max_threads: int) -> list[int]:
    """Return the numbers of threads that are tried: 1, 2, 3, 4, then every power of two, and the most.

    Example:
        >>> thread_counts(12)
        [1, 2, 3, 4, 8, 12]
    """
    powers = (2**power for power in range(3, max_threads.bit_length() + 1))
    return sorted({count for count in (1, 2, 3, 4, *powers, max_threads) if 1 <= count <= max_threads})


def _matmul(rows: int) -> Callable[[], object]:
    """Return what multiplies two matrices; it has done so once."""
    left, right, out = (torch.ones(rows, rows) for _ in range(3))

    def work() -> object:
        return torch.mm(left, right, out=out)

    work()
    return work


def _timed_work(work: Callable[[], object], span_s: float) -> TimedWork:
    """Return what does something for so long; it has been done once."""
    work()

    def timed() -> list[float]:
        ends = [time.monotonic()]
        while ends[-1] - ends[0] < span_s:
            work()
            ends.append(time.monotonic())
        return ends

    return timed


def _median_s(work: Callable[[], object], span_s: float) -> float:
    """Return the median of the seconds of calls for so long, after one that does not count."""
    work()
    took: list[float] = []
    while len(took) < MIN_REPEATS or sum(took) < span_s:
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return max(median(took), 1e-9)


@contextmanager
def _with_threads(count: int) -> Iterator[None]:
    """So many threads compute inside of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


DIGITS = 3
"""So many digits of a measured figure count."""


def round_figure(figure: float) -> float:
    """Return a measured figure with the digits that count."""
    return float(f"{figure:.{DIGITS}g}")


def measure_contention(
    fabric: Fabric, per_host: int, config: ProbeConfig, make_work: Callable[[ProbeConfig], TimedWork] = layer_work
) -> list[float]:
    """Return how many pieces a second each of 1, 2, ... ranks of this host does at once; known to its first rank.

    Args:
        fabric: the way to the other ranks, all of which call this together.
        per_host: ranks of each host.
        effort: how large what they do is, and how long they do it.
        ready: makes their pieces ready; who still does so takes nothing from those that are measured.
    """
    first = fabric.rank - fabric.rank % per_host
    here, pieces, found = tuple(range(first, first + per_host)), make_work(config), []
    for count in range(1, per_host + 1):
        fabric.barrier(here)
        heard = fabric.gather_values("pieces", pieces() if fabric.rank - first < count else [], here)
        found.append(concurrent_rate([ends for ends in heard[:count] if isinstance(ends, list)]))
    return found


def concurrent_rate(rank_times: Sequence[Sequence[float]]) -> float:
    """Return how many pieces a second each rank does, on average, while all do.

    Where ranks outnumber cores some begin late and some end early, and the others are faster then: that does not count,
    unless there is nothing else.

    Args:
        ranks: when each began, and when each of its pieces was done.

    Example:
        >>> at_once([[0.0, 1.0, 3.0, 5.0], [1.0, 3.0, 5.0, 6.0]])  # both from 1 to 5
        0.5
    """
    firsts, lasts = [own[0] for own in rank_times], [own[-1] for own in rank_times]
    began, ended = max(firsts), min(lasts)
    if began >= ended:
        began, ended = min(firsts), max(lasts)
    done = (np.interp((began, ended), own, np.arange(len(own))) for own in rank_times)
    return float(sum(after - before for before, after in done)) / (ended - began) / len(rank_times)


def contention_curve(hosts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return for each number of ranks the middle one of the parts that hosts have told."""
    return _make_monotone([median(parts) for parts in zip(*hosts, strict=True)])


def relative_rates(rates: Sequence[Sequence[float]]) -> list[float]:
    """Return how fast ranks are at once, in parts of how fast one is alone."""
    middles = [median(rates) for rates in zip(*rates, strict=True)]
    return [rate / middles[0] for rate in middles]


def _make_monotone(parts: Sequence[float]) -> tuple[float, ...]:
    """Return parts of which none is above 1 or above one before it, as no rank is faster in a larger crowd."""
    return tuple(round_figure(min(1.0, *parts[: at + 1])) for at in range(len(parts)))


SAMPLE_S, MIN_SAMPLES = 2.5e-3, 3
"""A piece may last so long on average if there are to be as many as an effort has time for; there are no fewer."""
WARMUP_STEPS, BATCH_SIZE, WIDTH = 5, 16, 16


class WorkSample:
    """A short piece of work: a forward and a backward of a small model."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(1, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3)]
        self._model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(WIDTH))
        self._inputs = torch.ones(BATCH_SIZE, 1, WIDTH, WIDTH)
        for _ in range(WARMUP_STEPS):
            self.compute()

    def compute(self) -> float:
        """Return how long it has computed."""
        began = time.thread_time()
        self._model.zero_grad()
        self._model(self._inputs).sum().backward()
        return time.thread_time() - began


def measure_time_slice_rates(fabric: Fabric, per_host: int, config: ProbeConfig) -> list[float]:
    """Return how fast each of 1, 2, ... ranks of this host is in its turn, on average, known to its first rank.

    As a part of how fast one is that is alone. All ranks call it together.
    """
    first = fabric.rank - fabric.rank % per_host
    here, piece, took = tuple(range(first, first + per_host)), WorkSample(), []
    for count in range(1, per_host + 1):
        fabric.barrier(here)
        own_s = _time_in_turn(fabric, here[:count], piece, config) if fabric.rank - first < count else 0.0
        heard = fabric.gather_values("seconds", own_s, here)
        took.append(mean(seconds for seconds in heard[:count] if isinstance(seconds, float)))
    return [took[0] / seconds for seconds in took]


def num_samples(config: ProbeConfig) -> int:
    """Return how many pieces are done one after the other, or messages sent."""
    return max(MIN_SAMPLES, round(config.duration_s / SAMPLE_S))


def _time_in_turn(fabric: Fabric, members: tuple[int, ...], piece: WorkSample, config: ProbeConfig) -> float:
    """Return the seconds of a piece, each of which is followed by a wait for all members."""
    found = []
    for _ in range(num_samples(config)):
        found.append(piece.compute())
        fabric.barrier(members)
    return median(found)


def time_contended_message(fabric: Fabric, peer: int, config: ProbeConfig) -> float:
    """Return for how long a small message keeps both ranks of a pair, each of which comes to it from other work.

    The lower rank sends, and the other one begins to receive when the message is there; both call it with each other,
    and the lower one knows the answer.
    """
    piece, message, found = WorkSample(), torch.zeros(8, dtype=torch.uint8), []
    for _ in range(num_samples(config)):
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
