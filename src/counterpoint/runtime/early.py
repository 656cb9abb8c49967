"""Sums of gradients that begin while the backward goes on which makes them, bucket by bucket.

The program says which sums may begin early; when exactly is seen here. A first step sums as the words say, and looks in
which order gradients become ready. The order that the first member of a group has seen is everybody's from then on: in
this order gradients are put together in buckets, ranges of the flat buffers they lie in, and a bucket's sum is started
as soon as it and all buckets before it are complete. So all members start them in one order, whatever the order of
their own gradients is. What is not complete when the backward is over is started where the word stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.program.instruction import Collective, Value
from counterpoint.program.text import format_value
from counterpoint.runtime.agreement import Agreement, Cut, Weighed
from counterpoint.runtime.arena import Arena
from counterpoint.runtime.buckets import Range, joined, left_over
from counterpoint.runtime.direct import plainly
from counterpoint.runtime.layout import Slot, is_small
from counterpoint.runtime.listening import Listening
from counterpoint.runtime.store import Store
from counterpoint.runtime.strewn import Several
from counterpoint.strategies.buckets import Buckets

Clock: TypeAlias = Callable[[], float]

NO_BUCKET = -1
"""Of a gradient that is summed where the word stands."""


class Summing(Protocol):
    """What sums ranges of a gradient."""

    fabric: Fabric
    store: Store

    def begin_ranges(
        self, word: Collective, arena: Arena, label: str, ranges: Sequence[Range], flat: Tensor
    ) -> list[Work]:
        """Start to add up ranges of one arena's flat gradient."""


