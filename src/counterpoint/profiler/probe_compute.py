"""Measure how fast ranks compute: one at a time, several at once, and in time slices.

Matrix products measure arithmetic, sums of long vectors measure memory bandwidth, both after a warm-up. Time slices are
measured with steps of a small model, because evicted caches and branch predictors cost its many short calls far more
than they cost one long product.
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
    """What a probe measures, and for how long.

    Args:
        matrix_sizes: rows of the square matrices that are multiplied.
        layer_shape: samples, inputs and outputs of the layer that ranks compute at the same time; its weight and
            gradient exceed the caches of a core, as in most models.
        vector_bytes: of the vectors that are added; more than caches hold.
        message_bytes: message sizes, ascending.
        duration_s: for how long one figure is measured, but at least :data:`MIN_REPEATS` times.
        num_rounds: repetitions of the measurements with contention.
    """

    matrix_sizes: tuple[int, ...] = (256, 512, 1024)
    layer_shape: tuple[int, int, int] = (32, 1024, 4096)
    vector_bytes: int = 64 << 20
    message_bytes: tuple[int, ...] = (8, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
    duration_s: float = 0.1
    num_rounds: int = 5


TimedWork: TypeAlias = Callable[[], list[float]]
"""Repeats a piece of work for a while; returns the start time and the end time of each repetition."""

MIN_REPEATS = 3
"""Repetitions of a measurement at least."""


def measure_flops_by_size(config: ProbeConfig) -> dict[int, float]:
    """Return floating point operations per second by matrix size, with the present number of threads."""
    return {rows: 2.0 * rows**3 / _median_s(_matmul(rows), config.duration_s) for rows in config.matrix_sizes}


def measure_flops_by_threads(counts: Sequence[int], config: ProbeConfig) -> dict[int, dict[int, float]]:
    """Return :func:`measure_flops_by_size` for each number of threads, and restore the present one."""
    flops = {}
    for count in counts:
        with _with_threads(count):
            flops[count] = measure_flops_by_size(config)
    return flops


def layer_work(config: ProbeConfig) -> TimedWork:
    """Return work that runs forward and backward of one layer for the duration of the configuration."""
    samples, inputs, outputs = config.layer_shape
    weights, gradient = (torch.ones(outputs, inputs) for _ in range(2))
    activations, left = torch.ones(samples, inputs), torch.ones(samples, outputs)

    def work() -> None:
        torch.mm(activations, weights.t(), out=left)
        torch.mm(left.t(), activations, out=gradient)
        torch.mm(left, weights, out=activations)
        activations.fill_(1.0)  # values would overflow

    return _timed_work(work, config.duration_s)


def memory_work(config: ProbeConfig) -> TimedWork:
    """Return work that adds long vectors for the duration of the configuration; see :func:`vector_sum_bytes`.

    Both vectors have been written: untouched zeros would all lie in one page.
    """
    total, more = (torch.ones(config.vector_bytes // 4) for _ in range(2))
    return _timed_work(lambda: total.add_(more), config.duration_s)


def vector_sum_bytes(config: ProbeConfig) -> int:
    """Return how many bytes such an addition reads and writes."""
    return 3 * config.vector_bytes


def thread_counts(max_threads: int) -> list[int]:
    """Return the numbers of threads that are tried: 1, 2, 3, 4, powers of two, and the maximum.

    Example:
        >>> thread_counts(12)
        [1, 2, 3, 4, 8, 12]
    """
    powers = (2**power for power in range(3, max_threads.bit_length() + 1))
    return sorted({count for count in (1, 2, 3, 4, *powers, max_threads) if 1 <= count <= max_threads})


def _matmul(rows: int) -> Callable[[], object]:
    """Return a function that multiplies two matrices, after one call."""
    left, right, out = (torch.ones(rows, rows) for _ in range(3))

    def work() -> object:
        return torch.mm(left, right, out=out)

    work()
    return work


def _timed_work(work: Callable[[], object], span_s: float) -> TimedWork:
    """Return work that calls a function repeatedly for ``span_s``, after one call."""
    work()

    def timed() -> list[float]:
        ends = [time.monotonic()]
        while ends[-1] - ends[0] < span_s:
            work()
            ends.append(time.monotonic())
        return ends

    return timed


def _median_s(work: Callable[[], object], span_s: float) -> float:
    """Return the median seconds of calls during ``span_s``, after one call that does not count."""
    work()
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or sum(seconds) < span_s:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return max(median(seconds), 1e-9)


@contextmanager
def _with_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


DIGITS = 3
"""Significant digits of a measured figure."""


def round_figure(figure: float) -> float:
    """Return a measured figure rounded to its significant digits."""
    return float(f"{figure:.{DIGITS}g}")


def measure_contention(
    fabric: Fabric, per_host: int, config: ProbeConfig, make_work: Callable[[ProbeConfig], TimedWork] = layer_work
) -> list[float]:
    """Return how many pieces of work a second each of 1, 2, ... concurrent ranks of this host does.

    Args:
        fabric: connects the ranks, all of which call this together.
        per_host: ranks of each host.
        config: how large the work is, and for how long it runs.
        make_work: prepares the work, before the barrier that starts the measurement.

    Returns:
        The rates, on the first rank of the host.
    """
    first = fabric.rank - fabric.rank % per_host
    host_ranks, work, rates = tuple(range(first, first + per_host)), make_work(config), []
    for count in range(1, per_host + 1):
        fabric.barrier(host_ranks)
        times = fabric.gather_values("work", work() if fabric.rank - first < count else [], host_ranks)
        rates.append(concurrent_rate([ends for ends in times[:count] if isinstance(ends, list)]))
    return rates


def concurrent_rate(rank_times: Sequence[Sequence[float]]) -> float:
    """Return how many pieces of work a second each rank does on average while all of them run.

    If ranks outnumber cores, some start late and some end early, and the others are faster then; that is excluded,
    unless there is no moment at which all run.

    Args:
        rank_times: for each rank its start, and the end of each piece.

    Example:
        >>> concurrent_rate([[0.0, 1.0, 3.0, 5.0], [1.0, 3.0, 5.0, 6.0]])  # both from 1 to 5
        0.5
    """
    firsts, lasts = [times[0] for times in rank_times], [times[-1] for times in rank_times]
    began, ended = max(firsts), min(lasts)
    if began >= ended:
        began, ended = min(firsts), max(lasts)
    progress = (np.interp((began, ended), times, np.arange(len(times))) for times in rank_times)
    return float(sum(after - before for before, after in progress)) / (ended - began) / len(rank_times)


def contention_curve(hosts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return for each number of ranks the median over hosts, made monotone."""
    return _make_monotone([median(fractions) for fractions in zip(*hosts, strict=True)])


