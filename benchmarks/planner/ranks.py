"""One rank: takes some plans in turns, rounds of them, and prints as JSON how long its steps took.

Steps are timed in laps, each of so many that it takes the time that is asked for. Of every lap each rank notes how long
it has computed itself, and rank 0 how long all cores have: what is left over is what others have computed meanwhile.
Before and after every lap rank 0 takes steps of its own, alone, while all others wait, as they are taken beside the
profile: by these figures of different minutes can be compared, because the speed of a shared machine drifts. So does
what its cores lend each other: then one rank, two and so on compute at once, or go over memory, as they do for
the probe; they take turns with short pieces of work, and the first two send each other messages, as for the probe, too.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from cells import WORKLOADS, Cell

import counterpoint as cp
from counterpoint.launchers.environment import detect
from counterpoint.profiler.probe_compute import (
    ProbeConfig,
    layer_work,
    measure_contention,
    measure_time_slice_rates,
    memory_work,
    time_contended_message,
)
from counterpoint.profiler.timer import training_conditions
from counterpoint.training.distributed_world import connected_fabrics

REFERENCE_WARM_UP, WARM_UP, REFERENCE_S = 1, 8, 0.05
CONTENTION_PROBE = ProbeConfig(duration_s=0.05)
"""Half as long as the probe has ranks compute at once: this is done before and after every lap."""
PAIR = 2
"""Ranks that send each other messages."""
GIVE_UP_RATIO = 3.0
"""A plan whose turn took so many times as long as the fastest one's has no other, where that is asked for."""
LONG_STEP_S = 1.0
"""A longer step makes a lap, and there may be half as many."""


def machine_cpu_s():
    """Return for how long all cores of this machine have computed so far, for anybody or for its neighbours."""
    with Path("/proc/stat").open(encoding="ascii") as lines:
        counts = [int(count) for count in lines.readline().split()[1:]]
    user, nice, system, _idle, _waiting, irq, soft, stolen = counts[:8]
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


class ReferenceLoop:
    """A loop by hand in one process, with batches of one size, which has nothing to do with plans."""

    def __init__(self, subject, size):
        self.subject = subject
        self.model = subject.build()
        self.optimizer = subject.optimizer(self.model.parameters())
        for group in self.optimizer.param_groups:
            group.update(fused=True, foreach=False)  # as fast as an update of the runtime
        self.batches = subject.batches(size)

    def step(self):
        """Take one step and return its seconds."""
        inputs, targets = next(self.batches)
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.subject.loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def steps(self, least_s=REFERENCE_S, fewest=1):
        """Take some for so long, and at least so many, after some that warm; return the seconds of each."""
        warm_s = [self.step() for _ in range(REFERENCE_WARM_UP)][-1]
        return [self.step() for _ in range(max(fewest, round(least_s / warm_s)))]


def measure_reference(known, others, fewest):
    """Return what is taken beside a plan, on rank 0: a step of one process that the profile knows, crowds and turns."""
    step_s = median(known.steps(fewest=fewest)) if others.rank == 0 else 0.0
    others.max_over_ranks(0.0)
    crowds = {"crowd": others.measure_contention(layer_work), "memory_crowd": others.measure_contention(memory_work)}
    return {"beside_s": step_s, **crowds, **others.measure_time_slicing()}


class JobRanks:
    """The other ranks of this process's job."""

    def __init__(self):
        self.environment = detect()

    @property
    def rank(self):
        """Which rank this is."""
        return 0 if self.environment is None else self.environment.rank

    def max_over_ranks(self, seconds):
        """Return the longest time of all ranks, when all are here."""
        if self.environment is None or not connected_fabrics(self.environment):
            return seconds
        fabric = connected_fabrics(self.environment)[0]
        return max(fabric.gather_values("seconds", seconds, tuple(range(fabric.num_ranks))))

    def measure_contention(self, ready):
        """Return how fast 1, 2, ... ranks do something at once, on average; known to rank 0."""
        if self.environment is None or not connected_fabrics(self.environment):
            return [1.0]
        fabric = connected_fabrics(self.environment)[0]
        return measure_contention(fabric, fabric.num_ranks, CONTENTION_PROBE, ready)

    def measure_time_slicing(self):
        """Return how fast 1, 2, ... ranks are in their turns, and what a message costs two of them; known to rank 0."""
        if self.environment is None or not connected_fabrics(self.environment):
            return {"turns": [1.0], "message_s": 0.0}
        fabric = connected_fabrics(self.environment)[0]
        parts = measure_time_slice_rates(fabric, fabric.num_ranks, CONTENTION_PROBE)
        self.max_over_ranks(0.0)
        busy_s = time_contended_message(fabric, 1 - fabric.rank, CONTENTION_PROBE) if fabric.rank < PAIR else 0.0
        self.max_over_ranks(0.0)
        return {"turns": parts, "message_s": busy_s}


