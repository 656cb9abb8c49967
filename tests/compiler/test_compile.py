"""From a plan to a proved program."""

from dataclasses import replace

import pytest
from hypothesis import given

from counterpoint.compiler.compile import compile as compile_plan, count_bytes, promise_of, value_bytes
from counterpoint.errors import ProgramError
from counterpoint.model.spec import chain
from counterpoint.plan import Plan
from counterpoint.program.instruction import Value, grad, weight
from counterpoint.strategies.data import Data
from counterpoint.strategies.strategy import Forecast
from tests.laws.compositions import compiled, legal


def test_a_compiled_plan_keeps_the_plan_the_refined_model_and_the_proof():
    plan = Plan.parse("tensor(2) * data(2)")
    made = compile_plan(plan, chain(2))
    assert made.plan is plan
    assert [block.num_slices for block in made.model.blocks] == [2, 2]
    assert {entry.unit for entry in made.ledger.entries} == set(made.model.units)
    assert len(made.forecast.ranks) == 4


def test_the_promise_is_what_the_strategies_forecast():
    made = compiled("pipeline(2)", m=4)
    promise = promise_of(made.forecast)
    assert (promise.staleness, promise.in_flight) == (0, (2, 1))
    assert promise.sent_bytes == count_bytes(made.program, made.model, 1)


class Forgetful(Data):
    """Replicas whose author forgot the sum."""

    def lower(self, program, model):
        whole = super().lower(program, model)
        rows = [replace(row, body=tuple(w for w in row.body if not hasattr(w, "verb"))) for row in whole.rows]
        return replace(whole, rows=tuple(rows))


class Optimistic(Data):
    """Replicas whose author believes that sums are free."""

    def forecast(self, before: Forecast, model):
        return before.copied(self.degree)


@pytest.mark.parametrize(("strategy", "law"), [(Forgetful(2), 6), (Optimistic(2), 8)])
def test_a_strategy_that_breaks_a_law_never_compiles(strategy, law):
    with pytest.raises(ProgramError) as caught:
        compile_plan(Plan((strategy,)), chain(2))
    assert caught.value.law == law


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (weight((0,)), 128 * 256 * 4),
        (grad((1,)), 128 * 256 * 4),
        (Value("x", (1,), 5), 3 * 1024),
        (Value("g", (0,), 5), 3 * 1024),
        (Value("y", (1,), 0), 3 * 1024),
        (Value("dx", (1,), 0), 3 * 1024),
    ],
)
def test_a_value_has_the_bytes_of_its_slice_or_of_its_samples(value, size):
    assert value_bytes(value, compiled("tensor(2)").model, 3) == size


@pytest.mark.parametrize("name", ["y", "dx"])
def test_a_whole_block_has_no_partial_values(name):
    assert value_bytes(Value(name, (0,), 0), chain(1), 3) == 0


@given(legal())
def test_a_plan_knows_how_many_microbatches_its_program_has(case):
    model, plan, _ = case
    assert len(compile_plan(plan, model).program.micros) == plan.num_micros
