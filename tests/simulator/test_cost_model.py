"""Costs of a model on a cluster, and the memory of a rank; computed by hand."""

from fractions import Fraction

import pytest

from counterpoint.program.instruction import Collective
from counterpoint.program.text import format_instruction, parse_instruction
from counterpoint.simulator.instruction_times import time_instructions
from counterpoint.simulator.memory import memory_timeline, peak_memory_bytes
from counterpoint.simulator.network import (
    linear_broadcast_s,
    ring_collective_s,
    ring_reduce_scatter_s,
)
from counterpoint.simulator.simulate import simulate
from counterpoint.world.cluster import Link
from tests.simulator.programs import FakeCosts, build_costs, compile_text, program, size_fn_for

LINK = Link(latency_s=1.0, bytes_per_s=10.0)
WEIGHT = 4 * 256 * 256
OUTPUT = 4 * 256 * 2


def test_a_group_of_one_has_nothing_to_do():
    assert (ring_reduce_scatter_s(400, 1, LINK), linear_broadcast_s(400, 1, LINK)) == (0, 0)


@pytest.mark.parametrize(
    ("instruction", "seconds"),
    [
        ("all_reduce(grad0)@0-3", 66),
        ("reduce_scatter(grad0)@0-3", 33),
        ("all_gather(weight0)@0-3", 33),
        ("broadcast(weight0)@0-3", 123),
    ],
)
def test_a_collective_takes_as_long_as_its_algorithm(instruction, seconds):
    called = parse_instruction(instruction)
    assert isinstance(called, Collective)
    assert ring_collective_s(called, 400, LINK) == seconds


def test_a_backward_costs_two_forwards_and_a_shard_takes_its_part_of_an_update():
    compiled = compile_text("zero1(2)", blocks=1)
    instructions = compiled.program.rank_programs[0].body
    seconds = dict(
        zip(
            (type(instruction).__name__ for instruction in instructions),
            time_instructions(instructions, build_costs(compiled)).seconds,
            strict=True,
        )
    )
    assert seconds["Forward"] == 2 / 1e4
    assert seconds["Backward"] == 2 * seconds["Forward"]
    assert seconds["Update"] == pytest.approx(7 * WEIGHT / 2 / 10e9)


def test_each_part_of_a_backward_costs_half_of_it():
    compiled = compile_text("zero_bubble(2)", blocks=2)
    instructions = compiled.program.rank_programs[0].body
    seconds = dict(
        zip(
            map(format_instruction, instructions),
            time_instructions(instructions, build_costs(compiled)).seconds,
            strict=True,
        )
    )
    assert seconds["Bi0.0"] == seconds["Bw0.0"] == seconds["F0.0"] == 2 / 1e4


def test_what_a_forward_leaves_is_held_until_the_weight_part():
    first = [peak_memory_bytes(compile_text(f"{name}(2)", m=4, blocks=2).program, size_fn_for(compile_text("solo", blocks=2)))[1]
             for name in ("one_f_one_b", "zero_bubble")]  # fmt: skip
    assert first[1] - first[0] == OUTPUT


def test_only_the_shard_of_a_reduce_scattered_gradient_is_all_reduced():
    compiled = compile_text("zero1(2) * data(3)", blocks=1)
    instructions = compiled.program.rank_programs[0].body
    sums = [
        s
        for instruction, s in zip(
            instructions, time_instructions(instructions, build_costs(compiled)).seconds, strict=True
        )
        if getattr(instruction, "op", "") == "all_reduce"
    ]
    assert sums == [pytest.approx(4 * (1e-4 + WEIGHT / 2 / 3 / 1e8))]


def test_data_parallelism_takes_the_time_of_compute_all_reduce_and_commit():
    compiled = compile_text("data(2)", blocks=1)
    work, commit, update = 3 * 2 / 1e4, 2 * 1e-4, 7 * WEIGHT / 10e9
    assert simulate(compiled.program, build_costs(compiled)).step_s == pytest.approx(
        work + 2 * (1e-4 + WEIGHT / 2 / 1e8) + commit + update
    )


@pytest.mark.parametrize(
    ("plan", "weights"),
    [
        ("solo", 1 + 1 + 2),
        ("data(2)", 1 + 1 + 2),
        ("zero1(2)", 1 + 1 + 1),
        ("zero2(2)", 1 + 1.5 + 1),
        ("zero3(2)", 4),
    ],
)
def test_a_rank_holds_weights_gradients_states_and_what_backward_needs(plan, weights):
    compiled = compile_text(plan, m=2, blocks=1)
    assert set(peak_memory_bytes(compiled.program, size_fn_for(compiled))) == {weights * WEIGHT + OUTPUT}


