"""A signal to any one rank at any moment stops all ranks after the same step, and the rest of the run is exact."""

import pytest

from tests.process import rank_functions as ranks
from tests.process.forked_ranks import run_forked

pytestmark = pytest.mark.process
ROWS = [("data(2)", 2), ("zero(2, level=3)", 2), ("pipeline(2)", 4), ("server(1)", 2)]


SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "num_moments"), [(ROWS[:1], 1), *(pytest.param([row], 13, marks=SLOW) for row in ROWS)]
)
def test_a_signal_to_one_rank_at_any_moment_loses_no_step_on_any_rank(rows, num_moments, tmp_path):
    first, second = run_forked(ranks.stop_at_moments, ranks=2, args=[str(tmp_path), rows, num_moments, 39])
    assert first == second
    assert len(first) == num_moments * len(rows)
    assert [row for row in first if row[1] != row[2] or row[3] not in {0, 143} or not row[4]] == []
    stopped = [steps for _, steps, _, code, _ in first if code == 143]
    assert stopped
    assert all(0 < steps <= 16 for steps in stopped)


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_commit_alone_stop_in_mid_epoch_after_one_step_of_all(num_ranks, tmp_path):
    plans = {
        2: ["server(1, consistency=asp)", "pipedream(2)"],
        3: ["server(2, consistency=ssp, staleness=1)", "easgd(2)"],
    }
    runs = run_forked(ranks.stop_alone, ranks=num_ranks, args=[str(tmp_path), plans[num_ranks]])
    assert runs == [runs[0]] * num_ranks
    assert [(code, steps == saved, 2 < steps < 20) for code, steps, saved in runs[0]] == [(143, True, True)] * 2
