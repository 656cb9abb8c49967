"""Optimizer state of one rank that is on disk between updates, and streams through a few buffers during one.

The tensors that an optimizer updates are short enough that the state of each fits into a chunk; a chunk has the state
of one or several of them, one after the other::

    targets      [ t0 ........ ][ t1 ........ ][ t2 .. ][ t3 ]        at most max_target_elements long
    chunk 0      | t0.exp_avg     | t0.exp_avg_sq     |
    chunk 1      | t1.exp_avg     | t1.exp_avg_sq     |
    chunk 2      | t2.exp_avg | t2.exp_avg_sq | t3.exp_avg | t3.exp_avg_sq |

Numbers such as ``step`` stay in the optimizer's ``state``, and the entries above are there only while their chunk is.
The optimizer takes the same step as in memory, chunk after chunk: its update is elementwise. Where ranks hold casts of
weights, the master weights that it updates are one more entry, and the target is empty while its chunk is away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, optim

from counterpoint.model.spec import Unit
from counterpoint.program.offloading import NUM_OFFLOAD_BUFFERS
from counterpoint.runtime.offload.chunk_file import ChunkFile, Span, align, allocate_aligned

ENTRY_BYTES = 64
"""An entry begins at a multiple of it in its chunk."""

StateDtypes = Mapping[str, torch.dtype]
"""The dtypes of the entries of a state that have a number for each element."""

MASTER = "master weight"
"""The entry of a target that is itself offloaded; no optimizer has a space in its keys."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """How the ranks of a run offload their optimizer state.

    Args:
        folder: of the files; None for state in the memory of the host of a device.
        timeout_s: the longest time that a chunk may take, in seconds.
        max_target_elements: the most elements of a tensor that an optimizer updates; None where its state is empty.
        chunk_bytes: the most bytes of a chunk.
    """

    folder: str | None
    timeout_s: float
    max_target_elements: int | None
    chunk_bytes: int


def find_max_target_elements(state_dtypes: Sequence[StateDtypes], chunk_bytes: int) -> int | None:
    """Return how many elements a tensor may have so that its state fits into a chunk; None if there is none.

    Args:
        state_dtypes: of all option groups and dtypes of parameters.
        chunk_bytes: of a chunk.

    Example:
        >>> find_max_target_elements([{"exp_avg": torch.float32, "exp_avg_sq": torch.float32}], 32 << 20)
        4194304
    """
    bytes_per_element = max((sum(dtype.itemsize for dtype in dtypes.values()) for dtypes in state_dtypes), default=0)
    if not bytes_per_element:
        return None
    whole = max(chunk_bytes // bytes_per_element, 1)
    return whole if whole < ENTRY_BYTES else whole // ENTRY_BYTES * ENTRY_BYTES


@dataclass(slots=True)
class TargetState:
    """Where the state of one tensor that is updated lies in its chunk.

    Args:
        target: the tensor.
        entries: first byte and dtype of each entry.
        stored: the entries that the file has.
    """

    target: Tensor
    entries: Mapping[str, tuple[int, torch.dtype]]
    stored: set[str] = field(default_factory=set)

    def view(self, key: str, buffer: Tensor) -> Tensor:
        """Return an entry in a buffer of its chunk."""
        start, dtype = self.entries[key]
        stop = start + self.target.numel() * dtype.itemsize
        return buffer[start:stop].view(dtype).view(self.target.shape)


@dataclass(slots=True)
class Chunk:
    """What is read and written as one.

    Args:
        span: its place in the file.
        first: index of its first target in those of its optimizer.
        states: of its targets.
    """

    span: Span
    first: int
    states: list[TargetState]

    @property
    def stop(self) -> int:
        """One past the index of its last target."""
        return self.first + len(self.states)

    @property
    def is_stored(self) -> bool:
        """Whether the file has some of it."""
        return any(own.stored for own in self.states)

    def load(self, optimizer: optim.Optimizer, buffer: Tensor) -> None:
        """Give the optimizer the entries that were read into a buffer."""
        for own in self.states:
            for key in own.stored - {MASTER}:
                optimizer.state[own.target][key] = own.view(key, buffer)
            if MASTER in own.stored:
                own.target.data = own.view(MASTER, buffer)

    def unload(self, optimizer: optim.Optimizer, buffer: Tensor) -> None:
        """Take the entries from the optimizer, and write those that are not there yet to a buffer."""
        for own in self.states:
            state, masters = optimizer.state.get(own.target, {}), own.stored & {MASTER}
            own.stored = masters | (own.entries.keys() & state.keys())
            for key in own.stored - masters:
                value, place = state.pop(key), own.view(key, buffer)
                if value.data_ptr() != place.data_ptr():
                    place.copy_(value)
            if masters:
                own.target.data = absent_values(own.target)


def absent_values(like: Tensor) -> Tensor:
    """Return a tensor of the shape of another one, without memory for its values: all are nan."""
    return torch.full((1,), torch.nan, dtype=like.dtype, device=like.device).expand(like.shape)


def plan_chunks(
    targets: Sequence[Tensor], state_dtypes: Sequence[StateDtypes], place: Span, chunk_bytes: int
) -> list[Chunk]:
    """Return the chunks of the targets of one optimizer.

    Args:
        targets: in order.
        state_dtypes: of the state of each.
        place: index and offset of the first chunk.
        chunk_bytes: the most bytes of a chunk with several targets.
    """
    chunks: list[Chunk] = []
    offset = place.offset
    for number, (target, dtypes) in enumerate(zip(targets, state_dtypes, strict=True)):
        sizes = [align(target.numel() * dtype.itemsize, ENTRY_BYTES) for dtype in dtypes.values()]
        last = chunks[-1] if chunks else None
        used = last.span.num_bytes if last is not None else 0
        if last is None or used + sum(sizes) > chunk_bytes:
            offset += align(used)
            last, used = Chunk(Span(place.index + len(chunks), offset, 0), number, []), 0
            chunks.append(last)
        starts = list(accumulate(sizes, initial=used))
        places = zip(starts[:-1], dtypes.values(), strict=True)
        last.states.append(TargetState(target, dict(zip(dtypes, places, strict=True))))
        last.span = Span(last.span.index, last.span.offset, starts[-1])
    for chunk in chunks:
        chunk.span = Span(chunk.span.index, chunk.span.offset, align(chunk.span.num_bytes))
    return chunks


class Buffers:
    """The buffers of the chunks that are read, updated and written at a time.

    Args:
        file: of the chunks.
        chunks: that are read and written, in order.
    """

    def __init__(self, file: ChunkFile, chunks: Sequence[Chunk]) -> None:
        self.file, self.chunks = file, chunks
        self.num_bytes = max((chunk.span.num_bytes for chunk in chunks), default=0)
        self.num_left = min(NUM_OFFLOAD_BUFFERS, len(chunks))  # that may be allocated
        self.reads: dict[int, tuple[Tensor, Future[None] | None]] = {}  # by position of the chunk
        self.writes: list[tuple[Chunk, Tensor, Future[None]]] = []
        self.free: list[Tensor] = []

    def start_read(self, position: int) -> None:
        """Start to read a chunk, if there is one at this position that is not read yet."""
        if position in self.reads or position >= len(self.chunks):
            return
        chunk, buffer = self.chunks[position], self.take()
        self.reads[position] = buffer, self.file.start_read(chunk.span, buffer) if chunk.is_stored else None

    def take(self) -> Tensor:
        """Return a free buffer; wait for the oldest write if all are in use."""
        if self.free:
            return self.free.pop()
        if self.num_left:
            self.num_left -= 1
            return allocate_aligned(self.num_bytes)
        return self.finish_write()

    def await_read(self, position: int) -> Tensor:
        """Return the buffer with a chunk, and start to read the next one."""
        self.start_read(position)
        self.start_read(position + 1)
        buffer, job = self.reads.pop(position)
        if job is not None:
            self.file.wait(job, f"reading chunk {self.chunks[position].span.index}")
        return buffer

    def start_write(self, position: int, buffer: Tensor) -> None:
        """Start to write a chunk, if it has anything."""
        chunk = self.chunks[position]
        if chunk.is_stored:
            self.writes.append((chunk, buffer, self.file.start_write(chunk.span, buffer)))
        else:
            self.free.append(buffer)

    def finish_write(self) -> Tensor:
        """Wait for the oldest write and return its buffer."""
        chunk, buffer, job = self.writes.pop(0)
        self.file.wait(job, f"writing chunk {chunk.span.index}")
        return buffer

    def finish(self) -> None:
        """Wait for all writes, and free the buffers."""
        while self.writes:
            self.finish_write()
        self.free.clear()


@dataclass(slots=True)
class OffloadedOptimizer:
    """The state of one optimizer of a rank.

    Args:
        optimizer: the optimizer.
        chunks: of its state.
        buffers: while it is fetched.
    """

    optimizer: optim.Optimizer
    chunks: Sequence[Chunk]
    buffers: Buffers | None = None


class OffloadedState:
    """The optimizer state of one rank, in a file.

    Args:
        config: of the run.
        folder: of the file.
        rank: for errors and the file's name.
    """

    def __init__(self, config: OffloadConfig, folder: str, rank: int) -> None:
        self.config = config
        self.file = ChunkFile(folder, rank, config.timeout_s)
        self.optimizers: dict[tuple[Unit, ...], OffloadedOptimizer] = {}
        self.places: dict[int, tuple[Chunk, TargetState]] = {}  # by the target's id
        self.num_bytes = self.num_chunks = 0
        self.is_open = False
        self._opened: tuple[Chunk, Tensor] | None = None  # the last chunk that was read or changed between steps
        self._is_changed = False  # whether it has to be written

    def add(
        self,
        units: tuple[Unit, ...],
        optimizer: optim.Optimizer,
        targets: Sequence[Tensor],
        state_dtypes: Sequence[StateDtypes],
    ) -> None:
        """Let the state of an optimizer be in the file.

        Args:
            units: that it updates.
            optimizer: the optimizer, without state.
            targets: what it updates.
            state_dtypes: of the state of each.
        """
        place = Span(self.num_chunks, self.num_bytes, 0)
        chunks = plan_chunks(targets, state_dtypes, place, self.config.chunk_bytes)
        self.optimizers[units] = OffloadedOptimizer(optimizer, chunks)
        self.places |= {id(own.target): (chunk, own) for chunk in chunks for own in chunk.states}
        self.num_chunks += len(chunks)
        self.num_bytes += sum(chunk.span.num_bytes for chunk in chunks)

    def open(self) -> None:
        """Make the file, when all optimizers are known.

        Raises:
            OffloadError: the disk has no room.
        """
        self.file.open(self.num_bytes)
        self.is_open = True

    def fetch(self, units: tuple[Unit, ...]) -> None:
        """Start to read the state of the optimizers that update only some of these units."""
        self.flush()
        self.file.require_intact()
        for own_units, own in self.optimizers.items():
            if {*own_units} <= {*units}:
                if own.buffers is not None:  # of an update that nothing has waited for, or that has failed
                    own.buffers.finish()
                own.buffers = Buffers(self.file, own.chunks)
                own.buffers.start_read(0)

    def update(self, units: tuple[Unit, ...], step_targets: Callable[[int, int], None]) -> None:
        """Update chunk by chunk.

        Args:
            units: of the optimizer.
            step_targets: updates the targets from one index up to another.
        """
        own = self.optimizers[units]
        if own.buffers is None:
            self.fetch(units)
        buffers = own.buffers
        assert buffers is not None, "fetched"
        for position, chunk in enumerate(own.chunks):
            buffer = buffers.await_read(position)
            chunk.load(own.optimizer, buffer)
            with only_targets(own.optimizer, [state.target for state in chunk.states]):
                step_targets(chunk.first, chunk.stop)
            chunk.unload(own.optimizer, buffer)
            buffers.start_write(position, buffer)

    def offload(self, units: tuple[Unit, ...]) -> None:
        """Wait until the state of the optimizers that update only some of these units is written."""
        for own_units, own in self.optimizers.items():
            if {*own_units} <= {*units} and own.buffers is not None:
                own.buffers.finish()
                own.buffers = None

    def read_state(self, optimizer: optim.Optimizer, target: Tensor) -> dict[str, Any]:
        """Return the whole state of a target, between steps."""
        state = dict(optimizer.state.get(target, {}))
        chunk, own = self.places[id(target)]
        if own.stored - {MASTER}:
            buffer = self._open_chunk(chunk)
            state |= {key: own.view(key, buffer).clone() for key in own.stored - {MASTER}}
        return state

    def write_state(self, optimizer: optim.Optimizer, target: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the whole state of a target, between steps."""
        chunk, own = self.places[id(target)]
        buffer, keys = self._open_chunk(chunk), own.entries.keys() & state.keys()
        own.stored = (own.stored & {MASTER}) | keys
        for key in keys:
            own.view(key, buffer).copy_(state[key])
        optimizer.state.pop(target, None)
        numbers = {key: value for key, value in state.items() if key not in keys}
        if numbers:
            optimizer.state[target] = numbers
        self._is_changed = True

    def read_master(self, target: Tensor) -> Tensor:
        """Return the values of a target that is itself offloaded, between steps; valid until the next call."""
        chunk, own = self.places[id(target)]
        return own.view(MASTER, self._open_chunk(chunk))

    def write_master(self, target: Tensor, start: int, values: Tensor) -> None:
        """Write flat values to a target that is itself offloaded, from an element on, between steps."""
        chunk, own = self.places[id(target)]
        place = own.view(MASTER, self._open_chunk(chunk)).view(-1)
        place[start : start + values.numel()].copy_(values)
        own.stored.add(MASTER)
        self._is_changed = True

    def _open_chunk(self, chunk: Chunk) -> Tensor:
        """Return a buffer with a chunk, the last one that was used or a new one."""
        if self._opened is not None and self._opened[0] is chunk:
            return self._opened[1]
        self.flush()
        buffer = allocate_aligned(chunk.span.num_bytes)
        if chunk.is_stored:
            self.file.wait(self.file.start_read(chunk.span, buffer), f"reading chunk {chunk.span.index}")
        self._opened = chunk, buffer
        return buffer

    def flush(self) -> None:
        """Write the chunk that was changed between steps, if there is one, and free its buffer."""
        opened, self._opened = self._opened, None
        if opened is not None and self._is_changed and opened[0].is_stored:
            chunk, buffer = opened
            self.file.wait(self.file.start_write(chunk.span, buffer), f"writing chunk {chunk.span.index}")
        self._is_changed = False

    def close(self) -> None:
        """Give the space on the disk back; the state is lost."""
        self._opened = None
        self.file.close()


@contextmanager
def only_targets(optimizer: optim.Optimizer, targets: Sequence[Tensor]) -> Iterator[None]:
    """Let an optimizer have only some of its tensors inside, which are consecutive in each of its groups.

    Example:
        >>> weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
        >>> optimizer = optim.SGD(weights, lr=0.1)
        >>> with only_targets(optimizer, weights[1:2]):
        ...     [len(group["params"]) for group in optimizer.param_groups]
        [1]
    """
    whole, chosen = optimizer.param_groups, {id(target) for target in targets}
    own = [[tensor for tensor in group["params"] if id(tensor) in chosen] for group in whole]
    optimizer.param_groups = [
        {**group, "params": tensors} for group, tensors in zip(whole, own, strict=True) if tensors
    ]
    try:
        yield
    finally:
        optimizer.param_groups = whole
