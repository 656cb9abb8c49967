"""Profile the layers of one model on one core, as ``counterpoint profile`` does, and print the result as JSON.

Arguments: the model and the microbatch sizes. Each size is profiled several times, between steps of the reference loop,
    to
which all profiles are scaled, since the speed of a shared machine varies. The median of each figure is taken over those
during which the speed changed least (half, or three of four).
"""

import json
import sys
import time
from dataclasses import astuple, dataclass, replace
from statistics import median

from cells import WORKLOADS
from ranks import ReferenceLoop

import counterpoint as cp
from counterpoint.model.model_profile import BatchSizeProfile, LayerProfile, ModelProfile, Overheads, format_profile
from counterpoint.profiler.timer import training_conditions

MAX_SAMPLES, REFERENCE_S = 64, 0.3
EXTRA_ROUNDS, MAX_S = 4, 60.0
"""Optional rounds, and the time after which none of them starts."""


@dataclass(frozen=True)
class TimedProfile:
    """A profile, with a reference step before and after it."""

    timing: ModelProfile
    before_s: float
    after_s: float

    @property
    def reference_step_s(self):
        """The mean of both."""
        return (self.before_s + self.after_s) / 2

    @property
    def speed_change(self):
        """The relative change of the machine's speed during the profile."""
        return abs(self.after_s - self.before_s) / self.reference_step_s

    def scale_to(self, beside_s):
        """Return the profile scaled to a reference step of this duration."""
        return self.timing.scale(beside_s / self.reference_step_s)


def main(letter, text, min_rounds):
    subject, sizes = WORKLOADS[letter](), json.loads(text)
    with training_conditions(threads=1):
        alone = ReferenceLoop(subject, subject.reference)
        alone.steps()
        found = {size: [] for size in sizes}
        rounds, began = 0, time.perf_counter()
        max_rounds = min_rounds + EXTRA_ROUNDS if min_rounds > 1 else 1
        while rounds < min_rounds or (rounds < max_rounds and time.perf_counter() - began < MAX_S):
            for size in sizes:
                found[size].append(take_profile(subject, alone, size))
            rounds += 1
    for size, own in found.items():
        found[size] = sorted(own, key=lambda one: one.speed_change)[: max(min_rounds - 1, len(own) // 2, 1)]
    beside_s = median(one.reference_step_s for own in found.values() for one in own)
    best = [median_profile([one.scale_to(beside_s) for one in own]) for own in found.values()]
    sys.stdout.write(f"{json.dumps({'timing': format_profile(merge_profiles(best)), 'beside_s': beside_s})}\n")


def take_profile(subject, alone, size):
    """Return a profile of a model for one microbatch size."""
    inputs, targets = next(subject.batches(MAX_SAMPLES))
    before_s = median(alone.steps(REFERENCE_S))
    timing = cp.profile(
        subject.build(), inputs, targets, loss=subject.loss, optimizer=subject.optimizer, microbatch_sizes=[size]
    )
    return TimedProfile(timing, before_s, median(alone.steps(REFERENCE_S)))


def median_profile(timings):
    """Return the profile of one size with the median of each figure."""
    points = [timing.batch_sizes[0] for timing in timings]
    pieces = tuple(map(median_layer, zip(*(point.layers for point in points), strict=True)))
    whole = median_layer([point.unpartitioned for point in points])
    alone = None if points[0].single_microbatch is None else median_layer([point.single_microbatch for point in points])
    return replace(merge_profiles(timings), batch_sizes=(BatchSizeProfile(points[0].samples, pieces, whole, alone),))


def median_layer(pieces):
    """Return a layer's profile with the median of each figure."""
    return LayerProfile(*medians(pieces))


def merge_profiles(timings):
    """Return the profiles of several sizes as one; figures without a size are medians."""
    return replace(
        timings[0],
        batch_sizes=tuple(point for timing in timings for point in timing.batch_sizes),
        update_s_per_byte=median(timing.update_s_per_byte for timing in timings),
        add_s_per_byte=median(timing.add_s_per_byte for timing in timings),
        overheads=Overheads(*medians(timing.overheads for timing in timings)),
    )


def medians(found):
    """Yield the median of each field."""
    yield from map(median, zip(*map(astuple, found), strict=True))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]))
