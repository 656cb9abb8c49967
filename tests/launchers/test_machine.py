import os

import pytest

from counterpoint.launchers.machine import host_memory_bytes, read_memory_bytes, read_topology, this_host
from counterpoint.world.topology import Core
from tests.launchers.kernel_files import four_nodes, host, two_sockets, write


def test_one_core_and_nothing_else_is_read_from_an_empty_folder(tmp_path):
    topology = read_topology(tmp_path)
    assert (topology.cores, topology.quota_cpus, topology.num_usable) == ((Core((0,)),), None, 1)


def test_two_cores_without_numa_are_on_one_node(tmp_path):
    topology = read_topology(host(tmp_path, ["0", "1"]))
    assert topology.cores == (Core((0,)), Core((1,)))
    assert str(topology) == "2 cores (2 hyperthreads), 1 NUMA node, 1 package"


def test_hyperthreads_of_one_core_are_one_core(tmp_path):
    topology = read_topology(two_sockets(tmp_path))
    assert topology.cores[:2] == (Core((0, 8)), Core((1, 9)))
    assert topology.nodes[1] == tuple(Core((cpu, cpu + 8), 1, 1) for cpu in range(4, 8))
    assert str(topology) == "8 cores (16 hyperthreads), 2 NUMA nodes, 2 packages"


def test_a_node_without_cores_is_not_there(tmp_path):
    topology = read_topology(four_nodes(tmp_path))
    assert {node: [core.cpus for core in cores] for node, cores in topology.nodes.items()} == {
        0: [(0,), (1,)], 1: [(2,), (3,)], 3: [(4,), (5,)],
    }  # fmt: skip


def test_a_container_sees_only_the_cores_of_its_cpuset(tmp_path):
    topology = read_topology(two_sockets(tmp_path, allowed="2-3,4"))
    assert topology.cores == (Core((2,)), Core((3,)), Core((4,), 1, 1))


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "300000 100000"}, 1.0),
        ("0::/../../outside", {"cpu.max": "400000 100000"}, 4.0),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("2:memory:/job", {"cpu.max": "100000 100000"}, None),
    ],
)
def test_the_narrowest_quota_of_a_control_group_counts(tmp_path, group, files, quota):
    write(tmp_path / "proc/self/cgroup", group)
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert read_topology(host(tmp_path, ["0", "1", "2"])).quota_cpus == quota


def test_a_quota_of_half_a_core_still_lets_one_thread_compute(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "50000 100000")
    assert read_topology(host(tmp_path, ["0", "1"])).num_usable == 1


def test_this_host_has_the_hyperthreads_that_this_process_may_use():
    result = [cpu for core in this_host().cores for cpu in core.cpus]
    assert sorted(result) == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "size"),
    [
        ({}, 0),
        ({"proc/meminfo": "MemTotal:  2048 kB\nMemFree: 1 kB"}, 2048 * 1024),
        ({"proc/meminfo": "MemTotal:  2048 kB", "sys/fs/cgroup/job/memory.max": "1000"}, 1000),
        ({"proc/meminfo": "MemTotal:  2048 kB", "sys/fs/cgroup/job/memory.max": "max"}, 2048 * 1024),
        ({"proc/meminfo": "MemTotal:  2048 kB", "sys/fs/cgroup/memory.max": "9000000000"}, 2048 * 1024),
    ],
)
def test_memory_is_what_the_host_has_or_its_control_group_allows(tmp_path, files, size):
    for name, text in ({"proc/self/cgroup": "0::/job"} | files).items():
        write(tmp_path / name, text)
    assert read_memory_bytes(tmp_path) == size


def test_this_host_has_memory():
    assert host_memory_bytes() > 2**20
