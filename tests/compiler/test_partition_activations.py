"""Partitioned activations: where inputs are freed and gathered again, what it costs and saves, what is refused."""

from fractions import Fraction

import pytest

from counterpoint.compiler.compile import bounds_from, count_bytes, storage_size_fn
from counterpoint.errors import PlanError, ProgramError
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import verify
from counterpoint.simulator.memory import memory_timeline, peak_memory_bytes
from counterpoint.simulator.simulate import simulate
from tests.program.verify.damaged_programs import edit
from tests.simulator.programs import build_costs, compile_text

PASSES = ("recompute", "partition_activations")


def test_each_rank_keeps_a_part_from_the_forward_to_the_recomputation():
    first, second = format_program(compile_text("tensor(2)", blocks=3, passes=PASSES).program).splitlines()
    assert first == (
        "0/2: F0.0 all_reduce(y0.0)@0,1 F1.0 free(x1.0) all_reduce(y1.0)@0,1 F2.0 all_reduce(y2.0)@0,1 B2.0 "
        "all_reduce(dx2.0)@0,1 all_gather(x1.0)@0,1 R1.0 B1.0 all_reduce(dx1.0)@0,1 R0.0 B0.0 commit@0,1 U0 U1 U2"
    )
    assert second == first.replace("0/2:", "1/2:")


def test_only_inputs_of_the_selected_blocks_are_partitioned():
    passes = ("recompute", "partition_activations:blocks=2", "offload:activations=disk:blocks=1+3")
    first = format_program(compile_text("tensor(2)", blocks=5, passes=passes).program).splitlines()[0].split()
    moved = [word for word in first if word.startswith(("free", "all_gather", "fetch", "offload"))]
    assert moved == ["offload(x1.0)>disk", "free(x2.0)", "offload(x3.0)>disk", "fetch(x3.0)<disk",
                     "all_gather(x2.0)@0,1", "fetch(x1.0)<disk"]  # fmt: skip


def test_what_was_received_is_partitioned_and_the_inputs_of_the_model_are_not():
    rows = format_program(compile_text("tensor(2) * pipeline(2, recompute=always)", blocks=2, m=2,
                                       passes=PASSES[1:]).program).splitlines()  # fmt: skip
    assert "free" not in rows[0]
    assert "x1.0<0 F1.0 free(x1.0) all_reduce(y1.0)@2,3 all_gather(x1.0)@2,3 R1.0 B1.0" in rows[2]


def test_it_sends_all_parts_but_the_own_one():
    plain, moved = (compile_text("tensor(4)", blocks=6, passes=passes) for passes in (PASSES[:1], PASSES))
    inputs = 4 * 2 * moved.model.find_edge((0, 1)).num_bytes  # of four blocks, two samples
    added = [after - before for before, after in zip(plain.sent_bytes(), moved.sent_bytes(), strict=True)]
    assert added == [Fraction(3, 4) * inputs] * 4


def test_the_simulator_counts_the_time_of_the_gatherings():
    plain, moved = (compile_text("tensor(2)", blocks=6, passes=passes) for passes in (PASSES[:1], PASSES))
    step_s = [simulate(one.program, build_costs(one, latency_s=0.0)).step_s for one in (plain, moved)]
    gathered_s = 4 * moved.model.find_edge((0, 1)).num_bytes * 2 / 2 / 1e8
    assert step_s[1] - step_s[0] == pytest.approx(gathered_s)


