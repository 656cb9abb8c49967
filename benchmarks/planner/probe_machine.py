"""One rank: runs ``counterpoint probe`` several times, and prints the clusters as JSON.

Before and after each probe rank 0 runs the reference loop, so that the figures can be scaled to another speed of the
machine.
"""

import json
import sys
from itertools import pairwise
from statistics import median

from cells import WORKLOADS
from ranks import JobRanks, ReferenceLoop

from counterpoint.cli import probe
from counterpoint.launchers.environment import detect
from counterpoint.profiler.timer import training_conditions
from counterpoint.training.distributed_world import open_world

REFERENCE_S = 0.3


def main(num_probes):
    open_world(detect(), 1, probe.TIMEOUT_S)
    others = JobRanks()
    with training_conditions(threads=1):
        loops = (
            {letter: ReferenceLoop(subject, subject.reference) for letter, subject in build_workloads()}
            if others.rank == 0
            else {}
        )
        edges_s, clusters = [measure_reference(loops, others)], []
        for _ in range(num_probes):
            clusters.append(probe.measure()["cluster"])
            edges_s.append(measure_reference(loops, others))
    if others.rank == 0:
        for cluster, (before_s, after_s) in zip(clusters, pairwise(edges_s), strict=True):
            beside_s = {letter: (before_s[letter] + after_s[letter]) / 2 for letter in loops}
            sys.stdout.write(f"{json.dumps({'cluster': cluster, 'beside_s': beside_s})}\n")


def build_workloads():
    """Yield every workload by its letter."""
    for letter, build in WORKLOADS.items():
        yield letter, build()


def measure_reference(loops, others):
    """Return the step time of each reference loop, while all other ranks wait."""
    taken = {letter: median(loop.steps(REFERENCE_S)) for letter, loop in loops.items()}
    others.max_over_ranks(0.0)
    return taken


if __name__ == "__main__":
    main(int(sys.argv[1]))
