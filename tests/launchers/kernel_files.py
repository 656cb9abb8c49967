"""The kernel's files about processors, for hosts other than this one."""

from pathlib import Path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="ascii")


def host(root: Path, cores, *, nodes=None, allowed=None, package=lambda cpu: 0):
    """Write the files of a host below ``root``.

    Args:
        cores: for each core the numbers of its hyperthreads, as text.
        nodes: for each NUMA node its hyperthreads.
        allowed: the hyperthreads that a process may use; all when left out.
        package: from a hyperthread to its socket.
    """
    numbers = [int(cpu) for core in cores for cpu in core.split(",")]
    for core in cores:
        for cpu in map(int, core.split(",")):
            folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            write(folder / "core_cpus_list", core)
            write(folder / "physical_package_id", package(cpu))
    for number, cpus in enumerate(nodes or []):
        write(root / f"sys/devices/system/node/node{number}/cpulist", cpus)
    write(root / "sys/devices/system/cpu/online", ",".join(map(str, sorted(numbers))))
    if allowed is not None:
        write(root / "proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}")
    return root


def two_sockets(root: Path, **options):
    """Two sockets of four cores of two hyperthreads, as Linux numbers them."""
    cores = [f"{core},{core + 8}" for core in range(8)]
    return host(root, cores, nodes=["0-3,8-11", "4-7,12-15"], package=lambda cpu: cpu % 8 // 4, **options)


def four_nodes(root: Path):
    """Four NUMA nodes, of which one has memory and no core; two cores in each of the others."""
    return host(root, [str(cpu) for cpu in range(6)], nodes=["0-1", "2-3", "", "4-5"], package=lambda cpu: cpu // 4)
