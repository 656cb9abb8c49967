"""How many microbatches a batch has where nobody says."""

import pytest
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from tests.training.fits import ADAMW, dataset, fit, same_bits, seeded


def normed():
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))


@pytest.mark.filterwarnings("ignore:BatchNorm1d")
def test_a_model_with_batch_norm_has_two_samples_in_every_microbatch_at_least():
    plan = {"batch_size": 8, "progress": "off"}
    found, _ = fit("pipeline(2)", normed(), dataset(8), **plan)
    said, _ = fit("pipeline(2)", normed(), dataset(8), num_microbatches=4, **plan)
    assert same_bits(found, said)


@pytest.mark.filterwarnings("ignore:BatchNorm1d")
def test_a_loop_of_ones_own_has_two_samples_in_every_microbatch_too():
    with cp.parallelize(normed(), ADAMW, F.cross_entropy, strategy="pipeline(2)") as step:
        step(*dataset(8).tensors)
        assert step.team.plan.num_microbatches == 4
