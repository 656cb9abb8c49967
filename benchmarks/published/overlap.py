"""Gain of overlapping the gradient all-reduce with the backward: PyTorch's DistributedDataParallel on 32 GPUs."""

from __future__ import annotations

from functools import cache, partial

from benchmarks.published.block_costs import bisect_falling, step_s
from benchmarks.published.networks import FLOAT, NetworkLayer, bert_large, make_model_spec, num_params, resnet
from benchmarks.published.table import FigureRow, FigureTable
from counterpoint.compiler.compile import CompiledPlan, compile as compile_plan
from counterpoint.plan.plan import Plan

RANKS = 32
MODELS = {"ResNet-50": resnet(3, 4, 6, 3), "BERT-large": bert_large()}
GAINS = {
    ("ResNet-50", "NCCL"): "38.0",
    ("BERT-large", "NCCL"): "35.2",
    ("ResNet-50", "gloo"): "26.8",
    ("BERT-large", "gloo"): "21.5",
}
BACKWARD_S = 1.0
SLOWEST = 8.0


@cache
def programs(name: str) -> tuple[CompiledPlan, CompiledPlan]:
    """Return the program that reduces gradients after the backward, and the one that overlaps."""
    model, replicas = make_model_spec(MODELS[name]), Plan.parse(f"data({RANKS})").strategies
    at_the_end = compile_plan(Plan(replicas), model, verified=False)
    return at_the_end, compile_plan(Plan(replicas, 1, ("overlap",)), model, verified=False)


def gain(name: str, ratio: float) -> float:
    """Return by how many percent a step is shorter if all reductions take ``ratio`` times as long as the backward."""
    layers = MODELS[name]
    bytes_per_s = 2 * (RANKS - 1) / RANKS * FLOAT * num_params(layers) / (ratio * BACKWARD_S)
    forward, backward = block_seconds(layers)
    at_the_end, beside = (step_s(made, forward, backward, bytes_per_s) for made in programs(name))
    return 100 * (1 - beside / at_the_end)


def block_seconds(layers: tuple[NetworkLayer, ...]) -> tuple[list[float], list[float]]:
    """Return forward and backward seconds of each block, by multiplications; a backward takes twice a forward."""
    costs = [block.cost for block in make_model_spec(layers).blocks]
    backward = [BACKWARD_S * cost / sum(costs) for cost in costs]
    return [seconds / 2 for seconds in backward], backward


def largest_gain(name: str) -> float:
    """Return the largest gain, reached where reductions take about as long as the backward."""
    return max(gain(name, ratio) for ratio in (0.8, 0.9, 1.0, 1.1, 1.2))


@cache
def overlap_table() -> FigureTable:
    """Return the gains, and the links at which they are as published."""
    rows = [FigureRow((name, "NCCL", "the largest gain"), GAINS[name, "NCCL"], largest_gain(name)) for name in MODELS]
    for (name, backend), published in GAINS.items():
        found = bisect_falling(1.0, SLOWEST, partial(gain, name), float(published))
        label = f"fitted: sums take {found:.2f} times the backward"
        rows.append(FigureRow((name, backend, label), published, gain(name, found), is_fitted=True))
    return FigureTable(
        "What overlap gains",
        "Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 5.1: "
        "32 GPUs.",
        "`data(32)` with and without the pass `overlap`, on the layers of the networks, one block for each "
        "residual block or layer. A backward takes two forwards, distributed by multiplications. Seconds, "
        "batches and the bandwidth of the links are not published, nor whether BERT is the large one, so that "
        "the gain depends on one unknown: the time of all reductions relative to the backward. The first rows "
        "show the largest gain over all values of it, which no link can exceed and NCCL nearly reaches; the "
        "others the slowest link with the published gain, which is slower for gloo, and slower for BERT.",
        ("model", "backend", "figure"),
        tuple(rows),
        within=0.06,
        unit="% of a step",
    )