@dataclass(frozen=True, slots=True)
class Flat:
    """One flat gradient of a site.

    Args:
        word: its sum.
        arena: where it lies.
        number: among those of the site.
        label: what it is called between ranks.
    """

    word: Collective
    arena: Arena
    number: int
    label: str


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter whose gradient may be summed early.

    Args:
        flat: in which of a site's flat buffers it lies.
        slot: where in there.
        is_large: whether it moves there by itself.
    """

    flat: Flat
    slot: Slot
    is_large: bool

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return (self.slot.stop - self.slot.start) * self.flat.arena.layout.dtype.itemsize


@dataclass(slots=True)
class Transfer:
    """Sums that were under way, from their start until they were seen complete; changes when they are."""

    word: Collective
    works: Sequence[Work]
    start_s: float
    stop_s: float = math.nan

    def look(self, clock: Clock) -> None:
        """Note that they are complete, if they can be seen to be."""
        if math.isnan(self.stop_s) and all(work.is_complete for work in self.works):
            self.stop_s = clock()


@dataclass(slots=True)
class Progress:
    """How far a backward is; changes with every gradient.

    Args:
        cut: its buckets.
        left: for each bucket how many gradients it waits for.
        seen: for each place how often a gradient was put on it.
        ready_s: when that was the last time; nan for never.
        num_begun: buckets that have been started, the first ones.
        works: of these, by flat gradient.
        ranges: what they sum, by flat gradient.
        is_over: whether all that can be has been started.
    """

    cut: Cut
    left: list[int]
    seen: list[int]
    ready_s: list[float]
    began_s: float
    num_begun: int = 0
    works: dict[int, list[Work]] = field(default_factory=dict)
    ranges: dict[int, list[Range]] = field(default_factory=dict)
    is_over: bool = False


class Site:
    """One backward of a row, and the sums of one group that may begin during it.

    Args:
        words: the sums.
        summing: what sums ranges.
        sizes: how large buckets are, as the plan says.
    """

    def __init__(self, words: Sequence[Collective], summing: Summing, sizes: Buckets) -> None:
        self.words = tuple(words)
        self.summing = summing
        self.flats = list(_flats(words, summing.store))
        self.places = [
            Place(flat, slot, not is_small(slot, flat.arena.layout))
            for flat in self.flats
            for slot in flat.arena.layout.slots
            if slot.name not in flat.arena.strewn.slots and flat.arena.params[slot.name].requires_grad
        ]
        self.often = [0] * len(self.places)  # how often a gradient is put on each in one backward
        weighed = [Weighed(place.flat.number, place.num_bytes) for place in self.places]
        label = " ".join(format_value(word.value) for word in words)
        self.agreement = Agreement(summing.fabric, words[0].group, sizes, weighed, label)
        self.bucket_of: list[int] = []  # for each place, or that it has none
        self.progress = self.begun_backward()
        self.clock: Clock | None = None
        self.transfers: list[Transfer] = []
        self.listening = Listening(
            [place.flat.arena.params[place.slot.name] for place in self.places],
            [partial(self.on_gradient, at) for at in range(len(self.places))],
        )

    @property
    def is_open(self) -> bool:
        """Whether gradients are summed at all: in memory in common, they are not."""
        return all(flat.arena.commons is None for flat in self.flats)

    def begun_backward(self) -> Progress:
        """Return how far a backward is that has just begun."""
        cut, count = self.agreement.cut, len(self.places)
        self.bucket_of = [NO_BUCKET] * count
        for bucket, places in enumerate(cut):
            for at in places:
                self.bucket_of[at] = bucket
        return Progress(cut, [len(places) for places in cut], [0] * count, [math.nan] * count, time.perf_counter())

    @contextmanager
    def during(self, clock: Clock | None) -> Iterator[None]:
        """Buckets are started while the backward goes on inside."""
        self.progress, self.clock = self.begun_backward(), clock
        self.transfers.clear()
        with self.listening.during():
            yield
        self.often = list(map(max, self.often, self.progress.seen))

    def on_gradient(self, at: int, _: Tensor) -> None:
        """A gradient has been put on a parameter; a bucket that waited for it alone is started.

        Raises:
            DataError: its sum has begun without it.
        """
        now = self.progress
        now.seen[at] = seen = now.seen[at] + 1
        now.ready_s[at] = time.perf_counter() - now.began_s
        if self.clock is not None:
            for transfer in self.transfers:
                transfer.look(self.clock)
        often, bucket = self.often[at], self.bucket_of[at]
        if bucket == NO_BUCKET or not 0 < often <= seen:
            return
        if bucket < now.num_begun:
            raise DataError(
                f"{self.places[at].slot.name} got gradient number {seen} of one backward after its sum had begun, "
                f"because in no backward before it got more than {often}; a sum that begins early has to "
                "know which one is the last: give passes=(), so that sums begin after the backward"
            )
        now.left[bucket] -= seen == often
        if self.places[at].is_large or (bucket == now.num_begun and now.left[bucket] == 0):
            with plainly():
                self._take(self.places[at])

    def _take(self, place: Place) -> None:
        """Move a gradient that is too large to wait for others, and start the buckets that are complete."""
        if place.is_large:
            place.flat.arena.move(place.slot)
        now = self.progress
        while now.num_begun < len(now.cut) and now.left[now.num_begun] == 0:
            self.start_bucket()

    def start_bucket(self) -> None:
        """Start the next bucket, whose gradients are there; the small ones go to their flat buffer together."""
        places = [self.places[at] for at in self.progress.cut[self.progress.num_begun]]
        self.progress.num_begun += 1
        places[0].flat.arena.move_all([place.slot for place in places])
        self.start_ranges(places[0].flat, joined((place.slot.start, place.slot.stop) for place in places))

    def start_ranges(self, flat: Flat, ranges: Sequence[Range]) -> None:
        """Start to add up some ranges of a flat gradient."""
        now, began_s = self.progress, self.clock() if self.clock is not None else 0.0
        works = self.summing.begin_ranges(flat.word, flat.arena, flat.label, ranges, flat.arena.buffer())
        now.ranges.setdefault(flat.number, []).extend(ranges)
        now.works.setdefault(flat.number, []).extend(works)
        if self.clock is not None and works:
            self.transfers.append(Transfer(flat.word, works, began_s))

    def start(self, word: Collective) -> Iterator[tuple[Arena, Work, Collective]]:
        """Start what is left of a sum where it stands in the row; yield what is under way of it."""
        now = self.progress
        if not now.is_over:
            now.is_over = True
            for flat in self.flats:
                flat.arena.fold()
            while now.num_begun < len(now.cut):
                self.start_bucket()
            self.agreement.ask(now.ready_s)
        for flat in self.flats:
            if flat.word == word:
                strewn = flat.arena.strewn
                if strewn.slots:
                    strewn.gather(self.summing.fabric, word.group, flat.label, has_share=False)
                dense = strewn.dense_ranges(0, flat.arena.layout.num_elements)
                self.start_ranges(flat, list(left_over(dense, now.ranges.get(flat.number, []))))
                yield flat.arena, Several(now.works[flat.number]), word

    def wait(self, word: Collective) -> None:
        """What the group has agreed on is known; with a clock, also when the parts of the sum were complete."""
        for transfer in self.transfers:
            if transfer.word.value == word.value and self.clock is not None:
                for work in transfer.works:
                    work.wait()
                transfer.stop_s = self.clock() if math.isnan(transfer.stop_s) else transfer.stop_s
        self.agreement.hear()


def _flats(words: Sequence[Collective], store: Store) -> Iterator[Flat]:
    number = 0
    for word in words:
        label = format_value(word.value)
        for index, arena in enumerate(store.units[word.value.blocks].arenas):
            yield Flat(word, arena, number, f"{label}[{index}]" if index else label)
            number += 1


class Early:
    """All sums of a rank that may begin early.

    Args:
        summing: what sums ranges.
        sizes: how large buckets are, as the plan says.
    """

    def __init__(self, summing: Summing, sizes: Buckets) -> None:
        self.summing = summing
        self.sizes = sizes
        self.sites: dict[tuple[Collective, ...], list[Site]] = {}
        self.active: dict[Value, Site] = {}

    @contextmanager
    def during(self, words: tuple[Collective, ...], clock: Clock | None) -> Iterator[None]:
        """These sums may begin during the backward inside."""
        if words not in self.sites:
            groups = dict.fromkeys(word.group for word in words)
            self.sites[words] = [
                Site([word for word in words if word.group == group], self.summing, self.sizes) for group in groups
            ]
        with ExitStack() as stack:
            for site in self.sites[words]:
                if site.is_open:
                    self.active.update((word.value, site) for word in site.words)
                    stack.enter_context(site.during(clock))
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Tell those who try sizes of buckets how long the step inside takes."""
        trying = [site.agreement for sites in self.sites.values() for site in sites if site.agreement.is_trying]
        self.active.clear()
        began = time.perf_counter()
        yield
        for agreement in trying:
            agreement.trials.take(time.perf_counter() - began)

    def drop(self) -> None:
        """Forget all sums, and in which order and in what buckets they begin."""
        self.sites.clear()
        self.active.clear()

    def wait(self, word: Collective) -> None:
        """A sum is about to be waited for."""
        site = self.active.pop(word.value, None)
        if site is not None:
            site.wait(word)

    def transfers(self) -> list[Transfer]:
        """Return the sums of the last step that were under way while there was a clock."""
        return [transfer for sites in self.sites.values() for site in sites for transfer in site.transfers]
