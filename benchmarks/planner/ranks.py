"""One rank: runs plans alternately, in rounds, and prints their step times as JSON.

Steps are timed in laps of a given duration. For every lap each rank records its own CPU time, and rank 0 that of all
cores; the difference was used by other programs. Before and after every lap rank 0 runs the reference loop while all
others wait, as during the profile, since the speed of a shared machine drifts. Contention drifts, too, so one rank, two
and so on compute or stream through memory concurrently, run short tasks, and two of them exchange messages, as for the
probe.
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
"""Half as long as in the probe, since it runs before and after every lap."""
PAIR = 2
"""Number of ranks that exchange messages."""
GIVE_UP_RATIO = 3.0
"""Ratio to the fastest plan's time above which a plan is dropped, if requested."""
LONG_STEP_S = 1.0
"""A longer step is a lap by itself, and half as many laps are enough."""


def machine_cpu_s():
    """Return the CPU seconds of all cores of this machine so far, including time stolen by other guests."""
    with Path("/proc/stat").open(encoding="ascii") as lines:
        counts = [int(count) for count in lines.readline().split()[1:]]
    user, nice, system, _idle, _waiting, irq, soft, stolen = counts[:8]
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


class ReferenceLoop:
    """A plain training loop in one process, with batches of one size, independent of plans."""

    def __init__(self, subject, size):
        self.subject = subject
        self.model = subject.build()
        self.optimizer = subject.optimizer(self.model.parameters())
        for group in self.optimizer.param_groups:
            group.update(fused=True, foreach=False)  # as fast as the runtime's update
        self.batches = subject.batches(size)

    def step(self):
        """Run one step and return its seconds."""
        inputs, targets = next(self.batches)
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.subject.loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def steps(self, least_s=REFERENCE_S, fewest=1):
        """Run steps for a duration, at least ``fewest``, after warm-up steps; return the seconds of each."""
        warm_s = [self.step() for _ in range(REFERENCE_WARM_UP)][-1]
        return [self.step() for _ in range(max(fewest, round(least_s / warm_s)))]


def measure_reference(known, others, fewest):
    """Return, on rank 0, a reference step, contention and time slicing."""
    step_s = median(known.steps(fewest=fewest)) if others.rank == 0 else 0.0
    others.max_over_ranks(0.0)
    crowds = {"crowd": others.measure_contention(layer_work), "memory_crowd": others.measure_contention(memory_work)}
    return {"beside_s": step_s, **crowds, **others.measure_time_slicing()}


class JobRanks:
    """All ranks of this process's job."""

    def __init__(self):
        self.environment = detect()

    @property
    def rank(self):
        """The index of this rank."""
        return 0 if self.environment is None else self.environment.rank

    def max_over_ranks(self, seconds):
        """Wait for all ranks, and return their maximum."""
        if self.environment is None or not connected_fabrics(self.environment):
            return seconds
        fabric = connected_fabrics(self.environment)[0]
        return max(fabric.gather_values("seconds", seconds, tuple(range(fabric.num_ranks))))

    def measure_contention(self, ready):
        """Return, on rank 0, the mean speed of 1, 2, ... concurrent ranks."""
        if self.environment is None or not connected_fabrics(self.environment):
            return [1.0]
        fabric = connected_fabrics(self.environment)[0]
        return measure_contention(fabric, fabric.num_ranks, CONTENTION_PROBE, ready)

    def measure_time_slicing(self):
        """Return, on rank 0, the speed of 1, 2, ... ranks on short tasks, and the cost of a message between two."""
        if self.environment is None or not connected_fabrics(self.environment):
            return {"turns": [1.0], "message_s": 0.0}
        fabric = connected_fabrics(self.environment)[0]
        parts = measure_time_slice_rates(fabric, fabric.num_ranks, CONTENTION_PROBE)
        self.max_over_ranks(0.0)
        busy_s = time_contended_message(fabric, 1 - fabric.rank, CONTENTION_PROBE) if fabric.rank < PAIR else 0.0
        self.max_over_ranks(0.0)
        return {"turns": parts, "message_s": busy_s}


def time_lap(run, batches, count):
    """Run steps; return the seconds of the lap, and the CPU seconds of this rank and of the machine."""
    if count > 1:
        run(*next(batches))  # refill the caches after the reference measurements
    given = [next(batches) for _ in range(count)]
    all_s, own_s, began = machine_cpu_s(), time.process_time(), time.perf_counter()
    for batch in given:
        run(*batch)
    return [time.perf_counter() - began, time.process_time() - own_s, machine_cpu_s() - all_s]


def warm_up(run, batches, others, budget_s):
    """Run steps until memory allocation is stable, or the budget is spent; return the last step's time."""
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
    """Return the laps of one plan, and the reference measurements before and after each."""
    budget_s, lap_s = asked["seconds"], asked["lap_s"]
    batches = subject.batches(subject.batch)
    with cp.parallelize(subject.build(), subject.optimizer, subject.loss, strategy=cell.plan) as run:
        run.local_ranks.use_buckets(
            replace(run.local_ranks.buckets, tune=False)
        )  # otherwise the first steps try bucket sizes, including slow ones
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
    """Run the requested plans.

    Args:
        text: JSON with the cells, the minimum rounds and duration, the seconds of a plan's run and of a lap, the
            minimum laps, steps and reference steps, and whether very slow plans are dropped.
    """
    asked = json.loads(text)
    with training_conditions(threads=1):
        run_turns(asked)


def run_turns(asked):
    """Run the requested plans and print the result of each on a line."""
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
