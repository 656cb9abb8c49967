"""One rank: takes some plans in turns, rounds of them, and prints as JSON how long its steps took.

Steps are timed in laps, each of so many that it takes a tenth of a second. Of every lap each rank notes how long it has
computed itself, and rank 0 how long all cores have: what is left over is what others have computed meanwhile. Beside
every plan rank 0 takes steps of its own, alone, while all others wait, and then all ranks take them at once: by these
figures of different minutes can be compared, because the speed of a shared machine drifts, and so does what its cores
lend each other.
"""

import json
import os
import sys
import time
from pathlib import Path

from cells import SUBJECTS, Cell

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.profiler.watch import as_in_training
from counterpoint.training.world import met

BESIDE, WARM_UP, LAP_S = 4, 8, 0.1


def computed_s():
    """Return for how long all cores of this machine have computed so far, for anybody or for its neighbours."""
    with Path("/proc/stat").open(encoding="ascii") as lines:
        counts = [int(count) for count in lines.readline().split()[1:]]
    user, nice, system, _idle, _waiting, irq, soft, stolen = counts[:8]
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


class Alone:
    """A loop by hand in one process, which has nothing to do with plans."""

    def __init__(self, subject):
        self.subject = subject
        self.model = subject.build()
        self.optimizer = subject.optimizer(self.model.parameters())
        for group in self.optimizer.param_groups:
            group.update(fused=True, foreach=False)  # as fast as an update of the runtime
        self.batches = subject.batches(subject.reference)

    def step(self):
        """Take one step and return its seconds."""
        inputs, targets = next(self.batches)
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.subject.loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def steps(self):
        """Take some, warm, and return the seconds of each."""
        return [self.step() for _ in range(2 * BESIDE)][BESIDE:]

    def beside(self, others):
        """Take some on rank 0 alone, and some on all ranks at once; return the seconds of each."""
        own = self.steps() if others.rank == 0 else []
        others.slowest(0.0)
        together = [others.slowest(self.step()) for _ in range(BESIDE)]
        others.slowest(0.0)
        return own, together


class Others:
    """The other ranks of this process's job."""

    def __init__(self):
        self.environment = detect()

    @property
    def rank(self):
        """Which rank this is."""
        return 0 if self.environment is None else self.environment.rank

    def slowest(self, seconds):
        """Return the longest time of all ranks, when all are here."""
        if self.environment is None or not met(self.environment):
            return seconds
        fabric = met(self.environment)[0]
        return max(fabric.gather_values("seconds", seconds, tuple(range(fabric.num_ranks))))


def lap(run, batches, count):
    """Take so many steps; return the seconds of each, and of the lap what was computed here and by all."""
    given, steps = [next(batches) for _ in range(count)], []
    all_s, own_s = computed_s(), time.process_time()
    for batch in given:
        began = time.perf_counter()
        run(*batch)
        steps.append(time.perf_counter() - began)
    return [steps, time.process_time() - own_s, computed_s() - all_s]


def turn(cell, subject, alone, others, budget_s):
    """Return the laps of one plan, and the steps beside it."""
    batches = subject.batches(subject.batch)
    with cp.parallelize(subject.build(), subject.optimizer, subject.loss, strategy=cell.plan) as run:
        for _ in range(WARM_UP):  # until no step takes memory that the ones before had not
            began = time.perf_counter()
            run(*next(batches))
        step_s = others.slowest(time.perf_counter() - began)
        count = max(1, round(LAP_S / step_s))
        before = alone.beside(others)
        laps = [lap(run, batches, count) for _ in range(max(1, round(budget_s / (count * step_s))))]
        others.slowest(0.0)
        after = alone.beside(others)
    beside = {"alone": before[0] + after[0], "together": before[1] + after[1]}
    return {"cell": [cell.letter, cell.strategy, cell.micros], "laps": laps, **beside}


def main(text):
    """Take the turns that are asked for as JSON: cells, rounds, and seconds of each turn."""
    asked = json.loads(text)
    with as_in_training(threads=1):
        taken(asked)


def taken(asked):
    """Take the turns and print what they took."""
    others, found = Others(), []
    for letter in dict.fromkeys(letter for letter, _, _ in asked["cells"]):
        subject = SUBJECTS[letter]()
        alone = Alone(subject)
        alone.steps()
        cells = [Cell(*one) for one in asked["cells"] if one[0] == letter]
        for number in range(asked["rounds"]):
            first = number % len(cells)
            order = cells[first:] + cells[:first]
            found += [turn(cell, subject, alone, others, asked["seconds"]) for cell in order]
    sys.stdout.write(f"{json.dumps({'rank': others.rank, 'turns': found})}\n")


if __name__ == "__main__":
    main(sys.argv[1])
