import pytest

from counterpoint.program.program import Program, RankProgram
from counterpoint.program.text import parse_program
from counterpoint.program.trace import Trace, TraceEvent
from counterpoint.viz.ascii_timeline import abbreviate_program, draw_ascii_timeline
from tests.viz.sample_traces import PROGRAM, REAL, UNIT


def test_a_trace_of_unit_costs_has_one_column_per_tick():
    assert draw_ascii_timeline(UNIT, tick_s=1).splitlines() == [
        "tick   0  1  2  3  4  5",
        "rank 0 F0 F1 .  .  B0 ==",
        "rank 1 .  F0 B0 == F1 .",
    ]


def test_without_ticks_a_column_is_an_equal_part_of_the_step():
    assert draw_ascii_timeline(UNIT, tick_s=None, width=31).splitlines() == [
        "s      0                   5",
        "rank 0 F0==F1==........B0======",
        "rank 1 ....F0==B0======F1==....",
    ]


def test_ticks_that_do_not_fit_are_counted():
    assert draw_ascii_timeline(UNIT, tick_s=1, width=16).splitlines() == [
        "tick   0  1  2",
        "rank 0 F0 F1 .",
        "rank 1 .  F0 B0",
        "and 3 more ticks of 6",
    ]


def test_ranks_that_do_not_fit_are_counted_and_names_stay_in_line():
    events = [TraceEvent(rank, 0, f"F0.{rank}", 0.0, 1.0, "compute") for rank in range(40)]
    lines = draw_ascii_timeline(Trace.from_events(events, 40, "simulated"), tick_s=1, max_ranks=11).splitlines()
    assert lines[:3] == ["tick    0", "rank 0  F0", "rank 1  F1"]
    assert lines[-2:] == ["rank 10 F10", "and 29 more ranks"]


@pytest.mark.parametrize("tick_s", [None, 1.0, 0.25, 3.0])
@pytest.mark.parametrize("width", [1, 12, 40, 100])
def test_no_line_is_wider_than_asked_and_all_are_ascii(tick_s, width):
    drawing = draw_ascii_timeline(UNIT, tick_s=tick_s, width=width)
    assert drawing.isascii()
    grid = [line for line in drawing.splitlines() if not line.startswith("and ")]
    assert max(map(len, grid)) <= max(width, 10)


def test_a_cell_shows_what_took_most_of_it():
    events = [TraceEvent(0, 0, "F0.0", 0.0, 0.7, "compute"), TraceEvent(0, 1, "B0.0", 0.7, 1.4, "compute")]
    assert draw_ascii_timeline(Trace.from_events(events, 1, "measured"), tick_s=1).splitlines()[1] == "rank 0 F0 ."


def test_names_other_than_microbatches_are_short_and_transfers_stay_out():
    assert draw_ascii_timeline(REAL, tick_s=0.001).splitlines()[1] == "rank 0 F0 == == == B0 == == == == == == == .  U"


def test_ticks_of_narrow_columns_are_numbered_where_there_is_room():
    events = [TraceEvent(0, at, "U0", at, at + 1, "compute") for at in range(12)]
    assert draw_ascii_timeline(Trace.from_events(events, 1, "simulated"), tick_s=1).splitlines() == [
        "tick   0   2   4   6   8   10",
        "rank 0 U U U U U U U U U U U U",
    ]


def test_a_trace_in_which_nothing_takes_time_is_still_drawn():
    nothing = Trace((TraceEvent(0, 0, "F0.0", 0.0, 0.0, "compute"),), 2, "simulated")
    assert draw_ascii_timeline(nothing, tick_s=1).splitlines() == ["tick", "rank 0", "rank 1"]
    assert draw_ascii_timeline(nothing, tick_s=None).splitlines() == ["time   0", "rank 0", "rank 1"]


@pytest.mark.parametrize("tick_s", [0.0, -1.0, float("nan")])
def test_a_tick_takes_time(tick_s):
    with pytest.raises(ValueError, match="a column needs a positive duration; give seconds above 0"):
        draw_ascii_timeline(UNIT, tick_s=tick_s)


def test_rank_programs_that_fit_are_not_abbreviated():
    assert abbreviate_program(PROGRAM).splitlines() == [
        "rank 0 F0.0 x1.0>1 F0.1 x1.1>1 g0.0<1 B0.0 g0.1<1 B0.1 U0",
        "rank 1 x1.0<0 F1.0 B1.0 g0.0>0 x1.1<0 F1.1 U1",
    ]


def test_a_long_rank_program_keeps_its_beginning_and_its_end():
    assert abbreviate_program(PROGRAM, width=40).splitlines() == [
        "rank 0 F0.0 x1.0>1 F0.1 ..4.. B0.1 U0",
        "rank 1 x1.0<0 F1.0 B1.0 ..2.. F1.1 U1",
    ]
    assert abbreviate_program(PROGRAM, width=1).splitlines() == ["rank 0 F0.0 ..7.. U0", "rank 1 x1.0<0 ..5.. U1"]


def test_a_rank_program_that_is_too_short_to_abbreviate_stays_whole():
    assert abbreviate_program(parse_program("all_reduce(grad0)@0,1 U0"), width=12) == "rank 0 all_reduce(grad0)@0,1 U0"


def test_of_many_ranks_the_first_and_the_last_are_written():
    program = Program(tuple(RankProgram(parse_program(f"U{rank}").rank_programs[0].body) for rank in range(1000)))
    assert abbreviate_program(program, max_ranks=3).splitlines() == [
        "rank 0   U0",
        "rank 1   U1",
        "997 more ranks",
        "rank 999 U999",
    ]


def test_an_async_pipeline_keeps_its_three_parts():
    program = parse_program("F0.0 | F0.+1 B0.+0 U0 | B0.+0 U0")
    assert abbreviate_program(program) == "rank 0 F0.0 | F0.+1 B0.+0 U0 | B0.+0 U0"
