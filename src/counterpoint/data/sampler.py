"""The samples of each batch, as a function of (seed, epoch, position) only.

The order does not depend on the number of ranks: batch 7 of epoch 2 has the same samples on one rank, on a thousand,
and after the number has changed in the middle of the epoch. There is no index array of the dataset; to resume, only a
`Cursor` of two integers has to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from counterpoint.errors import DataError

Indices: TypeAlias = npt.NDArray[np.int64]
UInt64s: TypeAlias = npt.NDArray[np.uint64]
Shuffle: TypeAlias = Literal["feistel", "sequential"]

NUM_ROUNDS = 6
WORD_MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_FIRST, MIX_SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next batch to be trained on: the position of a run in its data.

    Args:
        epoch: number of complete passes over the dataset.
        batch: number of complete batches of the current epoch.
    """

    epoch: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.batch < 0:
            raise DataError(
                f"a cursor at epoch {self.epoch}, batch {self.batch} does not exist; both count from 0: "
                "start with Cursor(0, 0)"
            )

    def advance(self, num_batches: int) -> Cursor:
        """Return the cursor one batch further, at the end of an epoch in the next one.

        Args:
            num_batches: number of batches of an epoch, `Sampler.num_batches`.
        """
        if self.batch >= num_batches:
            raise DataError(
                f"the cursor is at batch {self.batch}, but an epoch has {num_batches} batches (0 to "
                f"{num_batches - 1}); resume with the dataset and the batch size the cursor was saved with"
            )
        if self.batch + 1 == num_batches:
            return Cursor(self.epoch + 1, 0)
        return Cursor(self.epoch, self.batch + 1)

    def to_dict(self) -> dict[str, int]:
        """Return the cursor as a JSON-compatible mapping."""
        return {"epoch": self.epoch, "batch": self.batch}

    @classmethod
    def from_dict(cls, saved: Mapping[str, object]) -> Cursor:
        """Parse the output of `to_dict`.

        Raises:
            DataError: a key is missing or unknown, or a value is not a whole number from 0.
        """
        if set(saved) != {"epoch", "batch"}:
            raise DataError(
                f"a saved cursor has the keys {sorted(saved)}, but must have exactly batch and epoch; "
                "resume from a checkpoint that this version wrote"
            )
        epoch, batch = saved["epoch"], saved["batch"]
        if type(epoch) is not int or type(batch) is not int:
            raise DataError(
                f"a saved cursor has epoch {epoch!r} and batch {batch!r}, but both must be whole numbers; "
                "resume from a checkpoint that is not damaged"
            )
        return cls(epoch, batch)


