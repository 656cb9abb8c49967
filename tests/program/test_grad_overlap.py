"""Which reductions may start before the backward has ended."""

import pytest

from counterpoint.program.grad_overlap import overlappable_reductions
from counterpoint.program.text import format_instruction, parse_program


def early(text, rank=0):
    result = overlappable_reductions(parse_program(text), rank)
    return {at: " ".join(map(format_instruction, words)) for at, words in result.items()}


def test_an_all_reduce_started_after_the_last_backward_may_begin_during_it():
    row = "F0.{0} B0.{0} F0.{1} B0.{1} all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1 commit@0,1 U0"
    assert early(row.format(0, 1) + "\n" + row.format(2, 3)) == {3: "all_reduce_start(grad0)@0,1"}


def test_what_is_said_to_other_stages_in_between_does_not_matter():
    row = "B0.{0} g0.{0}>{1} all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1"
    assert early(f"{row.format(0, 2)}\n{row.format(1, 3)}\ng0.0<0\ng0.1<1") == {0: "all_reduce_start(grad0)@0,1"}


@pytest.mark.parametrize(
    "end",
    [
        "all_reduce(grad0)@0,1",  # no pass has split it
        "all_reduce_start:int8(grad0)@0,1 all_reduce_wait:int8(grad0)@0,1",  # a code takes whole gradients
        "commit@0,1 all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1",
        "grad0>1 all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1",
    ],
)
def test_no_other_instruction_begins_early(end):
    assert early(f"F0.0 B0.0 {end}\nF0.1 B0.1 {end}") == {}


def test_several_sums_of_a_group_begin_together():
    row = "B1.{0} B0.{0} all_reduce_start(grad1)@0,1 all_reduce_start(grad0)@0,1 all_reduce_wait(grad1)@0,1 all_reduce_wait(grad0)@0,1"
    assert early(row.format(0) + "\n" + row.format(1)) == {1: "all_reduce_start(grad1)@0,1 all_reduce_start(grad0)@0,1"}


def test_where_rank_programs_of_a_group_differ_nothing_begins_early():
    rows = "B0.0 all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1\nB0.1 commit@1 all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1"
    assert early(rows, 0) == early(rows, 1) == {}


def test_groups_whose_rank_programs_agree_overlap_although_others_do_not():
    rows = [
        "B0.0 all_reduce_start(grad0)@0,1 all_reduce_start(grad1)@0,2 all_reduce_wait(grad0)@0,1 all_reduce_wait(grad1)@0,2",
        "B0.1 all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1",
        "B1.0 commit@2 all_reduce_start(grad1)@0,2 all_reduce_wait(grad1)@0,2",
    ]
    assert early("\n".join(rows)) == {0: "all_reduce_start(grad0)@0,1"}
