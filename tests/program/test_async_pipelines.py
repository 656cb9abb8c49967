"""Asynchronous pipelines: programs with prologue, body and epilogue. PipeDream's programs are written by hand."""

from dataclasses import replace

import pytest

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import execution_order
from counterpoint.program.instruction import Backward
from counterpoint.program.program import Program, shift_microbatch
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import Bounds, verify
from tests.program.verify.damaged_programs import edit, verify_text
from tests.program.verify.random_plans import compile_text

TWO = "\n".join(
    [
        "F0.0 x1.0>1 F0.1 x1.1>1 g0.0<1 B0.0 commit@0 U0"
        " | F0.+2 x1.+2>1 g0.+1<1 B0.+1:-1 commit@0 U0"
        " | g0.+1<1 B0.+1:-1 commit@0 U0",
        "x1.0<0 F1.0 B1.0 g0.0>0 commit@1 U1"
        " | x1.+1<0 F1.+1 B1.+1 g0.+1>0 commit@1 U1"
        " | x1.+1<0 F1.+1 B1.+1 g0.+1>0 commit@1 U1",
    ]
)

THREE = "\n".join(
    [
        "F0.0 x1.0>1 F0.1 x1.1>1 F0.2 x1.2>1 g0.0<1 B0.0 commit@0 U0 F0.3 x1.3>1 g0.1<1 B0.1:-1 commit@0 U0"
        " | F0.+4 x1.+4>1 g0.+2<1 B0.+2:-2 commit@0 U0 | g0.+2<1 B0.+2:-2 commit@0 U0 g0.+3<1 B0.+3:-2 commit@0 U0",
        "x1.0<0 F1.0 x2.0>2 x1.1<0 F1.1 x2.1>2 g1.0<2 B1.0 g0.0>0 commit@1 U1"
        " x1.2<0 F1.2 x2.2>2 g1.1<2 B1.1:-1 g0.1>0 commit@1 U1"
        " | x1.+3<0 F1.+3 x2.+3>2 g1.+2<2 B1.+2:-1 g0.+2>0 commit@1 U1"
        " | x1.+3<0 F1.+3 x2.+3>2 g1.+2<2 B1.+2:-1 g0.+2>0 commit@1 U1 g1.+3<2 B1.+3:-1 g0.+3>0 commit@1 U1",
        "x2.0<1 F2.0 B2.0 g1.0>1 commit@2 U2 x2.1<1 F2.1 B2.1 g1.1>1 commit@2 U2"
        " | x2.+2<1 F2.+2 B2.+2 g1.+2>1 commit@2 U2"
        " | x2.+2<1 F2.+2 B2.+2 g1.+2>1 commit@2 U2 x2.+3<1 F2.+3 B2.+3 g1.+3>1 commit@2 U2",
    ]
)
STREAMS = pytest.mark.parametrize(("text", "stages"), [(TWO, 2), (THREE, 3)], ids=["two stages", "three stages"])


@STREAMS
def test_an_async_pipeline_reads_back_as_it_was_written(text, stages):
    program = parse_program(text)
    assert format_program(program) == text
    assert program.is_async_pipeline
    assert program.num_ranks == stages


@STREAMS
def test_the_strategy_writes_what_a_person_does(text, stages):
    assert format_program(compile_text(f"pipedream({stages})", blocks=stages).program) == text


@STREAMS
def test_an_async_pipeline_keeps_the_rules_with_the_staleness_of_its_stages(text, stages):
    symbolic = verify_text(text, staleness=stages - 1, in_flight=tuple(range(stages, 0, -1)))
    oldest = [max(entry.staleness for entry in symbolic.updates if entry.rank == rank) for rank in range(stages)]
    assert oldest == list(range(stages - 1, -1, -1))


@STREAMS
def test_an_async_pipeline_exceeds_a_smaller_bound_on_staleness(text, stages):
    with pytest.raises(ProgramError, match=f"a gradient {stages - 1} updates old") as caught:
        verify_text(text, staleness=stages - 2)
    assert caught.value.rule == 5


@STREAMS
def test_an_async_pipeline_exceeds_a_smaller_bound_on_microbatches_in_flight(text, stages):
    with pytest.raises(ProgramError, match=f"rank 0 has {stages} microbatches in flight") as caught:
        verify_text(text, staleness=stages - 1, in_flight=(stages - 1,) * stages)
    assert caught.value.rule == 7


