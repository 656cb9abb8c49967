"""What is computed again trains the same: dropout, ties, sliced layers, running statistics, older weights."""

import pytest

from counterpoint.testing import parity
from counterpoint.testing.parity import TOLERANCE
from tests.equivalence import async_pipeline_cases
from tests.equivalence.test_schedules import difference, trained

PLANS = [
    "solo + recompute",
    "data(2) + overlap + recompute:50%",
    "zero(2, level=2) + recompute",
    "zero(2, level=3) + overlap + recompute",
    "server(2) + recompute",
    "pipeline(2) + recompute",
    "pipeline(2, schedule=gpipe, recompute=always)",
    "pipeline(4, schedule=gpipe, recompute=except_last)",
    "pipeline(4, recompute=always)",
    "pipeline(2, schedule=interleaved, chunks_per_stage=2, recompute=always)",
    "pipeline(2, schedule=zero_bubble, recompute=always)",
    "pipeline(2, schedule=zero_bubble, chunks_per_stage=2, recompute=except_last)",
    "pipeline(2, replicas=(2,1), recompute=always)",
    "pipeline(2, recompute=always) * data(2) + overlap",
    "pipeline(2, recompute=except_last) * zero(2, level=1)",
    "pipeline(2, recompute=always) * zero(2, level=3)",
]


@pytest.mark.long(quick=["pipeline(4, recompute=always)"])
@pytest.mark.parametrize("strategy", PLANS)
def test_a_model_that_draws_and_shares_weights_trains_the_same(strategy):
    assert difference(trained(strategy)) <= TOLERANCE


@pytest.mark.long(quick=["tensor(2) + recompute"])
@pytest.mark.parametrize("strategy", ["tensor(2) + recompute", "tensor(2) * pipeline(2, recompute=always)"])
def test_sliced_layers_are_recomputed_without_their_sums(strategy):
    assert parity.check_parity("mlp", strategy).worst <= TOLERANCE


@pytest.mark.long(quick=["except_last"])
@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_running_statistics_do_not_change_when_a_block_is_computed_again(recompute):
    result = parity.check_parity("cnn", f"pipeline(2, schedule=gpipe, recompute={recompute})")
    assert result.buffers <= TOLERANCE
    assert result.worst <= TOLERANCE


@pytest.mark.slow
def test_a_traced_transformer_trains_the_same():
    assert parity.check_parity("gpt", "pipeline(2, recompute=except_last) * data(2)").worst <= TOLERANCE


@pytest.mark.long(
    quick=[
        "except_last-stashing-replicas0",
        "except_last-vertical_sync-replicas1",
        "except_last-double_buffer-replicas2",
    ]
)
@pytest.mark.parametrize(
    ("rule", "replicas"), [("stashing", (1, 1, 1)), ("vertical_sync", (2, 1)), ("double_buffer", (1, 1))]
)
@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_a_stream_recomputes_with_the_weights_of_its_forward(rule, replicas, recompute):
    case = async_pipeline_cases.Case(rule, replicas, (6,) * 6 + (3,), recompute=recompute, flushes=(4,))
    assert async_pipeline_cases.max_error(case) <= TOLERANCE
