"""If ranks outnumber cores, a rank that wakes up does not preempt one that computes, while they are connected."""

import os

import pytest

from counterpoint.fabric.shm.transport import BatchScheduling

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel schedules in another way")


@pytest.mark.parametrize(("cores", "policy"), [(1, "SCHED_BATCH"), (2, "SCHED_OTHER"), (3, "SCHED_OTHER")])
def test_batch_scheduling_only_if_ranks_outnumber_cores(cores, policy):
    yielding = BatchScheduling(num_ranks=2, num_cores=cores)
    assert os.sched_getscheduler(0) == getattr(os, policy)
    yielding.restore()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_forbidden_policy_change_is_ignored(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert not BatchScheduling(num_ranks=2, num_cores=1).is_enabled


def test_another_policy_of_the_user_is_kept():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        BatchScheduling(num_ranks=2, num_cores=1).restore()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
