"""Inputs of blocks on disk between the forward that reads them and the recomputation.

One input is written at a time, from a buffer of its own, while the next blocks run. Each has a place in the rank's file
that another one takes after it was read. The file grows where no free place is large enough: in the first steps, and
when a batch is larger than those before::

    computing   F1 | F2      | F3      |   ...   | B3     | R2 B2  | R1 B1
    writing        | x1      | x2      |
    reading                                      | x2     | x1     |
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from counterpoint.runtime.offload.chunk_file import INPUTS, ChunkFile, Span, align, allocate_aligned
from counterpoint.runtime.offload.partitioned_values import ValuePart, split_value

ValueKey: TypeAlias = tuple[int, int]
"""A value of the model, and the microbatch."""


@dataclass(frozen=True, slots=True)
class InputOffloadConfig:
    """How the ranks of a run offload the inputs of recomputed blocks.

    Args:
        folder: of the files.
        timeout_s: the longest time that a read or a write may take, in seconds.
    """

    folder: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class InputOnDisk:
    """A value that was written to disk.

    Args:
        value: its shape and dtype, without data.
        num_bytes: of the value.
        requires_grad: whether it needs a gradient.
        span: where it is.
    """

    value: ValuePart
    num_bytes: int
    requires_grad: bool
    span: Span


class OffloadedInputs:
    """The inputs that one rank keeps in a file.

    Args:
        config: of the run.
        rank: for errors.
    """

    def __init__(self, config: InputOffloadConfig, rank: int) -> None:
        self.file = ChunkFile(config.folder, rank, config.timeout_s, content=INPUTS)
        self.num_bytes = self.num_spans = 0  # of the file; nothing is written before the first step
        self.free_spans: list[Span] = []
        self.on_disk: dict[ValueKey, InputOnDisk] = {}
        self.reading: dict[ValueKey, tuple[InputOnDisk, Tensor, Future[None]]] = {}
        self.writing: Future[None] | None = None

    def start_write(self, key: ValueKey, value: Tensor, *, requires_grad: bool) -> bool:
        """Start to write a value, once the one before it is written.

        Returns:
            Whether it is written; not a value whose elements do not fill its memory, which stays where it is.

        Raises:
            OffloadError: the disk is full, or does not write.
        """
        part = split_value(value, 0, 1)
        if part is None:
            return False
        self.file.require_intact()
        self.wait_for_write()
        num_bytes = len(part.data)
        span = self.take_span(align(num_bytes))
        buffer = allocate_aligned(span.num_bytes)
        buffer[:num_bytes] = part.data
        self.writing = self.file.start_write(span, buffer)
        self.on_disk[key] = InputOnDisk(replace(part, data=part.data.new_empty(0)), num_bytes, requires_grad, span)
        return True

    def start_read(self, key: ValueKey) -> None:
        """Start to read a value that was written, if it was."""
        if key in self.on_disk:
            self.wait_for_write()
            stored = self.on_disk.pop(key)
            buffer = allocate_aligned(stored.span.num_bytes)
            self.reading[key] = stored, buffer, self.file.start_read(stored.span, buffer)

    def take(self, key: ValueKey) -> tuple[Tensor, bool] | None:
        """Return a value that is read, and whether it needs a gradient; None if it was never written.

        Raises:
            OffloadError: it cannot be read.
        """
        if key not in self.reading:
            return None
        stored, buffer, job = self.reading.pop(key)
        self.file.wait(job, "reading the input of a block")
        self.free_spans.append(stored.span)
        return stored.value.view_value(buffer), stored.requires_grad

    def take_span(self, num_bytes: int) -> Span:
        """Return the smallest free place that is large enough; the file grows if there is none.

        New places have a power of two of bytes where inputs of another size came before, so that lengths that change
        with every batch find a place.
        """
        large_enough = [span for span in self.free_spans if span.num_bytes >= num_bytes]
        if large_enough:
            span = min(large_enough, key=lambda one: one.num_bytes)
            self.free_spans.remove(span)
            return span
        if not self.num_spans:
            self.file.open(0)
        if self.free_spans:  # of other sizes
            num_bytes = 1 << (num_bytes - 1).bit_length()
        span = Span(self.num_spans, self.num_bytes, num_bytes)
        self.file.reserve(num_bytes, self.num_bytes)
        self.num_bytes, self.num_spans = self.num_bytes + num_bytes, self.num_spans + 1
        return span

    def wait_for_write(self) -> None:
        """Wait until the last value is written."""
        job, self.writing = self.writing, None
        if job is not None:
            self.file.wait(job, "writing the input of a block")

    def clear(self) -> None:
        """Forget all values; their places are free again once what reads or writes them has ended."""
        jobs = [job for job in (self.writing, *(job for _, _, job in self.reading.values())) if job is not None]
        if wait(jobs, self.file.timeout_s).not_done:
            self.file.wait(jobs[-1], "the last input of a step that has failed")
        for stored in [*self.on_disk.values(), *(one for one, _, _ in self.reading.values())]:
            self.free_spans.append(stored.span)
        self.writing = None
        self.on_disk.clear()
        self.reading.clear()
