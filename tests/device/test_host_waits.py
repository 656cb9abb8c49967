"""How often a step waits for the device: once for each rank's report, and nowhere between."""

import itertools

import pytest

from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from tests.device.survey_cases import batches, parallelize

pytestmark = pytest.mark.filterwarnings("ignore")


def count_waits(name, plan, **options):
    """Return the waits of the fourth step; checks of a loss are made in the first, second, third and fifth."""
    step, _ = parallelize(name, plan, StandInAccelerator(), **options)
    with step:
        *before, last = itertools.islice(batches(name), 4)
        for batch in before:
            step(*batch)
        with DEVICE.count_host_waits() as waits:
            step(*last)
    return waits


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


def test_clipping_waits_for_the_norm_only():
    waits = count_waits("mlp", "pipeline(2)", clip_norm=0.5, nonfinite="skip")
    assert sum(waits.values()) <= 2, waits
