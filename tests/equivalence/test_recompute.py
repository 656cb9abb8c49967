"""What is computed again trains the same: dropout, ties, sliced layers, running statistics, older weights."""

from dataclasses import replace

import pytest

import counterpoint as cp
from counterpoint.testing import parity
from counterpoint.testing.parity import TOLERANCE
from counterpoint.testing.parity_models import ADAMW, make_parity_model, plan_for
from tests.equivalence import async_pipeline_cases
from tests.equivalence.test_schedules import difference, trained
from tests.training.trainers import equal_bits, params_of

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


def train_with(name, strategy, *passes, **options):
    """Return losses and parameters of a few steps under a plan with further passes."""
    plan, model_case = plan_for(strategy, 4), make_parity_model(name)
    model = model_case.build()
    plan = replace(plan, passes=(*plan.passes, *passes))
    with cp.parallelize(model, ADAMW(model.parameters()), model_case.loss, strategy=plan, seed=3, **options) as step:
        losses = [float(step(inputs, targets)) for inputs, targets in model_case.batches]
    return losses, params_of(model)


@pytest.mark.long(quick=["tensor(2) + recompute-mlp", "tensor(2) * pipeline(2, recompute=always)-gpt"])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(
    "strategy",
    [
        "tensor(2) + recompute",
        "tensor(2) * data(2) + overlap + recompute",
        "tensor(2) * zero(2, level=3) + recompute",
        "tensor(2) * pipeline(2, recompute=always)",
        "pipeline(2) * tensor(2) + recompute",
    ],
)
def test_what_is_recomputed_from_partitioned_inputs_has_the_same_bits(name, strategy):
    losses, params = train_with(name, strategy)
    found_losses, found = train_with(name, strategy, "partition_activations")
    assert found_losses == losses
    assert equal_bits(found, params)


@pytest.mark.long(
    quick=[
        "solo + recompute-mlp",
        "pipeline(2, recompute=always)-gpt",
        "zero(2, level=3) + overlap + recompute + prefetch-mlp",
    ]
)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(
    "strategy",
    [
        "solo + recompute",
        "data(2) + overlap + recompute",
        "zero(2, level=3) + overlap + recompute + prefetch",
        "pipeline(2) + recompute",
        "pipeline(2, recompute=always)",
        "pipeline(2, schedule=zero_bubble) + recompute",
        "tensor(2) + recompute",
    ],
)
def test_what_is_recomputed_from_inputs_on_disk_has_the_same_bits(name, strategy, tmp_path):
    losses, params = train_with(name, strategy)
    found_losses, found = train_with(name, strategy, "offload:activations=disk", offload_folder=tmp_path)
    assert found_losses == losses
    assert equal_bits(found, params)
    assert parity.check_parity(name, strategy).worst <= TOLERANCE


def test_each_block_may_keep_recompute_partition_or_offload_with_the_same_bits(tmp_path):
    """Block 0 keeps its activations, and the input of each of the others is somewhere else."""
    losses, params = train_with("gpt", "tensor(2)")
    passes = ("recompute:blocks=1-3", "partition_activations:blocks=2", "offload:activations=disk:blocks=3")
    found_losses, found = train_with("gpt", "tensor(2)", *passes, offload_folder=tmp_path)
    assert found_losses == losses
    assert equal_bits(found, params)


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
