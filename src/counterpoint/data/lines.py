"""Lines of the standard library's sources, to be classified by package; features are hashed n-grams and tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from counterpoint.data.sampler import Indices
from counterpoint.data.sources import DatasetSplit, SourceFile, read_sources, select_split
from counterpoint.errors import DataError

ByteArray: TypeAlias = npt.NDArray[np.uint8]
Hashes: TypeAlias = npt.NDArray[np.uint32]
FeatureRows: TypeAlias = npt.NDArray[np.int32]
Mask: TypeAlias = npt.NDArray[np.bool_]

NGRAM_SIZES = (3, 4, 5)
FNV_START = np.uint32(0x811C9DC5)
FNV_PRIME = np.uint32(0x01000193)
TOKEN_START = np.uint32(0x2F0B4C47)


def hash_lines(lines: Sequence[bytes], *, line_len: int, num_features: int, num_rows: int) -> FeatureRows:
    """Return the features of each line as rows of an embedding table, the same on every machine.

    A feature is a run of 3, 4 or 5 bytes, or a token (letters, digits and underscores). Its 32-bit FNV-1a hash
    selects a row from 1 to ``num_rows - 1``; several features may share a row. Row 0 is padding.

    Args:
        lines: lines of text.
        line_len: maximum number of bytes of a line that are used.
        num_features: number of features per line; tokens come first, then the shorter n-grams.
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


def _grid(lines: Sequence[bytes], line_len: int) -> ByteArray:
    """Return the lines as ``(line, line_len)`` bytes, padded with 0."""
    joined = b"".join(line[:line_len].ljust(line_len, b"\0") for line in lines)
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(lines), line_len)


def _ngrams(text: ByteArray, size: int) -> tuple[Hashes, Mask]:
    """Return the hash of the n-gram at each position, and a mask of complete ones."""
    width = max(text.shape[1] - size + 1, 0)
    hashes = np.full((len(text), width), FNV_START, dtype=np.uint32)
    for offset in range(size):
        hashes = (hashes ^ text[:, offset : offset + width]) * FNV_PRIME
    return hashes, text[:, size - 1 : size - 1 + width] != 0


def _tokens(text: ByteArray) -> tuple[Hashes, Mask]:
    """Return the hash of the token up to each position, and a mask of ends of tokens."""
    letter = _is_word(text)
    hashes = np.empty(text.shape, dtype=np.uint32)
    running = np.full(len(text), TOKEN_START, dtype=np.uint32)
    for column in range(text.shape[1]):
        running = np.where(letter[:, column], (running ^ text[:, column]) * FNV_PRIME, TOKEN_START)
        hashes[:, column] = running
    ends = letter.copy()
    ends[:, :-1] &= ~letter[:, 1:]
    return hashes, ends


def _is_word(text: ByteArray) -> Mask:
    digit = (text >= ord("0")) & (text <= ord("9"))
    lower = text | np.uint8(0x20)
    word: Mask = digit | ((lower >= ord("a")) & (lower <= ord("z"))) | (text == ord("_")) | (text >= 0x80)
    return word


def _pack(rows: FeatureRows, present: Mask, num_features: int) -> FeatureRows:
    """Move present features to the front of each line, in order; truncate or pad with 0."""
    packed = np.zeros((len(rows), num_features), dtype=np.int32)
    line, column = np.nonzero(present)
    position = (np.cumsum(present, axis=1) - 1)[line, column]
    kept = position < num_features
    packed[line[kept], position[kept]] = rows[line[kept], column[kept]]
    return packed


HELD_OUT_ONE_IN = 5
NUM_ROWS = 2**20
NUM_CLASSES = 20
LINE_LEN = 40
NUM_FEATURES = 96
SHORTEST_LINE = 8
LINES_AT_ONCE = 8192