def time_lap(run, batches, count):
    """Take so many steps; return the seconds of the lap, and what was computed meanwhile here and by all."""
    if count > 1:
        run(*next(batches))  # what has been done beside it has left the caches to others
    given = [next(batches) for _ in range(count)]
    all_s, own_s, began = machine_cpu_s(), time.process_time(), time.perf_counter()
    for batch in given:
        run(*batch)
    return [time.perf_counter() - began, time.process_time() - own_s, machine_cpu_s() - all_s]


def warm_up(run, batches, others, budget_s):
    """Take steps until none needs memory that the ones before had not, or for long enough; return the last's time."""
    step_s = spent_s = 0.0
    for _ in range(WARM_UP):
        began = time.perf_counter()
        run(*next(batches))
        step_s = others.max_over_ranks(time.perf_counter() - began)
        spent_s += step_s
        if spent_s > WARM_UP * budget_s:
            break
    return step_s


def measure_plan(cell, subject, known, others, asked):
    """Return the laps of one plan, and the steps beside it, before and after each."""
    budget_s, lap_s = asked["seconds"], asked["lap_s"]
    batches = subject.batches(subject.batch)
    with cp.parallelize(subject.build(), subject.optimizer, subject.loss, strategy=cell.plan) as run:
        run.local_ranks.buckets = replace(
            run.local_ranks.buckets, tune=False
        )  # else many first steps try sizes, slow ones, too
        step_s = warm_up(run, batches, others, budget_s)
        least_laps, least_steps = asked["laps"], asked["fewest"]
        if step_s > LONG_STEP_S:
            least_laps, least_steps = max(1, least_laps // 2), 1
        count = max(least_steps, round(lap_s / step_s))
        laps, paces = [], [measure_reference(known, others, asked["beside"])]
        for _ in range(max(least_laps, round(budget_s / max(lap_s, count * step_s)))):
            laps.append(time_lap(run, batches, count))
            others.max_over_ranks(0.0)
            paces.append(measure_reference(known, others, asked["beside"]))
    named = {"rank": others.rank, "cell": [cell.letter, cell.strategy, cell.micros]}
    return {**named, "count": count, "laps": laps, "paces": paces}


def main(text):
    """Take the turns that are asked for as JSON.

    Args:
        text: the cells, how many rounds and for how long at least; the seconds of a turn and of a lap, and how few laps
            and steps there may be of either however long a step is, and how few steps beside them; whether hopeless
            plans are given up.
    """
    asked = json.loads(text)
    with training_conditions(threads=1):
        run_turns(asked)


def run_turns(asked):
    """Take the turns and print what they took, each on a line."""
    others = JobRanks()
    for letter in dict.fromkeys(letter for letter, _, _ in asked["cells"]):
        subject = WORKLOADS[letter]()
        cells = [Cell(*one) for one in asked["cells"] if one[0] == letter]
        known = ReferenceLoop(subject, subject.reference)
        began, number = time.perf_counter(), 0
        while number < asked["rounds"] or others.max_over_ranks(time.perf_counter() - began) < asked["least_s"]:
            first, steps, number = number % len(cells), {}, number + 1
            for cell in cells[first:] + cells[:first]:
                told = measure_plan(cell, subject, known, others, asked)
                sys.stdout.write(f"{json.dumps(told)}\n")
                steps[cell] = others.max_over_ranks(min(seconds for seconds, _, _ in told["laps"]) / told["count"])
            if asked["gives_up"]:
                cells = [cell for cell in cells if steps[cell] <= GIVE_UP_RATIO * min(steps.values())]


if __name__ == "__main__":
    main(sys.argv[1])
