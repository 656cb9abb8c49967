"""Simulated pipelines: bubbles as given in the papers, and the speed-ups of GPipe and torchgpipe."""

from __future__ import annotations

from functools import cache

from benchmarks.published.table import FigureRow, FigureTable, split_mark
from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.trace import Trace
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate, simulate_variant

GPIPE = "Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, NeurIPS 2019"
MEGATRON = "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021"
ZERO_BUBBLE = "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024"
SPREAD = ((4, 1, "0.75"), (4, 4, "0.4286"), (4, 8, "0.2727"), (4, 32, "0.0857"), (8, 32, "0.1795"))
TPU = {  # microbatches: AmoebaNet-D(18, 256) and Transformer-48, each on 2, 4 and 8 partitions
    1: "1 1.13 1.38b 1 1.07 1.3b",
    4: "1.07a 1.26a 1.72a 1.7b 3.2b 4.8b",
    32: "1.21a 1.84a 3.48a 1.8 3.4 6.3",
}
P100 = {"AmoebaNet-D(18, 128)": "1 1.7a 2.7a", "Transformer-24": "1 1.8 3.3"}
PARTITIONS = (2, 4, 8)
STEP = "(n-1)/(m+n-1) of the step"
LAYERS = 8


@cache
def simulate_plan(text: str, num_micros: int, num_blocks: int = LAYERS) -> Trace:
    """Return one step of a plan on equal blocks: a forward takes one tick, a backward two."""
    made = compile_plan(Plan.parse(text, num_microbatches=num_micros), linear_chain(num_blocks), verified=False)
    turn = made.step_variants[-1]
    costs = unit_costs(backward_ticks=2)
    return simulate(made.program, costs) if turn.async_pipeline is None else simulate_variant(turn, costs)


def idle_over_compute(text: str, num_micros: int, num_blocks: int) -> float:
    """Return the idle time of the ranks relative to their compute time."""
    bubble = simulate_plan(text, num_micros, num_blocks).bubble
    return bubble / (1 - bubble)


@cache
def bubble_table() -> FigureTable:
    """Return the bubbles of all schedules."""
    rows = [
        FigureRow((f"{order}({n})", str(m), STEP, name), published, simulate_plan(f"{order}({n})", m, n).bubble)
        for order, name in (("gpipe", "GPipe"), ("one_f_one_b", "PipeDream-Flush"))
        for n, m, published in SPREAD
    ]  # fmt: skip
    for n, m, v in ((4, 8, 2), (4, 8, 4), (8, 16, 2)):
        text = f"interleaved({n}, chunks_per_stage={v})"
        formula = f"{(n - 1) / (v * m):.4f}"
        rows.append(
            FigureRow(
                (text, str(m), "(n-1)/(v m) of computing", "Megatron-LM"), formula, idle_over_compute(text, m, n * v)
            )
        )
    for n, m in ((4, 8), (8, 16)):
        for order, ticks, idle in (("one_f_one_b", 3, 3), ("zero_bubble", 3, 1)):
            text, formula = f"{order}({n})", f"{idle * (n - 1) / (ticks * m):.4f}"
            said = "(n-1)(F+B+W)" if idle == 3 else "(n-1)(F+B-W)"
            rows.append(
                FigureRow(
                    (text, str(m), f"{said} idle", "1F1B" if idle == 3 else "ZB-H1"),
                    formula,
                    idle_over_compute(text, m, n),
                )
            )
    rows.append(
        FigureRow(
            ("pipedream(4)", "8", "none in the long run", "PipeDream"),
            "0.0000",
            simulate_plan("pipedream(4)", 8, 4).bubble,
        )
    )
    return FigureTable(
        "Bubbles",
        f"{GPIPE}, section 2.3; {MEGATRON}, section 2.2; {ZERO_BUBBLE}, section 2 (with F = B = W); Narayanan et al., "
        "PipeDream, SOSP 2019, section 3.2.",
        "Simulated programs of equal blocks without communication. Megatron-LM gives its bubble relative to the"
        " compute time, the zero bubble paper in seconds; both are shown relative to the compute time.",
        ("plan", "microbatches", "as published", "where"),
        tuple(rows),
    )


def speed_up(num_stages: int, num_micros: int) -> float:
    """Return the speed-up of a batch over two stages without microbatches."""
    plan = "gpipe({}, checkpoint=always)"
    whole, cut = (
        simulate_plan(plan.format(2), 1).step_s,
        simulate_plan(plan.format(num_stages), num_micros).step_s / num_micros,
    )
    return whole / cut


@cache
def throughput_table() -> FigureTable:
    """Return GPipe's tables 2 and 3."""
    rows = []
    for num_micros, line in TPU.items():
        models = ((model, n) for model in ("AmoebaNet-D(18, 256)", "Transformer-48") for n in PARTITIONS)
        for (model, n), cell in zip(models, line.split(), strict=True):
            published, why = split_mark(cell)
            rows.append(FigureRow(("TPU", model, str(n), str(num_micros)), published, speed_up(n, num_micros), why))
    for model, line in P100.items():
        for n, cell in zip(PARTITIONS, line.split(), strict=True):
            published, why = split_mark(cell)
            rows.append(FigureRow(("P100", model, str(n), "32"), published, speed_up(n, 32) / speed_up(2, 32), why))
    return FigureTable(
        "GPipe's throughput",
        f"{GPIPE}, tables 2 and 3, relative to 2 partitions with 1 microbatch (TPU), or with 32 (P100).",
        f"`gpipe(n, checkpoint=always)` on {LAYERS} equal layers without communication: what a batch of constant "
        "size would gain. The shapes of the Transformer are published; the seconds of layers, the placement of the "
        "vocabulary projection, and the cells of AmoebaNet are not.",
        ("device", "model", "partitions", "microbatches"),
        tuple(rows),
        within=0.1,
        unit="times",
        reasons=(
            ("a", "the cells of AmoebaNet differ in work, and the paper says that its partitions are unequal; "
                  "equal ones are an upper limit of the gain"),
            ("b", "faster than any schedule of the same batch can be: the batch was adapted to the memory in "
                  "each cell, by how much is not published"),
        ),
    )  # fmt: skip