class SourceLines:
    """Source lines as hashed features, and the package of each.

    A sample is ``(features, label)``: the features int64 ``(96,)``, rows of an embedding table of 2**20 padded with 0,
    see `hash_lines`; the label an int64 scalar, an index into ``classes``. Lines of less than 8 characters are skipped.
    All features are computed on construction. The dataset is deterministic.

    Args:
        sources: the files of this split, from `split_lines` or `select_split`.
        classes: names of packages; files of others are skipped.
        limit: number of lines to use, spread evenly over all of them; all by default.

    Raises:
        DataError: no line is left, or ``limit`` is below 1.
    """

    def __init__(self, sources: Sequence[SourceFile], classes: Sequence[str], limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise DataError(f"limit is {limit}; give 1 line or more")
        labels = {name: label for label, name in enumerate(classes)}
        found = [
            (line, labels[source.top_level])
            for source in sources
            if source.top_level in labels
            for line in _lines(source)
        ]
        if not found:
            raise DataError(
                f"none of the {len(sources)} files has a line of one of the {len(labels)} classes; "
                "give other classes or more files"
            )
        num_lines = len(found) if limit is None else min(limit, len(found))
        chosen = [found[number * len(found) // num_lines] for number in range(num_lines)]
        self.classes = tuple(classes)
        self._features = torch.from_numpy(_hash_all([line for line, _ in chosen]))
        self._labels = torch.tensor([label for _, label in chosen])

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ``(features, label)``, int64 ``(96,)`` and ``()``."""
        return self._features[index].long(), self._labels[index]

    def fetch(self, indices: Sequence[int] | Indices) -> tuple[Tensor, Tensor]:
        """Return many samples: features int64 ``(line, 96)`` and labels int64 ``(line,)``."""
        samples = torch.as_tensor(np.asarray(indices, dtype=np.int64))
        return self._features[samples].long(), self._labels[samples]


def split_lines(
    limit: int | None = 60_000, held_out_limit: int | None = 10_000, root: Path | None = None
) -> tuple[SourceLines, SourceLines]:
    """Return the training and the held-out split, which have no file in common but the same classes.

    Args:
        limit: number of lines to train on, spread evenly over all files; None for all.
        held_out_limit: the same for the held-out lines.
        root: folder to read; the standard library by default.
    """
    sources = read_sources(root)
    parts: tuple[DatasetSplit, DatasetSplit] = ("train", "held-out")
    train, held_out = (select_split(sources, part, HELD_OUT_ONE_IN) for part in parts)
    classes = most_frequent_classes(train, held_out)
    return SourceLines(train, classes, limit), SourceLines(held_out, classes, held_out_limit)


def most_frequent_classes(train: Sequence[SourceFile], held_out: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the packages with most bytes to train on, in alphabetical order, at most 20 of them.

    A module of a single file is in one split only, and therefore not a class.

    Raises:
        DataError: fewer than two packages have files in both splits.
    """
    both = {source.top_level for source in train} & {source.top_level for source in held_out}
    size_bytes: Counter[str] = Counter()
    for source in train:
        if source.top_level in both:
            size_bytes[source.top_level] += len(source.content)
    ranked = sorted(size_bytes, key=lambda name: (-size_bytes[name], name))
    if len(ranked) < 2:
        raise DataError(
            f"only {len(ranked)} of the top-level packages have files in both splits; a "
            "classification needs two; give a folder of more files"
        )
    return tuple(sorted(ranked[:NUM_CLASSES]))


def _lines(source: SourceFile) -> Iterator[bytes]:
    for line in source.content.splitlines():
        stripped = line.strip()
        if len(stripped) >= SHORTEST_LINE:
            yield stripped


def _hash_all(lines: Sequence[bytes]) -> FeatureRows:
    """Return int32 ``(line, 96)``, computed in pieces to limit temporary memory."""
    pieces = [lines[start : start + LINES_AT_ONCE] for start in range(0, len(lines), LINES_AT_ONCE)]
    hashed = [hash_lines(piece, line_len=LINE_LEN, num_features=NUM_FEATURES, num_rows=NUM_ROWS) for piece in pieces]
    return np.concatenate(hashed)
