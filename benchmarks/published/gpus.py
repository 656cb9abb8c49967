"""Published rates of language models on H100, H200 and A100, compared with the rooflines of these GPUs.

A block is a list of kernels, counted from the published shapes: products with their FLOPs and bytes, attention as one
kernel with the FLOPs of all pairs of tokens, and passes over activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from benchmarks.published.block_costs import KnownBlockSeconds
from benchmarks.published.table import FigureRow, FigureTable, split_mark
from counterpoint.compiler.compile import compile as compile_plan, message_size_fn
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param, TensorParallelSpec
from counterpoint.plan.plan import Plan
from counterpoint.simulator.cost_model import CostModel, analytic_costs
from counterpoint.simulator.simulate import simulate_breakdown
from counterpoint.world.cluster import Cluster, Device
from counterpoint.world.cluster_file import resolve_cluster

HALF = 2  # bytes of a number in bf16 and fp16
ADAM = 12  # bytes of master weights and states


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """What a block computes for one microbatch on one rank.

    Args:
        products: FLOPs and bytes of each product.
        attention: FLOPs and bytes of attention; zeros for none.
        passes_bytes: bytes of everything else.
        product_dtype: of the products.
    """

    products: tuple[tuple[float, float], ...]
    attention: tuple[float, float] = (0.0, 0.0)
    passes_bytes: float = 0.0
    product_dtype: str = "bf16"

    def forward_s(self, device: Device) -> float:
        """Return the seconds of a forward."""
        return self._products_s(device) + device.kernel_s(0, self.passes_bytes) + self._attention_s(device, 1)

    def backward_s(self, device: Device) -> float:
        """Return the seconds of a backward: two products for each, 2.5 times the FLOPs of attention."""
        passes_s = device.kernel_s(0, 2 * self.passes_bytes)
        return 2 * self._products_s(device) + passes_s + self._attention_s(device, 2.5)

    def selective_s(self, device: Device) -> float:
        """Return the seconds of computing again half of the products and all passes, but not attention."""
        return self._products_s(device) / 2 + device.kernel_s(0, self.passes_bytes)

    def _products_s(self, device: Device) -> float:
        return sum(device.kernel_s(*product, self.product_dtype) for product in self.products)

    def _attention_s(self, device: Device, times: float) -> float:
        flops, moved_bytes = self.attention
        return device.kernel_s(times * flops, times * moved_bytes, "bf16") if flops else 0.0


def product(rows: float, inner: float, outer: float) -> tuple[float, float]:
    """Return the FLOPs and bytes of a product in a narrow dtype."""
    return 2 * rows * inner * outer, HALF * (rows * inner + inner * outer + rows * outer)


LLAMA = {"layers": 32, "width": 4096, "kv": 1024, "hidden": 14336, "tokens": 128256, "context": 8192, "batch": 2}
"""Llama 3.1 8B (Dubey et al., The Llama 3 Herd of Models, 2024, table 3), and the batch of a GPU."""


def llama_layer(*, is_compiled: bool, dtype: str) -> BlockKernels:
    """Return a layer of Llama 3.1 8B; if it is compiled, adjacent passes are one kernel."""
    width, hidden, kv = LLAMA["width"], LLAMA["hidden"], LLAMA["kv"]
    rows = LLAMA["batch"] * LLAMA["context"]
    shapes = ((width, width), (width, kv), (width, kv), (width, width), *2 * ((width, hidden),), (hidden, width))
    norm, rotary, gate, add = (2, 2, 3, 2) if is_compiled else (16, 10, 5, 3)  # eager: in float32, casts in between
    passes: float = rows * (2 * norm * width + rotary * (width + kv) + gate * hidden + 2 * add * width)
    if dtype == "fp8":  # the largest value is found, then inputs are cast
        passes += rows * 2.5 * sum(inner for inner, _ in shapes)
    pairs = 4 * LLAMA["batch"] * LLAMA["context"] ** 2 * width
    attention = (pairs, HALF * rows * (2 * width + 2 * kv))
    return BlockKernels(tuple(product(rows, *shape) for shape in shapes), attention, HALF * passes, dtype)


def llama_blocks(*, is_compiled: bool, dtype: str) -> tuple[ModelSpec, list[BlockKernels]]:
    """Return the model, and the kernels of its embedding, layers and head with the loss."""
    width, rows = LLAMA["width"], LLAMA["batch"] * LLAMA["context"]
    per_layer = 2 * width * width + 2 * width * LLAMA["kv"] + 3 * width * LLAMA["hidden"] + 2 * width
    sizes = [LLAMA["tokens"] * width, *LLAMA["layers"] * [per_layer], LLAMA["tokens"] * width + width]
    loss_passes = (4 if is_compiled else 8) * rows * LLAMA["tokens"]
    embedding = BlockKernels((), passes_bytes=HALF * 2 * rows * width)
    head = BlockKernels((product(rows, width, LLAMA["tokens"]),), passes_bytes=HALF * loss_passes)
    layer = llama_layer(is_compiled=is_compiled, dtype=dtype)
    model = chain_of(sizes, HALF * LLAMA["context"] * width)
    return model, [embedding, *LLAMA["layers"] * [layer], head]


def chain_of(sizes: Sequence[int], output_bytes: int) -> ModelSpec:
    """Return a chain of blocks with these numbers of parameters in FSDP's mixed precision, as torchtitan has it.

    Weights are float32, gathered as bf16; gradients are reduced in float32.
    """
    params = tuple(
        Param(f"block{index}.weight", (size,), cast_bytes=HALF, gathers_cast=True) for index, size in enumerate(sizes)
    )
    layers = (LayerSpec(param.name, (param.name,), 1.0, output_bytes) for param in params)
    return ModelSpec(tuple(Block((layer,), index) for index, layer in enumerate(layers)), params)


def simulate_step_s(
    plan: Plan, model: ModelSpec, kernels: Sequence[BlockKernels], cluster: Cluster, *, samples: int = 1
) -> float:
    """Return the seconds of a step.

    Args:
        plan: that was trained with.
        model: its blocks.
        kernels: of each block of the program.
        cluster: where it was trained.
        samples: of a microbatch.
    """
    made = compile_plan(plan, model, samples_per_micro=samples, verified=False)
    device = cluster.device
    forward = tuple(block.forward_s(device) for block in kernels)
    backward = tuple(
        block.backward_s(device) + (block.selective_s(device) if block.attention[0] else 0.0) for block in kernels
    )
    others = analytic_costs(made.model, cluster, message_size_fn(made.model, samples), samples_per_microbatch=samples)
    costs = cast("CostModel", KnownBlockSeconds(forward, backward, others))
    return simulate_breakdown(made.step_variants[-1], [costs], cluster)[0].step_s


TORCHTITAN = (  # GPUs, compiled, dtype, tokens per second and GPU
    ("8 H100", False, "bf16", "5762a"),
    ("8 H100", True, "bf16", "6667a"),
    ("8 H100", True, "fp8", "8532a"),
    ("128 H100", False, "bf16", "5605a"),
    ("128 H100", True, "bf16", "6514a"),
    ("128 H100", True, "fp8", "8380a"),
    ("32 H200", True, "fp8", "10938b"),
    ("64 H200", True, "fp8", "10753b"),
)


@cache
def llama_tokens_per_s(gpus: str, *, is_compiled: bool, dtype: str) -> float:
    """Return the tokens per second and GPU of torchtitan's Llama 3.1 8B."""
    count, gpu = gpus.split()
    hosts = f"{int(count) // 8}x" if int(count) > 8 else ""
    cluster = resolve_cluster(f"{hosts}8x{gpu.lower()}")
    if gpu == "H100":  # of that platform: 96 GB of HBM2e with 2.4 TB/s
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes_per_s=2.4e12))
    plan = replace(Plan.parse(f"zero({count}, level=3)"), passes=("overlap", "prefetch"))
    model, kernels = llama_blocks(is_compiled=is_compiled, dtype=dtype)
    step = simulate_step_s(plan, model, kernels, cluster, samples=LLAMA["batch"])
    return LLAMA["batch"] * LLAMA["context"] / step


