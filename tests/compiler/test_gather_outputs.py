"""Gathering of outputs for a loss of the whole batch: where it is inserted, what the rules require, what is refused."""

from dataclasses import replace

import pytest

from counterpoint.compiler.compile import bounds_from, compile as compile_plan, count_bytes
from counterpoint.errors import PlanError, ProgramError
from counterpoint.program.instruction import Collective, Forward
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import verify
from tests.covering import given_few_or_many
from tests.program.verify.random_plans import compile_text, legal_cases

PASS = ("gather_outputs",)


def rows(text, **given):
    return format_program(compile_text(text, passes=PASS, **given).program).splitlines()


def test_one_device_runs_all_forwards_first():
    assert rows("solo", m=2, blocks=1) == ["F0.0 F0.1 all_gather(out0)@0 B0.0 B0.1 commit@0 U0"]


def test_only_ranks_with_the_last_block_gather():
    assert rows("gpipe(2) * data(2)", m=2, blocks=2)[1::2] == [
        "x1.0<0 F1.0 x1.1<0 F1.1 all_gather(out1)@1,3 B1.1 g0.1>0 B1.0 g0.0>0 all_reduce(grad1)@1,3 commit@0-3 U1",
        "x1.2<2 F1.2 x1.3<2 F1.3 all_gather(out1)@1,3 B1.3 g0.3>2 B1.2 g0.2>2 all_reduce(grad1)@1,3 commit@0-3 U1",
    ]


@given_few_or_many(10, 60, legal_cases())
def test_a_composition_that_gathers_outputs_keeps_every_rule_or_is_refused(case):
    model, plan, samples = case
    try:
        compiled = compile_plan(replace(plan, passes=(*plan.passes, *PASS)), model, samples_per_micro=samples)
    except PlanError:
        return
    program = compiled.program
    gathers = [one for _, one in program.instructions() if isinstance(one, Collective) and one.tensor.name == "out"]
    last = compiled.model.num_blocks - 1
    ranks = {rank for rank, one in program.instructions() if isinstance(one, Forward) and one.block == last}
    assert {member for gather in gathers for member in gather.group} == ranks
    assert parse_program(format_program(program)) == program
    assert count_bytes(program, compiled.model, samples) == compiled.cost.sent_bytes()


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda text: text.replace("F0.2 F0.3 all_gather(out0)@0,1", "F0.2 F0.3"), "call the same collectives in the same order"),
        (lambda text: text.replace(" all_gather(out0)@0,1", ""), ""),
        (lambda text: text.replace("@0,1 B0.0", "@0,1 all_gather(out0)@0,1 B0.0").replace("@0,1 B0.2", "@0,1 "
         "all_gather(out0)@0,1 B0.2"), "is not live here"),
        (lambda text: text.replace("F0.1 all_gather(out0)@0,1", "all_gather(out0)@0,1 F0.1"), "is not live here"),
        (lambda text: text.replace("all_gather(out0)@0,1", "all_reduce(out0)@0,1"), "outputs of the last block are gathered"),
        (lambda text: text.replace("F0.1 all_gather(out0)@0,1", "F0.1 all_gather(out0)@0").replace(
            "F0.3 all_gather(out0)@0,1", "F0.3 all_gather(out0)@1"), r"have the outputs of microbatches \[0, 1\]"),
    ],
)  # fmt: skip
def test_the_verifier_finds_a_gathering_that_is_wrong(damage, fact):
    compiled = compile_text("data(2)", m=2, blocks=1, passes=PASS)
    program = parse_program(damage(format_program(compiled.program)))
    bounds = replace(bounds_from(compiled.cost), sent_bytes=None)
    if not fact:  # a loss of each microbatch
        assert verify(program, bounds, compiled.model.units).updates
        return
    with pytest.raises(ProgramError, match=fact):
        verify(program, bounds, compiled.model.units)
