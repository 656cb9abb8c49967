"""What one place sends to another: a kind, who sent it, for which step, and bytes; never a pickle of ours.

One superstep: every place makes parcels for every place, and notes for the driver.

This is all that is asked of Spark. A place is a partition; what it makes goes through a shuffle, whose files are what
Spark keeps of it. Notes go to a partition behind the last place, and the only task that anybody waits for reads that
one; so each superstep is one Spark job of two stages, and the next one begins from its shuffle files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from counterpoint.errors import ProtocolError
from counterpoint.spark.failures import translate_spark_errors

HEADER = struct.Struct("<4sB3xII")
MAGIC = b"cpsp"


class ShuffleMessageKind(IntEnum):
    """What is in a parcel."""

    SAMPLES = 1
    WEIGHTS = 2
    STATE = 3
    GRADIENT = 4
    REPORT = 5


@dataclass(frozen=True, slots=True)
class ShuffleMessage:
    """Bytes on their way from one place to another.

    Args:
        kind: what they are.
        sender: the place that made them.
        step: the step that they were made in.
        payload: the bytes: safetensors for samples and state, plain numbers for weights and gradients, JSON for notes.

    Example:
        >>> parse_message(format_message(ShuffleMessage(ShuffleMessageKind.REPORT, 2, 7, b"{}")))
        ShuffleMessage(kind=<ShuffleMessageKind.REPORT: 5>, sender=2, step=7, payload=b'{}')
    """

    kind: ShuffleMessageKind
    sender: int
    step: int
    payload: bytes


def format_message(message: ShuffleMessage) -> bytes:
    """Return the parcel as bytes: 16 in front of its payload."""
    return HEADER.pack(MAGIC, message.kind, message.sender, message.step) + message.payload


def parse_message(text: bytes) -> ShuffleMessage:
    """Return what ``format_message`` wrote.

    Raises:
        ProtocolError: it did not write this.
    """
    if len(text) < HEADER.size or text[:4] != MAGIC or text[4] not in set(ShuffleMessageKind):
        raise ProtocolError(
            f"{len(text)} bytes came that begin with {text[:8]!r}, which is no parcel; do all executors have the same "
            "version of counterpoint?"
        )
    _, kind, sender, step = HEADER.unpack_from(text)
    return ShuffleMessage(ShuffleMessageKind(kind), sender, step, text[HEADER.size :])


if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

AddressedMessage: TypeAlias = tuple[int, ShuffleMessage]
PartitionWork: TypeAlias = Callable[[int, Sequence[ShuffleMessage]], Iterable[AddressedMessage]]
"""What a place does: from its number and the parcels for it, in the order of kinds and senders, to new parcels."""

ShuffleData: TypeAlias = Any
"""Parcels by place, as an exchange keeps them."""


class Shuffle(Protocol):
    """A way to let places exchange parcels; each also has the samples that it began with."""

    num_partitions: int

    def place_messages(self, messages: Iterable[AddressedMessage]) -> ShuffleData:
        """Return parcels that lie where they are addressed to."""
        ...

    def map_and_shuffle(
        self, data: ShuffleData, work: PartitionWork, label: str, *, with_samples: bool = False
    ) -> ShuffleData:
        """Return what the places make of what they hold; nothing has to run before it is looked at."""
        ...

    def collect_reports(self, data: ShuffleData, label: str) -> list[ShuffleMessage]:
        """Return what has been addressed to the driver, the place behind the last, once all places are done."""
        ...

    def release(self, data: ShuffleData) -> None:
        """What was held before something is not needed any more."""
        ...


class LocalShuffle:
    """Places in this process, one after the other: what the places do, without Spark.

    Args:
        samples: of each place, a parcel.
    """

    def __init__(self, samples: Sequence[ShuffleMessage]) -> None:
        self.num_partitions = len(samples)
        self._samples = samples

    def place_messages(self, messages: Iterable[AddressedMessage]) -> list[list[ShuffleMessage]]:
        """Return parcels by place."""
        held: list[list[ShuffleMessage]] = [[] for _ in range(self.num_partitions + 1)]
        for place, parcel in messages:
            held[place].append(parse_message(format_message(parcel)))
        return held

    def map_and_shuffle(
        self, data: list[list[ShuffleMessage]], work: PartitionWork, label: str, *, with_samples: bool = False
    ) -> list[list[ShuffleMessage]]:
        """Return what the places make of what they hold."""
        del label
        made: list[AddressedMessage] = []
        for place in range(self.num_partitions):
            own = [self._samples[place]] if with_samples else []
            made += work(place, sort_messages([*data[place], *own]))
        return self.place_messages(made)

    def collect_reports(self, data: list[list[ShuffleMessage]], label: str) -> list[ShuffleMessage]:
        """Return what has been addressed to the driver."""
        del label
        return sort_messages(data[self.num_partitions])

    def release(self, data: list[list[ShuffleMessage]]) -> None:
        """What was held is gone."""
        data.clear()


class SparkShuffle:
    """Places as partitions of RDDs.

    Args:
        context: of Spark.
        samples: one parcel for each place, as :func:`counterpoint.spark.samples.pack_partitions` gives them.
        num_places: how many partitions they have, but for the one behind the last.
    """

    def __init__(self, context: SparkContext, samples: RDD[tuple[int, bytes]], num_partitions: int) -> None:
        self.context, self.num_partitions = context, num_partitions
        self._samples = samples

    def place_messages(self, messages: Iterable[AddressedMessage]) -> RDD[tuple[int, bytes]]:
        """Return an RDD of parcels by place; nothing runs yet."""
        found = [(place, format_message(parcel)) for place, parcel in messages]
        return self.context.parallelize(found, max(1, len(found))).partitionBy(
            self.num_partitions + 1, identity_partitioner
        )

    def map_and_shuffle(
        self, data: RDD[tuple[int, bytes]], work: PartitionWork, label: str, *, with_samples: bool = False
    ) -> RDD[tuple[int, bytes]]:
        """Return the RDD of what the places make of what they hold; nothing runs yet."""
        both = data.union(self._samples) if with_samples else data
        with translate_spark_errors(label):
            return both.mapPartitionsWithIndex(ShuffleTask(work, self.num_partitions)).partitionBy(
                self.num_partitions + 1, identity_partitioner
            )

    def collect_reports(self, data: RDD[tuple[int, bytes]], label: str) -> list[ShuffleMessage]:
        """Return the notes for the driver; this is one job.

        Raises:
            LaunchError: Spark gave it up.
        """
        self.context.setJobDescription(f"counterpoint: {label}")
        with translate_spark_errors(label):
            found = self.context.runJob(data, collect_payloads, [self.num_partitions])
        return sort_messages(map(parse_message, found))

    def release(self, data: RDD[tuple[int, bytes]]) -> None:
        """The shuffle files of an RDD and of all before it may go."""
        data.cleanShuffleDependencies()


class ShuffleTask:
    """What Spark ships to a partition: the work of a place.

    It is a class with a name, so that Spark's serializer writes down where it is found and not what it is made of.

    Args:
        work: what the place does.
        num_places: how many there are; partitions behind them have nothing to do.
    """

    def __init__(self, work: PartitionWork, num_partitions: int) -> None:
        self.work, self.num_partitions = work, num_partitions

    def __call__(self, partition: int, messages: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield what the place makes."""
        found = sort_messages(parse_message(payload) for _, payload in messages)
        if partition < self.num_partitions:
            for target, parcel in self.work(partition, found):
                yield target, format_message(parcel)


def identity_partitioner(partition: int) -> int:
    """Return the partition of a place: its number."""
    return partition


def collect_payloads(messages: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Return what has been sent to a partition."""
    return [payload for _, payload in messages]


def sort_messages(messages: Iterable[ShuffleMessage]) -> list[ShuffleMessage]:
    """Return parcels by kind and sender, whichever came first."""
    return sorted(messages, key=lambda parcel: (parcel.kind, parcel.sender))
