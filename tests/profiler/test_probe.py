"""Ranks measure themselves and their links; the result is a cluster for predictions."""

from functools import partial

import pytest
import torch

from counterpoint.errors import PlanError
from counterpoint.fabric import LocalWorld
from counterpoint.profiler.probe import (
    LinkTimings,
    fit_link,
    median_timings,
    probe_cluster,
    relative_speeds,
    time_messages_by_size,
)
from counterpoint.profiler.probe_compute import (
    ProbeConfig,
    concurrent_rate,
    layer_work,
    measure_flops_by_threads,
    memory_work,
    thread_counts,
)
from counterpoint.world.cluster import Link
from counterpoint.world.cluster_file import parse_cluster
from tests.fabric.run_ranks import on_hosts

GIB = 2**30
LITTLE = ProbeConfig((32,), (2, 32, 32), 1 << 16, (8, 1 << 10, 1 << 17), duration_s=1e-3, num_rounds=1)


def probed(fabric, hosts=None, effort=LITTLE):
    """Result on one rank; the host of each rank is detected, or given."""
    host = None if hosts is None else hosts[fabric.rank]
    return probe_cluster(fabric, host_memory_bytes=4 * GIB, max_threads=2, host=host, config=effort)


def probed_values(hosts, fabric):
    return probed(fabric, hosts, ProbeConfig(duration_s=0.05)).to_json_dict()


def on_ranks(num_ranks, hosts=None):
    with LocalWorld(num_ranks) as world:
        return world.run(partial(probed, hosts=hosts))


def test_one_rank_has_a_device_and_no_link():
    (result,) = on_ranks(1)
    assert result.cluster.device.cost_per_s > 1e6
    assert result.cluster.device.memory_bytes == 4 * GIB
    assert (result.link_timings, result.cluster.levels, result.cluster.link, result.cluster.compute_contention) == (
        (),
        (),
        Link(),
        (1.0,),
    )
    assert "# one rank has no link" in result.to_json_dict()["cluster"]


def test_what_was_found_is_the_same_on_all_ranks_and_reads_as_the_same_cluster():
    first, *others = on_ranks(2)
    assert all(other == first for other in others)
    assert parse_cluster(first.to_json_dict()["cluster"]) == first.cluster
    (level,) = first.cluster.levels
    assert (level.name, level.count, first.cluster.device.memory_bytes) == ("host", 2, 2 * GIB)
    assert [size for size, _ in first.link_timings[0].messages] == [8, 1 << 10, 1 << 17]


def test_ranks_of_two_hosts_have_two_levels():
    first, *_ = on_ranks(4, hosts="aabb")
    assert [(level.name, level.count) for level in first.cluster.levels] == [("host", 2), ("network", 2)]
    assert [(one.ranks, one.level) for one in first.link_timings] == [
        ((0, 1), "host"), ((2, 3), "host"), ((0, 2), "network"),
    ]  # fmt: skip
    assert len(first.cluster.compute_contention) == len(first.cluster.memory_contention) == 2


@pytest.mark.parametrize("hosts", ["aab", "abab"])
def test_hosts_that_no_cluster_file_can_describe_are_rejected(hosts):
    with pytest.raises(PlanError, match="equally many ranks that are numbered host by host"):
        on_ranks(len(hosts), hosts=hosts)


@pytest.mark.process
@pytest.mark.slow
def test_processes_on_two_hosts_measure_memory_and_sockets():
    values, *_ = on_hosts((0, 0, 1, 1), partial(probed_values, "aabb"), 4, timeout_s=60)
    cluster = parse_cluster(values["cluster"])
    inside, outside = (level.link for level in cluster.levels)
    assert inside.is_shared_memory
    assert not outside.is_shared_memory
    assert cluster.compute_contention[0] == 1.0 >= cluster.compute_contention[1]


def test_threads_are_as_before_when_others_were_tried():
    before = torch.get_num_threads()
    assert list(measure_flops_by_threads([1], LITTLE)) == [1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("ready", [layer_work, memory_work])
def test_a_rank_works_for_the_given_duration(ready):
    began, *ends = ready(LITTLE)()
    assert sorted(ends) == ends
    assert ends[-1] - began >= LITTLE.duration_s


def test_ranks_are_compared_while_all_of_them_work():
    early, late = [0.0, 1.0, 3.0, 5.0], [1.0, 3.0, 5.0, 6.0]
    assert concurrent_rate([early, late]) == 0.5  # of the pieces from 1 to 5, where the first one was done alone


def test_where_no_ranks_work_at_the_same_time_the_whole_time_counts():
    assert concurrent_rate([[0.0, 1.0, 2.0], [3.0, 4.0]]) == 3 / 4 / 2


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 3, 4, 6]), (64, [1, 2, 3, 4, 8, 16, 32, 64])]
)
def test_few_numbers_of_threads_are_tried(most, counts):
    assert thread_counts(most) == counts


def test_latency_is_that_of_the_smallest_and_bandwidth_that_of_the_large():
    link = Link(1e-4, 1e8)
    assert fit_link([(size, link.seconds(size)) for size in (0, 1 << 10, 1 << 20, 1 << 22)]) == link
    assert fit_link([(0, 1e-4), (1 << 10, link.seconds(1 << 10))]).bytes_per_s == pytest.approx(1e8)


def test_the_lower_rank_of_a_pair_has_the_figures():
    with LocalWorld(2) as world:
        lower, upper = world.run(lambda fabric: time_messages_by_size(fabric, 1 - fabric.rank, LITTLE))
    assert len(lower) == 3
    assert upper == []


def test_the_median_over_rounds_counts_for_sizes_that_were_sent_in_each():
    rounds = [((8, 1e-5), (64, 3e-5)), ((8, 9e-5), (64, 2e-5), (128, 1.0)), ((8, 2e-5), (64, 9e-5))]
    result = median_timings([LinkTimings((0, 1), "host", messages) for messages in rounds])
    assert result == LinkTimings((0, 1), "host", ((8, 2e-5), (64, 3e-5)))


def test_a_rank_that_was_slower_every_time_has_its_own_speed():
    assert relative_speeds([[8.0, 6.0, 8.0], [6.0, 8.0, 8.0], [4.0, 4.4, 5.0], [16.0, 12.0, 9.9]]) == (
        1.0,
        1.0,
        0.55,
        1.5,
    )


@pytest.mark.parametrize("third", [[4.0, 4.0, 7.0], [14.0, 12.0, 8.0], [7.0, 7.5, 7.0]])
def test_a_rank_is_not_slow_or_fast_that_was_as_fast_as_the_others_once(third):
    assert relative_speeds([[8.0, 6.0, 8.0], [6.0, 8.0, 8.0], third]) == ()
