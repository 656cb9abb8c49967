"""How often a step waits for the device: once for each rank's report, and nowhere between."""

import itertools

import pytest
import torch

from counterpoint.testing.device_survey import batches, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")


def count_waits(name, plan, **options):
    """Return the waits of the fourth step; checks of a loss are made in the first, second, third and fifth."""
    step, _ = make_step(name, plan, StandInAccelerator(), **options)
    with step:
        *before, last = itertools.islice(batches(name), 4)
        for batch in before:
            step(*batch)
        with DEVICE.count_host_waits() as waits:
            step(*last)
    return waits


@pytest.mark.long(quick=["mlp-zero(2, level=3)-2", "embedding-data(2)-2"])
@pytest.mark.parametrize(
    ("name", "plan", "num_waits"),
    [
        ("mlp", "solo", 1),
        ("mlp", "data(2) + overlap", 2),
        ("mlp", "data(2, compress=powersgd)", 2),
        ("mlp", "data(2, reduce=adasum)", 2),
        ("mlp", "zero(2, level=3)", 2),
        ("mlp", "pipeline(2) + recompute", 2),
        ("mlp", "server(2)", 2),
        ("experts", "tensor(2)", 2),
        ("gpt", "pipeline(2)", 2),
        ("embedding", "data(2)", 2),
    ],
)
def test_a_step_waits_at_most_once_for_each_rank(name, plan, num_waits):
    waits = count_waits(name, plan)
    assert sum(waits.values()) <= num_waits, waits


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2) + recompute", "tensor(2)"])
def test_no_call_of_a_step_on_a_gpu_synchronizes(plan):
    """torch counts copies and numbers that are read; the step waits for an event, once its work is launched."""
    step, _ = make_step("mlp", plan, "cuda", clip_norm=0.5, nonfinite="skip")
    with step:
        *before, last = itertools.islice(batches("mlp"), 4)
        for batch in before:
            step(*batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*last)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_clipping_waits_for_the_norm_only():
    waits = count_waits("mlp", "pipeline(2)", clip_norm=0.5, nonfinite="skip")
    assert sum(waits.values()) <= 2, waits
