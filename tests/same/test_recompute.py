"""What is computed again trains the same: dropout, ties, sliced layers, running statistics, older weights."""

import pytest

from counterpoint.testing import parity
from counterpoint.testing.parity import BAR
from tests.same import streamed
from tests.same.test_orders import difference as off, trained

PLANS = [
    "solo + recompute",
    "data(2) + overlap + recompute:50%",
    "zero(2, level=2) + recompute",
    "zero(2, level=3) + overlap + recompute",
    "server(2) + recompute",
    "pipeline(2) + recompute",
    "pipeline(2, order=gpipe, recompute=always)",
    "pipeline(4, order=gpipe, recompute=except_last)",
    "pipeline(4, recompute=always)",
    "pipeline(2, order=interleaved, virtual=2, recompute=always)",
    "pipeline(2, order=zero_bubble, recompute=always)",
    "pipeline(2, order=zero_bubble, virtual=2, recompute=except_last)",
    "pipeline(2, replicas=(2,1), recompute=always)",
    "pipeline(2, recompute=always) * data(2) + overlap",
    "pipeline(2, recompute=except_last) * zero(2, level=1)",
    "pipeline(2, recompute=always) * zero(2, level=3)",
]


@pytest.mark.parametrize("strategy", PLANS)
def test_a_model_that_draws_and_shares_weights_trains_the_same(strategy):
    assert off(trained(strategy)) <= BAR


@pytest.mark.parametrize("strategy", ["tensor(2) + recompute", "tensor(2) * pipeline(2, recompute=always)"])
def test_sliced_layers_are_recomputed_without_their_sums(strategy):
    assert parity.cell("mlp", strategy).worst <= BAR


@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_running_statistics_do_not_change_when_a_block_is_computed_again(recompute):
    found = parity.cell("cnn", f"pipeline(2, order=gpipe, recompute={recompute})")
    assert found.buffers <= BAR
    assert found.worst <= BAR


@pytest.mark.slow
def test_a_traced_transformer_trains_the_same():
    assert parity.cell("gpt", "pipeline(2, recompute=except_last) * data(2)").worst <= BAR


@pytest.mark.parametrize(("rule", "replicas"), [("stashed", (1, 1, 1)), ("synced", (2, 1)), ("double", (1, 1))])
@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_a_stream_recomputes_with_the_weights_of_its_forward(rule, replicas, recompute):
    case = streamed.Case(rule, replicas, (6,) * 6 + (3,), recompute=recompute, flushes=(4,))
    assert streamed.off(case) <= BAR
