"""Times the pieces of one model on one core, as ``counterpoint profile`` does, and prints them as JSON.

Called with the model and the sizes of microbatches. Each size is profiled by itself, some times, between steps of the
loop that is taken beside plans, too: by these all are brought to one speed, because that of a shared machine jumps. Of
those during which it jumped least, the half or three of four, the median of each figure is taken.
"""

import json
import sys
import time
from dataclasses import astuple, dataclass, replace
from statistics import median

from cells import SUBJECTS
from ranks import Alone

import counterpoint as cp
from counterpoint.model.timing import Fixed, PieceTime, Point, Timing
from counterpoint.model.timing_file import write_timing
from counterpoint.profiler.watch import as_in_training

MOST_AT_ONCE, BESIDE_S = 64, 0.3
FEWEST, MOST, LONG_S = 4, 8, 60.0
"""So many rounds there are at least, and at most; after so long no other one begins that need not be."""


@dataclass(frozen=True)
class Taken:
    """One profile, with a step of the loop before it and one afterwards."""

    timing: Timing
    before_s: float
    after_s: float

    @property
    def beside_s(self):
        """The mean of both."""
        return (self.before_s + self.after_s) / 2

    @property
    def jump(self):
        """By how much the speed has changed meanwhile."""
        return abs(self.after_s - self.before_s) / self.beside_s

    def at_pace(self, beside_s):
        """Return the timing as it would have been, had a step of the loop taken so long."""
        return self.timing.at_speed(beside_s / self.beside_s)


def main(letter, text):
    subject, sizes = SUBJECTS[letter](), json.loads(text)
    with as_in_training(threads=1):
        alone = Alone(subject, subject.reference)
        alone.steps()
        found = {size: [] for size in sizes}
        rounds, began = 0, time.perf_counter()
        while rounds < FEWEST or (rounds < MOST and time.perf_counter() - began < LONG_S):
            for size in sizes:
                found[size].append(taken(subject, alone, size))
            rounds += 1
    for size, own in found.items():
        found[size] = sorted(own, key=lambda one: one.jump)[: max(FEWEST - 1, len(own) // 2)]
    beside_s = median(one.beside_s for own in found.values() for one in own)
    best = [in_the_middle([one.at_pace(beside_s) for one in own]) for own in found.values()]
    sys.stdout.write(f"{json.dumps({'timing': write_timing(merged(best)), 'beside_s': beside_s})}\n")


def taken(subject, alone, size):
    """Return a profile of a model for microbatches of one size."""
    inputs, targets = next(subject.batches(MOST_AT_ONCE))
    before_s = median(alone.steps(BESIDE_S))
    timing = cp.profile(
        subject.build(), inputs, targets, loss=subject.loss, optimizer=subject.optimizer, samples=[size]
    )
    return Taken(timing, before_s, median(alone.steps(BESIDE_S)))


def in_the_middle(timings):
    """Return the timings of one model for one size as one, of each figure the median."""
    points = [timing.points[0] for timing in timings]
    pieces = tuple(map(in_between, zip(*(point.pieces for point in points), strict=True)))
    whole = in_between([point.whole for point in points])
    alone = None if points[0].alone is None else in_between([point.alone for point in points])
    return replace(merged(timings), points=(Point(points[0].samples, pieces, whole, alone),))


def in_between(pieces):
    """Return what a piece takes by the median of each figure."""
    return PieceTime(*medians(pieces))


def merged(timings):
    """Return the timings of one model for several sizes as one; what has no size is the median."""
    return replace(
        timings[0],
        points=tuple(point for timing in timings for point in timing.points),
        update_s_per_byte=median(timing.update_s_per_byte for timing in timings),
        add_s_per_byte=median(timing.add_s_per_byte for timing in timings),
        fixed=Fixed(*medians(timing.fixed for timing in timings)),
    )


def medians(found):
    """Yield the median of each field."""
    yield from map(median, zip(*map(astuple, found), strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
