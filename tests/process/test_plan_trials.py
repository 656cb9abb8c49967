"""Plans that are tried on real processes: all ranks take the same one, and train as solo does."""

import pytest
import torch

import counterpoint as cp
from counterpoint.planner.choose import NOISY_TOLERANCE
from tests.process import rank_functions as ranks
from tests.training.trainers import fit, max_difference

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_ranks_agree_on_what_measured_best_and_train_as_solo_does():
    torch.set_num_threads(1)
    expected, history = fit("solo")
    result = cp.launch(ranks.measure_and_train, ranks=2)
    assert result[0]["trials"] == result[1]["trials"]
    assert "data(2)" in result[0]["trials"]
    assert result[0]["plan"] == result[1]["plan"]
    assert result[0]["trials"][result[0]["plan"]] <= NOISY_TOLERANCE * min(result[0]["trials"].values())
    for one in result:
        assert max_difference(one["params"], expected) < 1e-12
        assert one["losses"] == pytest.approx(history.losses, rel=1e-12)