@cache
def torchtitan_table() -> FigureTable:
    """Rates of torchtitan."""
    rows = []
    for gpus, is_compiled, dtype, cell in TORCHTITAN:
        published, why = split_mark(cell)
        found = llama_tokens_per_s(gpus, is_compiled=is_compiled, dtype=dtype)
        labels = (gpus, "torch.compile" if is_compiled else "eager", dtype)
        rows.append(FigureRow(labels, published, found, why))
    return FigureTable(
        "torchtitan's Llama 3.1 8B",
        "torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md` (tables 1 and 3) and "
        "`benchmarks/llama3_8b_h200_2025-06_torchtitan.md`.",
        "`zero(n, level=3)` with the passes `overlap` and `prefetch`, 2 sequences of 8192 tokens per GPU, on the "
        "clusters `8xh100`, `16x8xh100`, `4x8xh200` and `8x8xh200`; that platform's H100 have 2.4 TB/s. Kernels are "
        "counted from the shapes and take what they take at the roofline: 0.75 of the peak of their dtype, 0.875 of "
        "the bandwidth of the memory. As in torchtitan's selective checkpointing every second product is computed "
        "again, and everything else but attention. `torch.compile` makes one kernel of adjacent passes.",
        ("GPUs", "code", "products"),
        tuple(rows),
        within=0.1,
        unit="tokens/s/GPU",
        reasons=(
            ("a", "the cards were limited to 500 of the 700 W of the data sheet, and the page says that nobody knows "
                  "their peak; the fraction of the peak is that of one large product on a card with 700 W"),
            ("b", "the roofline has the speed of the largest products for all products and for attention, and nothing "
                  "for launches that the host is late with, for copies of FSDP, and for clipping"),
        ),
    )  # fmt: skip


