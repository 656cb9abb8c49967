"""Bytes sent, instruction by instruction."""

from fractions import Fraction

import pytest

from counterpoint.program.comm_volume import bytes_by_instruction, sent_bytes
from counterpoint.program.text import parse_program


def traffic(text, rank=0):
    return [
        bytes_
        for _, bytes_ in bytes_by_instruction(
            rank, parse_program(text).rank_programs[0].body, lambda value, code="": 120
        )
    ]


@pytest.mark.parametrize(
    ("instruction", "rank", "bytes_"),
    [
        ("all_reduce(grad0)@0-2", 0, 160),
        ("reduce_scatter(grad0)@0-2", 0, 80),
        ("all_gather(weight0)@0-2", 1, 80),
        ("broadcast(weight0)@0-2", 0, 240),
        ("broadcast(weight0)@0-2", 1, 0),
        ("all_reduce_start(grad0)@0-2", 0, 160),
        ("all_reduce_wait(grad0)@0-2", 0, 0),
        ("all_reduce(grad0)@0", 0, 0),
        ("x1.0>1", 0, 120),
        ("x1.0<1", 0, 0),
        ("push(grad0)>1", 0, 120),
        ("pull(weight0)<1", 0, 0),
        ("apply_and_reply(0,1)@0-2", 4, 720),
        ("commit@0-2", 0, 0),
        ("F0.0", 0, 0),
    ],
)
def test_an_instruction_sends_what_a_ring_or_a_message_sends(instruction, rank, bytes_):
    assert traffic(instruction, rank) == [bytes_]


def test_what_was_shared_out_is_summed_in_parts():
    assert traffic("reduce_scatter(grad0)@0-3 all_reduce(grad0)@0,4 all_reduce(grad1)@0,4") == [90, 30, 120]


def test_only_the_body_counts_and_thirds_stay_exact():
    program = parse_program("all_reduce(grad0)@0-2 | all_reduce(grad0)@0-2 | all_reduce(grad0)@0-2")
    assert sent_bytes(program, lambda value, code="": 1) == (Fraction(4, 3),)
