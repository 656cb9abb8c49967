"""Windows of the standard library's sources, for byte-level language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from counterpoint.data.sampler import Indices
from counterpoint.data.sources import DatasetSplit, SourceFile, read_sources, select_split
from counterpoint.errors import DataError

HELD_OUT_ONE_IN = 10


class Text:
    """Windows of concatenated files; window ``i`` is the ``context + 1`` bytes from position ``i * context``.

    A sample is ``(x, y)``, both int64 ``(context,)`` with values from 0 to 255; ``y`` is ``x`` one byte
    later. The dataset is deterministic. One file in ten is held out.

    Args:
        sources: the files of this split, from `split_text` or `select_split`.
        context: number of bytes of an input.
        limit: number of windows to use, spread evenly over the text; all by default.

    Raises:
        DataError: the text is shorter than one window, or a number is below 1.
    """

    def __init__(self, sources: tuple[SourceFile, ...], context: int = 128, limit: int | None = None) -> None:
        if context < 1 or (limit is not None and limit < 1):
            raise DataError(f"context is {context} and limit is {limit}; give positive numbers")
        content = bytearray(b"".join(source.content for source in sources))
        num_windows = (len(content) - 1) // context
        if num_windows < 1:
            raise DataError(
                f"{len(content)} bytes of text are shorter than one window of {context + 1}; "
                "give a smaller context or more files"
            )
        self.context = context
        self._text = torch.frombuffer(content, dtype=torch.uint8)
        self._num_windows = num_windows
        self._num_samples = num_windows if limit is None else min(limit, num_windows)
        self._offsets = torch.arange(context + 1)

    def __len__(self) -> int:
        """Return the number of windows."""
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return ``(x, y)`` of one window, int64 ``(context,)`` each."""
        x, y = self.fetch([index])
        return x[0], y[0]

    def fetch(self, indices: Sequence[int] | Indices) -> tuple[Tensor, Tensor]:
        """Return ``(x, y)`` of many windows, int64 ``(window, context)`` each.

        Raises:
            IndexError: there is no such window.
        """
        samples = np.asarray(indices, dtype=np.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < self._num_samples:
            raise IndexError(f"windows {samples.min()} to {samples.max()} of {self._num_samples}")
        windows = torch.from_numpy(samples * self._num_windows // self._num_samples)
        bytes_ = self._text[windows[:, None] * self.context + self._offsets].long()
        return bytes_[:, :-1].contiguous(), bytes_[:, 1:].contiguous()


def split_text(context: int = 128, held_out_limit: int | None = None, root: Path | None = None) -> tuple[Text, Text]:
    """Return the training and the held-out split, which have no file in common.

    Args:
        context: number of bytes of an input.
        held_out_limit: number of held-out windows, spread evenly; all by default.
        root: folder to read; the standard library by default.
    """
    sources = read_sources(root)
    parts: tuple[DatasetSplit, DatasetSplit] = ("train", "held-out")
    train, held_out = (select_split(sources, part, HELD_OUT_ONE_IN) for part in parts)
    return Text(train, context), Text(held_out, context, held_out_limit)