def test_memory_is_predicted_with_a_part_of_each_input():
    size, drops = 0, []
    for ranks in (2, 4):
        compiled = [compile_text(f"tensor({ranks})", blocks=6, passes=passes) for passes in (PASSES[:1], PASSES)]
        sizes = [storage_size_fn(one.model, 1000) for one in compiled]
        peaks = [peak_memory_bytes(one.program, fn)[0] for one, fn in zip(compiled, sizes, strict=True)]
        drops.append(peaks[0] - peaks[1])
        size = compiled[0].model.find_edge((0, 1)).num_bytes * 1000
    assert drops == [4 * size // 2, 4 * size * 3 // 4]


def test_memory_is_whole_again_from_the_gathering_on():
    compiled = compile_text("tensor(2)", blocks=3, passes=PASSES)
    size_of = storage_size_fn(compiled.model, 1000)
    (timeline, _), instructions = memory_timeline(compiled.program, size_of), compiled.program.unroll(1)[0]
    during = dict(zip(format_program(compiled.program).splitlines()[0].split()[1:], timeline[1:], strict=True))
    assert len(instructions) == len(during)
    size = compiled.model.find_edge((0, 1)).num_bytes * 1000
    assert during["F1.0"] - during["free(x1.0)"] == size // 2
    assert during["all_gather(x1.0)@0,1"] - during["all_reduce(dx2.0)@0,1"] == size // 2


@pytest.mark.parametrize(
    ("text", "passes", "message"),
    [
        ("tensor(2)", PASSES[1:], "nothing is recomputed; add the pass recompute, or give the pipeline recompute=al"),
        ("data(2)", PASSES, "no two ranks hold the same activations; use tensor\\(n\\), or drop the pass"),
        ("tensor(1)", PASSES, "no two ranks hold the same activations"),
        ("tensor(2) * pipedream(2, recompute=always)", PASSES[1:], "not available; drop it, or give the pipeline sch"),
        ("tensor(2)", ("recompute:block3", PASSES[1]), "finds no input that is kept for a recomputation"),
        ("tensor(2)", ("recompute", "partition_activations:blocks=1", PASSES[1]), "which inputs are partitioned; drop"),
        ("tensor(2)", ("recompute", "partition_activations:blocks=9"), "names block 9, but the program has the blocks"),
        ("tensor(2)", ("recompute", "partition_activations:"), "does not say which blocks"),
        ("tensor(2)", ("recompute", "partition_activation"), "there is no pass 'partition_activation'; the passes are"),
    ],
)
def test_what_makes_no_sense_is_refused(text, passes, message):
    with pytest.raises(PlanError, match=message):
        compile_text(text, passes=passes)


DAMAGE = [
    ("not gathered", "all_gather(x1.0)@0,1", "", "x1.0 is not live here"),
    ("gathered too late", "all_gather(x1.0)@0,1 R1.0", "R1.0 all_gather(x1.0)@0,1", "x1.0 is not live here"),
    ("gathered twice", "all_gather(x1.0)@0,1", "all_gather(x1.0)@0,1 all_gather(x1.0)@0,1", "the part of x1.0 is not live"),
    ("not kept", "free(x1.0)", "", "the part of x1.0 is not live"),
    ("freed too early", "F1.0 free(x1.0)", "free(x1.0) F1.0", "x1.0 is not live here"),
    ("summed", "all_gather(x1.0)@0,1", "all_reduce(x1.0)@0,1", "only partial results are combined"),
    ("halved", "all_gather(x1.0)@0,1", "all_gather_start(x1.0)@0,1 all_gather_wait(x1.0)@0,1", "not split in two"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "instead", "message"), [one[1:] for one in DAMAGE], ids=[one[0] for one in DAMAGE])
def test_an_input_that_is_not_there_is_found(words, instead, message):
    compiled = compile_text("tensor(2)", blocks=3, passes=PASSES)
    program = parse_program(edit(format_program(compiled.program), ((-1, words, instead),)))
    with pytest.raises(ProgramError, match=message) as caught:
        verify(program, bounds_from(compiled.cost), compiled.model.units, count_bytes(program, compiled.model, 2))
    assert caught.value.rule == 4


def test_a_gathering_of_a_part_of_the_parts_is_found():
    text = format_program(compile_text("tensor(4)", blocks=3, passes=PASSES).program)
    rows = [row.replace("all_gather(x1.0)@0-3", f"all_gather(x1.0)@{'0,1' if rank < 2 else '2,3'}")
            for rank, row in enumerate(text.splitlines())]  # fmt: skip
    with pytest.raises(ProgramError, match=r"its members are the shards \[0, 1\] of 4") as caught:
        verify(parse_program("\n".join(rows)))
    assert caught.value.rule == 4
