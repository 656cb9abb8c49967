"""How many microbatches a batch has by default."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from tests.training.trainers import ADAMW, build_seeded, dataset


def normed():
    return build_seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))


@pytest.mark.filterwarnings("ignore:BatchNorm1d")
def test_a_model_with_batch_norm_has_two_samples_in_every_microbatch_at_least():
    options: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": ADAMW,
        "strategy": "pipeline(2)",
        "progress": "off",
    }
    with cp.Trainer(normed(), **options) as trainer:
        trainer.fit(dataset(8), batch_size=8)
        assert trainer.plan.num_microbatches == 4


@pytest.mark.filterwarnings("ignore:BatchNorm1d")
def test_a_custom_loop_has_two_samples_in_every_microbatch_too():
    with cp.parallelize(normed(), ADAMW, F.cross_entropy, strategy="pipeline(2)") as step:
        step(*dataset(8).tensors)
        assert step.local_ranks.plan.num_microbatches == 4
