"""Rows that nobody has written: what they are follows from (seed, key, row, column), whenever and wherever asked."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from counterpoint.data.sampler import GOLDEN_GAMMA, WORD_MASK, Words, mix
from counterpoint.server.choices import Constant, Normal, Start, Uniform


def begin(start: Start, key: str, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return how rows of a key begin, ``(len(rows), width)``.

    Args:
        start: how.
        key: the name of the table.
        rows: their numbers, int64.
        width: numbers of a row.
        dtype: of the result; the numbers are made in float64.

    Example:
        >>> rows = torch.tensor([3, 1_000_000_007])
        >>> both = begin(Uniform(-1, 1), "words", rows, 2, torch.float64)
        >>> torch.equal(both[1:], begin(Uniform(-1, 1), "words", rows[1:], 2, torch.float64))
        True
    """
    match start:
        case Constant():
            return torch.full((len(rows), width), start.number, dtype=dtype)
        case Uniform():
            even = _even(_words(start.seed, key, rows, width))
            return torch.from_numpy(start.low + (start.high - start.low) * even).to(dtype)
        case Normal():
            words = _words(start.seed, key, rows, 2 * width)
            first, second = 1 - _even(words[:, :width]), _even(words[:, width:])
            normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
            return torch.from_numpy(start.mean + start.std * normal).to(dtype)
        case _:
            assert_never(start)


def _words(seed: int, key: str, rows: Tensor, width: int) -> Words:
    """Return 64 random bits for every column of every row."""
    numbers = rows.numpy().astype(np.uint64)
    gamma = np.uint64(GOLDEN_GAMMA)
    of_row = mix(mix(numbers * gamma + np.uint64(_digest(key))) ^ np.uint64(seed & WORD_MASK))
    return mix(of_row[:, None] + np.arange(1, width + 1, dtype=np.uint64) * gamma)


def _even(words: Words) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return numbers evenly distributed from 0 to below 1."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=1024)
def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
