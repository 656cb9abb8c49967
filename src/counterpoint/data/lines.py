"""Lines of the standard library's sources: which package does a line come from?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterpoint.data.ngrams import Rows, hash_lines
from counterpoint.data.sampler import Indices
from counterpoint.data.sources import Part, Source, read_sources, select
from counterpoint.errors import DataError

HELD_OUT_ONE_IN = 5
NUM_ROWS = 2**20
NUM_CLASSES = 20
LINE_LEN = 40
NUM_FEATURES = 96
SHORTEST_LINE = 8
LINES_AT_ONCE = 8192


class Lines:
    """Source lines as hashed features, and the package each comes from.

    A sample is ``(features, label)``: the features int64 ``(96,)``, rows of a table of 2**20 from 1 on and
    filled up with 0, which stands for nothing, see `hash_lines`; the label an int64 scalar, an index into
    ``classes``. Lines of less than 8 characters are left out. All features are computed once, when it is
    built. There is nothing random in it.

    Args:
        sources: the files of this part, from `split_lines` or `select`.
        classes: names of packages; files of others are left out.
        limit: use only so many lines, spread evenly over all of them; all of them if not given.

    Raises:
        DataError: no line is left, or ``limit`` is below 1.
    """

    def __init__(self, sources: Sequence[Source], classes: Sequence[str], limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise DataError(f"limit is {limit}; a dataset has at least one line; give 1 or more")
        labels = {name: label for label, name in enumerate(classes)}
        found = [
            (line, labels[source.top_level])
            for source in sources
            if source.top_level in labels
            for line in _lines(source)
        ]
        if not found:
            raise DataError(
                f"none of the {len(sources)} files has a line of one of the {len(labels)} classes; a dataset "
                "has at least one; give other classes or more files"
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
) -> tuple[Lines, Lines]:
    """Return the training part and the held-out part, which have no file in common but the same classes.

    Args:
        limit: lines to train on, spread evenly over all files; all if not given.
        held_out_limit: lines held out, likewise.
        root: folder to read; the standard library if not given.
    """
    sources = read_sources(root)
    parts: tuple[Part, Part] = ("train", "held-out")
    train, held_out = (select(sources, part, HELD_OUT_ONE_IN) for part in parts)
    classes = most_frequent(train, held_out)
    return Lines(train, classes, limit), Lines(held_out, classes, held_out_limit)


def most_frequent(train: Sequence[Source], held_out: Sequence[Source]) -> tuple[str, ...]:
    """Return the packages with most bytes to train on, in alphabetical order, at most 20 of them.

    A module of one file is on one side only, and so is nothing that can be both learnt and tested.

    Raises:
        DataError: fewer than two packages have files in both parts.
    """
    both = {source.top_level for source in train} & {source.top_level for source in held_out}
    size_bytes: Counter[str] = Counter()
    for source in train:
        if source.top_level in both:
            size_bytes[source.top_level] += len(source.content)
    ranked = sorted(size_bytes, key=lambda name: (-size_bytes[name], name))
    if len(ranked) < 2:
        raise DataError(
            f"only {len(ranked)} of the top-level packages have files in both parts; telling packages apart "
            "needs two; give a folder of more files"
        )
    return tuple(sorted(ranked[:NUM_CLASSES]))


def _lines(source: Source) -> Iterator[bytes]:
    for line in source.content.splitlines():
        stripped = line.strip()
        if len(stripped) >= SHORTEST_LINE:
            yield stripped


def _hash_all(lines: Sequence[bytes]) -> Rows:
    """Return int32 ``(line, 96)``, made in pieces so that what is needed in between stays small."""
    pieces = [lines[start : start + LINES_AT_ONCE] for start in range(0, len(lines), LINES_AT_ONCE)]
    hashed = [hash_lines(piece, line_len=LINE_LEN, num_features=NUM_FEATURES, num_rows=NUM_ROWS) for piece in pieces]
    return np.concatenate(hashed)
