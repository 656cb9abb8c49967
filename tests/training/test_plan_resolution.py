"""What a plan becomes where ranks have been started on several hosts."""

import pytest

from counterpoint.launchers.environment import RankEnvironment
from counterpoint.plan.plan import Plan
from counterpoint.training.plan_resolution import (
    RequestedPlan,
    hosts_of_ranks,
    resolve_initial_plan,
    share_params_per_host,
)
from counterpoint.world.mesh import replicas_per_host


def started(num_ranks, per_host):
    return RankEnvironment(0, num_ranks, 0, per_host, "localhost", 1, "job")


def test_a_launcher_fills_one_host_after_the_other():
    assert hosts_of_ranks(started(6, 2)) == [0, 0, 1, 1, 2, 2]
    assert hosts_of_ranks(None) == []


@pytest.mark.parametrize(
    ("per_host", "becomes"),
    [
        (4, "tree(4, shape=chain, send=during_backward)"),
        (2, "tree(2, shape=chain, send=during_backward) * tree(2, send=during_backward)"),
    ],
)
def test_a_system_gets_the_number_of_ranks_on_each_host(per_host, becomes):
    assert str(resolve_initial_plan(RequestedPlan("s_caffe"), started(4, per_host))) == becomes


def test_without_a_launcher_all_ranks_are_on_one_host():
    assert str(resolve_initial_plan(RequestedPlan("s_caffe(4)"), None)) == "tree(4, shape=chain, send=during_backward)"


def test_copies_that_do_not_update_have_no_update_to_share():
    plan = Plan.parse("tree(2) * data(2)")
    assert share_params_per_host(plan, (0, 0, 0, 0)) == share_params_per_host(plan, (0, 0, 1, 1)) == plan


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
    assert replicas_per_host(degree, stride, hosts) == among
