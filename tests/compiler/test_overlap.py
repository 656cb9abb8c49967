"""Reductions start early and are awaited late, without changing results."""

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.compiler.overlap import overlap
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param
from counterpoint.plan.plan import Plan
from counterpoint.program.text import format_program, parse_program
from tests.program.verify.random_plans import compile_text


def early(text):
    return format_program(overlap(parse_program(text)))


def test_a_sum_starts_after_the_last_backward_of_its_unit_and_is_waited_for_where_it_stood():
    assert early("F0.0 F1.0 B1.0 B0.0 all_reduce(grad1)@0 all_reduce(grad0)@0 commit@0 U0 U1") == (
        "F0.0 F1.0 B1.0 all_reduce_start(grad1)@0 B0.0 all_reduce_start(grad0)@0 all_reduce_wait(grad1)@0 all_reduce_wait(grad0)@0 commit@0 U0 U1"
    )


def test_a_tied_weight_waits_for_the_backward_of_its_first_block():
    assert early("B2.0 B1.0 B0.0 all_reduce(grad1)@0 all_reduce(grad0+2)@0 commit@0") == (
        "B2.0 B1.0 all_reduce_start(grad1)@0 B0.0 all_reduce_start(grad0+2)@0 all_reduce_wait(grad1)@0 all_reduce_wait(grad0+2)@0 commit@0"
    )


def test_a_gradient_that_others_add_to_waits_for_what_they_send():
    assert early("B1.0 B0.0 grad1<1 grad0<1 all_reduce(grad1)@0 all_reduce(grad0)@0 commit@0") == (
        "B1.0 B0.0 grad1<1 all_reduce_start(grad1)@0 grad0<1 all_reduce_start(grad0)@0 all_reduce_wait(grad1)@0 all_reduce_wait(grad0)@0 commit@0"
    )


@pytest.mark.parametrize(
    "text",
    [
        "F0.0 B0.0 commit@0 U0 all_reduce(weight0)@0",
        "B0.0 reduce_scatter(grad0)@0 all_reduce(grad0)@1 commit@0 U0",
        "all_reduce(grad0)@0 commit@0 U0",
        "B0.0 all_reduce(grad0)@0 U0",
        "F0.0 all_reduce(y0.0)@0 B0.0 commit@0 U0",
    ],
)
def test_instructions_stay_where_moving_them_would_be_wrong_or_idle(text):
    assert early(text) == text


def test_only_the_gradients_are_moved_in_a_sharded_step():
    program = compile_text("zero(2)", passes=("overlap",)).program
    assert format_program(program).splitlines()[0] == (
        "F0.0 F1.0 B1.0 reduce_scatter_start(grad1)@0,1 B0.0 reduce_scatter_start(grad0)@0,1 reduce_scatter_wait(grad1)@0,1 reduce_scatter_wait(grad0)@0,1 commit@0,1 U0 U1 "
        "all_gather(weight0)@0,1 all_gather(weight1)@0,1"
    )


def test_members_whose_tied_units_are_complete_in_another_order_still_start_alike():
    """Blocks 0 and 3 share a weight, 1 and 2 another: stage 0 completes 1+2 first, stage 1 completes 0+3 first."""
    names = "abba"
    pieces = [LayerSpec(f"piece{index}", (name,), output_bytes=8) for index, name in enumerate(names)]
    blocks = tuple(Block((piece,), index) for index, piece in enumerate(pieces))
    model = ModelSpec(blocks, (Param("a", (4,)), Param("b", (4,))))
    compiled = compile_plan(Plan(Plan.parse("pipeline(2)").strategies, 1, ("overlap",)), model)
    starts = [
        [instruction for instruction in rank_program.body if getattr(instruction, "phase", "") == "start"]
        for rank_program in compiled.program.rank_programs
    ]
    assert starts[0] == starts[1]
    assert len(starts[0]) == 2
