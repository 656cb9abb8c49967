"""Memory and messages of plans whose models read casts of their weights; computed by hand."""

from dataclasses import replace

import pytest

from counterpoint.compiler.compile import compile as compile_plan, message_size_fn
from counterpoint.model.precision import parse_precision
from counterpoint.model.spec import Block, ModelSpec, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.instruction_times import time_instructions
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.world.cluster import Cluster, Link

ELEMENTS = 256 * 256
BLOCKS = 4
CASTS = {"cast_bytes": 2, "gathers_cast": True}


def chain(num_blocks, *, precision=None, **held):
    """Return equal blocks without activations, whose parameters are held as given."""
    model = linear_chain(num_blocks, precision=parse_precision(precision))
    blocks = (
        Block(tuple(replace(layer, output_bytes=0, tp=None) for layer in block.layers), block.first_layer)
        for block in model.blocks
    )
    return ModelSpec(tuple(blocks), tuple(replace(param, **held) for param in model.params))


def compile_chain(text, num_blocks=BLOCKS, *, num_microbatches=1, **held):
    return compile_plan(Plan.parse(text, num_microbatches=num_microbatches), chain(num_blocks, **held))


def peak_per_element(text, num_blocks=BLOCKS, **held):
    """Return the peak memory of a rank in bytes per element of all parameters."""
    compiled = compile_chain(text, num_blocks, **held)
    (peak,) = set(peak_memory_bytes(compiled.program, message_size_fn(compiled.model, 1)))
    return peak / ELEMENTS / num_blocks


@pytest.mark.parametrize(
    ("plan", "in_float32", "in_bf16"),
    [
        ("solo", 16, 18),
        ("data(2)", 16, 18 + 2),
        ("zero(2, level=1)", 12, 14 + 2),
        ("zero(2, level=2)", 12, 14 + 2),
        ("zero(2, level=3)", 2 + 4 + 4 + 4, 2 + 2 + 4 + 4 + 4),
    ],
)
def test_a_rank_holds_casts_beside_weights_that_it_keeps_and_instead_of_weights_that_it_gathers(
    plan, in_float32, in_bf16
):
    """Where gradients of casts are copied to flat ones, they exist twice, while their casts are freed."""
    assert [peak_per_element(plan, 1, **held) for held in ({}, CASTS)] == [in_float32, in_bf16]


@pytest.mark.parametrize(("num_microbatches", "held"), [(1, 18), (2, 22)])
def test_gradients_that_are_reduced_as_they_come_exist_once(num_microbatches, held):
    """With two microbatches, that of the first one is on the parameters when the backward of the second one begins."""
    plan = replace(Plan.parse("data(2)", num_microbatches=num_microbatches), passes=("overlap",))
    compiled = compile_plan(plan, chain(1, **CASTS))
    peaks = peak_memory_bytes(compiled.program, message_size_fn(compiled.model, 1))
    assert {peak / ELEMENTS for peak in peaks} == {held}


@pytest.mark.parametrize(
    ("plan", "in_float32", "in_bf16"),
    [
        ("solo", 16, 16 + 2 / 4),
        ("zero(2, level=1)", 12, 12 + (2 + 2) / 4),
        ("zero(2, level=2)", 4 + (4 + 3 * 2) / 4 + 4, 4 + (4 + 2 + 4 * 2) / 4 + 4),
        ("zero(2, level=3)", 2 + (4 + 4 + 3 * 2) / 4 + 4, 2 + (2 + 4 + 4 + 3 * 2) / 4 + 4),
        ("zero(2, level=3, persistence_threshold=65536)", 4 + (4 + 3 * 2) / 4 + 4, 4 + (4 + 2 + 4 * 2) / 4 + 4),
    ],
)
def test_the_backward_frees_casts_as_gradients_come(plan, in_float32, in_bf16):
    """Of four blocks: the last backward has the casts and the gradient of one; the first one at level 2 in bf16."""
    assert [peak_per_element(plan, BLOCKS, **held) for held in ({}, CASTS)] == [in_float32, in_bf16]


@pytest.mark.parametrize(("schedule", "casts"), [("gpipe", 2 * 4 - 1), ("one_f_one_b", 2 * 2)])
def test_each_microbatch_in_flight_has_casts_of_its_own(schedule, casts):
    """Of a stage of two blocks: under gpipe the first one has been freed when the last gradient comes."""
    compiled = compile_chain(f"pipeline(2, schedule={schedule})", num_microbatches=4, **CASTS)
    first, _ = peak_memory_bytes(compiled.program, message_size_fn(compiled.model, 1))
    assert first / (ELEMENTS * BLOCKS / 2) == 16 + casts


def test_recomputation_makes_casts_again_instead_of_holding_them():
    plan = Plan.parse("solo", num_microbatches=1)
    compiled = compile_plan(replace(plan, passes=("recompute",)), chain(BLOCKS, **CASTS))
    (peak,) = peak_memory_bytes(compiled.program, message_size_fn(compiled.model, 1))
    assert peak / ELEMENTS / BLOCKS == 16 + 2 / BLOCKS


def test_weights_that_are_also_read_in_their_own_dtype_are_gathered_in_it_and_cast_beside():
    wide = peak_per_element("zero(2, level=3)")
    assert peak_per_element("zero(2, level=3)", cast_bytes=2) > wide
    assert max(compile_chain("zero(2, level=3)", cast_bytes=2).sent_bytes()) == max(
        compile_chain("zero(2, level=3)").sent_bytes()
    )


