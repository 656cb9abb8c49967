"""Partitions that are too slow are left out of a step, by the clock."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from counterpoint import PlanError
from counterpoint.spark.training import train_local
from counterpoint.spark.training_loop import SparkOptions, StragglerPolicy, TimeLimit, straggler_limit_s
from tests.spark.training_helpers import mse

SLOW_S = 0.05
DATA = [(torch.tensor([float(number)]), torch.tensor([1.0])) for number in range(24)]
POLICY = StragglerPolicy(drop_fraction=0.7, max_missing_fraction=0.9, warmup_steps=1, update_every=100)
OPTIONS = SparkOptions(batch_size=24, epochs=4, num_microbatches=4, straggler_policy=POLICY)


class SlowLinear(nn.Linear):
    """Takes its time over samples from 16 on, which lie in the last partition."""

    def forward(self, x):
        until = time.perf_counter() + (SLOW_S if float(x.detach().max()) >= 16 else 0)
        while time.perf_counter() < until:
            pass
        return super().forward(x)


def train_with_straggler(options):
    torch.manual_seed(1)
    model = SlowLinear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4)
    parts = [DATA[:8], DATA[8:16], DATA[16:]]
    return train_local(parts, model, loss=mse, optimizer=sgd, options=options).steps


@pytest.mark.serial
def test_microbatches_of_stragglers_are_dropped_after_the_warmup():
    counts = [step.num_samples for step in train_with_straggler(OPTIONS)]
    assert counts[0] == 24
    assert all(6 <= count < 24 for count in counts[1:])


@pytest.mark.serial
def test_a_step_that_lacks_too_many_samples_updates_nothing():
    steps = train_with_straggler(replace(OPTIONS, straggler_policy=replace(POLICY, max_missing_fraction=0.1)))
    assert [step.is_skipped for step in steps] == [False, True, True, True]


def test_the_limit_is_the_slowest_that_still_counts_and_a_little():
    assert straggler_limit_s([3.0, 1.0, 2.0, 4.0], 0.25) == pytest.approx(3.03)
    assert straggler_limit_s([3.0], 0.9) == pytest.approx(3.03)


def test_the_limit_is_set_after_the_warmup_and_then_every_few_steps():
    limit, result = TimeLimit(StragglerPolicy(drop_fraction=0.5, warmup_steps=2, update_every=2)), []
    for step in range(6):
        limit.record_step([float(step), float(step) + 1])
        result.append(limit.seconds)
    assert result == [None, *[pytest.approx(1.01)] * 2, *[pytest.approx(3.03)] * 2, pytest.approx(5.05)]


def test_a_fraction_that_is_none_is_refused():
    with pytest.raises(
        PlanError, match=r"drop_fraction=1.5, max_missing_fraction=0.5, warmup_steps=20 are out of range"
    ):
        StragglerPolicy(drop_fraction=1.5)
