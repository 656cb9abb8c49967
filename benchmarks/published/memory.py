"""Memory and communication of ZeRO's programs, compared with tables 1 and 2 of its paper."""

from __future__ import annotations

from functools import cache

from benchmarks.published.table import FigureRow, FigureTable
from counterpoint.compiler.compile import CompiledPlan, compile as compile_plan, message_size_fn
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param, TensorParallelSpec
from counterpoint.plan.plan import Plan
from counterpoint.program.program import Program
from counterpoint.simulator.memory import peak_memory_bytes

PAPER = "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020"
LEVELS = {0: "data", 1: "os", 2: "os+g", 3: "os+g+p"}
HALF = 2  # bytes of a weight, of its gradient and of what is sent
ADAM = 12  # bytes that Adam keeps of a weight in float32: itself, its mean and its variance
TABLE_1 = {  # ranks: 7.5e9, 128e9 and 1e12 parameters, each on the levels 1, 2 and 3
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}
SIZES = {"7.5 B": 7.5e9, "128 B": 128e9, "1 T": 1e12}
TABLE_2 = {1: "2 7.6 14.4 128", 2: "4 15.2 28.8 256", 4: "8 30.4 57.6 500"}  # slices: levels 0 to 3
MEASURED = {1: "1.3 6.2", 2: "2.5 12.5", 4: "5 25"}
GPU_BYTES = 32e9
NUM_SHARDS = 64


def make_half_precision_model(num_blocks: int, num_params: float) -> ModelSpec:
    """Return a model of equal blocks with 2-byte parameters that can be split by tensor parallelism."""
    each = int(num_params) // num_blocks
    params = tuple(
        Param(f"block{index}.weight", (each,), item_bytes=HALF, state_bytes=ADAM) for index in range(num_blocks)
    )
    blocks = (
        Block(
            (LayerSpec(param.name, (param.name,), tp=TensorParallelSpec("hidden", ((param.name, 0),), each, 0, 0)),),
            index,
        )
        for index, param in enumerate(params)
    )
    return ModelSpec(tuple(blocks), params)


@cache
def zero_program(level: int, num_ranks: int, num_blocks: int, slices: int = 1) -> CompiledPlan:
    """Return the program of a level; it does not depend on the number of parameters."""
    inner = f"tensor({slices}) * " if slices > 1 else ""
    plan = Plan.parse(f"{inner}zero({num_ranks}, level={level})" if level else f"{inner}data({num_ranks})")
    return compile_plan(plan, make_half_precision_model(num_blocks, num_blocks * 10_000), verified=False)


def peak_gb(level: int, num_ranks: int, num_params: float, num_blocks: int, *, slices: int = 1) -> float:
    """Return the peak memory of a rank."""
    made = zero_program(level, num_ranks, num_blocks, slices)
    model = make_half_precision_model(num_blocks, num_params)
    if slices > 1:
        model = model.split_out_tp_blocks(("hidden",), slices)
    replica = Program(made.program.rank_programs[:1])  # all of them hold alike
    return max(peak_memory_bytes(replica, message_size_fn(model, 1))) / 1e9


def states_gb(level: int, num_ranks: int, num_params: float, *, slices: int = 1) -> float:
    """Return the memory of the sharded states: the peak without one block's full weights and gradients.

    That part halves for blocks of half the size, so it cancels in the difference of two programs.
    """
    few, many = (peak_gb(level, num_ranks, num_params, count, slices=slices) for count in (1, 2))
    return 2 * many - few


@cache
def memory_table() -> FigureTable:
    """Return table 1: gigabytes per rank."""
    rows = []
    for num_ranks, line in TABLE_1.items():
        cells = ((name, level) for name in SIZES for level in (1, 2, 3))
        for (name, level), published in zip(cells, line.split(), strict=True):
            simulated = states_gb(level, num_ranks, SIZES[name])
            rows.append(FigureRow((name, str(num_ranks), LEVELS[level]), published, simulated))
    return FigureTable(
        "Memory of ZeRO's states",
        f"{PAPER}, table 1 (computed by its authors).",
        "Peak memory of the programs of `zero(n, level=1..3)`, for weights and gradients of 2 bytes and Adam in"
        " float32, 12 bytes per parameter. A program also needs the whole gradient of one block, and from level"
        " 3 its whole weights; the table shows the limit for ever smaller blocks. The paper rounds some cells "
        "and truncates others.",
        ("parameters", "ranks", "level"),
        tuple(rows),
        unit="GB",
    )


@cache
def largest_table() -> FigureTable:
    """Return table 2: the largest model that fits."""
    rows = []
    for slices, line in TABLE_2.items():
        for level, published in enumerate(line.split()):
            held = states_gb(level, NUM_SHARDS, 16 * 64e6, slices=slices) * 1e9 / (16 * 64e6)
            labels = (str(slices), str(NUM_SHARDS * slices), LEVELS[level])
            rows.append(FigureRow((*labels, "in theory"), published, GPU_BYTES / held / 1e9))
            if level < 2:
                rows.append(
                    FigureRow((*labels, "measured"), MEASURED[slices].split()[level], GPU_BYTES / held / 1e9, "a")
                )
    return FigureTable(
        "The largest model that ZeRO fits",
        f"{PAPER}, table 2.",
        "`tensor(mp) * data(64)` and `tensor(mp) * zero(64, level=1..3)` on devices of 32 GB (10^9 bytes). The "
        "paper multiplies rounded figures by the degree of model parallelism and writes 500, 1000 and 2000 for "
        "512, 1024 and 2048.",
        ("slices", "ranks", "level", "figure"),
        tuple(rows),
        within=0.025,
        unit="B parameters",
        reasons=(
            ("a", "the measured figures are of training, where activations, buffers and fragmentation take 18 "
                  "to 37 % of the device; the shapes and the batch of the model are not published with the "
                  "table, so that only states are counted"),
        ),
    )  # fmt: skip


@cache
def volume_table() -> FigureTable:
    """Return section 7: communication volume."""
    rows = []
    for level, published in enumerate(("2", "2", "2", "3")):
        made = zero_program(level, NUM_SHARDS, 4)
        weights = sum(param.num_bytes for param in made.model.params)
        rows.append(FigureRow((LEVELS[level],), published, float(max(made.cost.sent_bytes())) / weights))
    return FigureTable(
        "What ZeRO sends",
        f"{PAPER}, section 7.",
        f"Bytes that each of {NUM_SHARDS} ranks sends in a step, divided by the bytes of its weights, from the same "
        "programs. The paper omits the factor (n-1)/n.",
        ("level",),
        tuple(rows),
        within=0.02,
        unit="times the weights",
    )
