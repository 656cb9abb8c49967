"""Layouts do not change results: every row of the table equals solo, and solo equals a plain torch loop."""

import pytest

from counterpoint.plan.plan import Plan
from counterpoint.testing import parity
from counterpoint.testing.parity_models import STRATEGIES, TrainConfig, make_parity_model, plan_for
from counterpoint.testing.reference_loop import expected_buffers
from tests.covering import each_value_once
from tests.process.forked_ranks import run_forked

CLIPPED = ["solo", "data(4)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(4)", "server(2)", "tensor(2) * data(2)",
           "tensor(2) * pipeline(2)", "tensor(2) * pipeline(2, schedule=zero_bubble) * data(2)"]  # fmt: skip
APART = ["data(2)", "data(4)", "zero(2, level=1)", "pipeline(2) * data(2)", "data(2) + overlap"]
ISSUE = {
    "data(2)", "data(4)", *(f"zero({n}, level={level})" for n in (2, 4) for level in (1, 2, 3)),
    *(f"pipeline(2, schedule={schedule})" for schedule in ("interleaved, chunks_per_stage=2", "zero_bubble", "zero_bubble, chunks_per_stage=2")),
    *(f"pipeline({n}{schedule})" for n in (2, 4) for schedule in ("", ", schedule=gpipe")), "pipeline(2, replicas=(2,1))",
    "server(2)", "tensor(2)", "pipeline(2) * data(2)", "pipeline(2) * zero(2, level=1)",
    "pipeline(2) * zero(2, level=2)", "tensor(2) * data(2)", "zero(2, level=3) * data(2)",
}  # fmt: skip


@pytest.mark.long(
    quick=["mlp-pipeline(2, schedule=gpipe)", "mlp-pipeline(2) * zero(2, level=1)", "cnn-zero(2, level=2)"]
)
@pytest.mark.parametrize(("name", "strategy"), each_value_once(["mlp", "cnn", "gpt"], ["solo", *STRATEGIES]))
def test_five_steps_end_with_the_parameters_losses_and_buffers_of_the_reference(name, strategy):
    assert parity.check_parity(name, strategy).worst <= parity.TOLERANCE


@pytest.mark.long(quick=["zero(2, level=2)"])
@pytest.mark.parametrize("strategy", CLIPPED)
def test_clipping_by_the_global_norm_changes_every_plan_alike(strategy):
    cell = parity.check_parity("mlp", strategy, clip_norm=0.3)
    assert cell.worst <= parity.TOLERANCE
    assert (
        parity.relative_difference(
            *(parity.reference_runs("mlp", 4, clip)[0].params["0.weight"] for clip in (0.3, None))
        )
        > 1e-3
    )


@pytest.mark.long(quick=["mlp-data(2) + overlap"])
@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_replicas_with_weights_of_their_own_end_there_too(name, strategy):
    assert parity.check_parity(name, strategy, one_copy=False).worst <= parity.TOLERANCE


def test_the_table_has_every_strategy_that_was_promised():
    assert set(STRATEGIES) >= ISSUE


def test_a_plan_that_trains_otherwise_is_not_taken_for_the_same():
    """An asynchronous server is not a layout: the comparison sees that its parameters are others."""
    assert parity.check_parity("mlp", "server(2, consistency=asp)").params > 1e-3


@pytest.mark.long(quick=["pipeline(2, replicas=(2,1))"])
@pytest.mark.parametrize("strategy", ["data(4)", "pipeline(2, replicas=(2,1))"])
def test_running_statistics_of_replicas_are_not_those_of_solo(strategy):
    """What the law for BatchNorm says beyond "equals solo" is needed: the replicas' mean is another number."""
    solo, plain = parity.reference_runs("cnn")
    run = parity.train(make_parity_model("cnn"), plan_for(strategy, 4), TrainConfig())
    ours = expected_buffers(plain, run.compiled)
    assert max(parity.relative_difference(ours[name], value) for name, value in solo.buffers.items()) > 1e-3


def test_rows_say_how_many_microbatches_and_passes_they_mean():
    assert plan_for("pipeline(2) * data(2) + overlap", 4) == Plan(
        Plan.parse("pipeline(2) * data(2)").strategies, 2, ("overlap",)
    )


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_real_processes_end_where_solo_ends(num_ranks):
    cells = parity.results_of_processes(num_ranks, start=run_forked)
    assert {cell.strategy for cell in cells} == set(parity.strategies_for_processes(num_ranks))
    assert not [(cell.strategy, cell.worst) for cell in cells if not cell.worst <= parity.TOLERANCE]
