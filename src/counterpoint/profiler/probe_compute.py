"""How fast a rank computes and goes through its memory: products of matrices and sums of long vectors, timed warm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

from counterpoint.profiler.effort import Effort

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


def flops_for(effort: Effort) -> float:
    """Return floating point operations per second while computing for the span of the effort without a pause."""
    work, turns, rows = _product(effort.crowd_rows), 0, effort.crowd_rows
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < effort.span_s:
        work()
        turns += 1
    return 2.0 * rows**3 * turns / spent


def memory_bytes_per_s(effort: Effort) -> float:
    """Return how many bytes a second are read and written where one long vector is added to another in place.

    Both have been written, as zeros that nobody has written lie in one page.
    """
    total, more = (torch.ones(effort.vector_bytes // 4) for _ in range(2))
    return 3 * effort.vector_bytes / _median_s(lambda: total.add_(more), effort.span_s)


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
