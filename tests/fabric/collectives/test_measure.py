"""The choice uses links measured on the ranks, and all ranks make the same one."""

import pytest

from counterpoint.fabric.collectives.choose import choose_algorithm, measure_host_links


def chosen(fabric):
    network = measure_host_links(fabric)
    return network.hosts, network.within, network.reduce_bytes_per_s, choose_algorithm(1 << 20, network).name


@pytest.mark.long(quick=["local"])
def test_all_ranks_get_the_same_figures_and_choose_alike(run_scenario):
    (hosts, link, adding, name), *others = run_scenario(chosen, 3)
    assert all(other == (hosts, link, adding, name) for other in others)
    assert name
    assert adding > 0


@pytest.mark.long(quick=["shm"])
def test_figures_of_shared_memory_are_those_of_a_memory(processes):
    hosts, link, _, _ = processes(chosen, 2)[0]
    if hosts[0] == hosts[1]:
        assert 0 < link.latency_s < 0.01
        assert link.bytes_per_s > 50e6
