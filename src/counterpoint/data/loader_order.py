"""The order of samples of a torch ``DataLoader``, drawn from its batch sampler once per epoch.

Whatever a sampler draws from the global random generators is drawn from a hash of (seed, epoch). Generators of its own,
its ``state_dict`` if it has one, and its ``set_epoch`` are respected; so ranks draw the same order, and a run can be
resumed in mid-epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from counterpoint.data.microbatch_reader import preserve_rng, seed_rng
from counterpoint.data.sampler import Cursor, Indices
from counterpoint.errors import CheckpointError, DataError

ORDER = -1
"""In place of a sample, for the random numbers of samplers."""


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order of one epoch.

    Args:
        batches: the samples of each batch.
        state: of the samplers before they drew it.
    """

    batches: list[Indices]
    state: dict[str, Any]

    @property
    def digest(self) -> str:
        """A hash of the order."""
        hasher = hashlib.sha256()
        for batch in self.batches:
            hasher.update(len(batch).to_bytes(8) + batch.tobytes())
        return hasher.hexdigest()[:16]

    def first_samples(self, count: int) -> list[int | str]:
        """Return how many samples the first batches have together, and a hash of these."""
        samples = np.concatenate([*self.batches[:count], np.zeros(0, np.int64)])
        return [len(samples), hashlib.sha256(samples.tobytes()).hexdigest()[:16]]


