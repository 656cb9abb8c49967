"""``DistributedOptimizer`` trains what one rank with all data trains."""

import pytest
import torch

from counterpoint.fabric.collectives.adasum import adasum
from tests.compat.horovod import training_scenarios as training
from tests.compat.horovod.rank_runner import once_on_ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
WORLDS = pytest.mark.parametrize(("num_ranks", "transport"), [(2, "auto"), (3, "auto"), (2, "gloo")])
ADVICE = [
    "call it before backward(), or after step(); if the backward was that of another model's loss, as of a generator through "
    "its discriminator, freeze this model for it",
    "raise backward_passes_per_step to accumulate gradients locally",
    "named_parameters has w more than once",
    "named_parameters lacks 1 of the optimizer's 2 parameters, the first with shape (2,)",
    "omit it, or use op=Average",
    "give 1 or more",
    "give Average, Sum or Adasum",
    "give each parameter once",
    "use op=Average to clip reduced gradients",
    "hvd.elastic.TorchState is not supported",
    "give op only",
    "whose sum is the number of rows",
    "1 parameters, the first with shape (5,), were added to the optimizer or unfrozen",
    "add it before use",
]


def ranks_of(num_ranks, transport):
    return once_on_ranks(training.SCENARIOS, num_ranks, transport)


@WORLDS
@pytest.mark.parametrize("scenario", training.REFERENCES, ids=lambda scenario: scenario.__name__)
def test_ranks_train_what_one_rank_with_all_data_trains(scenario, num_ranks, transport):
    expected = training.solo(num_ranks, **training.REFERENCES[scenario])
    for result in ranks_of(num_ranks, transport):
        assert result[scenario.__name__] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@WORLDS
def test_a_generator_is_trained_through_a_discriminator_that_is_frozen_for_it(num_ranks, transport):
    expected = training.solo_adversaries(num_ranks)
    for result in ranks_of(num_ranks, transport):
        assert result["adversaries"] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@WORLDS
def test_a_sum_is_as_many_means_as_there_are_ranks(num_ranks, transport):
    expected = training.solo(num_ranks, factor=num_ranks)
    for result in ranks_of(num_ranks, transport):
        assert result["added_up"] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@WORLDS
def test_an_optimizer_that_computes_the_loss_itself_finds_that_of_all_ranks(num_ranks, transport):
    expected = training.solo_by_closures(num_ranks)
    for result in ranks_of(num_ranks, transport):
        assert result["by_closures"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@WORLDS
@pytest.mark.parametrize("name", ["sparse", "sparse_as_dense"])
def test_a_sparse_embedding_trains_and_keeps_its_sparse_gradients(name, num_ranks, transport):
    expected = training.solo_embedded(num_ranks)
    for result in ranks_of(num_ranks, transport):
        weights, is_sparse = result[name]
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert is_sparse


@WORLDS
def test_adasum_combines_the_steps_of_the_ranks_by_parameter(num_ranks, transport):
    ranks = [result["by_adasum"] for result in ranks_of(num_ranks, transport)]
    steps = [[torch.tensor(step, dtype=torch.float64) for _, step in own] for own, _ in ranks]
    for _, moved in ranks:
        for at, (_, result) in enumerate(moved):
            expected = adasum([own[at] for own in steps])
            assert torch.allclose(torch.tensor(result, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


@WORLDS
def test_gradients_in_half_precision_lead_nearly_to_the_same(num_ranks, transport):
    assert all(result["with_half_the_bytes"] == [True, True] for result in ranks_of(num_ranks, transport))


@WORLDS
def test_the_new_optimizer_is_of_the_old_one_s_class_and_shares_its_options(num_ranks, transport):
    assert all(result["by_a_schedule"] == [0.25, "SGD", True] for result in ranks_of(num_ranks, transport))


@pytest.mark.parametrize(("place", "advice"), list(enumerate(ADVICE)))
def test_a_mistake_is_reported_with_its_remedy(place, advice):
    for result in ranks_of(2, "auto"):
        assert advice in result["misused"][place]
