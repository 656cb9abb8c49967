"""Prefetched weights and gradients that are awaited later change no number, in training or evaluation."""

from dataclasses import replace

import pytest

import counterpoint as cp
from tests.training.trainers import dataset, fit, max_difference

PLANS = (
    "zero(2, level=3)",
    "zero(2, level=3, reshard_after_forward=off)",
    "pipeline(2) * zero(2, level=3, reshard_after_forward=off)",
    "pipeline(2) * zero(2, level=3)",
    "zero(2, level=3) * data(2)",
    "tensor(2) * zero(2, level=3)",
)
PASSES = {
    "overlap": ("overlap",),
    "prefetch": ("overlap", "prefetch"),
    "prefetch 2": ("overlap", "prefetch:2"),
    "recompute": ("overlap", "prefetch", "recompute"),
    "recompute 3": ("overlap", "prefetch:3", "recompute"),
}
OPTIONS = {"epochs": 2, "data": dataset(32), "batch_size": 16, "fit_options": {"eval_dataset": dataset(8)}}


@pytest.fixture(scope="module", name="alone")
def one_device():
    return fit("solo", **OPTIONS)


@pytest.mark.long(quick=["pipeline(2) * zero(2, level=3)-2-recompute", "pipeline(2) * zero(2, level=3)-1-prefetch 2"])
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_losses_weights_and_evaluations_are_those_of_one_device(plan, num_microbatches, passes, alone):
    weights, history = alone
    found, other = fit(
        replace(cp.Plan.parse(plan, num_microbatches=num_microbatches), passes=PASSES[passes]), **OPTIONS
    )
    assert max_difference(found, weights) <= 1e-12
    assert other.losses == pytest.approx(history.losses, rel=1e-12)
    assert other.evaluations[-1].metrics == pytest.approx(history.evaluations[-1].metrics, rel=1e-12)