@STREAMS
def test_in_the_steady_state_stage_s_of_n_goes_backward_n_minus_s_minus_1_versions_ago(text, stages):
    for stage, rank_program in enumerate(parse_program(text).rank_programs):
        assert {instruction.version for instruction in rank_program.body if isinstance(instruction, Backward)} == {
            stage + 1 - stages
        }


@STREAMS
@pytest.mark.parametrize("times", [1, 2, 5])
def test_an_unrolled_async_pipeline_does_each_microbatch_once_and_can_be_walked(text, stages, times):
    program = parse_program(text)
    unrolled = program.unroll(times)
    assert len(list(execution_order(unrolled))) == sum(len(instructions) for instructions in unrolled)
    micros = [instruction.micro for instruction in unrolled[0] if isinstance(instruction, Backward)]
    assert micros == list(range(times + 2 * (stages - 1)))


def test_a_repetition_starts_the_microbatches_that_enter_block_0():
    assert parse_program(TWO).micros == (2,)
    assert parse_program(THREE).micros == (4,)
    assert compile_text("data(2)", m=2).program.micros == (0, 1, 2, 3)


def test_an_async_pipeline_that_reads_the_wrong_version_breaks_rule_5():
    with pytest.raises(ProgramError, match="forward used version 0 of weight0, backward 1") as caught:
        verify_text(edit(TWO, ((0, "B0.+1:-1 commit@0 U0 |", "B0.+1 commit@0 U0 |"),)), staleness=1)
    assert caught.value.rule == 5


def test_an_async_pipeline_whose_body_is_not_steady_state_is_refused():
    """Twice it works out: microbatch 5 went forward in the prologue. A third time it would go forward again."""
    text = "F0.0 F0.1 F0.5 | F0.+2 B0.+0 | B0.+0 B0.+1 F0.+2 B0.+2 B0.+3 commit@0 U0"
    with pytest.raises(ProgramError, match="the loop body is not steady-state") as caught:
        verify_text(text)
    assert caught.value.rule == 7
    verify_text("F0.0 F0.1 | F0.+2 B0.+0 | B0.+0 B0.+1 commit@0 U0")


def test_an_async_pipeline_that_reads_the_right_version_twice_but_not_a_third_time_breaks_rule_7():
    """Stage 0 of 4 as its last prologue forward comes one update late: only the third body would meet it."""
    text = (
        "F0.0 F0.1 F0.2 F0.3 B0.0 commit@0 U0 F0.4 B0.1:-1 commit@0 U0 B0.2:-2 commit@0 U0 F0.5"
        " | F0.+6 B0.+3:-3 commit@0 U0 | B0.+3:-2 commit@0 U0 B0.+4:-3 commit@0 U0 B0.+5:-3 commit@0 U0"
    )
    with pytest.raises(ProgramError) as caught:
        verify_text(text, staleness=3)
    assert caught.value.rule == 7


@pytest.mark.parametrize(
    "plan", ["solo", "pipeline(2) * data(2)", "zero2(2)", "zero3(2)", "server(2)", "asp(2)", "tensor(2)"]
)
def test_a_synchronous_program_keeps_the_rules_over_several_steps(plan):
    """A stream of steps: one in front, and two repetitions of the body."""
    compiled = compile_text(plan, m=2)
    stride = len(compiled.program.micros)
    rank_programs = tuple(
        replace(
            rank_program,
            prologue=rank_program.body,
            body=tuple(shift_microbatch(instruction, stride) for instruction in rank_program.body),
        )
        for rank_program in compiled.program.rank_programs
    )
    symbolic = verify(Program(rank_programs), Bounds(compiled.cost.staleness), compiled.model.units)
    assert len(symbolic.updates) == 3 * len(compiled.symbolic.updates)


def test_unrolling_once_gives_the_bodies_unchanged():
    program = compile_text("data(2)").program
    assert program.unroll(1) == tuple(rank_program.body for rank_program in program.rank_programs)
    assert not program.is_async_pipeline


HALVES = "F0.0 Bi0.0 | F0.+1 Bi0.+1 Bw0.+0 commit@0 U0 | Bw0.+0 commit@0 U0"


def test_an_async_pipeline_may_put_weight_parts_off_for_a_repetition():
    symbolic = verify_text(HALVES, staleness=1, in_flight=(2,))
    assert [sorted(mark[1] for mark in entry.contributions) for entry in symbolic.updates] == [[0], [1], [2]]
