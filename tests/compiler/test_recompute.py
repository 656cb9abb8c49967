"""Recomputation: where it is inserted, what the rules require, what is refused."""

from dataclasses import replace

import pytest

from counterpoint.compiler.compile import bounds_from, compile as compile_plan, count_bytes
from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.recompute_sets import peak_saved_activations
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import verify
from tests.program.verify.damaged_programs import edit
from tests.program.verify.random_plans import compile_text


def rows(text, **given):
    return format_program(compile_text(text, **given).program).splitlines()


def test_a_stage_is_recomputed_at_once_before_its_gradient_arrives():
    first, last = rows("gpipe(2, checkpoint=always)", m=2, blocks=4)
    assert first == (
        "F0.0 F1.0 x2.0>1 F0.1 F1.1 x2.1>1 R0.1 R1.1 g1.1<1 B1.1 B0.1 R0.0 R1.0 g1.0<1 B1.0 B0.0 commit@0,1 U0 U1"
    )
    assert last.startswith("x2.0<0 F2.0 F3.0 x2.1<0 F2.1 F3.1 R2.1 R3.1 B3.1 B2.1 g1.1>0 R2.0 R3.0 B3.0 B2.0")


def test_except_last_keeps_what_goes_backward_next():
    """Under gpipe that is the last microbatch, as in torchgpipe; under 1F1B every one of the last stage."""
    first, last = rows("gpipe(2, checkpoint=except_last)", m=2)
    assert first == "F0.0 x1.0>1 F0.1 x1.1>1 g0.1<1 B0.1 R0.0 g0.0<1 B0.0 commit@0,1 U0"
    assert last == "x1.0<0 F1.0 x1.1<0 F1.1 B1.1 g0.1>0 R1.0 B1.0 g0.0>0 commit@0,1 U1"
    assert "R" not in rows("pipeline(2, recompute=except_last)", m=4)[1]


def test_the_pass_recomputes_one_block_after_the_other():
    assert rows("solo", blocks=3, passes=("recompute",)) == [
        "F0.0 F1.0 F2.0 B2.0 R1.0 B1.0 R0.0 B0.0 commit@0 U0 U1 U2"
    ]


def test_a_block_whose_weights_are_gathered_is_recomputed_with_those_of_its_backward():
    compiled = compile_text("zero3(2)", blocks=2, passes=("recompute",))
    plain = compile_text("zero3(2)", blocks=2)
    assert "all_gather(weight0)@0,1 R0.0 B0.0 reduce_scatter(grad0)@0,1" in format_program(compiled.program)
    assert compiled.sent_bytes() == plain.sent_bytes()


def test_a_recomputation_of_shards_sends_nothing_and_keeps_what_a_sum_has_made():
    compiled = compile_text("tensor(2) * pipeline(2, recompute=always)", blocks=4)
    assert compiled.sent_bytes() == compile_text("tensor(2) * pipeline(2)", blocks=4).sent_bytes()


def test_a_recomputation_reads_the_version_of_its_forward():
    assert "R0.+1:-1 g0.+1<1 B0.+1:-1" in rows("pipedream(2, recompute=always)")[0].split(" | ")[1]


def test_the_input_part_of_a_backward_is_what_is_recomputed_for():
    assert "R0.0 g0.0<1 Bi0.0 Bw0.0" in rows("zero_bubble(2, recompute=always)", m=2)[0]


def layers(*names):
    blocks = [
        Block((LayerSpec(name, (name,), cost=cost, output_bytes=4),), at) for at, (name, cost) in enumerate(names)
    ]
    return ModelSpec(tuple(blocks), tuple(Param(name, (2,)) for name, _ in names))


def chosen(which):
    model = layers(("wte", 9.0), ("h.0.attn", 2.0), ("h.0.mlp", 4.0), ("h.1.attn", 2.0), ("h.1.mlp", 4.0))
    compiled = compile_plan(Plan((), 1, (f"recompute:{which}",)), model)
    return [instruction for instruction in format_program(compiled.program).split() if instruction.startswith("R")]


def test_blocks_are_chosen_by_module_path_or_by_what_costs_least_work_per_byte():
    assert chosen("*.attn") == ["R3.0", "R1.0"]
    assert chosen("h.0") == ["R2.0", "R1.0"]
    assert chosen("40%") == ["R3.0", "R1.0"]
    assert chosen("blocks=0-1+3") == ["R3.0", "R1.0", "R0.0"]


