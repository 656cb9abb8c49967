"""Small traces, and a report of one."""

from dataclasses import replace

from counterpoint.program.text import parse_program
from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.viz.report import EvaluationPoint, ReportData, ReportHeading, StatCard, StepTimelines, TrainingCurves

UNIT = Trace.from_events(
    [
        TraceEvent(0, 0, "F0.0", 0.0, 1.0, "compute"),
        TraceEvent(0, 1, "x1.0>1", 1.0, 1.0, "link"),
        TraceEvent(0, 2, "F0.1", 1.0, 2.0, "compute"),
        TraceEvent(0, 3, "g0.0<1", 2.0, 4.0, "wait"),
        TraceEvent(0, 4, "B0.0", 4.0, 6.0, "compute"),
        TraceEvent(1, 0, "x1.0<0", 0.0, 1.0, "wait"),
        TraceEvent(1, 1, "F1.0", 1.0, 2.0, "compute"),
        TraceEvent(1, 2, "B1.0", 2.0, 4.0, "compute"),
        TraceEvent(1, 3, "F1.1", 4.0, 5.0, "compute"),
    ],
    2,
    "simulated",
)
REAL = Trace.from_events(
    [
        TraceEvent(0, 0, "F0.0 F1.0", 0.0, 0.004, "compute"),
        TraceEvent(0, 2, "all_reduce_start(grad1)@0,1", 0.006, 0.011, "link"),
        TraceEvent(0, 3, "B0.0", 0.004, 0.012, "compute"),
        TraceEvent(0, 4, "commit@0,1", 0.012, 0.013, "wait"),
        TraceEvent(0, 5, "U0", 0.013, 0.014, "compute"),
    ],
    1,
    "measured",
)
PROGRAM = parse_program("F0.0 x1.0>1 F0.1 x1.1>1 g0.0<1 B0.0 g0.1<1 B0.1 U0\nx1.0<0 F1.0 B1.0 g0.0>0 x1.1<0 F1.1 U1")


REPORT = ReportData(
    ReportHeading("digits", "pipeline(2)"),
    (StatCard("accuracy", 0.9722), StatCard("throughput", 812.44, "samples/s")),
    TrainingCurves(
        ((0, 2.3), (1, 1.9), (2, 1.2)),
        ((0, 700.0), (1, 810.0), (2, 820.0)),
        (EvaluationPoint(2, (("loss", 1.3), ("accuracy", 0.9722))),),
    ),
    PROGRAM,
    StepTimelines(UNIT, REAL),
    "job: digits\nseed: 0\n",
)


def report(**changes):
    return replace(REPORT, **changes)
