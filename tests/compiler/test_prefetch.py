"""Weights are gathered and gradients reduced during computations, without changing results."""

import pytest

from counterpoint.compiler.prefetch import prefetch
from counterpoint.program.text import format_program, parse_program
from tests.program.verify.random_plans import compile_text

PASSES = ("overlap", "prefetch")


def early(text):
    return format_program(prefetch(parse_program(text)))


def test_a_gather_starts_before_the_computation_in_front():
    assert early("all_gather(weight0)@0 F0.0 free(weight0) all_gather(weight1)@0 F1.0 free(weight1)") == (
        "all_gather(weight0)@0 all_gather_start(weight1)@0 F0.0 free(weight0) all_gather_wait(weight1)@0 F1.0 free(weight1)"
    )


def test_what_is_needed_next_is_not_freed():
    assert early("all_gather(weight0)@0 F0.0 free(weight0) all_gather(weight0)@0 B0.0 free(weight0)") == (
        "all_gather(weight0)@0 F0.0 B0.0 free(weight0)"
    )


def test_a_gradient_is_awaited_after_the_next_backward_has_started_its_own_reduction():
    assert early("B1.0 reduce_scatter(grad1)@0 free(grad1) B0.0 reduce_scatter(grad0)@0 free(grad0) commit@0") == (
        "B1.0 reduce_scatter_start(grad1)@0 B0.0 reduce_scatter_start(grad0)@0 reduce_scatter_wait(grad1)@0 free(grad1) "
        "reduce_scatter_wait(grad0)@0 free(grad0) commit@0"
    )


@pytest.mark.parametrize(
    "text",
    [
        "F0.0 commit@0 U0 all_gather(weight0)@0 F0.1",
        "F0.0 B0.0 commit@0 U0 all_gather(weight0)@0",
        "B0.0 reduce_scatter(grad0)@0 commit@0 U0",
    ],
)
def test_gathers_stay_behind_updates_and_gradients_that_are_kept_are_not_awaited_later(text):
    assert early(text) == text


def test_one_gather_of_the_last_block_is_saved_in_each_microbatch_and_one_of_the_first_between_two():
    before, after = (compile_text("zero(2, level=3)", m=2, blocks=4, passes=one) for one in (("overlap",), PASSES))
    size = 4 * 256 * 256 // 2
    saved = before.sent_bytes()[0] - after.sent_bytes()[0]
    assert saved == 3 * size
    assert before.sent_bytes()[0] == 3 * 2 * 4 * size