def relative_rates(rates: Sequence[Sequence[float]]) -> list[float]:
    """Return the median rate of concurrent ranks as a fraction of that of one rank."""
    medians = [median(column) for column in zip(*rates, strict=True)]
    return [rate / medians[0] for rate in medians]


def _make_monotone(parts: Sequence[float]) -> tuple[float, ...]:
    """Return fractions none of which exceeds 1 or an earlier one: no rank is faster with more contention."""
    return tuple(round_figure(min(1.0, *parts[: index + 1])) for index in range(len(parts)))


SAMPLE_S, MIN_SAMPLES = 2.5e-3, 3
"""Expected seconds of a work sample, from which the number of samples follows, and their minimum number."""
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
        """Run the work and return its CPU time."""
        began = time.thread_time()
        self._model.zero_grad()
        self._model(self._inputs).sum().backward()
        return time.thread_time() - began


def measure_time_slice_rates(fabric: Fabric, per_host: int, config: ProbeConfig) -> list[float]:
    """Return how fast each of 1, 2, ... ranks of this host is while it has a time slice, relative to one rank.

    All ranks call it together; the result is known to the first rank of the host.
    """
    first = fabric.rank - fabric.rank % per_host
    host_ranks, sample, mean_s = tuple(range(first, first + per_host)), WorkSample(), []
    for count in range(1, per_host + 1):
        fabric.barrier(host_ranks)
        median_s = _time_in_turn(fabric, host_ranks[:count], sample, config) if fabric.rank - first < count else 0.0
        medians = fabric.gather_values("seconds", median_s, host_ranks)
        mean_s.append(mean(seconds for seconds in medians[:count] if isinstance(seconds, float)))
    return [mean_s[0] / seconds for seconds in mean_s]


def num_samples(config: ProbeConfig) -> int:
    """Return how many work samples are run, or messages are sent."""
    return max(MIN_SAMPLES, round(config.duration_s / SAMPLE_S))


def _time_in_turn(fabric: Fabric, members: tuple[int, ...], sample: WorkSample, config: ProbeConfig) -> float:
    """Return the median seconds of a work sample that is followed by a barrier of all members."""
    samples = []
    for _ in range(num_samples(config)):
        samples.append(sample.compute())
        fabric.barrier(members)
    return median(samples)


def time_contended_message(fabric: Fabric, peer: int, config: ProbeConfig) -> float:
    """Return the CPU time of a small message on both ranks of a pair that also compute.

    The lower rank sends, and the other one begins to receive when the message is there. Both call it with each other;
    the lower one returns the sum of both.
    """
    sample, message, times = WorkSample(), torch.zeros(8, dtype=torch.uint8), []
    for _ in range(num_samples(config)):
        fabric.barrier((min(fabric.rank, peer), max(fabric.rank, peer)))
        sample.compute()
        if fabric.rank > peer:
            sample.compute()  # while the lower rank sends
        began = time.thread_time()
        if fabric.rank < peer:
            fabric.send(peer, "contended message", [message])
        else:
            fabric.recv(peer, "contended message")
        times.append(time.thread_time() - began)
    local_s = median(times)
    if fabric.rank > peer:
        fabric.send(peer, "seconds", [torch.tensor([local_s], dtype=torch.float64)])
        return local_s
    (remote_s,) = fabric.recv(peer, "seconds")
    return local_s + float(remote_s.item())
