"""One superstep: every place makes parcels for every place, and notes for the driver.

This is all that is asked of Spark. A place is a partition; what it makes goes through a shuffle, whose files are what
Spark keeps of it. Notes go to a partition behind the last place, and the only task that anybody waits for reads that
one; so each superstep is one Spark job of two stages, and the next one begins from its shuffle files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from counterpoint.spark.failures import translated
from counterpoint.spark.parcels import Parcel, format_parcel, parse_parcel

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

Addressed: TypeAlias = tuple[int, Parcel]
Work: TypeAlias = Callable[[int, Sequence[Parcel]], Iterable[Addressed]]
"""What a place does: from its number and the parcels for it, in the order of kinds and senders, to new parcels."""

Held: TypeAlias = Any
"""Parcels by place, as an exchange keeps them."""


class Exchange(Protocol):
    """A way to let places exchange parcels; each also has the samples that it began with."""

    num_places: int

    def begin(self, parcels: Iterable[Addressed]) -> Held:
        """Return parcels that lie where they are addressed to."""
        ...

    def hand(self, held: Held, work: Work, label: str, *, with_samples: bool = False) -> Held:
        """Return what the places make of what they hold; nothing has to run before it is looked at."""
        ...

    def notes(self, held: Held, label: str) -> list[Parcel]:
        """Return what has been addressed to the driver, the place behind the last, once all places are done."""
        ...

    def forget(self, held: Held) -> None:
        """What was held before something is not needed any more."""
        ...


class Here:
    """Places in this process, one after the other: what the places do, without Spark.

    Args:
        samples: of each place, a parcel.
    """

    def __init__(self, samples: Sequence[Parcel]) -> None:
        self.num_places = len(samples)
        self._samples = samples

    def begin(self, parcels: Iterable[Addressed]) -> list[list[Parcel]]:
        """Return parcels by place."""
        held: list[list[Parcel]] = [[] for _ in range(self.num_places + 1)]
        for place, parcel in parcels:
            held[place].append(parse_parcel(format_parcel(parcel)))
        return held

    def hand(
        self, held: list[list[Parcel]], work: Work, label: str, *, with_samples: bool = False
    ) -> list[list[Parcel]]:
        """Return what the places make of what they hold."""
        del label
        made: list[Addressed] = []
        for place in range(self.num_places):
            own = [self._samples[place]] if with_samples else []
            made += work(place, in_order([*held[place], *own]))
        return self.begin(made)

    def notes(self, held: list[list[Parcel]], label: str) -> list[Parcel]:
        """Return what has been addressed to the driver."""
        del label
        return in_order(held[self.num_places])

    def forget(self, held: list[list[Parcel]]) -> None:
        """What was held is gone."""
        held.clear()


class OnSpark:
    """Places as partitions of RDDs.

    Args:
        context: of Spark.
        samples: one parcel for each place, as :func:`counterpoint.spark.samples.packed` gives them.
        num_places: how many partitions they have, but for the one behind the last.
    """

    def __init__(self, context: SparkContext, samples: RDD[tuple[int, bytes]], num_places: int) -> None:
        self.context, self.num_places = context, num_places
        self._samples = samples

    def begin(self, parcels: Iterable[Addressed]) -> RDD[tuple[int, bytes]]:
        """Return an RDD of parcels by place; nothing runs yet."""
        found = [(place, format_parcel(parcel)) for place, parcel in parcels]
        return self.context.parallelize(found, max(1, len(found))).partitionBy(self.num_places + 1, as_is)

    def hand(
        self, held: RDD[tuple[int, bytes]], work: Work, label: str, *, with_samples: bool = False
    ) -> RDD[tuple[int, bytes]]:
        """Return the RDD of what the places make of what they hold; nothing runs yet."""
        both = held.union(self._samples) if with_samples else held
        with translated(label):
            return both.mapPartitionsWithIndex(Task(work, self.num_places)).partitionBy(self.num_places + 1, as_is)

    def notes(self, held: RDD[tuple[int, bytes]], label: str) -> list[Parcel]:
        """Return the notes for the driver; this is one job.

        Raises:
            LaunchError: Spark gave it up.
        """
        self.context.setJobDescription(f"counterpoint: {label}")
        with translated(label):
            found = self.context.runJob(held, payloads, [self.num_places])
        return in_order(map(parse_parcel, found))

    def forget(self, held: RDD[tuple[int, bytes]]) -> None:
        """The shuffle files of an RDD and of all before it may go."""
        held.cleanShuffleDependencies()


class Task:
    """What Spark ships to a partition: the work of a place.

    It is a class with a name, so that Spark's serializer writes down where it is found and not what it is made of.

    Args:
        work: what the place does.
        num_places: how many there are; partitions behind them have nothing to do.
    """

    def __init__(self, work: Work, num_places: int) -> None:
        self.work, self.num_places = work, num_places

    def __call__(self, place: int, parcels: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """Yield what the place makes."""
        found = in_order(parse_parcel(payload) for _, payload in parcels)
        if place < self.num_places:
            for target, parcel in self.work(place, found):
                yield target, format_parcel(parcel)


def as_is(place: int) -> int:
    """Return the partition of a place: its number."""
    return place


def payloads(parcels: Iterable[tuple[int, bytes]]) -> list[bytes]:
    """Return what has been sent to a partition."""
    return [payload for _, payload in parcels]


def in_order(parcels: Iterable[Parcel]) -> list[Parcel]:
    """Return parcels by kind and sender, whichever came first."""
    return sorted(parcels, key=lambda parcel: (parcel.kind, parcel.sender))
