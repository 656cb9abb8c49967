"""Data parallelism on many devices: published rates compared with simulated ones."""

from __future__ import annotations

from functools import cache

from benchmarks.published.block_costs import step_s
from benchmarks.published.networks import NetworkLayer, inception_v3, make_model_spec, resnet, vgg16
from benchmarks.published.table import FigureRow, FigureTable, split_mark
from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.plan.plan import Plan

GBIT = 1e9 / 8
TENSORFLOW = "TensorFlow's benchmarks of May 2017 (`docs_src/performance/benchmarks.md`)"
NETWORKS = {
    "Inception-v3": inception_v3(),
    "ResNet-50": resnet(3, 4, 6, 3),
    "ResNet-101": resnet(3, 4, 23, 3),
    "ResNet-152": resnet(3, 8, 36, 3),
    "VGG-16": vgg16(),
}
ONE = {"Inception-v3": 142, "ResNet-101": 1656.82 / 16, "VGG-16": 154}  # images/s of one Pascal GPU, 64 a minibatch
HOROVOD = (
    ("Inception-v3", 128, "88"),
    ("ResNet-101", 128, "88"),
    ("Inception-v3", 512, "90"),
    ("ResNet-101", 512, "90"),
    ("VGG-16", 512, "68a"),
)
SERVERS = {  # images/s of a p2.8xlarge, its minibatch, then the rates of 2, 4 and 8 of them
    "Inception-v3": (229, 8 * 64, "459 902 1783"),
    "ResNet-50": (378, 8 * 64, "751 1388 2744a"),
    "ResNet-152": (146, 8 * 32, "291 565 981a"),
}
DGX = {"VGG-16": (154, 64, "295 584 1081a")}


def data_parallel_step_s(layers: tuple[NetworkLayer, ...], one_s: float, num_ranks: int, bytes_per_s: float) -> float:
    """Return the seconds of a step of ranks that each take ``one_s`` alone; a backward takes two forwards."""
    model = make_model_spec(layers, grain=1 / 12)
    made = compile_plan(Plan(Plan.parse(f"data({num_ranks})").strategies, 1, ("overlap",)), model, verified=False)
    whole = sum(block.cost for block in model.blocks)
    forward = [one_s / 3 * block.cost / whole for block in model.blocks]
    return step_s(made, forward, [2 * seconds for seconds in forward], bytes_per_s)


@cache
def horovod_table() -> FigureTable:
    """Efficiency of Horovod."""
    rows = []
    for name, num_ranks, cell in HOROVOD:
        published, why = split_mark(cell)
        one_s = 64 / ONE[name]
        found = 100 * one_s / data_parallel_step_s(NETWORKS[name], one_s, num_ranks, 25 * GBIT)
        rows.append(FigureRow((name, str(num_ranks), "TCP" if num_ranks == 128 else "RoCE"), published, found, why))
    return FigureTable(
        "Horovod's efficiency",
        "Sergeev and Del Balso, Horovod, arXiv 1802.05799, figures 6 and 7 (128 GPUs); Horovod's "
        "`docs/benchmarks.rst` (512).",
        "`data(n)` with the pass `overlap`, 64 images per GPU, one ring through all servers of 4 GPUs with 25 "
        "Gbit/s each at line rate. Images/s of one GPU: 142 and 154 for Inception-v3 and VGG-16 on a P100 "
        f"({TENSORFLOW}), and for ResNet-101 a sixteenth of the 1656.82 that Horovod's page prints for 16 GPUs. It "
        "is assumed that Horovod's `Pascal GPUs` are P100. At line rate nearly all reductions are hidden: what the "
        "published 88 and 90 % lose is not in the program.",
        ("model", "GPUs", "network"),
        tuple(rows),
        within=0.15,
        unit="% of perfect",
        reasons=(
            ("a", "the 495 MB of the dense layers are all-reduced as soon as the backward begins, and are "
                  "nearly hidden at line rate; all-reduces over 512 GPUs were slower than that, by how much is "
                  "not published"),
        ),
    )  # fmt: skip


@cache
def tensorflow_table() -> FigureTable:
    """Rates of TensorFlow on Amazon's servers and on a DGX-1."""
    rows = []
    for name, (one, batch, line) in SERVERS.items():
        for count, cell in zip((2, 4, 8), line.split(), strict=True):
            published, why = split_mark(cell)
            step = data_parallel_step_s(NETWORKS[name], batch / one, count, 10 * GBIT)
            rows.append(FigureRow((name, f"{count} p2.8xlarge, {8 * count} K80"), published, count * batch / step, why))
    for name, (one, batch, line) in DGX.items():
        for count, cell in zip((2, 4, 8), line.split(), strict=True):
            published, why = split_mark(cell)
            step = data_parallel_step_s(NETWORKS[name], batch / one, count, 80e9)
            rows.append(FigureRow((name, f"DGX-1, {count} P100"), published, count * batch / step, why))
    return FigureTable(
        "TensorFlow's images per second",
        f"{TENSORFLOW}, synthetic data.",
        "`data(n)` with the pass `overlap`. Each of several servers counts as one rank, with the speed that the page "
        "prints for 8 GPUs and 10 Gbit/s; parameter servers on the hosts of workers send as much as a ring. In the "
        "DGX-1, whose VGG-16 is all-reduced by NCCL, a rank is a GPU with 80 GB/s of NVLink.",
        ("model", "devices"),
        tuple(rows),
        within=0.1,
        unit="images/s",
        reasons=(
            ("a", "while the network is not saturated, nothing in a program costs more with more devices: the "
                  "page's own bottlenecks (four parameter servers for 8 workers, summation, kernel launches) "
                  "are not modelled"),
        ),
    )  # fmt: skip
