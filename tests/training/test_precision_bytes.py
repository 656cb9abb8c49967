"""Bytes that ranks hold and send in mixed precision: predicted from the program, and counted while ranks run."""

import threading
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef

from counterpoint.data.sampler import split_batch
from counterpoint.model.precision import parse_precision
from counterpoint.partitioning import module_casts
from counterpoint.planner.prepare import storage_sizes
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params import flat_grads
from counterpoint.runtime.params.flat_grads import FlatGrads
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.training.options import TrainingOptions
from counterpoint.training.plan_resolution import AutoStrategy, trace_model_spec
from tests.runtime.comm.test_bytes_sent import RingFabric
from tests.runtime.local_ranks import build_local_ranks, flat_params_of, storage_bytes

WIDTH, LAYERS, MICROBATCHES = 48, 16, 2
PLANS = ["solo", "data(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)"]
HELD = "bf16(reduce=bf16, weights=compute)"
CASES = [(plan, precision) for plan in PLANS for precision in (None, "bf16", "bf16(reduce=bf16)", HELD)
         if not (precision == HELD and "level=3" in plan)]  # fmt: skip
SMALL_BUCKETS = "bucket=10KiB, first_bucket=10KiB, tune=off"


def normed_chain():
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)))
    )


def make_batch(num_micros, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(2 * num_micros, WIDTH, generator=draw).to(dtype) for _ in range(2))
    return SlicedBatch((inputs, targets), tuple(split_batch(2 * num_micros, num_micros)))


def build(plan, precision, *, num_microbatches=MICROBATCHES, passes=()):
    options = {"model": normed_chain(), "precision": precision, "passes": passes, "share_params_on_host": False}
    return build_local_ranks(plan, num_microbatches=num_microbatches, batches=make_batch, **options)


class CountingFabric(RingFabric):
    """Counts a reduce-scatter as a ring: all ranges are sent but one."""

    def reduce_scatter(self, label, whole, bounds, group, op="sum"):
        next_range = slice(*bounds[self.rank : self.rank + 2])
        self.sent += (whole.numel() - whole[next_range].numel()) * whole.element_size()
        return self.fabric.reduce_scatter(label, whole, bounds, group, op)


@pytest.mark.long(quick=["zero(2, level=1)-bf16(reduce=bf16)", f"zero(2, level=2)-{HELD}", "solo-None"])
@pytest.mark.parametrize(("plan", "precision"), CASES)
def test_ranks_send_the_bytes_that_are_predicted(plan, precision):
    with build(plan, precision) as one:
        fabrics = [CountingFabric(rank.interpreter.fabric) for rank in one.ranks.values()]
        for rank, fabric in zip(one.ranks.values(), fabrics, strict=True):
            rank.interpreter.communication.fabric = fabric
        one.step(0, make_batch(one.global_num_microbatches))
        predicted = float(sum(one.compiled.sent_bytes()))
    assert sum(fabric.sent for fabric in fabrics) == pytest.approx(predicted, rel=0.02)


class LiveBytes:
    """The most bytes that each rank has held of its parameters, whenever it took a look."""

    def __init__(self, ranks):
        self.ranks, self.casts = ranks, []
        self.most = dict.fromkeys(ranks, 0)

    def note_cast(self, cast):
        self.casts.append((threading.get_ident(), StorageWeakRef(cast.untyped_storage()), cast.nbytes))

    def look(self, number):
        store, flats = self.ranks[number].interpreter.store, flat_params_of(self.ranks[number])
        states = [state for one, _ in store.optimizers.values() if one for state in one.state.values()]
        tensors = [
            *(tensor for param in store.params.values() for tensor in (param, param.grad)),
            *(tensor for flat in flats for tensor in (flat.weights, flat.local_shard, flat.read_weights)),
            *(tensor for flat in flats for tensor in (flat.own_grads.flat, flat.own_grads.shard)),
            *(value for state in states for value in state.values() if value.dim()),
        ]
        by_address = {one.untyped_storage().data_ptr(): storage_bytes(one) for one in tensors if one is not None}
        own = threading.get_ident()
        casts = sum(size for thread, cast, size in self.casts if thread == own and not cast.expired())
        self.most[number] = max(self.most[number], sum(by_address.values()) + casts)
        return 0.0

    def owner_of(self, grads):
        return next(n for n, rank in self.ranks.items() if any(one.own_grads is grads for one in flat_params_of(rank)))


def watch(one, monkeypatch):
    """Return the bytes that ranks hold from now on: between their calls, and when a gradient comes."""
    live, narrow, buffer = LiveBytes(one.ranks), module_casts.narrow, FlatGrads.buffer

    def cast(dtype, tensor):
        made = narrow(dtype, tensor)
        if isinstance(tensor, nn.Parameter) and made is not tensor:
            live.note_cast(made)
        return made

    def grad_buffer(grads):
        flat = buffer(grads)
        live.look(live.owner_of(grads))
        return flat

    monkeypatch.setattr(module_casts, "narrow", cast)
    monkeypatch.setattr(FlatGrads, "buffer", grad_buffer)
    for number, rank in one.ranks.items():
        rank.interpreter.use_clock(partial(live.look, number))
    return live


def without_activations(size_of):
    return lambda tensor, codec="": size_of(tensor, codec) if tensor.micro is None and tensor.name != "g" else 0


