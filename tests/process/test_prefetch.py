"""Processes that gather weights early and await gradients late train as one device does."""

import pytest

from tests.process import rank_functions as ranks
from tests.process.forked_ranks import run_forked
from tests.process.rank_functions import plan_of, train_with_passes

pytestmark = pytest.mark.process
PLANS = [("zero(2, level=3)", 1), ("zero(2, level=3)", 3)]


@pytest.mark.long(quick=["shm"])
@pytest.mark.parametrize("transport", ["shm", "gloo", "process_group"])
def test_losses_are_those_of_one_device(transport):
    alone = train_with_passes(plan_of("solo", 1), (), None)
    for losses in run_forked(ranks.train_prefetched, ranks=2, args=[PLANS, transport]):
        assert isinstance(losses, list), losses
        assert losses == [pytest.approx(alone, rel=1e-12)] * 6
