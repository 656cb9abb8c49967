"""A rank's shards of weights on disk, but while they are gathered or updated.

Each shard has a place in the rank's file, and its tensor has no memory while it is away::

    fetch(weight0)     reading:  file -> buffer
    all_gather         the whole weights <- buffer, which is freed
    U0                 tensor <- buffer; the optimizer updates it; buffer <- tensor, writing: buffer -> file
    offload(weight0)   waits until it is written

The tensors that an optimizer updates are views of the shard's tensor: its memory comes and goes, and they stay.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from counterpoint.runtime.offload.chunk_file import WEIGHTS, ChunkFile, Span, align, allocate_aligned


@dataclass(frozen=True, slots=True)
class WeightOffloadConfig:
    """How the ranks of a run offload their shards of weights.

    Args:
        folder: of the files.
        timeout_s: the longest time that a read or a write may take, in seconds.
    """

    folder: str
    timeout_s: float


class OffloadedWeights:
    """The file with the weights of one rank.

    Args:
        config: of the run.
        rank: for errors.
    """

    def __init__(self, config: WeightOffloadConfig, rank: int) -> None:
        self.file = ChunkFile(config.folder, rank, config.timeout_s, content=WEIGHTS)
        self.shards: list[OffloadedShard] = []
        self.num_bytes = 0  # of the file
        self.opened: OffloadedShard | None = None  # which is read or changed between steps

    def add(self, shard: Tensor) -> OffloadedShard:
        """Write a shard to the file, and free its memory.

        Args:
            shard: flat, the only tensor of its memory.

        Raises:
            OffloadError: the folder cannot be used, or its disk has no room.
        """
        if not self.shards:
            self.file.open(0)
        span = Span(len(self.shards), self.num_bytes, align(shard.nbytes))
        self.file.reserve(span.num_bytes, span.offset)
        self.num_bytes += span.num_bytes
        own = OffloadedShard(self, span, shard)
        self.shards.append(own)
        own.start_write()
        own.finish()  # so that no more than one is in memory twice
        return own

    def open(self, shard: OffloadedShard | None) -> None:
        """Let a shard be read and changed between steps, and no other one; write the one before if it was changed."""
        before, self.opened = self.opened, shard
        if before is not None and before is not shard:
            before.close()

    def clear(self) -> None:
        """Forget what a failed step has read."""
        for shard in self.shards:
            shard.reading = None
            shard.release()

    def close(self) -> None:
        """Give the space on the disk back; the weights are lost."""
        self.opened = None
        self.file.close()


class OffloadedShard:
    """The weights of one unit and dtype that a rank keeps, in a file.

    Args:
        weights: the rank's file.
        span: where they are in it.
        shard: their tensor, which has memory while they are updated.
    """

    def __init__(self, weights: OffloadedWeights, span: Span, shard: Tensor) -> None:
        self.weights, self.file, self.span = weights, weights.file, span
        self.shard, self.dtype, self.num_elements = shard, shard.dtype, shard.numel()
        self.reading: tuple[Tensor, Future[None]] | None = None
        self.writing: Future[None] | None = None
        self.buffer: Tensor | None = None  # between steps
        self.is_changed = False

    @property
    def is_resident(self) -> bool:
        """Whether the tensor has its memory."""
        return self.shard.untyped_storage().size() > 0

    def allocate(self) -> None:
        """Give the tensor memory, with any values."""
        self.shard.untyped_storage().resize_(self.num_elements * self.dtype.itemsize)

    def release(self) -> None:
        """Free the memory of the tensor."""
        self.shard.untyped_storage().resize_(0)

    def start_read(self) -> None:
        """Start to read the shard."""
        self.weights.open(None)
        if self.writing is not None:  # of a step that has failed since
            self.finish()
        buffer = allocate_aligned(self.span.num_bytes)
        self.reading = buffer, self.file.start_read(self.span, buffer)

    def read_whole(self) -> Tensor:
        """Return the shard that is being read, valid until :meth:`finish`; else read it now."""
        if self.reading is None:
            return self.open_values().clone()
        buffer, job = self.reading
        self.file.wait(job, self.describe("reading"))
        return self.view(buffer)

    def load(self) -> None:
        """Give the tensor the values that are read, for an update."""
        values = self.read_whole()
        self.allocate()
        self.shard.data.copy_(values)
        self.reading = None

    def start_write(self) -> None:
        """Start to write the tensor's values, and free its memory."""
        buffer = allocate_aligned(self.span.num_bytes)
        self.view(buffer).copy_(self.shard.data)
        self.release()
        self.writing = self.file.start_write(self.span, buffer)

    def finish(self) -> None:
        """Wait until the shard is written, and free the memory that it has."""
        job, self.writing, self.reading = self.writing, None, None
        self.release()
        if job is not None:
            self.file.wait(job, self.describe("writing"))

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of a range, between steps."""
        return self.open_values()[start:stop].clone()

    def write(self, start: int, values: Tensor) -> None:
        """Write flat values from an element on, between steps."""
        self.open_values()[start : start + values.numel()].copy_(values)
        self.is_changed = True

    def open_values(self) -> Tensor:
        """Return the values in a buffer that is written before another shard is opened, or a step reads one."""
        self.weights.open(self)
        if self.writing is not None:  # of a step that has failed since
            self.finish()
        if self.buffer is None:
            self.buffer = allocate_aligned(self.span.num_bytes)
            self.file.wait(self.file.start_read(self.span, self.buffer), self.describe("reading"))
        return self.view(self.buffer)

    def close(self) -> None:
        """Write the buffer if it was changed between steps, and free it."""
        buffer, self.buffer, is_changed, self.is_changed = self.buffer, None, self.is_changed, False
        if buffer is not None and is_changed:
            self.file.wait(self.file.start_write(self.span, buffer), self.describe("writing"))

    def view(self, buffer: Tensor) -> Tensor:
        """Return the values in a buffer of the shard's bytes."""
        return buffer[: self.num_elements * self.dtype.itemsize].view(self.dtype)

    def describe(self, verb: str) -> str:
        """Return what is waited for, for errors."""
        return f"{verb} shard {self.span.index} of the weights"

    def view_shard(self, start: int, stop: int) -> Tensor:
        """Return a view of a range of the tensor, whose memory comes and goes."""
        is_resident = self.is_resident
        if not is_resident:
            self.allocate()  # no page of which is touched
        view = self.shard[start:stop]
        if not is_resident:
            self.release()
        return view
