"""Events of runs that never took place, for those who listen to runs."""

import math

from counterpoint.compiler import compile as compiler
from counterpoint.model.spec import chain
from counterpoint.plan import Plan
from counterpoint.simulator.costs import unit_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.training.events import Evaluated, RunEnd, RunStart, StepEnd, Timed

PLAN = "pipeline(2) * data(2)"


class Clock:
    """Shows the seconds that a test has set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def begun(num_steps=1000, first_step=0, batch_size=64):
    compiled = compiler.compile(Plan.parse(PLAN, num_microbatches=2), chain(4))
    return RunStart(compiled, first_step, num_steps, batch_size)


def step(number, loss=2.0, seconds=0.125, fault=""):
    return StepEnd(number, 0, loss, 64, seconds, math.nan, fault, {"lr": 0.001})


def timed(start, number=3):
    trace = simulate(start.compiled.program, unit_costs())
    return Timed(number, type(trace)(trace.events, trace.num_ranks, "measured"))


def play(listener, num_steps=4, error=None):
    """A whole run, with one measured step and one evaluation."""
    start = begun(num_steps)
    listener.on_start(start)
    for number in range(num_steps):
        listener.on_step(step(number, loss=1 / (number + 1)))
    listener.on_trace(timed(start))
    listener.on_evaluation(Evaluated(num_steps, {"accuracy": 0.75}))
    listener.on_end(RunEnd(num_steps, error))
