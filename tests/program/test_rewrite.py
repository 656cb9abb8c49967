"""The rewrites from which strategies are composed."""

from counterpoint.program.instruction import Update
from counterpoint.program.program import Program, shift_microbatch
from counterpoint.program.rewrite import (
    expand,
    forward_blocks,
    grad_completion_index,
    insert_before_commit,
    order_by_grad_completion,
    replicate,
    shift_ranks,
    widen_commits,
)
from counterpoint.program.text import format_instruction, format_program, parse_instruction, parse_program

ALL_WORDS = "F0.1 B0.1:-1 U0 x1.1>1 x1.1<0 all_reduce(grad0)@0,1 push(grad0)>1 pull(weight0)<1 apply_and_reply(0)@0 commit@0 free(x1.1)"


def rewritten(change):
    return " ".join(format_instruction(change(parse_instruction(instruction))) for instruction in ALL_WORDS.split())


def test_shifting_moves_every_rank_an_instruction_names():
    assert rewritten(lambda instruction: shift_ranks(instruction, 4)) == (
        "F0.1 B0.1:-1 U0 x1.1>5 x1.1<4 all_reduce(grad0)@4,5 push(grad0)>5 pull(weight0)<5 apply_and_reply(0)@4 commit@4 free(x1.1)"
    )
    assert rewritten(lambda instruction: shift_ranks(instruction, 0)) == ALL_WORDS


def test_moving_changes_every_microbatch_an_instruction_names():
    assert rewritten(lambda instruction: shift_microbatch(instruction, 4)) == (
        "F0.5 B0.5:-1 U0 x1.5>1 x1.5<0 all_reduce(grad0)@0,1 push(grad0)>1 pull(weight0)<1 apply_and_reply(0)@0 commit@0 free(x1.5)"
    )
    assert rewritten(lambda instruction: shift_microbatch(instruction, 0)) == ALL_WORDS


def test_copies_stand_side_by_side_and_read_their_own_samples_or_the_same():
    program = parse_program("F0.0 F0.1 x1.0>1\nx1.0<0")
    assert format_program(replicate(program, 2)) == "F0.0 F0.1 x1.0>1\nx1.0<0\nF0.2 F0.3 x1.2>3\nx1.2<2"
    assert format_program(replicate(program, 2, same_samples=True)).splitlines()[2] == "F0.0 F0.1 x1.0>3"


def test_expanding_reaches_all_three_parts_of_a_rank_program():
    program = parse_program("F0.0 | U0 | B0.+0")
    assert (
        format_program(expand(program, lambda rank, instruction: (instruction, Update((rank,)))))
        == "F0.0 U0 | U0 U0 | B0.+0 U0"
    )


def test_instructions_are_put_before_the_commit_of_rank_programs_that_have_one():
    program = parse_program("B0.0 commit@0,1 U0\nB1.0 commit@0,1\napply_and_reply(0)@0")
    put = [
        insert_before_commit(rank_program, [Update((7,))] if rank != 1 else [])
        for rank, rank_program in enumerate(program.rank_programs)
    ]
    assert format_program(Program(tuple(put))) == "B0.0 U7 commit@0,1 U0\nB1.0 commit@0,1\napply_and_reply(0)@0"


def test_copies_commit_together():
    program = replicate(parse_program("commit@0\ncommit@1"), 2)
    assert format_program(widen_commits(program, 2)) == "commit@0,2\ncommit@1,3\ncommit@0,2\ncommit@1,3"


def test_units_come_in_the_order_in_which_their_gradients_are_complete():
    rank_program = parse_program("F0.0 B2.0 B1.0 B0.0").rank_programs[0]
    assert order_by_grad_completion(rank_program, [(0,), (1,), (2,), (0, 2), (9,)]) == [(9,), (2,), (1,), (0,), (0, 2)]


def test_a_rank_program_knows_the_blocks_of_its_prologue_and_of_its_body():
    assert forward_blocks(parse_program("F3.0 F1.0 | F1.+1 | B1.+1").rank_programs[0]) == {1, 3}


def test_an_empty_program_has_no_ranks():
    assert (Program(()).num_ranks, Program(()).micros, Program(()).is_async_pipeline) == (0, (), False)


def test_a_gradient_is_complete_after_the_last_instruction_that_adds_to_it():
    words = (
        parse_program("B2.0 grad2<1 B0.0 grad0+2<1 all_reduce(grad0+2)@0,1 grad2>3 commit@0,1").rank_programs[0].body
    )
    assert [grad_completion_index(words, unit) for unit in ((2,), (0, 2), (1,))] == [1, 4, None]
