"""Placement: ranks x threads = cores, each rank on one NUMA node if possible, and a note if not."""

import pytest
from hypothesis import given, strategies as st

from counterpoint.errors import PlanError
from counterpoint.world.cpu_affinity import BINDINGS, place_ranks
from counterpoint.world.topology import Core, Topology


def machine(*cores_of_nodes, threads=1, quota=None):
    """A host with so many cores on each node; hyperthreads of one core are 100 apart."""
    nodes = [node for node, count in enumerate(cores_of_nodes) for _ in range(count)]
    cores = (Core(tuple(number + 100 * t for t in range(threads)), node) for number, node in enumerate(nodes))
    return Topology(tuple(cores), quota)


def cpus(topology, ranks, bind, **options):
    return [place.cpus for place in place_ranks(topology, ranks, bind=bind, **options).ranks]


def threads(topology, ranks, **options):
    return [place.threads for place in place_ranks(topology, ranks, **options).ranks]


@pytest.mark.parametrize(("ranks", "each"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1)])
def test_ranks_share_the_physical_cores_evenly_and_hyperthreads_do_not_count(ranks, each):
    assert threads(machine(4, 4, threads=2), ranks) == [each] * ranks


def test_a_quota_counts_as_fewer_cores():
    assert threads(machine(8, quota=4.5), 2) == [2, 2]
    assert place_ranks(machine(8, quota=2.0), 3).note.startswith(
        "3 ranks x 2 threads on 2 cores; setting 1 thread each"
    )


def test_nothing_is_bound_unless_asked_for():
    assert cpus(machine(2, 2), 2, "none") == [(), ()]
    assert [result.cpus for result in place_ranks(machine(2, 2), 2).ranks] == [(), ()]


def test_core_keeps_neighbours_on_a_node_compact_fills_it_and_spread_alternates():
    two = machine(4, 4)
    assert cpus(two, 4, "core", threads=1) == [(0,), (1,), (4,), (5,)]
    assert cpus(two, 4, "compact", threads=1) == [(0,), (1,), (2,), (3,)]
    assert cpus(two, 4, "spread", threads=1) == [(0,), (4,), (1,), (5,)]


def test_a_rank_has_all_hyperthreads_of_its_cores():
    assert cpus(machine(2, threads=2), 2, "core") == [(0, 100), (1, 101)]


def test_a_node_is_a_replica_under_numa():
    assert cpus(machine(2, 2), 2, "numa") == [(0, 1), (2, 3)]
    assert cpus(machine(2, 2), 4, "numa") == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert cpus(machine(2, 2, 2, 2), 2, "numa") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert threads(machine(2, 2), 2, bind="numa") == [2, 2]


def test_a_rank_straddles_nodes_only_where_no_node_has_room():
    assert cpus(machine(3, 3), 3, "core") == [(0, 1), (3, 4), (2, 5)]
    assert cpus(machine(2, 2), 1, "core") == [(0, 1, 2, 3)]


def test_more_ranks_than_cores_are_reported_and_have_one_thread_each():
    result = place_ranks(machine(2), 4, threads=2, bind="core")
    assert result.note == (
        "4 ranks x 2 threads on 2 cores; setting 1 thread each, and ranks share cores: at most 2 ranks can compute "
        "at the same time"
    )
    assert {(where.threads, where.cpus) for where in result.ranks} == {(1, ())}


def test_more_threads_than_cores_are_kept_if_requested_and_reported():
    result = place_ranks(machine(2), 2, threads=2)
    assert [where.threads for where in result.ranks] == [2, 2]
    assert result.note == (
        "2 ranks x 2 threads on 2 cores: threads share cores, as requested; omit --threads and OMP_NUM_THREADS "
        "for 1 each"
    )
    assert place_ranks(machine(2), 2).note == ""


def test_a_binding_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(PlanError, match=r"there is no binding 'socket'; the bindings are none, core, numa, compact"):
        place_ranks(machine(2), 2, bind="socket")  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12), st.sampled_from(BINDINGS[1:]))
def test_ranks_never_share_a_core_but_under_numa_and_each_has_a_core_for_each_thread(nodes, ranks, bind):
    topology = machine(*nodes)
    result = place_ranks(topology, ranks, bind=bind)
    if ranks > topology.num_usable:
        return
    assert ranks * result.ranks[0].threads <= topology.num_usable
    taken = [cpu for where in result.ranks for cpu in where.cpus]
    if bind != "numa":
        assert len(taken) == len(set(taken))
        assert all(len(where.cpus) == where.threads for where in result.ranks)
