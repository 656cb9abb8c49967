"""The busy time of a rank is what it does itself, not what it waits for."""

import pytest

from counterpoint.runtime.busy_time import BusyTimer
from counterpoint.runtime.commit.step_commit import StepGuard, StepReport, StepResult, decide_step, merge_results


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("counts_pauses", "second"), [(False, 4.0), (True, 14.0)])
def test_waits_are_left_out_and_pauses_unless_they_count(counts_pauses, second):
    clock = FakeClock()
    timer = BusyTimer(clock)
    if counts_pauses:
        timer.count_pauses()
    timer.begin_step()
    clock.now = 5.0
    timer.add_wait(2.0)
    assert timer.read() == 3.0
    clock.now = 6.0  # the commit has waited
    timer.restart()
    clock.now = 7.0
    timer.end_step()
    clock.now = 17.0
    timer.begin_step()
    clock.now = 20.0
    assert timer.read() == second, "the update after the commit counts to the next one"


def test_all_members_of_a_commit_know_the_busy_times_of_all():
    reports = [StepReport(1.0, 1, 1.0, 1, busy_s=0.25), StepReport(1.0, 1, 1.0, 1, busy_s=0.5)]
    result = decide_step(reports, (2, 5), StepGuard())
    assert result.busy_s == ((2, 0.25), (5, 0.5))
    assert merge_results(result, StepResult(1.0, 1, 0.0, 1.0, "", busy_s=((5, 0.5),))).busy_s == ((2, 0.25), (5, 1.0))
