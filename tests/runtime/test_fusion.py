"""A rank program as calls: what is fused, where segments end, and what evaluation keeps."""

import pytest

from counterpoint.program.text import format_instruction, parse_instruction
from counterpoint.runtime.fusion import (
    ApplyPushesRun,
    BackwardRun,
    CollectiveRun,
    ForwardRun,
    UpdateRun,
    forward_only,
    fuse,
    segment_boundaries,
)


def words(text):
    return [parse_instruction(instruction) for instruction in text.split()]


def calls(text):
    """Return each call as its text, and check that together they are the whole row in order."""
    row = words(text)
    fused = fuse(row)
    assert [index for _, start, stop in fused for index in range(start, stop)] == list(range(len(row)))
    return [" ".join(format_instruction(instruction) for instruction in row[start:stop]) for _, start, stop in fused]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("F0.0 F1.0 F2.0", ["F0.0 F1.0 F2.0"]),
        ("F0.0 F1.0 F0.1 F1.1", ["F0.0 F1.0", "F0.1 F1.1"]),
        ("F0.0 F2.0", ["F0.0", "F2.0"]),
        ("F0.0 F1.0 B1.0 B0.0", ["F0.0 F1.0", "B1.0 B0.0"]),
        ("B2.0 B1.0 all_reduce(grad1)@0,1 B0.0", ["B2.0 B1.0", "all_reduce(grad1)@0,1", "B0.0"]),
        ("B0.0 B1.0", ["B0.0", "B1.0"]),
        ("all_reduce(grad1)@0,1 all_reduce(grad0)@0,1 U0 U1", ["all_reduce(grad1)@0,1 all_reduce(grad0)@0,1", "U0 U1"]),
        ("all_reduce(grad1)@0,1 all_reduce(grad0)@0,2", ["all_reduce(grad1)@0,1", "all_reduce(grad0)@0,2"]),
        ("reduce_scatter(grad1)@0,1 all_gather(weight1)@0,1", ["reduce_scatter(grad1)@0,1", "all_gather(weight1)@0,1"]),
        (
            "all_reduce_start(grad1)@0,1 all_reduce_start(grad0)@0,1",
            ["all_reduce_start(grad1)@0,1", "all_reduce_start(grad0)@0,1"],
        ),
        ("F0.0 all_reduce(y0.0)@0,1 F1.0", ["F0.0", "all_reduce(y0.0)@0,1", "F1.0"]),
        ("all_reduce(y0.0)@0,1 all_reduce(y1.0)@0,1", ["all_reduce(y0.0)@0,1", "all_reduce(y1.0)@0,1"]),
        ("x1.0<0 x1.1<0", ["x1.0<0", "x1.1<0"]),
    ],
)
def test_instructions_that_can_run_as_one_call_are_fused_and_no_others(row, expected):
    assert calls(row) == expected


def test_every_kind_of_run_has_the_range_that_it_covers():
    result = [
        call for call, _, _ in fuse(words("F1.2 F2.2 B2.2 B1.2 all_reduce(grad1)@0,1 all_reduce(grad2)@0,1 U1 U2"))
    ]
    assert result[:2] == [ForwardRun(1, 2, 2), BackwardRun(1, 2, 2)]
    assert isinstance(result[2], CollectiveRun)
    assert len(result[2].instructions) == 2
    assert result[3] == UpdateRun(((1,), (2,)))


def test_a_server_applies_all_pushes_in_one_call():
    (call, *_), *rest = fuse(words("apply_and_reply(0)@0,1 apply_and_reply(1)@0,1"))
    assert isinstance(call, ApplyPushesRun)
    assert not rest


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("F0.0 F1.0 F2.0 B2.0 B1.0 B0.0", [(0, 3)]),
        ("F0.0 F1.0 F2.0 B2.0 all_reduce(grad2)@0,1 B1.0 B0.0", [(0, 2), (2, 3)]),
        ("F0.0 all_reduce(y0.0)@0,1 F1.0 F2.0 B2.0 B1.0 B0.0", [(0, 1), (1, 3)]),
        ("F1.0 B1.0 F4.0 F5.0 B5.0 B4.0", [(1, 2), (4, 6)]),
        ("all_gather(weight0)@0,1 U0", []),
    ],
)
def test_segments_end_exactly_where_a_forward_or_a_backward_ends(row, expected):
    assert list(segment_boundaries(fuse(words(row)))) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("F0.0 F1.0 B1.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0 U1", "F0.0 F1.0"),
        ("x1.0<0 F1.0 B1.0 g0.0>0 x1.1<0 F1.1 B1.1 g0.1>0 commit@0,1 U1", "x1.0<0 F1.0 x1.1<0 F1.1"),
        ("F0.0 all_reduce(y0.0)@0,1 F1.0 B1.0 all_reduce(dx1.0)@0,1 B0.0 U0", "F0.0 all_reduce(y0.0)@0,1 F1.0"),
        (
            "all_gather(weight0)@0,1 F0.0 free(weight0) "
            "all_gather(weight0)@0,1 B0.0 reduce_scatter(grad0)@0,1 free(grad0) free(weight0) commit@0,1 U0",
            "all_gather(weight0)@0,1 F0.0 free(weight0)",
        ),
        ("F0.0 B0.0 reduce_scatter(grad0)@0,1 commit@0,1 U0 all_gather(weight0)@0,1", "F0.0"),
    ],
)
def test_an_evaluation_keeps_only_forwards_and_what_they_need(row, expected):
    assert " ".join(map(format_instruction, forward_only(words(row)))) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("F0.0 B0.0 F0.1 B0.1 commit@0 U0", [True, False]),
        ("B1.0 B0.0 B1.1 B0.1 commit@0 U0 U1", [True, False]),
        ("B1.0 B0.0 B1.1 all_reduce(grad1)@0,1 B0.1 all_reduce(grad0)@0,1", [True, False, False]),
        ("B1.0 B0.0 reduce_scatter(grad1)@0,1 B1.1 B0.1", [False, False]),
        ("B0.0 commit@0 U0 B0.1 commit@0 U0", [False, False]),
        ("B0.0 all_gather(weight0)@0,1 F0.1 B0.1", [True, False]),
        ("B0.0 free(grad0) B0.1", [False, False]),
        ("Bi0.0 Bw0.0 Bi0.1 Bw0.1", [True, True, True, False]),
    ],
)
def test_a_backward_accumulates_if_the_next_use_of_its_gradients_is_another_backward(row, expected):
    assert [call.accumulates for call, _, _ in fuse(words(row)) if isinstance(call, BackwardRun)] == expected
