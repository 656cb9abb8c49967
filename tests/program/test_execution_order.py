"""Execution order: one valid order of all instructions, or the ranks that wait for each other."""

import pytest

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import check_rendezvous_sends, execution_order, format_locations
from counterpoint.program.text import format_instruction, parse_program


def instruction_order(text):
    rows = parse_program(text).unroll(1)
    return [f"{rank}:{format_instruction(rows[rank][index])}" for rank, index in execution_order(rows)]


def test_each_rank_goes_as_far_as_it_can_and_a_receive_comes_after_its_send():
    assert instruction_order("x1.0<1 F1.0\nF0.0 x1.0>0 U0") == ["1:F0.0", "1:x1.0>0", "1:U0", "0:x1.0<1", "0:F1.0"]


def test_the_members_of_a_collective_come_one_after_the_other_in_rank_order():
    assert instruction_order("F0.0 all_reduce(grad0)@0-2 U0\nall_reduce(grad0)@0-2\nB0.0 all_reduce(grad0)@0-2") == [
        *("0:F0.0", "2:B0.0", "0:all_reduce(grad0)@0-2", "1:all_reduce(grad0)@0-2", "2:all_reduce(grad0)@0-2", "0:U0"),
    ]


def test_a_start_passes_at_once_and_a_wait_when_every_member_has_started():
    assert instruction_order(
        "all_reduce_start(grad0)@0,1 F0.0 all_reduce_wait(grad0)@0,1 U0\nF0.1 all_reduce_start(grad0)@0,1 U1 all_reduce_wait(grad0)@0,1"
    ) == [
        *(
            "0:all_reduce_start(grad0)@0,1",
            "0:F0.0",
            "1:F0.1",
            "1:all_reduce_start(grad0)@0,1",
            "1:U1",
            "1:all_reduce_wait(grad0)@0,1",
        ),
        *("0:all_reduce_wait(grad0)@0,1", "0:U0"),
    ]


def test_a_server_waits_for_all_pushes_and_a_worker_for_its_answer():
    text = "push(grad0)>2 pull(weight0)<2\nF0.0 push(grad0)>2 pull(weight0)<2\napply_and_reply(0)@0,1"
    assert instruction_order(text) == [
        *(
            "0:push(grad0)>2",
            "1:F0.0",
            "1:push(grad0)>2",
            "2:apply_and_reply(0)@0,1",
            "0:pull(weight0)<2",
            "1:pull(weight0)<2",
        ),
    ]


def test_ranks_that_wait_for_each_other_are_all_shown():
    with pytest.raises(ProgramError) as caught:
        instruction_order("F0.0 g0.0<1 x1.0>1\nx1.0<0 g0.0>0\nU0")
    assert str(caught.value) == (
        "verifier rule 2 violated: deadlock: 2 of 3 ranks wait for each other\n"
        "  rank 0: F0.0 [g0.0<1] x1.0>1 <- waits here\n"
        "  rank 1: [x1.0<0] g0.0>0 <- waits here"
    )


@pytest.mark.parametrize(
    "text",
    [
        "x1.0>1 g0.0<1\ng0.0>0 x1.0<0",
        "F0.0 x1.0>1 F0.1 x1.1>1 g0.0<1 B0.0\nx1.0<0 F1.0 B1.0 g0.0>0 x1.1<0 F1.1",
        "x0.0>1\nF0.0 F0.1 x0.0<0",
    ],
)
def test_sends_and_receives_that_stand_together_are_one_batch(text):
    rows = parse_program(text).unroll(1)
    check_rendezvous_sends(rows)
    assert len(list(execution_order(rows))) == sum(map(len, rows))


@pytest.mark.parametrize("text", ["x1.0>1\nF0.0", "x1.0>1\nx1.0>0", "x1.0>1\nF0.0 x1.0<2\nU0"])
def test_a_send_without_a_receive_blocks_forever(text):
    with pytest.raises(ProgramError, match="deadlock") as caught:
        check_rendezvous_sends(parse_program(text).unroll(1))
    assert caught.value.rule == 2


def test_places_are_shown_in_brackets_with_two_instructions_on_either_side():
    rows = parse_program("F0.0 F0.1 F0.2 F0.3 F0.4 F0.5").unroll(1)
    assert format_locations(rows, {0: 3}, "here") == "  rank 0: F0.1 F0.2 [F0.3] F0.4 F0.5 <- here"
    assert format_locations(rows, {0: 0}, "here") == "  rank 0: [F0.0] F0.1 F0.2 <- here"


def test_no_more_places_are_shown_than_fit_a_message():
    rows = parse_program("\n".join(["F0.0"] * 11)).unroll(1)
    assert format_locations(rows, dict.fromkeys(range(11), 0), "here").splitlines()[7:] == [
        "  rank 7: [F0.0] <- here",
        "  and 3 more ranks",
    ]
