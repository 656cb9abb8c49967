"""How fast a rank computes and goes through its memory: products of matrices and sums of long vectors, timed warm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TypeAlias

import torch

from counterpoint.profiler.effort import Effort

Pieces: TypeAlias = Callable[[], list[float]]
"""Does a piece of work after the other for a while; returns when it began, and when each was done, by the clock."""

FEWEST = 3
"""So often a figure is measured at least."""


def flops_by_size(effort: Effort) -> dict[int, float]:
    """Return floating point operations per second by rows of the matrices, with the threads that torch has now."""
    return {rows: 2.0 * rows**3 / _median_s(_product(rows), effort.span_s) for rows in effort.rows}


def flops_by_threads(counts: Sequence[int], effort: Effort) -> dict[int, dict[int, float]]:
    """Return what :func:`flops_by_size` does with each of these numbers of threads; torch has as many as before."""
    found = {}
    for count in counts:
        with _threads(count):
            found[count] = flops_by_size(effort)
    return found


def layer_pieces(effort: Effort) -> Pieces:
    """Return what goes through a layer, forward and backward, again and again for the span of the effort."""
    samples, inputs, outputs = effort.layer
    weights, gradient = (torch.ones(outputs, inputs) for _ in range(2))
    arrived, left = torch.ones(samples, inputs), torch.ones(samples, outputs)

    def work() -> None:
        torch.mm(arrived, weights.t(), out=left)
        torch.mm(left.t(), arrived, out=gradient)
        torch.mm(left, weights, out=arrived)
        arrived.fill_(1.0)  # else they grow beyond all numbers

    return _pieces(work, effort.span_s)


def memory_pieces(effort: Effort) -> Pieces:
    """Return what adds one long vector to another again and again for the span of the effort; see :func:`sum_bytes`.

    Both have been written, as zeros that nobody has written lie in one page.
    """
    total, more = (torch.ones(effort.vector_bytes // 4) for _ in range(2))
    return _pieces(lambda: total.add_(more), effort.span_s)


def sum_bytes(effort: Effort) -> int:
    """Return how many bytes such a sum reads and writes."""
    return 3 * effort.vector_bytes


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads that are tried: 1, 2, 3, 4, then every power of two, and the most.

    Example:
        >>> thread_counts(12)
        [1, 2, 3, 4, 8, 12]
    """
    powers = (2**power for power in range(3, most.bit_length() + 1))
    return sorted({count for count in (1, 2, 3, 4, *powers, most) if 1 <= count <= most})


def _product(rows: int) -> Callable[[], object]:
    """Return what multiplies two matrices; it has done so once."""
    left, right, out = (torch.ones(rows, rows) for _ in range(3))

    def work() -> object:
        return torch.mm(left, right, out=out)

    work()
    return work


def _pieces(work: Callable[[], object], span_s: float) -> Pieces:
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
    while len(took) < FEWEST or sum(took) < span_s:
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return max(median(took), 1e-9)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads compute inside of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
