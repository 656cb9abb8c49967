"""Exchange of messages between partitions by a Spark shuffle, and the form of these messages.

A superstep maps the messages of every partition to new messages for every partition, and to reports for the driver. It
is one Spark job of two stages: messages travel through the shuffle, whose files are all that Spark stores. Reports go
to an extra partition after the last one, and the job's only awaited task reads that partition. The next superstep
starts from the shuffle files.
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
    """Content of a message."""

    SAMPLES = 1
    WEIGHTS = 2
    STATE = 3
    GRADIENT = 4
    REPORT = 5


@dataclass(frozen=True, slots=True)
class ShuffleMessage:
    """A message from one partition to another.

    Args:
        kind: of the content.
        sender: partition that sent it.
        step: in which it was sent.
        payload: of :mod:`counterpoint.value_codec` for samples and state, raw values for weights and gradients, JSON
            for reports; never pickle.

    Example:
        >>> parse_message(format_message(ShuffleMessage(ShuffleMessageKind.REPORT, 2, 7, b"{}")))
        ShuffleMessage(kind=<ShuffleMessageKind.REPORT: 5>, sender=2, step=7, payload=b'{}')
    """

    kind: ShuffleMessageKind
    sender: int
    step: int
    payload: bytes


def format_message(message: ShuffleMessage) -> bytes:
    """Return the message as bytes: a header of 16 bytes, then the payload."""
    return HEADER.pack(MAGIC, message.kind, message.sender, message.step) + message.payload


def parse_message(text: bytes) -> ShuffleMessage:
    """Return the message written by ``format_message``.

    Raises:
        ProtocolError: the bytes are not such a message.
    """
    if len(text) < HEADER.size or text[:4] != MAGIC or text[4] not in set(ShuffleMessageKind):
        raise ProtocolError(
            f"received {len(text)} bytes starting with {text[:8]!r}, which are not a shuffle message; install the same "
            "version of counterpoint on all executors"
        )
    _, kind, sender, step = HEADER.unpack_from(text)
    return ShuffleMessage(ShuffleMessageKind(kind), sender, step, text[HEADER.size :])


if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

AddressedMessage: TypeAlias = tuple[int, ShuffleMessage]
PartitionWork: TypeAlias = Callable[[int, Sequence[ShuffleMessage]], Iterable[AddressedMessage]]
"""Maps a partition index and its messages, sorted by kind and sender, to new messages."""

ShuffleData: TypeAlias = Any
"""Messages by partition, in the representation of a shuffle."""


class Shuffle(Protocol):
    """Exchange of messages between partitions, each of which also has the samples that it started with."""

    num_partitions: int

    def place_messages(self, messages: Iterable[AddressedMessage]) -> ShuffleData:
        """Return messages placed in the partitions that they are addressed to."""
        ...

    def map_and_shuffle(
        self, data: ShuffleData, work: PartitionWork, label: str, *, with_samples: bool = False
    ) -> ShuffleData:
        """Run ``work`` on the messages of every partition and return its messages, shuffled; may be lazy."""
        ...

    def collect_reports(self, data: ShuffleData, label: str) -> list[ShuffleMessage]:
        """Return the messages addressed to the driver, after all partitions are done."""
        ...

    def release(self, data: ShuffleData) -> None:
        """Free the messages of an earlier superstep."""
        ...


class LocalShuffle:
    """Partitions in this process, run one after the other.

    Args:
        samples: one message per partition.
    """

    def __init__(self, samples: Sequence[ShuffleMessage]) -> None:
        self.num_partitions = len(samples)
        self._samples = samples

    def place_messages(self, messages: Iterable[AddressedMessage]) -> list[list[ShuffleMessage]]:
        """Return messages by partition."""
        placed: list[list[ShuffleMessage]] = [[] for _ in range(self.num_partitions + 1)]
        for partition, message in messages:
            placed[partition].append(parse_message(format_message(message)))
        return placed

    def map_and_shuffle(
        self, data: list[list[ShuffleMessage]], work: PartitionWork, label: str, *, with_samples: bool = False
    ) -> list[list[ShuffleMessage]]:
        """Run ``work`` on the messages of every partition and return its messages by partition."""
        del label
        sent: list[AddressedMessage] = []
        for partition in range(self.num_partitions):
            samples = [self._samples[partition]] if with_samples else []
            sent += work(partition, sort_messages([*data[partition], *samples]))
        return self.place_messages(sent)

    def collect_reports(self, data: list[list[ShuffleMessage]], label: str) -> list[ShuffleMessage]:
        """Return the messages addressed to the driver."""
        del label
        return sort_messages(data[self.num_partitions])

    def release(self, data: list[list[ShuffleMessage]]) -> None:
        """Free the messages."""
        data.clear()


class SparkShuffle:
    """Partitions of Spark RDDs.

    Args:
        context: of Spark.
        samples: one message per partition, from :func:`counterpoint.spark.samples.pack_partitions`.
        num_partitions: without the extra partition for reports.
    """

    def __init__(self, context: SparkContext, samples: RDD[tuple[int, bytes]], num_partitions: int) -> None:
        self.context, self.num_partitions = context, num_partitions
        self._samples = samples

    def place_messages(self, messages: Iterable[AddressedMessage]) -> RDD[tuple[int, bytes]]:
        """Return an RDD of messages by partition, evaluated lazily."""
        rows = [(partition, format_message(message)) for partition, message in messages]
        return self.context.parallelize(rows, max(1, len(rows))).partitionBy(
            self.num_partitions + 1, identity_partitioner
        )

    def map_and_shuffle(
        self, data: RDD[tuple[int, bytes]], work: PartitionWork, label: str, *, with_samples: bool = False
    ) -> RDD[tuple[int, bytes]]:
        """Return the RDD of the messages that ``work`` sends, evaluated lazily."""
        inputs = data.union(self._samples) if with_samples else data
        with translate_spark_errors(label):
            return inputs.mapPartitionsWithIndex(ShuffleTask(work, self.num_partitions)).partitionBy(
                self.num_partitions + 1, identity_partitioner
            )

    def collect_reports(self, data: RDD[tuple[int, bytes]], label: str) -> list[ShuffleMessage]:
        """Return the reports for the driver; this runs one job.

        Raises:
            LaunchError: Spark aborted it.
        """
        self.context.setJobDescription(f"counterpoint: {label}")
        with translate_spark_errors(label):
            payloads = self.context.runJob(data, collect_payloads, [self.num_partitions])
        return sort_messages(map(parse_message, payloads))

    def release(self, data: RDD[tuple[int, bytes]]) -> None:
        """Delete the shuffle files of an RDD and of its ancestors."""
        data.cleanShuffleDependencies()


class ShuffleTask:
    """Function that Spark runs on a partition.

    A class at module level, so that Spark's serializer writes its import path instead of its code.

    Args:
        work: function of the partition.
        num_partitions: the extra partition for reports runs nothing.
    """

    def __init__(self, work: PartitionWork, num_partitions: int) -> None:
        self.work, self.num_partitions = work, num_partitions

    def __call__(self, partition: int, messages: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield the messages that the partition sends."""
        sorted_messages = sort_messages(parse_message(payload) for _, payload in messages)
        if partition < self.num_partitions:
            for target, message in self.work(partition, sorted_messages):
                yield target, format_message(message)


def identity_partitioner(partition: int) -> int:
    """Return the partition index itself."""
    return partition


def collect_payloads(messages: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Return the payloads sent to a partition."""
    return [payload for _, payload in messages]


def sort_messages(messages: Iterable[ShuffleMessage]) -> list[ShuffleMessage]:
    """Return messages sorted by kind and sender, independent of their arrival."""
    return sorted(messages, key=lambda message: (message.kind, message.sender))
