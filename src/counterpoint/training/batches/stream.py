"""Batches that can only be read one after the other: an iterable, a generator, or a loader of a stream.

Every rank reads all of them and takes its part. What they draw from the global random generators depends on the seed
and the epoch only, and does not disturb other draws. The position to resume from is the ``state_dict`` of the loader or
dataset; without one, batches are read again and dropped. One batch is read ahead, which tells where an epoch ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from counterpoint.data.batch_form import SplitFn
from counterpoint.data.loader_order import ORDER, is_stateful, unique
from counterpoint.data.microbatch_reader import preserve_rng, seed_rng
from counterpoint.data.sampler import Cursor
from counterpoint.errors import CheckpointError, DataError
from counterpoint.partitioning.pytree import register_dataclasses
from counterpoint.runtime.microbatches import KeptBatch, MicrobatchSource
from counterpoint.terminal_text import warn
from counterpoint.training.batches.global_batch import (
    MicrobatchSelection,
    batch_digest,
    count_samples,
    make_global_batch,
)


class StreamedBatch(NamedTuple):
    """A batch that was read.

    Args:
        kept: the model's inputs, and what the loss gets.
        num_samples: their number.
        state: of the stream before it was read; empty for one without.
    """

    kept: KeptBatch
    num_samples: int
    state: dict[str, Any]

    @property
    def values(self) -> tuple[Any, Any]:
        """The model's inputs, and what the loss gets."""
        return self.kept.values