def ratio(one: str, other: str) -> str:
    """Return the ratio of two published figures with three decimals."""
    return f"{float(split_mark(other)[0]) / float(split_mark(one)[0]):.3f}"


@cache
def torchtitan_ratio_table() -> FigureTable:
    """What changes multiply the rates of torchtitan by."""
    pairs = (
        ("torch.compile, 8 H100", 0, 1),
        ("float8, 8 H100", 1, 2),
        ("16 times the GPUs, eager", 0, 3),
        ("16 times the GPUs, torch.compile", 1, 4),
        ("16 times the GPUs, float8", 2, 5),
        ("64 H200 instead of 32", 6, 7),
    )
    rows = []
    for label, first, second in pairs:
        found = [
            llama_tokens_per_s(gpus, is_compiled=is_compiled, dtype=dtype)
            for gpus, is_compiled, dtype, _ in (TORCHTITAN[first], TORCHTITAN[second])
        ]
        rows.append(FigureRow((label,), ratio(TORCHTITAN[first][3], TORCHTITAN[second][3]), found[1] / found[0]))
    return FigureTable(
        "What changes torchtitan's rate",
        "The same tables: one figure divided by another.",
        "The same programs. Unknown properties of a card affect both rates of a ratio, and cancel in part.",
        ("change",),
        tuple(rows),
        within=0.1,
        unit="times the tokens/s/GPU",
    )


@dataclass(frozen=True, slots=True)
class MegatronRow:
    """A row of Megatron-LM's table.

    Args:
        size: billions of parameters.
        heads: of attention.
        width: of the model.
        num_layers: of the model.
        slices: degree of tensor parallelism.
        num_gpus: of all replicas.
        batch: sequences in a step.
        published: TFLOP/s of a GPU.
    """

    size: str
    heads: int
    width: int
    num_layers: int
    slices: int
    num_gpus: int
    batch: int
    published: str