@pytest.mark.parametrize(
    ("text", "passes", "message"),
    [
        (
            "solo",
            ("recompute:conv*",),
            "no block of the model matches recompute:conv\\*; its blocks are block0, block1",
        ),
        ("solo", ("recompute:",), "does not say which blocks; write recompute for all blocks"),
        ("solo", ("recompute:0%",), "does not say which blocks"),
        ("solo", ("recompute:blocks=",), "does not say which blocks; write .* recompute:blocks=0-3\\+7 for those"),
        ("solo", ("recompute:blocks=3-1",), "does not say which blocks"),
        ("solo", ("recompute:blocks=0-999999999",), "names block 999999999, but the program has the blocks 0 to 1"),
        ("gpipe(2, checkpoint=always)", ("recompute",), "recompute=always of .* and the pass recompute both say"),
        ("gpipe(2, checkpoint=sometimes)", (), "gpipe has no checkpoint=sometimes; give checkpoint=never"),
        ("solo", ("overlap:1",), "there is no pass 'overlap:1'; the passes are overlap, recompute"),
    ],
)
def test_what_makes_no_sense_is_refused(text, passes, message):
    with pytest.raises(PlanError, match=message):
        compile_text(text, passes=passes)


def test_recomputing_needs_a_model_in_blocks():
    assert Plan((), 1, ("recompute",)).granularity == "blocks"
    assert Plan.parse("data(2)").granularity == "whole"


DAMAGE = [
    ("behind its backward", 4, "R0.0 g0.0<1 B0.0", "g0.0<1 B0.0 R0.0", "before its backward"),
    ("before its forward", 4, "F0.0", "R0.0 F0.0", "on the rank that ran its forward"),
    ("twice", 4, "R0.0", "R0.0 R0.0", "has been recomputed already"),
    ("by another rank", 4, "R0.0", "R1.0", "on the rank that ran its forward"),
    ("with other weights", 5, "R0.0", "R0.0:-1", "no version -1 of weight0 is held"),
    ("not at all", 7, "R0.0", "", "holds saved activations for 2 backwards at once"),
    ("not at all, in time", 7, "R0.1", "", "saves activations for the backward of block 0 on microbatch 1"),
    ("too early", 7, "x1.1>1 R0.1 g0.1<1 B0.1 R0.0", "x1.1>1 R0.1 R0.0 g0.1<1 B0.1", "it is at most 1"),
]


@pytest.mark.parametrize(
    ("rule", "words", "instead", "message"), [one[1:] for one in DAMAGE], ids=[one[0] for one in DAMAGE]
)
def test_a_block_that_is_recomputed_wrongly_is_found(rule, words, instead, message):
    compiled = compile_text("gpipe(2, checkpoint=always)", m=2)
    program = parse_program(edit(format_program(compiled.program), ((0, words, instead),)))
    with pytest.raises(ProgramError, match=message) as caught:
        verify(program, bounds_from(compiled.cost), compiled.model.units, count_bytes(program, compiled.model, 1))
    assert caught.value.rule == rule


def test_an_async_pipeline_that_recomputes_with_newer_weights_is_found():
    compiled = compile_text("pipedream(2, recompute=always)")
    text = format_program(compiled.program).replace("R0.+1:-1", "R0.+1")
    with pytest.raises(ProgramError, match="forward used version 0 of weight0, recomputation 1") as caught:
        verify(parse_program(text), bounds_from(compiled.cost), compiled.model.units)
    assert caught.value.rule == 5


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_the_activations_of_one_microbatch_are_there_at_once(schedule):
    for recompute, saved in [("never", [6, 3]), ("except_last", [3, 3]), ("always", [3, 3])]:
        compiled = compile_text(f"pipeline(2, schedule={schedule}, recompute={recompute})", m=2, blocks=6)
        first = peak_saved_activations(compiled.program.rank_programs[0].body)
        assert first == saved[0]
    assert (
        peak_saved_activations(compile_text("solo", blocks=6, passes=("recompute",)).program.rank_programs[0].body) == 1
    )


def test_a_plan_says_in_text_what_it_recomputes():
    plan = Plan.parse("pipeline(2, recompute=except_last)", num_microbatches=2)
    assert str(plan) == "pipeline(2, recompute=except_last)"
    assert Plan.from_yaml(replace(Plan.parse("solo"), passes=("recompute:*.attn",)).to_yaml()).passes == (
        "recompute:*.attn",
    )
    assert compile_plan(plan, linear_chain(2)).plan == plan