class BatchOrder(Protocol):
    """Which samples each batch of each epoch has."""

    @property
    def seed(self) -> int:
        """The seed of the random numbers that samples draw."""
        ...

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        ...

    def batch_len(self, index: int, epoch: int) -> int:
        """Return the number of samples of a batch."""
        ...

    def batch(self, epoch: int, index: int) -> Indices:
        """Return the samples of a batch, in their order."""
        ...

    def batches(self, epoch: int, first: int, count: int) -> list[Indices]:
        """Return up to ``count`` batches of an epoch from batch ``first`` on."""
        ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """Splits a permutation of the dataset into batches, a different one in every epoch.

    Args:
        num_samples: length of the dataset.
        batch_size: number of samples of a global batch, over all ranks.
        seed: different seeds give unrelated orders.
        shuffle: ``"feistel"`` for a new order in every epoch, ``"sequential"`` for 0, 1, 2, … in each.
        drop_last: skip the last batch of an epoch if it is not full; otherwise it is smaller.

    Raises:
        DataError: there is no sample, a batch size below 1, or no batch.

    Example:
        >>> sampler = Sampler(num_samples=10, batch_size=4, seed=1, shuffle="sequential")
        >>> [sampler.batch(epoch=0, index=index).tolist() for index in range(sampler.num_batches)]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: Shuffle = field(default="feistel", kw_only=True)
    drop_last: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                f"the dataset has {self.num_samples} samples; training needs at least one; "
                "check the path or the filter that the dataset was created with"
            )
        if self.batch_size < 1:
            raise DataError(f"batch_size is {self.batch_size}; give batch_size=1 or more")
        if self.shuffle not in get_args(Shuffle):
            raise DataError(f"there is no shuffle={self.shuffle!r}; give {' or '.join(get_args(Shuffle))}")
        if self.num_batches < 1:
            raise DataError(
                f"no batch is left: {self.num_samples} samples do not fill one batch of {self.batch_size}, "
                f"and drop_last skips it; give batch_size={self.num_samples} or "
                "drop_last=False"
            )

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def batch_len(self, index: int, epoch: int = 0) -> int:
        """Return the number of samples of batch ``index``, which is the same in every epoch."""
        self._check_index(index)
        return min(self.batch_size, self.num_samples - index * self.batch_size)

    def batch(self, epoch: int, index: int) -> Indices:
        """Return the indices of the samples of one global batch, in their order.

        Args:
            epoch: counts from 0.
            index: the batch within the epoch, from 0 to ``num_batches - 1``.

        Returns:
            int64 indices into the dataset, ``(batch_len,)``.

        Raises:
            DataError: there is no such epoch or no such batch.
        """
        if epoch < 0:
            raise DataError(f"there is no epoch {epoch}; epochs count from 0; give 0 or more")
        start = index * self.batch_size
        positions = np.arange(start, start + self.batch_len(index), dtype=np.int64)
        if self.shuffle == "sequential":
            return positions
        return permute(positions, num_samples=self.num_samples, seed=self.seed, epoch=epoch)

    def batches(self, epoch: int, first: int, count: int) -> list[Indices]:
        """Return up to ``count`` batches of an epoch from batch ``first`` on, as `batch` gives them, but at once.

        Args:
            epoch: counts from 0.
            first: the first batch.
            count: batches wanted; fewer where the epoch ends before.
        """
        stop = min(first + count, self.num_batches)
        lens = [self.batch_len(index) for index in range(first, stop)]
        start = first * self.batch_size
        positions = np.arange(start, start + sum(lens), dtype=np.int64)
        if self.shuffle != "sequential":
            positions = permute(positions, num_samples=self.num_samples, seed=self.seed, epoch=epoch)
        return np.split(positions, np.cumsum(lens)[:-1])

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.num_batches:
            raise DataError(
                f"there is no batch {index}: {self.num_samples} samples in batches of {self.batch_size} are "
                f"batches 0 to {self.num_batches - 1}; continue with the next epoch"
            )


class LengthGroupedBatchSampler:
    """Batches of samples of similar length, by a number of tokens or of samples; a batch sampler for a ``DataLoader``.

    Samples are sorted by length, with those of one length in random order, and divided into batches once; each epoch
    has these batches in another order, which depends on the seed and the epoch only. So a run resumed in mid-epoch
    continues exactly.

    Args:
        lengths: the length of each sample, in tokens.
        tokens_per_batch: the largest number of tokens of a batch, with those that pad its samples to the longest.
        batch_size: the number of samples of a batch, instead of a number of tokens.
        bucket_width: if given, a batch has samples of one bucket only: those of lengths from ``k * bucket_width + 1``
            to ``(k + 1) * bucket_width``, to which they are counted as padded. With samples padded to
            ``(k + 1) * bucket_width``, there are few lengths of batches.
        multiple_of: the number of samples of a batch is a multiple of this if it can be, except for the last batch, of
            each bucket if there are buckets.
        seed: of the order.
        shuffle: whether to change the order in every epoch.

    Raises:
        DataError: there is no sample, a number is not positive, or a sample is longer than a batch.

    Example:
        >>> sampler = LengthGroupedBatchSampler([5, 2, 9, 3, 4], tokens_per_batch=12, shuffle=False)
        >>> list(sampler)
        [[1, 3, 4], [0], [2]]

    Source:
        Vaswani et al., Attention is all you need, NeurIPS 2017, section 5.1; batches made once as in Ott et al.,
        fairseq, NAACL-HLT 2019 (demonstrations).
    """

    def __init__(  # noqa: PLR0913 - all but the lengths by keyword
        self,
        lengths: Sequence[int] | Indices,
        *,
        tokens_per_batch: int | None = None,
        batch_size: int | None = None,
        bucket_width: int | None = None,
        multiple_of: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if (tokens_per_batch is None) is (batch_size is None):
            raise DataError(
                f"tokens_per_batch={tokens_per_batch} and batch_size={batch_size} were given; a batch has either a "
                "number of tokens or of samples: give one of them"
            )
        for name, value in (
            ("tokens_per_batch", tokens_per_batch),
            ("batch_size", batch_size),
            ("bucket_width", bucket_width),
            ("multiple_of", multiple_of),
        ):
            if value is not None and value < 1:
                raise DataError(f"{name} is {value}; give {name}=1 or more")
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        padded = pad_lengths(np.asarray(lengths, dtype=np.int64), bucket_width)
        if not len(padded):
            raise DataError("there are no lengths, so there is no sample; give the length of each sample")
        ties = permute(np.arange(len(padded)), num_samples=len(padded), seed=seed, epoch=0)
        self.order = ties[np.argsort(padded[ties], kind="stable")]
        sorted_lengths = padded[self.order]
        longest = int(sorted_lengths[-1])
        if tokens_per_batch is not None and longest > tokens_per_batch:
            raise DataError(
                f"sample {self.order[-1]} has {longest} tokens, with those that pad it, but tokens_per_batch is "
                f"{tokens_per_batch}; give tokens_per_batch={longest} or more, or cut the sample"
            )
        self.starts = [0]
        for position, length in enumerate(sorted_lengths.tolist()):
            while count := position - self.starts[-1]:
                has_other_bucket = bucket_width is not None and length != sorted_lengths[position - 1]
                is_full = count == batch_size or (tokens_per_batch or math.inf) < (count + 1) * length
                if not (is_full or has_other_bucket):
                    break
                remainder = count % multiple_of if count > multiple_of and not has_other_bucket else 0
                self.starts.append(position - remainder)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the current epoch."""
        numbers = np.arange(len(self))
        if self.shuffle:
            numbers = permute(numbers, num_samples=len(self), seed=self.seed, epoch=self.epoch)
        stops = [*self.starts[1:], len(self.order)]
        for number in numbers:
            yield self.order[self.starts[number] : stops[number]].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; ``Trainer.fit`` does it."""
        self.epoch = epoch


def pad_lengths(lengths: Indices, bucket_width: int | None) -> Indices:
    """Return the lengths to which samples are padded: that of the longest sample of their bucket."""
    return lengths if bucket_width is None else -(-lengths // bucket_width) * bucket_width


def permute(positions: Indices, *, num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the sample at each position of the permutation of this seed and epoch.

    A Feistel network is a permutation of the numbers below the next power of four, for any round function. A result
    that is not below ``num_samples`` is permuted again until it is (cycle walking), which gives a permutation of the
    samples; from 5 samples on this takes less than 4 rounds on average.

    Args:
        positions: int64, below ``num_samples``.
        num_samples: length of the dataset.
        seed: any integer.
        epoch: any integer.

    Returns:
        int64 sample indices of the shape of ``positions``.

    Source:
        Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002, sections 3 and 4.
    """
    half_bits = max(2, -(-(num_samples - 1).bit_length() // 2))
    keys = _round_keys(seed, epoch)
    numbers = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(numbers >= num_samples)
    while outside.size:
        numbers[outside] = _feistel(numbers[outside], half_bits, keys)
        outside = outside[numbers[outside] >= num_samples]
    return numbers.astype(np.int64)


def split_batch(batch_len: int, num_microbatches: int) -> list[tuple[int, int]]:
    """Split a batch into contiguous microbatches of nearly equal size, the larger ones first.

    The sizes differ by at most one. If there are fewer samples than microbatches, the last ones are empty.

    Args:
        batch_len: number of samples of the batch.
        num_microbatches: number of microbatches.

    Returns:
        ``(start, stop)`` of each microbatch.

    Raises:
        DataError: the number of samples is negative, or there is no microbatch.

    Example:
        >>> split_batch(10, 4)
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if batch_len < 0 or num_microbatches < 1:
        raise DataError(
            f"a batch of {batch_len} samples cannot be split into {num_microbatches} microbatches; "
            "give 0 samples or more, and 1 microbatch or more"
        )
    size, larger = divmod(batch_len, num_microbatches)
    starts = [piece * size + min(piece, larger) for piece in range(num_microbatches + 1)]
    return list(pairwise(starts))


def sample_key(seed: int, epoch: int, sample: int) -> int:
    """Return a 64-bit hash of the arguments.

    Args:
        seed: any integer.
        epoch: any integer.
        sample: any integer.
    """
    key = 0
    for part in (seed, epoch, sample):
        key = _mix_int(key ^ (part & WORD_MASK))
    return key


def _feistel(numbers: UInt64s, half_bits: int, keys: tuple[int, ...]) -> UInt64s:
    """Apply a permutation of the numbers of ``2 * half_bits`` bits to each number."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = numbers >> shift, numbers & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def mix(numbers: UInt64s) -> UInt64s:
    """Mix 64-bit numbers, so that every bit depends on every bit.

    Source:
        The finalizer of splitmix64; Steele, Lea and Flood, Fast splittable pseudorandom number generators,
        OOPSLA 2014.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(MIX_FIRST)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(MIX_SECOND)
    return numbers ^ (numbers >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Return one 64-bit key per round, unrelated for different seeds and epochs."""
    start = _mix_int(_mix_int(seed & WORD_MASK) ^ (epoch & WORD_MASK))
    return tuple(_mix_int(start + number * GOLDEN_GAMMA) for number in range(1, NUM_ROUNDS + 1))


def _mix_int(number: int) -> int:
    """Return the next number of splitmix64: `mix` in plain integers, which is faster for a single number."""
    number = (number + GOLDEN_GAMMA) & WORD_MASK
    number = ((number ^ (number >> 30)) * MIX_FIRST) & WORD_MASK
    number = ((number ^ (number >> 27)) * MIX_SECOND) & WORD_MASK
    return number ^ (number >> 31)
