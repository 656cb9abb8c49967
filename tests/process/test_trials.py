"""Plans that are tried on real processes: all ranks take the same one, and train as solo does."""

import pytest
import torch

import counterpoint as cp
from counterpoint.planner.choose import EVER_AS_FAST
from tests.process import ranks
from tests.training.fits import distance, fit

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_ranks_agree_on_what_measured_best_and_train_as_solo_does():
    torch.set_num_threads(1)
    expected, history = fit("solo")
    found = cp.launch(ranks.measure_and_train, ranks=2)
    assert found[0]["trials"] == found[1]["trials"]
    assert "data(2)" in found[0]["trials"]
    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["trials"][found[0]["plan"]] <= EVER_AS_FAST * min(found[0]["trials"].values())
    for one in found:
        assert distance(one["params"], expected) < 1e-12
        assert one["losses"] == pytest.approx(history.losses, rel=1e-12)
