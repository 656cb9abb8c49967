"""Layouts do not change results: every row of the table equals solo, and solo equals a plain torch loop."""

import pytest

from counterpoint.plan import Plan
from counterpoint.testing import parity
from counterpoint.testing.plain import expected_buffers
from counterpoint.testing.subjects import STRATEGIES, Recipe, plan_for, subject
from tests.process.forked import on_forked_ranks

CLIPPED = ["solo", "data(4)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(4)", "server(2)", "tensor(2) * data(2)",
           "tensor(2) * pipeline(2)", "tensor(2) * pipeline(2, order=zero_bubble) * data(2)"]  # fmt: skip
APART = ["data(2)", "data(4)", "zero(2, level=1)", "pipeline(2) * data(2)", "data(2) + overlap"]
ISSUE = {
    "data(2)", "data(4)", *(f"zero({n}, level={level})" for n in (2, 4) for level in (1, 2, 3)),
    *(f"pipeline(2, order={order})" for order in ("interleaved, virtual=2", "zero_bubble", "zero_bubble, virtual=2")),
    *(f"pipeline({n}{order})" for n in (2, 4) for order in ("", ", order=gpipe")), "pipeline(2, replicas=(2,1))",
    "server(2)", "tensor(2)", "pipeline(2) * data(2)", "pipeline(2) * zero(2, level=1)",
    "pipeline(2) * zero(2, level=2)", "tensor(2) * data(2)", "zero(2, level=3) * data(2)",
}  # fmt: skip


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_five_steps_end_with_the_parameters_losses_and_buffers_of_the_reference(name, strategy):
    assert parity.cell(name, strategy).worst <= parity.BAR


@pytest.mark.parametrize("strategy", CLIPPED)
def test_clipping_by_the_global_norm_changes_every_plan_alike(strategy):
    cell = parity.cell("mlp", strategy, clip_norm=0.3)
    assert cell.worst <= parity.BAR
    assert parity.difference(*(parity.solo("mlp", 4, clip)[0].params["0.weight"] for clip in (0.3, None))) > 1e-3


@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_replicas_with_weights_of_their_own_end_there_too(name, strategy):
    assert parity.cell(name, strategy, one_copy=False).worst <= parity.BAR


def test_the_table_has_every_strategy_that_was_promised():
    assert set(STRATEGIES) >= ISSUE


def test_a_plan_that_trains_otherwise_is_not_taken_for_the_same():
    """An asynchronous server is no layout: the comparison sees that its parameters are others."""
    assert parity.cell("mlp", "server(2, consistency=asp)").params > 1e-3


@pytest.mark.parametrize("strategy", ["data(4)", "pipeline(2, replicas=(2,1))"])
def test_running_statistics_of_replicas_are_not_those_of_solo(strategy):
    """What the law for BatchNorm says beyond "equals solo" is needed: the replicas' mean is another number."""
    solo, plain = parity.solo("cnn")
    run = parity.train(subject("cnn"), plan_for(strategy, 4), Recipe())
    ours = expected_buffers(plain, run.compiled)
    assert max(parity.difference(ours[name], value) for name, value in solo.buffers.items()) > 1e-3


def test_rows_say_how_many_microbatches_and_passes_they_mean():
    assert plan_for("pipeline(2) * data(2) + overlap", 4) == Plan(
        Plan.parse("pipeline(2) * data(2)").strategies, 2, ("overlap",)
    )


@pytest.mark.process
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_real_processes_end_where_solo_ends(num_ranks):
    cells = parity.cells_on_processes(num_ranks, start=on_forked_ranks)
    assert {cell.strategy for cell in cells} == set(parity.rows_for_processes(num_ranks))
    assert not [(cell.strategy, cell.worst) for cell in cells if not cell.worst <= parity.BAR]
