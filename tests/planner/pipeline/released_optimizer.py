"""Results of PipeDream's released optimizer for its own profiles, as stage layouts, and their clusters."""

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

from counterpoint.planner.pipeline.layer_graph import GraphCuts, find_cuts, parse_graph
from counterpoint.planner.pipeline.partition import PartitionLevel as Parts
from counterpoint.planner.pipeline.stage_layout import PipelineQuery, StageLayout
from counterpoint.world.cluster import Cluster, Device, Level, Link

PROFILES = Path(__file__).with_name("profiles")
CASES = json.loads((PROFILES / "reference.json").read_text())["cases"]
DEVICE = Device(cost_per_s=1.0, memory_bytes=2**50, memory_bytes_per_s=900e9)
"""Memory is unlimited, since the results were found without regard to it; the speed is that of one of their GPUs."""
LATENCY_S = 10e-6


def case_name(case):
    """Model, parts of each level, and the slowest bandwidth."""
    return f"{case['model']}-{case['machines']}-{case['bandwidth'][-1]:g}"


def read_published(model):
    """The profile as it was published."""
    return parse_graph((PROFILES / f"{model}.txt").read_text())


def network_levels(case):
    """The levels as the dynamic program sees them."""
    return [Parts(*level) for level in zip(case["machines"], case["bandwidth"], strict=True)]


def case_cluster(case):
    """The levels as the simulator sees them; the parts of the innermost one are hosts where there are two."""
    both = zip(("host", "network"), case["machines"], case["bandwidth"], strict=False)
    levels = tuple(Level(name, count, Link(LATENCY_S, speed)) for name, count, speed in both)
    return Cluster(DEVICE, Link(LATENCY_S, case["bandwidth"][-1]), levels=levels)


def query_for(case, schedule="pipedream", num_microbatches=None):
    """The pipeline that the case is about."""
    states = find_cuts(read_published(case["model"]).without_inputs())
    return PipelineQuery(states, case_cluster(case), prod(case["machines"]), schedule, num_microbatches)


def released_layout(case, states: GraphCuts) -> StageLayout:
    """The optimizer's result: its stages by the seconds before them, without those that have no work.

    Where several of our states have those seconds, which differ in layers without work, they are taken that send least.
    """
    outer = case["levels"][0]
    inner = case["levels"][1] if len(case["levels"]) > 1 else [[*stage[:3], 1] for stage in outer]
    parts = [(result[2], result[3] * around[3]) for around in outer for result in inner if _is_in(result, around)]
    stages = [(seconds, replicas) for seconds, replicas in parts if seconds > 0]
    ends = {0: PathCost((0,), 0.0)}
    spent_s = 0.0
    for seconds, _ in stages:
        spent_s += seconds
        stops = [at for at in range(1, states.num_cuts) if abs(states.seconds[at] - spent_s) < 1e-9]
        longer = {stop: [row for at, row in ends.items() if states.is_subset[at, stop]] for stop in stops}
        ends = {
            stop: PathCost((*least.cuts, stop), least.sent + float(states.crossing_bytes[stop]))
            for stop, rows in longer.items()
            if (least := min(rows, key=lambda row: row.sent, default=None)) is not None
        }
    return StageLayout(ends[states.num_cuts - 1].cuts, tuple(replicas for _, replicas in stages))


class PathCost(NamedTuple):
    """Cuts from the empty one on, and the bytes that cross them."""

    cuts: tuple[int, ...]
    sent: float


def _is_in(stage, around):
    return around[0] <= stage[0] and stage[1] <= around[1]