class LoaderOrder:
    """The batches of a ``DataLoader``'s batch sampler.

    Args:
        loader: with a map-style dataset and a batch sampler that has a length.
        seed: of what samplers draw from the global random generators, and of samples.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        batch_sampler: Any = loader.batch_sampler
        self.batch_sampler = batch_sampler
        self.seed = seed
        self.loader_generator = loader.generator
        self.samplers = [*unique([loader.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None)])]
        generators = (getattr(owner, "generator", None) for owner in (loader, *self.samplers))
        self.generators = [owner for owner in unique(generators) if isinstance(owner, torch.Generator)]
        self.num_batches: int = len(self.batch_sampler)
        self.epochs: dict[int, EpochOrder] = {}

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch, which is kept until :meth:`drop_before`.

        Raises:
            DataError: the sampler gives another number of batches than its length, or what is not an index.
        """
        if epoch not in self.epochs:
            assert epoch > max(self.epochs, default=-1), "epochs are drawn in order"
            state = self.sampler_state()
            with preserve_rng():
                seed_rng(self.seed, epoch, ORDER)
                for sampler in self.samplers:
                    if hasattr(sampler, "set_epoch"):
                        sampler.set_epoch(epoch)
                if self.loader_generator is not None:
                    torch.empty((), dtype=torch.int64).random_(generator=self.loader_generator)  # as a loop over it
                batches = [as_indices(batch) for batch in self.batch_sampler]
            if len(batches) != self.num_batches:
                raise DataError(
                    f"{type(self.batch_sampler).__name__} has length {self.num_batches}, but gave {len(batches)} "
                    f"batches in epoch {epoch}; let __len__ return their number, or pass a function that returns the "
                    "DataLoader, whose batches are then read one after the other"
                )
            self.epochs[epoch] = EpochOrder(batches, state)
        return self.epochs[epoch]

    def drop_before(self, epoch: int) -> None:
        """Drop the orders of earlier epochs."""
        for number in [number for number in self.epochs if number < epoch]:
            del self.epochs[number]

    def batch_len(self, index: int, epoch: int) -> int:
        """Return the number of samples of a batch."""
        return len(self.batch(epoch, index))

    def batch(self, epoch: int, index: int) -> Indices:
        """Return the samples of a batch, in their order."""
        return self.epoch(epoch).batches[index]

    def batches(self, epoch: int, first: int, count: int) -> list[Indices]:
        """Return up to ``count`` batches of an epoch from batch ``first`` on."""
        return self.epoch(epoch).batches[first : first + count]

    def sampler_state(self) -> dict[str, Any]:
        """Return the state of the samplers and of their generators."""
        return {
            "generators": [generator.get_state() for generator in self.generators],
            "samplers": [sampler.state_dict() for sampler in self.samplers if is_stateful(sampler)],
        }

    def state_at(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state from which the cursor's epoch is drawn again, with hashes of its order if it is drawn."""
        if cursor.epoch in self.epochs:
            order = self.epochs[cursor.epoch]
            return {**order.state, "digest": order.digest, "read": order.first_samples(cursor.batch)}
        return self.sampler_state()

    def load_state(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw an epoch from a state that :meth:`state_at` returned.

        Raises:
            CheckpointError: its order is another one.
        """
        self.draw_again(epoch, state)
        if state.get("digest", digest := self.epoch(epoch).digest) != digest:
            raise self.order_error(epoch)

    def load_resized(self, cursor: Cursor, state: Mapping[str, Any]) -> tuple[Cursor, int]:
        """Draw an epoch from a state that :meth:`state_at` returned for batches of another size.

        Returns:
            The batch with the first sample that was not read before the cursor, and how many of it were.

        Raises:
            CheckpointError: the samples before the cursor are others.
        """
        self.draw_again(cursor.epoch, state)
        if not cursor.batch:
            return cursor, 0
        match state.get("read", (0, "")):
            case (int(num_read), str(digest)):
                pass
            case other:
                raise CheckpointError(
                    f"the saved position among the samples is {ascii(other)[:80]}, but must be a number and a hash; "
                    "take another checkpoint, or restore this one from a backup"
                )
        order = self.epoch(cursor.epoch)
        ends = np.cumsum([len(batch) for batch in order.batches])
        batch = int(np.searchsorted(ends, num_read, side="right"))
        start = int(ends[batch - 1]) if batch else 0
        samples = np.concatenate(order.batches[: batch + 1])[:num_read]
        if hashlib.sha256(samples.tobytes()).hexdigest()[:16] != digest:
            raise self.order_error(cursor.epoch)
        if batch == len(order.batches):  # the new order ends earlier, because the last batch is dropped
            return Cursor(cursor.epoch + 1, 0), 0
        return Cursor(cursor.epoch, batch), num_read - start

    def draw_again(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draw an epoch from a state of the samplers.

        Raises:
            CheckpointError: the state has another form than that which :meth:`state_at` returns.
        """
        try:
            for generator, saved in zip(self.generators, state.get("generators", ()), strict=False):
                generator.set_state(saved)
            samplers = list(state.get("samplers", ()))
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"the saved state of the samplers cannot be restored ({type(error).__name__}: {error}); take another "
                "checkpoint, or restore this one from a backup"
            ) from error
        for sampler, saved in zip(filter(is_stateful, self.samplers), samplers, strict=False):
            sampler.load_state_dict(saved)
        self.epochs = {}
        self.epoch(epoch)

    def order_error(self, epoch: int) -> CheckpointError:
        """Return the error about another order of samples than the saved one."""
        return CheckpointError(
            f"the order of samples that {type(self.batch_sampler).__name__} draws for epoch {epoch} is another one "
            "than when the checkpoint was saved, so samples would be read twice or never; resume with the same "
            "samplers, and let those with random numbers of their own draw them from a seed and the epoch "
            "(set_epoch), or have state_dict and load_state_dict"
        )


def unique(values: Iterable[Any]) -> list[Any]:
    """Return the objects that are not None, each once, in order."""
    return list({id(value): value for value in values if value is not None}.values())


def is_stateful(owner: object) -> bool:
    """Tell whether an object can save its position."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def as_indices(batch: Iterable[Any]) -> Indices:
    """Return what a batch sampler gave as indices.

    Raises:
        DataError: it is not a sequence of whole numbers.
    """
    numbers = np.asarray(list(batch))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":  # also an empty one
        raise DataError(
            f"a batch sampler gave {batch!r}; a batch is a list of indices of samples: give some whole numbers, or "
            "pass a function that returns the DataLoader, whose batches are then read one after the other"
        )
    return numbers.astype(np.int64)
