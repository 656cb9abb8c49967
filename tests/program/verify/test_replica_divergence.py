"""The rules for replicas that update separately, and for delayed gradients."""

from dataclasses import replace
from fractions import Fraction

import pytest

from counterpoint.compiler.compile import bounds_from
from counterpoint.errors import ProgramError
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import verify
from counterpoint.strategies.sync_schedule import SyncSchedule
from tests.program.verify.random_plans import compile_text

MEETING = "data(4, sync_every=8)"
LATE = "data(2, staleness=1)"


def broken(plan, *edits, **bounds):
    """The error of a program in which some words were replaced wherever they stand."""
    compiled = compile_text(plan, blocks=1)
    text = format_program(compiled.program)
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(ProgramError) as caught:
        verify(parse_program(text), replace(bounds_from(compiled.cost), **bounds), compiled.model.units)
    return caught.value


def test_the_kinds_of_steps_of_post_local_sgd_read_as_written():
    variants = {
        variant.name: variant
        for variant in compile_text("data(2, sync_every=8, sync_first=100)", blocks=1).step_variants
    }
    first_rank_programs = {name: format_program(variant.program).splitlines()[0] for name, variant in variants.items()}
    assert first_rank_programs == {
        "all_reduce": "F0.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0",
        "local": "F0.0 B0.0 commit@0,1:0 U0",
        "sync": "F0.0 B0.0 commit@0,1:0 U0 all_reduce_mean(weight0)@0,1",
    }
    assert [variant.frequency for variant in variants.values()] == [0, Fraction(7, 8), Fraction(1, 8)]


def test_a_sync_schedule_says_which_step_is_which():
    schedule = SyncSchedule(sync_every=3, sync_first=2)
    names = [schedule.kind_at(number, has_delayed_grad=False) for number in range(9)]
    assert names == ["all_reduce", "all_reduce", "local", "local", "sync", "local", "local", "sync", "local"]
    assert [SyncSchedule(staleness=1).kind_at(number, has_delayed_grad=number > 0) for number in range(3)] == [
        "fill",
        "steady",
        "steady",
    ]
    assert SyncSchedule().kind_at(7, has_delayed_grad=False) == "step"


def test_sixteen_steps_with_a_meeting_in_every_eighth_send_what_two_sums_of_the_weights_do():
    compiled = compile_text(MEETING, blocks=3)
    weights = sum(param.num_bytes for param in compiled.model.params)
    sent = [sum(bytes_) for bytes_ in zip(*(compiled.variant_at(step).sent_bytes for step in range(16)), strict=True)]
    assert sent == [2 * 2 * Fraction(3, 4) * weights] * 4
    assert compiled.sent_bytes() == tuple(bytes_ / 16 for bytes_ in sent)


@pytest.mark.parametrize("plan", ["data(4)", "zero1(4)", "data(2) * server(2)", "data(4, sync_every=8)",
                                  "data(4, staleness=1)", "pipeline(2) * data(2)"])  # fmt: skip
def test_more_microbatches_add_up_before_the_one_sum_and_send_no_gradient_more(plan):
    """Activations between stages aside; zero2 and zero3 free whole gradients, and share them out each time."""
    one, many = (compile_text(plan, m=m, blocks=2).sent_bytes() for m in (2, 8))
    activations = 6 * 256 * 4 if "pipeline" in plan else 0
    assert [after - before for before, after in zip(one, many, strict=True)] == [activations] * len(one)


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (" all_reduce_mean(weight0)@0-3", "", "that are not averaged over all of them"),
        (
            "U0 all_reduce_mean(weight0)@0-3",
            "all_reduce_mean(weight0)@0-3 U0",
            "that are not averaged over all of them",
        ),
        (
            "all_reduce_mean(weight0)@0-3",
            "all_reduce_mean(weight0)@0-3 all_reduce_mean(weight0)@0-3",
            "of different replicas, each counted once",
        ),
        ("commit@0-3:0", "commit@0-3:1", "all ranks of one loss group must state the same loss group"),
        ("commit@0-3:0", "commit@0-3:0,1", "rank 0 updates unit 0 with gradients counted never B0.1"),
        ("commit@0-3:0", "commit@0-3", "of different replicas, each counted once"),
        ("all_reduce_mean(weight0)", "all_reduce(weight0)", "weights can be gathered, broadcast or averaged"),
        (
            "all_reduce_mean(weight0)",
            "all_reduce_mean(grad0)",
            "gradients can be all-reduced or reduce-scattered, but not gathered or broadcast",
        ),
    ],
)
def test_replicas_that_end_with_different_weights_violate_rule_6(old, new, fact):
    error = broken(MEETING, (old, new))
    assert fact in str(error)
    assert error.rule == 6


def test_replicas_may_diverge_in_a_local_step_only_if_that_is_declared():
    compiled = compile_text(MEETING, blocks=1)
    local = next(variant for variant in compiled.step_variants if variant.name == "local")
    with pytest.raises(ProgramError, match="not averaged over all of them"):
        verify(local.program, replace(bounds_from(compiled.cost), sent_bytes=None), compiled.model.units)
    verify(local.program, replace(bounds_from(compiled.cost), replicas_may_diverge=True), compiled.model.units)


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        (
            " swap_grad_buffers(grad0) commit@0,1 |",
            " commit@0,1 |",
            "without a new gradient since its previous update",
        ),
        (
            "all_reduce_wait(delayed_grad0)@0,1 swap_grad_buffers(grad0)",
            "swap_grad_buffers(grad0) all_reduce_wait(delayed_grad0)@0,1",
            "update unit 0 with different gradients",
        ),
        (
            "swap_grad_buffers(grad0) commit@0,1 U0",
            "commit@0,1 swap_grad_buffers(grad0) U0",
            "there is no commit between the gradients",
        ),
        (" | free(delayed_grad0)", " | ", "gradients counted never B0.4"),
        ("U0 |", "free(delayed_grad0) U0 |", "a delayed gradient may only be dropped in the epilogue"),
    ],
)
def test_a_gradient_set_aside_is_decided_on_and_applied(old, new, fact):
    error = broken(LATE, (old, new))
    assert fact in str(error)
    assert error.rule == 6


def test_gradients_that_are_not_reduced_are_reported():
    error = broken(LATE, ("all_reduce_start(delayed_grad0)@0,1 ", ""), ("all_reduce_wait(delayed_grad0)@0,1 ", ""))
    assert "rank 0 updates unit 0 with gradients counted never B0.1, B0.3" in str(error)


def test_delayed_gradients_exceed_a_bound_of_no_staleness():
    assert "a gradient 1 updates old; the plan declares at most 0" in str(broken(LATE, staleness=0))