@pytest.mark.parametrize(("threshold", "small", "large"), [(0, 6, 14), (4096, 8, 14), (65536, 8, 12)])
def test_units_within_the_threshold_are_held_whole_and_others_as_shards(threshold, small, large):
    """The peak is the backward of the large one: half of its weight, the gathered one, its gradient, half of states."""
    model = chain(2)
    model = replace(model, params=(replace(model.params[0], shape=(16, 256)), model.params[1]))
    compiled = compile_plan(Plan.parse(f"zero(2, level=3, persistence_threshold={threshold})"), model)
    peaks = peak_memory_bytes(compiled.program, message_size_fn(compiled.model, 1))
    assert set(peaks) == {small * 4096 + large * ELEMENTS}


@pytest.mark.parametrize(
    ("plan", "in_float32", "in_bf16"),
    [
        ("data(4)", 8, 8),
        ("zero(4, level=1)", 8, 8),
        ("zero(4, level=2)", 8, 8),
        ("zero(4, level=3)", 12, 8),
        ("zero(4, level=3, persistence_threshold=65536)", 8, 8),
        ("zero(4, level=3) * data(2)", 12 / 4 * 3 + 8 / 8, 8 / 4 * 3 + 8 / 8),
    ],
)
def test_level_3_gathers_half_of_the_bytes(plan, in_float32, in_bf16):
    """In bytes per element and (n-1)/n; the program is verified to send what the strategies' formulas say."""
    fraction = 1 if "*" in plan else 3 / 4
    sent = [float(max(compile_chain(plan, **held).sent_bytes())) / ELEMENTS / BLOCKS for held in ({}, CASTS)]
    assert sent == [in_float32 * fraction, in_bf16 * fraction]


def test_a_gather_of_casts_occupies_the_link_for_half_of_the_time():
    seconds = []
    for held in ({}, CASTS):
        compiled = compile_chain("zero(2, level=3)", **held)
        cluster = Cluster(link=Link(latency_s=0.0, bytes_per_s=1e6))
        costs = analytic_costs(compiled.model, cluster, message_size_fn(compiled.model, 1))
        body = compiled.program.rank_programs[0].body
        times = time_instructions(body, costs, cluster=cluster).seconds
        seconds.append({str(one): s for one, s in zip(body, times, strict=True)})
    (wide, narrow) = ([s for one, s in found.items() if "all_gather" in one] for found in seconds)
    assert wide == [2 * s for s in narrow] == [ELEMENTS * 4 / 2 / 1e6] * len(wide)


GIGABYTES = {
    (2, 12): ("120.0", "31.4", "16.6", "1.9"),
    (4, 8): ("120.0", "60.9", "31.4", "1.9"),
    (2, 8): ("90.0", "30.9", "16.2", "1.4"),
}
"""By bytes of a weight and of its states: per rank, of 64, for 7.5e9 parameters; the first row is that of the paper."""


@pytest.mark.long(quick=["2-12"])
@pytest.mark.parametrize(("weight_bytes", "state_bytes"), GIGABYTES)
def test_states_take_the_gigabytes_of_the_table_of_zero(weight_bytes, state_bytes):
    """Without the one block whose gradient or weights are whole, whose part halves with its size."""
    held = {"item_bytes": weight_bytes, "state_bytes": state_bytes}
    plans = ["data(64)", *(f"zero(64, level={level})" for level in (1, 2, 3))]
    states = [2 * peak_per_element(plan, 2, **held) - peak_per_element(plan, 1, **held) for plan in plans]
    assert tuple(f"{7.5 * state:.1f}" for state in states) == GIGABYTES[weight_bytes, state_bytes]


MASTERS = "bf16(reduce=bf16, weights=compute)"
"""The precision of the first row; at level 3 ranks shard weights in float32, as in the second row."""


@pytest.mark.parametrize("plan", ["data(64)", "zero(64, level=1)", "zero(64, level=2)"])
def test_a_precision_that_runs_have_takes_the_gigabytes_of_the_table_of_zero(plan):
    """No rank holds casts beside weights in 2 bytes."""
    one, two = (peak_per_element(plan, num_blocks, precision=MASTERS) for num_blocks in (1, 2))
    expected = dict(zip(("data(64)", "zero(64, level=1)", "zero(64, level=2)"), GIGABYTES[2, 12], strict=False))
    assert f"{7.5 * (2 * two - one):.1f}" == expected[plan]


@pytest.mark.parametrize(("plan", "sent"), [("data(4)", 4), ("zero(4, level=1)", 4), ("zero(4, level=2)", 4)])
def test_master_weights_halve_the_gather_after_the_update_too(plan, sent):
    """In bytes per element and (n-1)/n; with gradients in bf16 alone, level 1 and 2 gather 4 bytes."""
    bytes_sent = {text: compile_chain(plan, precision=text).sent_bytes() for text in (MASTERS, "bf16(reduce=bf16)")}
    per_element = {text: float(max(found)) / ELEMENTS / BLOCKS / (3 / 4) for text, found in bytes_sent.items()}
    assert per_element == {MASTERS: sent, "bf16(reduce=bf16)": 4 if "data" in plan else 6}