class StreamRng:
    """The states of the global random generators while a stream is read."""

    def __init__(self, seed: int, epoch: int) -> None:
        self.numpy_generator = np.random.MT19937(0)
        with preserve_rng():
            np.random.mtrand.set_bit_generator(self.numpy_generator)
            seed_rng(seed, epoch, ORDER)
            self.python_state, self.torch_state = random.getstate(), torch.default_generator.get_state()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Continue with these states inside, and with the others afterwards."""
        with preserve_rng():
            np.random.mtrand.set_bit_generator(self.numpy_generator)
            random.setstate(self.python_state)
            torch.default_generator.set_state(self.torch_state)
            try:
                yield
            finally:
                self.python_state, self.torch_state = random.getstate(), torch.default_generator.get_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the states."""
        return {"python": self.python_state, "torch": self.torch_state, "numpy": dict(self.numpy_generator.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with saved states.

        Raises:
            CheckpointError: one is not the state of its generator.
        """
        try:
            random.Random().setstate(state["python"])
            torch.Generator().set_state(state["torch"])
            self.numpy_generator.state = state["numpy"]
        except (LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved state of a stream's random numbers cannot be restored ({type(error).__name__}: {error}); "
                "take another checkpoint, or restore this one from a backup"
            ) from error
        self.python_state, self.torch_state = state["python"], state["torch"]


class StreamedBatches:
    """The batches of a stream.

    Args:
        data: what was given.
        opens: returns an iterable of the batches of an epoch.
        split: returns the inputs and targets of a batch.
        seed: of what the stream draws from the global random generators.
        first_epoch: the first epoch that is read.
        group_size: samples of a batch, if it is made of a stream of samples.
    """

    def __init__(
        self,
        data: Any,  # noqa: ANN401 - any iterable, or a function that returns one
        opens: Callable[[], Iterable[Any]],
        split: SplitFn,
        *,
        seed: int,
        first_epoch: int,
        group_size: int | None = None,
    ) -> None:
        self.data = data
        self.opens = opens
        self.split = split
        self.seed = seed
        self.first_epoch = first_epoch
        self.group_size = group_size
        self.epoch = -1  # that is read
        self.num_read = 0  # batches of the epoch
        self.has_ended = False
        self.error: Exception | None = None  # of the stream
        self.buffer: list[StreamedBatch] = []
        self.copies = False  # the batches that it reads, since they are needed while it fills the same tensors again
        self.iterator: Iterator[Any] = iter(())
        self.rng = StreamRng(seed, first_epoch)
        owners = [data, data.dataset] if isinstance(data, DataLoader) and not data.num_workers else [data]
        self.stateful: Any = next(filter(is_stateful, owners), None)
        parts = [data, *(getattr(data, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
        self.epoch_listeners = [part for part in unique(parts) if hasattr(part, "set_epoch")]

    @property
    def num_batches(self) -> int | None:
        """Number of batches of an epoch, if it is sure."""
        return len(self.data) if isinstance(self.data, Sequence) else None

    @property
    def batch_size(self) -> int:
        """Samples of the first batch."""
        return self.peek().num_samples

    @property
    def is_fixed_size(self) -> bool:
        """Whether batches are of that size, of which a stream says nothing."""
        return False

    def last_batch_len(self, epoch: int) -> int | None:
        """Return None: it is known when it is read."""
        return None

    def peek(self) -> StreamedBatch:
        """Return the first batch that is read, without moving forward."""
        if self.epoch < 0:
            self.open_epoch(self.first_epoch)
        return self.fill(1)[0]

    def describe(self) -> list[list[str]]:
        """Return the type of the stream and its first batch."""
        batch = self.peek()
        content = f"{batch.num_samples} samples, digest {batch_digest(*batch.values)[:12]}"
        return [["the data", type(self.data).__qualname__], ["the first batch", content]]

    def metadata(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed, as JSON."""
        size = {} if self.group_size is None else {"batch_size": self.group_size}
        return {"dataset": {"type_name": type(self.data).__qualname__}, "seed": self.seed, **size}

    def sample_batch(self, count: int, num_microbatches: int = 1) -> MicrobatchSource:
        """Return up to ``count`` samples of the first batch, at least one."""
        batch = self.peek()
        count = min(max(count, 1), batch.num_samples)
        return make_global_batch(batch.values, count, num_microbatches)

    def start(self, cursor: Cursor, num_batches: int | None, selection: MicrobatchSelection) -> None:
        """Move to a cursor; a loader reads ahead on its own, and every rank reads everything."""
        self.move_to(cursor)
        if selection.are_kept and type(self.data) not in {list, tuple}:  # no code runs when these are read
            self.copies = True
            self.buffer = [batch._replace(kept=KeptBatch.copy(batch.values)) for batch in self.buffer]

    def open_epoch(self, epoch: int) -> None:
        """Begin to read an epoch.

        Raises:
            DataError: the stream gives its batches once, and was read before.
        """
        self.rng = StreamRng(self.seed, epoch)
        with self.rng.use():
            for listener in self.epoch_listeners:
                listener.set_epoch(epoch)
            iterator = iter(self.opens())
        if self.epoch >= 0 and iterator is self.data:
            raise DataError(
                f"a {type(self.data).__name__} gives its batches once, but epoch {epoch} reads them again; pass a "
                "function that returns it, or a list"
            )
        self.iterator = iterator
        self.epoch, self.num_read, self.has_ended, self.buffer, self.error = epoch, 0, False, [], None

    def fill(self, count: int) -> list[StreamedBatch]:
        """Return up to ``count`` batches from the first one that is kept on.

        An error of the stream is raised again by each later call: an iterator that has raised one ends, which must not
        be taken for the end of an epoch.

        Raises:
            DataError: there is no batch at all.
        """
        while len(self.buffer) < count and not self.has_ended:
            if self.error is not None:
                raise self.error
            try:
                self.read_next()
            except Exception as error:
                self.error = error
                raise
        if not self.num_read:
            raise DataError(
                f"a {type(self.data).__name__} gave no batch in epoch {self.epoch}; a generator gives its batches "
                "once: pass a function that returns it, or a list"
            )
        return self.buffer[:count]

    def read_next(self) -> None:
        """Read one more batch, unless the epoch has ended."""
        with self.rng.use():
            state = {} if self.stateful is None else {"stream": self.stateful.state_dict()}
        if state:
            state["rng"] = self.rng.state_dict()
        with self.rng.use():
            batch = next(self.iterator, self)
        if batch is self:
            self.has_ended = True
            return
        if not self.num_read:
            register_dataclasses(batch)
        values = self.split(batch)
        kept = KeptBatch.copy(values) if self.copies else KeptBatch(values)
        self.buffer.append(StreamedBatch(kept, count_samples(*values), state))
        self.num_read += 1

    def move_to(self, cursor: Cursor) -> None:
        """Drop the batches before a cursor, and begin its epoch if it is another one."""
        if cursor.epoch != self.epoch:
            self.open_epoch(cursor.epoch)
        while (first := self.num_read - len(self.buffer)) < cursor.batch:
            if not self.fill(1):
                raise DataError(
                    f"a {type(self.data).__name__} gave {first} batches in epoch {cursor.epoch}, but the run continues "
                    f"at batch {cursor.batch}; resume with the data that it was saved with"
                )
            del self.buffer[0]

    def count_left(self, cursor: Cursor, limit: int) -> int:
        """Return how many batches the epoch has from the cursor on, at most ``limit``."""
        self.move_to(cursor)
        return len(self.fill(limit))

    def batch_at(self, cursor: Cursor, num_microbatches: int) -> MicrobatchSource:
        """Return the batch at a cursor."""
        first = self.num_read - len(self.buffer)
        if cursor.epoch != self.epoch or cursor.batch < first:
            self.move_to(cursor)
            first = cursor.batch
        batch = self.fill(cursor.batch - first + 1)[cursor.batch - first]
        return make_global_batch(batch.kept, batch.num_samples, num_microbatches)

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """Return the position at a cursor in mid-epoch, with a hash of the batch there; empty between two epochs."""
        if cursor.epoch != self.epoch or not cursor.batch:
            return {}
        self.move_to(cursor)
        batch = self.fill(1)[0]
        return {**batch.state, "digest": batch_digest(*batch.values)}

    def load_state(self, cursor: Cursor, state: Mapping[str, Any]) -> None:
        """Continue at a cursor, from a saved position, or by reading the batches before it again.

        Raises:
            CheckpointError: there is another batch than when the position was saved.
        """
        if not cursor.batch:
            return
        if "stream" in state and self.stateful is not None:
            self.rng = StreamRng(self.seed, cursor.epoch)
            with self.rng.use():
                for listener in self.epoch_listeners:
                    listener.set_epoch(cursor.epoch)
                self.stateful.load_state_dict(state["stream"])
                self.iterator = iter(self.opens())
            self.rng.load_state_dict(state.get("rng", {}))
            self.epoch, self.num_read = cursor.epoch, cursor.batch
            self.has_ended, self.buffer, self.error = False, [], None
        elif self.num_batches is None:
            warn(
                f"a {type(self.data).__name__} has no position to continue from, so the run reads {cursor.batch} "
                f"batches of epoch {cursor.epoch} again and drops them; give it state_dict and load_state_dict, or "
                "pass a dataset with samples by index, to continue at once",
                RuntimeWarning,
                stacklevel=2,
            )
        self.move_to(cursor)
        batch = self.fill(1)
        if "digest" in state and (not batch or batch_digest(*batch[0].values) != state["digest"]):
            raise CheckpointError(
                f"batch {cursor.batch} of epoch {cursor.epoch} is another one than when the checkpoint was saved, so "
                "samples would be read twice or never; resume with the same data in the same order, drawn from a "
                "seed and the epoch, or from a checkpoint that was saved at the end of an epoch"
            )

    def load_resized(self, cursor: Cursor, batch_size: int, state: Mapping[str, Any]) -> tuple[Cursor, int]:
        """Continue at the start of an epoch, where the size of batches does not matter.

        Raises:
            CheckpointError: the cursor is in mid-epoch, and a stream counts batches.
        """
        if cursor.batch:
            raise CheckpointError(
                f"a {type(self.data).__name__} is read in batches, and the checkpoint is at batch {cursor.batch} of "
                f"epoch {cursor.epoch}, of {batch_size} samples each, which has no place among others; resume with "
                f"batch_size={batch_size}, or from a checkpoint that was saved at the end of an epoch"
            )
        return cursor, 0

    def close(self) -> None:
        """Stop reading."""
        self.iterator = iter(())
