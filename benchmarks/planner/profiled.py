"""Times the pieces of one model on one core, as ``counterpoint profile`` does, and prints them as JSON.

Called with the model and the sizes of microbatches.
"""

import json
import sys
from statistics import fmean

from cells import SUBJECTS
from ranks import Alone

import counterpoint as cp
from counterpoint.model.timing_file import write_timing
from counterpoint.profiler.watch import as_in_training

MOST_AT_ONCE = 64


def main(letter, sizes):
    subject = SUBJECTS[letter]()
    inputs, targets = next(subject.batches(MOST_AT_ONCE))
    with as_in_training(threads=1):
        alone = Alone(subject, subject.reference)
        alone.steps()
        beside = alone.steps()
        timing = cp.profile(
            subject.build(), inputs, targets, loss=subject.loss, optimizer=subject.optimizer, samples=json.loads(sizes)
        )
        beside += alone.steps()
    sys.stdout.write(f"{json.dumps({'timing': write_timing(timing), 'beside_s': fmean(beside)})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