def hold(plan, precision, **options):
    """Return the most bytes that each rank held in a step, and those predicted."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(flat_grads, "MIN_IN_PLACE_BYTES", 0)  # as gradients of large matrices are in float32
        with build(plan, precision, **options) as one:
            one.step(0, make_batch(one.global_num_microbatches))  # allocates the optimizer's state
            live = watch(one, monkeypatch)
            one.step(1, make_batch(one.global_num_microbatches))
            sizes = without_activations(storage_sizes(one.compiled.model, 2))
            return list(live.most.values()), list(peak_memory_bytes(one.compiled.program, sizes))


@pytest.mark.long(quick=["zero(2, level=1)-bf16", f"zero(2, level=2)-{HELD}", "solo-None"])
@pytest.mark.parametrize(("plan", "precision"), [(plan, text) for plan, text in CASES if text != "bf16(reduce=bf16)"])
def test_ranks_hold_the_bytes_that_are_predicted(plan, precision):
    held, predicted = hold(plan, precision)
    assert held == [pytest.approx(size, rel=0.02) for size in predicted]


@pytest.mark.long(quick=["data(2, bucket=10KiB, first_bucket=10KiB, tune=off)-2"])
@pytest.mark.parametrize(
    ("plan", "num_microbatches"),
    [*((f"data(2, {SMALL_BUCKETS})", count) for count in (1, 2)), ("zero(2, level=3)", 2)],
)
def test_ranks_that_reduce_during_the_backward_hold_the_bytes_that_are_predicted(plan, num_microbatches):
    held, predicted = hold(plan, "bf16", num_microbatches=num_microbatches, passes=("overlap",))
    assert held == [pytest.approx(size, rel=0.02) for size in predicted]


@pytest.mark.long(quick=["2-2"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_ranks_that_prefetch_hold_the_bytes_that_are_predicted(depth, num_microbatches):
    passes = ("overlap", f"prefetch:{depth}")
    held, predicted = hold("zero(2, level=3)", None, num_microbatches=num_microbatches, passes=passes)
    assert held == [pytest.approx(size, rel=0.02) for size in predicted]


@pytest.mark.parametrize("plan", ["solo", "zero(2, level=1)"])
def test_bf16_weights_that_are_rounded_stochastically_have_states_in_float32(plan, monkeypatch):
    options = {"precision": "bf16(rounding=stochastic)", "share_params_on_host": False}
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).bfloat16()
    batches = partial(make_batch, dtype=torch.bfloat16)
    with build_local_ranks(plan, model=model, batches=batches, **options) as one:
        one.step(0, batches(one.global_num_microbatches))
        live = watch(one, monkeypatch)
        states = sum(one.compiled.model.unit_bytes(unit, held_as="state") for unit in one.compiled.model.units)
        live.look(0)
    assert states == 8 * sum(param.numel() for param in model.parameters())
    assert live.most[0] == pytest.approx(
        {"solo": 2 + 2 + 8, "zero(2, level=1)": 2 + 2 + 4}[plan] * states / 8, rel=0.02
    )


class Tied(nn.Module):
    """A table whose rows are cast, a norm in float32, a layer, and a head that is tied to the table."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.norm(self.layer(self.table(tokens))))


def describe(model, inputs, precision):
    optimizer_spec = OptimizerSpec(partial(optim.AdamW, lr=1e-2), dict(model.named_parameters()))
    return trace_model_spec(model, optimizer_spec, inputs, None, parse_precision(precision))


def test_the_planner_knows_which_parameters_are_read_and_gathered_as_casts():
    spec = describe(Tied(), torch.zeros(2, 3, dtype=torch.long), "bf16")
    held = {param.name: (param.cast_bytes, param.gathers_cast) for param in spec.params}
    assert held == {
        "table.weight": (2, False),  # looked up in float32, and read as a cast by the head
        "norm.weight": (0, False),
        "norm.bias": (0, False),
        "layer.weight": (2, True),
        "layer.bias": (2, True),
    }


def test_activations_have_the_dtypes_of_a_run():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    sizes = {
        precision: [layer.output_bytes for layer in describe(Tied(), tokens, precision).layers]
        for precision in (None, "bf16", "bf16(output=compute)")
    }
    wide, narrow = 3 * 6 * 4, 3 * 6 * 2
    assert sizes == {
        None: [wide] * 4,
        "bf16": [narrow, narrow, narrow, wide],
        "bf16(output=compute)": [narrow] * 4,
    }


@pytest.mark.long
def test_a_plan_that_is_chosen_automatically_is_compared_in_the_precision_of_the_run():
    model, inputs = normed_chain(), torch.randn(8, WIDTH)
    optimizer_spec = OptimizerSpec(partial(optim.AdamW, lr=1e-2), dict(model.named_parameters()))
    sent = {}
    for precision in (None, "bf16"):
        choice = AutoStrategy(2, None, ()).rank_candidates(
            model, optimizer_spec, inputs, TrainingOptions(precision=precision, num_measured_plans=1), 64
        )
        found = {str(one.plan): one for one in choice.ranking.predictions}
        sent[precision] = [found[plan].sent_bytes for plan in ("zero(2, level=3)", "data(2)")]
    wide, narrow = sent[None], sent["bf16"]
    assert narrow[0] == pytest.approx(wide[0] * 2 / 3, rel=0.03)
    assert narrow[1] == wide[1]