@pytest.mark.parametrize(
    ("plan", "versions"),
    [("pipedream(3)", [3, 2, 1]), ("pipedream(3, vertical_sync=on)", [3, 3, 3]), ("pipedream_2bw(3)", [2, 2, 2])],
)
def test_an_async_stage_holds_its_weight_versions_and_the_activations_in_flight(plan, versions):
    """Each with one gradient and two states of the optimizer."""
    compiled = compile_text(plan, m=3 if "2bw" in plan else 1, blocks=3)
    peaks = peak_memory_bytes(compiled.step_variants[-1].full_program, size_fn_for(compiled))
    assert list(peaks) == [(count + 3) * WEIGHT + (3 - at) * OUTPUT for at, count in enumerate(versions)]


@pytest.mark.parametrize(
    ("plan", "weights"),
    [
        ("data(2, compress=fp16)", 4 + 2 + 0.5),
        ("data(2, compress=twobit)", 4 + 2 + 2 / 16),
        ("data(2, compress=onebit, compress_from=9)", 4 + 2 + 2 / 2 + 132 / 4096),
        ("data(4, reduce=adasum)", 4 + 4),
        ("data(2) * data(2, compress=topk)", 4 + 2 + 2 * 656 * 8 / WEIGHT),
    ],
)
def test_a_codec_holds_its_residual_and_its_send_buffer(plan, weights):
    compiled = compile_text(plan, m=2, blocks=1)
    assert set(peak_memory_bytes(compiled.program, size_fn_for(compiled))) == {weights * WEIGHT + OUTPUT}


def held_during_collectives(text):
    """Return the most bytes that a rank holds during a gather, and during a reduce-scatter."""
    compiled = compile_text(text, blocks=1)
    timeline = memory_timeline(compiled.program, size_fn_for(compiled))[0]
    held = {"all_gather": 0, "reduce_scatter": 0}
    for instruction, num_bytes in zip(compiled.program.rank_programs[0].body, timeline[1:], strict=True):
        if isinstance(instruction, Collective):
            held[instruction.op] = max(held[instruction.op], num_bytes)
    return held.values()


@pytest.mark.parametrize(
    ("option", "buffers"),
    [("quantized_weights=int8", Fraction(257, 1024)), ("quantized_gradients=int4", Fraction(2 * 129, 1024))],
)
def test_encoded_shards_are_held_while_they_are_communicated(option, buffers):
    exact, encoded = (held_during_collectives(text) for text in ("zero3(2)", f"zero3(2, {option})"))
    assert sorted(after - before for before, after in zip(exact, encoded, strict=True)) == [0, buffers * WEIGHT]


@pytest.mark.parametrize(
    ("code", "link_bytes", "rounds"),
    [
        ("fp16", 1.5 * WEIGHT / 2, 6),
        ("twobit", 3 * WEIGHT / 16, 3),
        ("powersgd", 1.5 * 512 * 4, 12),
        ("adasum", 3 * WEIGHT, 3),
    ],
)
def test_a_compressed_all_reduce_occupies_the_link_for_its_compressed_bytes(code, link_bytes, rounds):
    plan = f"data(4, {'reduce' if code == 'adasum' else 'compress'}={code})"
    compiled = compile_text(plan, blocks=1)
    instruction = compiled.program.rank_programs[0].body[2]
    assert build_costs(compiled).link_s(instruction, Fraction(1), 0) == pytest.approx(link_bytes / 1e8 + rounds * 1e-4)


@pytest.mark.parametrize(
    ("plan", "weights"),
    [("server(2)", 4 + 8 + 4), ("data(2) * server(2)", 4 + 8 + 4), ("asp(2)", 4 + 8 + 1), ("data(2) * asp(2)", 13)],
)
def test_a_server_holds_weights_states_and_the_gradients_that_have_come(plan, weights):
    """Of four blocks: all gradients until its update when it waits for all workers, else one block's at a time."""
    compiled = compile_text(plan)
    assert peak_memory_bytes(compiled.program, size_fn_for(compiled))[-1] == weights * WEIGHT


def test_an_asynchronous_server_holds_the_gradient_of_its_largest_unit():
    peaks = peak_memory_bytes(
        program("apply_and_reply(1,2)@1", "push(grad1)>0 push(grad2)>0"), lambda value, code="": 10 * value.blocks[0]
    )
    assert peaks == (2 * (10 + 20) + 20, 0)


def test_one_f_one_b_holds_fewer_activations_than_gpipe():
    def first(schedule):
        compiled = compile_text(f"pipeline(4, schedule={schedule})", m=8)
        return peak_memory_bytes(compiled.program, size_fn_for(compiled))[0]

    assert first("gpipe") - first("one_f_one_b") == 4 * OUTPUT


def test_a_forward_keeps_its_output_until_its_backward():
    peaks = peak_memory_bytes(program("F0.0 F0.1 F0.2 B0.2 B0.1 B0.0"), lambda value, code="": 10)
    assert peaks == (30,)


def test_two_ranks_that_do_the_same_hold_the_same():
    compiled = compile_text("pipeline(2) * data(2)", m=2)
    peaks = peak_memory_bytes(compiled.program, size_fn_for(compiled))
    assert peaks[:2] == peaks[2:]
    assert simulate(compiled.program, FakeCosts()).num_ranks == 4
