"""torchgpipe's ResNet-101 on up to eight devices, with the cuts and microbatches of its benchmark."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

from benchmarks.published.block_costs import linear_model, step_s
from benchmarks.published.networks import FLOAT, NetworkLayer, resnet
from benchmarks.published.table import FigureRow, FigureTable, split_mark
from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.plan.plan import Plan
from counterpoint.program.text import parse_program
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate

P40_FLOPS, P40_BYTES_PER_S, PCIE_BYTES_PER_S = 12e12, 346e9, 15.75e9
RUNS = {  # samples of a batch, microbatches, and layers of each stage, of release 0.0.5
    "pipeline-1": (220, 2, (370,)),
    "pipeline-2": (25000, 1667, (135, 235)),
    "pipeline-4": (5632, 256, (44, 92, 124, 110)),
    "pipeline-8": (5400, 150, (26, 22, 33, 44, 44, 66, 66, 69)),
}
MOST_MICROS = 256  # more of them change the bubble by less than a half of one in a hundred
SPEED_UPS = {
    "0.0.5": "0.853 1.414 2.774 4.294a",
    "0.0.3": "0.756 1.489 2.629 4.367",
    "GPipe's paper": "0.800 1.418 2.182b 2.891b",
}
ALONE = "F0.0 F0.1 B0.1 R0.0 B0.0"
"""What ``pipeline-1`` does: one stage that recomputes all microbatches but the last; ``gpipe(1)`` goes back at once."""


def forward_s(layer: NetworkLayer) -> float:
    """Return the seconds of a layer on a P40 that computes or reads and writes as fast as its data sheet says."""
    return max(2 * layer.macs / P40_FLOPS, FLOAT * (layer.inputs + layer.outputs) / P40_BYTES_PER_S)


def speed_up(name: str) -> float:
    """Return how many times as fast as one device without a pipeline a run is."""
    samples, num_micros, balance = RUNS[name]
    if len(balance) == 1:
        return 3 * num_micros / simulate(parse_program(ALONE), unit_costs(backward_ticks=2)).step_s
    layers, per_micro = resnet(3, 4, 23, 3), samples / num_micros
    num_micros = min(num_micros, MOST_MICROS)
    cuts = [0, *accumulate(balance)]
    stages = [layers[start:stop] for start, stop in pairwise(cuts)]
    forward = [per_micro * sum(map(forward_s, stage)) for stage in stages]
    handed = [per_micro * FLOAT * stage[-1].outputs for stage in stages]
    model = linear_model([f"stage{at}" for at in range(len(stages))], [0.0] * len(stages), handed)
    plan = Plan.parse(f"gpipe({len(stages)}, checkpoint=except_last)", num_microbatches=num_micros)
    made = compile_plan(plan, model, verified=False)
    step = step_s(made, forward, [2 * seconds for seconds in forward], PCIE_BYTES_PER_S)
    return 3 * num_micros * sum(forward) / step


@cache
def torchgpipe_table() -> FigureTable:
    """Return the speed-ups over one device."""
    found = {name: speed_up(name) for name in RUNS}
    rows = []
    for release, line in SPEED_UPS.items():
        for (name, (_, num_micros, _)), cell in zip(RUNS.items(), line.split(), strict=True):
            published, why = split_mark(cell)
            rows.append(FigureRow((release, name, str(num_micros)), published, found[name], why))
    return FigureTable(
        "torchgpipe's ResNet-101",
        "torchgpipe, `benchmarks/resnet101-speed` of release 0.0.5, which also reads the figures of the GPipe paper "
        "off its figure 3; documentation of release 0.0.3.",
        "`gpipe(n, checkpoint=except_last)` with the partitions, batches and microbatches of release 0.0.5 "
        "(those of 0.0.3 are not available). The time of a layer is that of a Tesla P40 at the peak of its data"
        " sheet, 12 Tflop/s or 346 GB/s, whichever is longer; a backward takes two forwards; links are PCIe 3.0"
        " x16, 15.75 GB/s.",
        ("release", "run", "microbatches"),
        tuple(rows),
        within=0.15,
        unit="times",
        reasons=(
            ("a", "the seconds of a layer omit kernel launches for 36 images, copies and Python, which are not "
                  "published"),
            ("b", "GPipe's own run used other devices; its partitions and microbatches are not published"),
        ),
    )  # fmt: skip
