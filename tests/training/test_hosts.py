"""What a plan becomes where ranks have been started on several hosts."""

import pytest

from counterpoint.launchers.environment import RankEnvironment
from counterpoint.plan import Plan
from counterpoint.training.choice import hosts_of, make_plan
from counterpoint.training.one_copy import with_one_copy
from counterpoint.world.hosts import neighbours


def started(num_ranks, per_host):
    return RankEnvironment(0, num_ranks, 0, per_host, "localhost", 1, "job")


def test_a_launcher_fills_one_host_after_the_other():
    assert hosts_of(started(6, 2)) == [0, 0, 1, 1, 2, 2]
    assert hosts_of(None) == []


@pytest.mark.parametrize(
    ("per_host", "becomes"),
    [(4, "tree(4, shape=chain, sends=early)"), (2, "tree(2, shape=chain, sends=early) * tree(2, sends=early)")],
)
def test_a_system_is_told_how_many_ranks_are_on_each_host(per_host, becomes):
    assert str(make_plan("s_caffe", started(4, per_host), None, None)) == becomes


def test_without_a_launcher_all_ranks_are_on_one_host():
    assert str(make_plan("s_caffe(4)", None, None, None)) == "tree(4, shape=chain, sends=early)"


def test_copies_that_do_not_update_have_no_update_to_share():
    plan = Plan.parse("tree(2) * data(2)")
    assert with_one_copy(plan, (0, 0, 0, 0)) == with_one_copy(plan, (0, 0, 1, 1)) == plan


@pytest.mark.parametrize(
    ("degree", "stride", "hosts", "among"),
    [
        (4, 1, (0, 0, 0, 0), 4),
        (4, 1, (0, 0, 1, 1), 2),
        (2, 2, (0, 0, 1, 1), 1),
        (2, 2, (0, 1, 0, 1), 2),
        (3, 1, (0, 0), 1),
    ],
)
def test_neighbours_are_as_many_as_every_host_has(degree, stride, hosts, among):
    assert neighbours(degree, stride, hosts) == among
