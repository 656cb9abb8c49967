"""Events of runs that never took place, for those who listen to runs."""

import math

from counterpoint.compiler import compile as compiler
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.training.callbacks.callback import EvaluationEnd, RunEnd, RunStart, StepEnd, TraceRecorded

PLAN = "pipeline(2) * data(2)"


class Clock:
    """Shows the seconds that a test has set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def make_run_start(num_steps=1000, first_step=0, batch_size=64):
    compiled = compiler.compile(Plan.parse(PLAN, num_microbatches=2), linear_chain(4))
    return RunStart(compiled, first_step, num_steps, batch_size)


def make_step_end(number, loss=2.0, seconds=0.125, skip_reason=""):
    return StepEnd(number, 0, loss, 64, seconds, math.nan, skip_reason, {"lr": 0.001})


def make_trace_recorded(start, number=3):
    trace = simulate(start.compiled.program, unit_costs())
    return TraceRecorded(number, type(trace)(trace.events, trace.num_ranks, "measured"))


def send_events(listener, num_steps=4, error=None):
    """A whole run, with one measured step and one evaluation."""
    start = make_run_start(num_steps)
    listener.on_start(start)
    for number in range(num_steps):
        listener.on_step(make_step_end(number, loss=1 / (number + 1)))
    listener.on_trace(make_trace_recorded(start))
    listener.on_evaluation(EvaluationEnd(num_steps, {"accuracy": 0.75}))
    listener.on_end(RunEnd(num_steps, error))
