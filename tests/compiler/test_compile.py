"""From a plan to a verified program."""

from dataclasses import replace

import pytest
from hypothesis import given

from counterpoint.compiler.compile import bounds_from, compile as compile_plan, count_bytes, value_bytes
from counterpoint.errors import ProgramError
from counterpoint.model.precision import Precision
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import TensorRef, grad, weight
from counterpoint.strategies.data import Data
from counterpoint.strategies.strategy import CostEstimate
from tests.program.verify.random_plans import compile_text, legal_cases


def test_a_compiled_plan_keeps_the_plan_the_refined_model_and_the_proof():
    plan = Plan.parse("tensor(2) * data(2)")
    compiled = compile_plan(plan, linear_chain(2))
    assert compiled.plan is plan
    assert [block.tp_degree for block in compiled.model.blocks] == [2, 2]
    assert {entry.unit for entry in compiled.symbolic.updates} == set(compiled.model.units)
    assert len(compiled.cost.ranks) == 4


def test_the_bounds_are_what_the_strategies_estimate():
    compiled = compile_text("pipeline(2)", m=4)
    bounds = bounds_from(compiled.cost)
    assert (bounds.staleness, bounds.in_flight) == (0, (2, 1))
    assert bounds.sent_bytes == count_bytes(compiled.program, compiled.model, 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "text",
    ["data(4)", "zero(2, level=1)", "zero(2, level=2) * data(2)", "pipeline(2) * zero(2, level=3)",
     "pipeline(2, replicas=(2,1))", "tensor(2) * data(2, update=sharded)", "gpipe(2) * data(2)"],
)  # fmt: skip
def test_sums_in_a_narrower_dtype_send_what_the_strategies_estimate(text, tied):
    """The verifier compares the bytes; only those of gradients become fewer."""
    wide, narrow = (
        compile_plan(
            Plan.parse(text, num_microbatches=2), linear_chain(4, tied=tied, precision=Precision("fp32", reduce=reduce))
        )
        for reduce in ("fp32", "bf16")
    )
    assert narrow.cost.sent_bytes() == count_bytes(narrow.program, narrow.model, 1)
    assert sum(narrow.sent_bytes()) < sum(wide.sent_bytes())


class Forgetful(Data):
    """Replicas whose author forgot the sum."""

    def lower(self, program, model):
        whole = super().lower(program, model)
        rank_programs = [
            replace(
                rank_program,
                body=tuple(instruction for instruction in rank_program.body if not hasattr(instruction, "op")),
            )
            for rank_program in whole.rank_programs
        ]
        return replace(whole, rank_programs=tuple(rank_programs))


class Optimistic(Data):
    """Replicas whose author believes that sums are free."""

    def estimate_cost(self, inner: CostEstimate, model):
        return inner.replicate(self.degree)


@pytest.mark.parametrize(("strategy", "rule"), [(Forgetful(2), 6), (Optimistic(2), 8)])
def test_a_strategy_that_breaks_a_rule_never_compiles(strategy, rule):
    with pytest.raises(ProgramError) as caught:
        compile_plan(Plan((strategy,)), linear_chain(2))
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (weight((0,)), 128 * 256 * 4),
        (grad((1,)), 128 * 256 * 4),
        (TensorRef("x", (1,), 5), 3 * 1024),
        (TensorRef("g", (0,), 5), 3 * 1024),
        (TensorRef("y", (1,), 0), 3 * 1024),
        (TensorRef("dx", (1,), 0), 3 * 1024),
    ],
)
def test_a_value_has_the_bytes_of_its_shard_or_of_its_samples(value, size):
    assert value_bytes(value, compile_text("tensor(2)").model, 3) == size


@pytest.mark.parametrize("name", ["y", "dx"])
def test_a_whole_block_has_no_partial_values(name):
    assert value_bytes(TensorRef(name, (0,), 0), linear_chain(1), 3) == 0


@pytest.mark.long
@given(legal_cases())
def test_a_plan_knows_how_many_microbatches_its_program_has(case):
    model, plan, _ = case
    assert len(compile_plan(plan, model).program.micros) == plan.global_num_microbatches