MEGATRON = (
    MegatronRow("1.7", 24, 2304, 24, 1, 32, 512, "137"),
    MegatronRow("3.6", 32, 3072, 30, 2, 64, 512, "138"),
    MegatronRow("7.5", 32, 4096, 36, 4, 128, 512, "142"),
    MegatronRow("18.4", 48, 6144, 40, 8, 256, 1024, "135"),
)
SEQUENCE, VOCABULARY = 2048, 51200


def megatron_blocks(row: MegatronRow) -> tuple[ModelSpec, list[BlockKernels]]:
    """Return the model, and the kernels of attention and feed-forward of each layer and of the head, on one rank."""
    width, slices, rows = row.width, row.slices, SEQUENCE
    part = width / slices
    scores = rows * rows * row.heads / slices
    attention = BlockKernels(
        (
            *(product(rows, width, 3 * part), product(rows, part, width)),
            *2 * ((2 * rows * rows * part, HALF * (2 * rows * part + scores)),),
        ),
        passes_bytes=HALF * (4.5 * scores + rows * 6 * width),  # softmax and dropout; norm, dropout and sum
    )
    feed = BlockKernels(
        (product(rows, width, 4 * part), product(rows, 4 * part, width)),
        passes_bytes=HALF * rows * (8 * part + 6 * width),
    )
    head = BlockKernels(
        (product(rows, width, VOCABULARY / slices),), passes_bytes=8 * HALF * rows * VOCABULARY / slices
    )
    sizes = [*row.num_layers * (4 * width * width, 8 * width * width), VOCABULARY * width]
    sent = [*2 * row.num_layers * (HALF * rows * width,), 0]
    params = [Param(f"block{at}.weight", (size,), item_bytes=HALF, state_bytes=ADAM) for at, size in enumerate(sizes)]
    layers = (
        LayerSpec(p.name, (p.name,), 1.0, size, TensorParallelSpec("hidden", ((p.name, 0),), p.shape[0], size, size))
        for p, size in zip(params, sent, strict=True)
    )
    model = ModelSpec(tuple(Block((layer,), at) for at, layer in enumerate(layers)), tuple(params))
    return model, [*row.num_layers * (attention, feed), head]


def megatron_tflops(row: MegatronRow) -> float:
    """Return the TFLOP/s of a GPU by the paper's count of operations, which has every layer computed twice forward."""
    replicas = row.num_gpus // row.slices
    inner = f"tensor({row.slices}) * " if row.slices > 1 else ""
    model, kernels = megatron_blocks(row)
    cluster = resolve_cluster(f"{row.num_gpus // 8}x8xa100-80gb")
    one, two = (
        simulate_step_s(
            replace(Plan.parse(f"{inner}data({replicas})", num_microbatches=count), passes=("recompute",)),
            *(model, kernels, cluster),
        )
        for count in (1, 2)
    )
    step = one + (row.batch // replicas - 1) * (two - one)  # all microbatches but the first take equally long
    layers, width = row.num_layers, row.width
    flops: float = 96 * row.batch * SEQUENCE * layers * width**2
    flops *= 1 + SEQUENCE / (6 * width) + VOCABULARY / (16 * layers * width)
    return flops / step / row.num_gpus / 1e12


@cache
def megatron_table() -> FigureTable:
    """Rates of Megatron-LM without pipelines."""
    rows = []
    for row in MEGATRON:
        labels = (f"{row.size} B", str(row.num_gpus), str(row.slices))
        rows.append(FigureRow(labels, row.published, megatron_tflops(row)))
    return FigureTable(
        "Megatron-LM's rate on A100",
        "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, table 1, the rows "
        "without pipelines.",
        "`tensor(t) * data(d)` with the pass `recompute`, in fp16, on clusters of `8xa100-80gb`; microbatches of one "
        "sequence, as those of the runs are not published. TFLOP/s by the paper's count of operations.",
        ("parameters", "GPUs", "slices"),
        tuple(rows),
        within=0.1,
        unit="TFLOP/s/GPU",
    )
