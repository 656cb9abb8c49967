"""Lines of text become rows of a table by the hashes of their n-grams and tokens, many lines at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Hashes: TypeAlias = npt.NDArray[np.uint32]
Rows: TypeAlias = npt.NDArray[np.int32]
Mask: TypeAlias = npt.NDArray[np.bool_]

NGRAM_SIZES = (3, 4, 5)
FNV_START = np.uint32(0x811C9DC5)
FNV_PRIME = np.uint32(0x01000193)
TOKEN_START = np.uint32(0x2F0B4C47)


def hash_lines(lines: Sequence[bytes], *, line_len: int, num_features: int, num_rows: int) -> Rows:
    """Return the features of each line as rows of a table, the same on every machine and in every process.

    A feature is a run of 3, 4 or 5 bytes, or a whole word (letters, digits and underscores). It becomes its
    32-bit FNV-1a hash, then a row from 1 to ``num_rows - 1``; two features may share a row. Row 0 means that
    nothing is there, and fills a line up.

    Args:
        lines: at most ``line_len`` bytes of each are read.
        line_len: see above.
        num_features: features kept of each line; the tokens come first, then the shorter n-grams.
        num_rows: rows of the table, at least 2.

    Returns:
        int32 ``(line, num_features)``.

    Source:
        Fowler, Noll and Vo, the FNV non-cryptographic hash algorithm, IETF draft-eastlake-fnv.
    """
    text = _grid(lines, line_len)
    found = [_tokens(text), *(_ngrams(text, size) for size in NGRAM_SIZES)]
    hashes = np.concatenate([hashes for hashes, _ in found], axis=1)
    present = np.concatenate([mask for _, mask in found], axis=1)
    rows = (hashes % np.uint32(num_rows - 1) + np.uint32(1)).astype(np.int32)
    rows[~present] = 0
    return _pack(rows, present, num_features)


def _grid(lines: Sequence[bytes], line_len: int) -> Bytes:
    """Return the lines as ``(line, line_len)`` bytes, filled up with 0."""
    joined = b"".join(line[:line_len].ljust(line_len, b"\0") for line in lines)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(lines), line_len)


def _ngrams(text: Bytes, size: int) -> tuple[Hashes, Mask]:
    """Return the hash of the run of ``size`` bytes at each position, and where there is a whole one."""
    width = max(text.shape[1] - size + 1, 0)
    hashes = np.full((len(text), width), FNV_START, dtype=np.uint32)
    for offset in range(size):
        hashes = (hashes ^ text[:, offset : offset + width]) * FNV_PRIME
    return hashes, text[:, size - 1 : size - 1 + width] != 0


def _tokens(text: Bytes) -> tuple[Hashes, Mask]:
    """Return the hash of the token that ends at each position, and where one ends."""
    letter = _is_word(text)
    hashes = np.empty(text.shape, dtype=np.uint32)
    running = np.full(len(text), TOKEN_START, dtype=np.uint32)
    for column in range(text.shape[1]):
        running = np.where(letter[:, column], (running ^ text[:, column]) * FNV_PRIME, TOKEN_START)
        hashes[:, column] = running
    ends = letter.copy()
    ends[:, :-1] &= ~letter[:, 1:]
    return hashes, ends


def _is_word(text: Bytes) -> Mask:
    digit = (text >= ord("0")) & (text <= ord("9"))
    lower = text | np.uint8(0x20)
    word: Mask = digit | ((lower >= ord("a")) & (lower <= ord("z"))) | (text == ord("_")) | (text >= 0x80)
    return word


def _pack(rows: Rows, present: Mask, num_features: int) -> Rows:
    """Return what is present moved to the front of each line, in its order, cut or filled up."""
    packed = np.zeros((len(rows), num_features), dtype=np.int32)
    line, column = np.nonzero(present)
    place = (np.cumsum(present, axis=1) - 1)[line, column]
    kept = place < num_features
    packed[line[kept], place[kept]] = rows[line[kept], column[kept]]
    return packed
