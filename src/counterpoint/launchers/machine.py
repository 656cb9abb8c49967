"""This host's processors and memory, from the kernel's files in ``/proc`` and ``/sys``."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterator
from pathlib import Path

from counterpoint.launchers.variables import requested_threads
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding, HostPlacement, place_ranks
from counterpoint.world.topology import Core, Topology

CPUS = Path("sys/devices/system/cpu")
NODES = Path("sys/devices/system/node")
GROUPS = Path("sys/fs/cgroup")


def this_host() -> Topology:
    """Return the topology of the cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return Topology(tuple(Core((cpu,)) for cpu in range(os.cpu_count() or 1)))
    return read_topology(Path("/"), os.sched_getaffinity(0))


def place_on_this_host(ranks: int, threads: int | None = None, bind: Binding = DEFAULT_BINDING) -> HostPlacement:
    """Return the cores and threads of each rank on this host, as launchers apply them.

    Args:
        ranks: how many.
        threads: of each; by default OMP_NUM_THREADS, else the cores divided by the ranks.
        bind: see :func:`counterpoint.world.cpu_affinity.place_ranks`.
    """
    return place_ranks(this_host(), ranks, threads=requested_threads() if threads is None else threads, bind=bind)


def host_memory_bytes() -> int:
    """Return the memory that processes of this host may use together: physical memory, or a cgroup's limit."""
    return read_memory_bytes(Path("/")) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_memory_bytes(root: Path) -> int:
    """Return the memory according to the kernel's files below ``root``; 0 if unknown.

    Args:
        root: of ``sys`` and ``proc``: ``/`` or a folder with copies.
    """
    lines = (line.split() for line in _read_text(root / "proc/meminfo").splitlines())
    limits_bytes = [1024 * int(fields[1]) for fields in lines if fields[0] == "MemTotal:"]
    for folder in _cgroups(root, "memory"):
        limits = (_read_text(folder / name) for name in ("memory.max", "memory.limit_in_bytes"))
        limits_bytes += [int(limit) for limit in limits if limit.isdigit()]
    return min(limits_bytes, default=0)


def read_topology(root: Path, allowed: Collection[int] | None = None) -> Topology:
    """Return the topology according to the kernel's files below ``root``.

    Defaults for missing files: a hyperthread is a core of its own, memory is uniform, and there is no CPU quota.

    Args:
        root: of ``sys`` and ``proc``: ``/`` or a folder with copies.
        allowed: the usable hyperthreads; by default those of ``proc/self/status``.
    """
    usable = sorted(_allowed(root) if allowed is None else allowed)
    near = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((root / NODES).glob("node[0-9]*"))
        for cpu in parse_cpu_list(_read_text(folder / "cpulist"))
    }
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in usable:
        folder = root / CPUS / f"cpu{cpu}" / "topology"
        siblings = parse_cpu_list(_read_text(folder / "core_cpus_list") or _read_text(folder / "thread_siblings_list"))
        cpus = tuple(sibling for sibling in siblings if sibling in usable) or (cpu,)
        package = _read_text(folder / "physical_package_id")
        cores.setdefault(cpus, Core(cpus, near.get(cpu, 0), int(package) if package.isdigit() else 0))
    return Topology(tuple(cores.values()) or (Core((0,)),), min(_quotas(root), default=None))


def processor_name(root: Path = Path("/")) -> str:
    """Return the model name of this host's processors, or the machine type."""
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine() or "unknown"


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the instruction sets of this host's processors, as the kernel names them; empty if it does not say."""
    for line in _read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(value.split())
    return frozenset()


def parse_cpu_list(text: str) -> list[int]:
    """Return the numbers of a kernel CPU list.

    Example:
        >>> parse_cpu_list("0-2,8")
        [0, 1, 2, 8]
    """
    runs = [run.split("-") for run in text.split(",") if run]
    return [cpu for run in runs for cpu in range(int(run[0]), int(run[-1]) + 1)]


def _allowed(root: Path) -> list[int]:
    for line in _read_text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return parse_cpu_list(value.strip())
    return parse_cpu_list(_read_text(root / CPUS / "online"))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's cgroup and its ancestors."""
    for folder in _cgroups(root, "cpu"):
        yield from _quota(_read_text(folder / "cpu.max"))
        yield from _quota(f"{_read_text(folder / 'cpu.cfs_quota_us')} {_read_text(folder / 'cpu.cfs_period_us')}")


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, for cgroup v1 and v2."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _ancestors(root / GROUPS, path)
        elif controller in controllers.split(","):
            yield from (
                folder for name in {controller, controllers} for folder in _ancestors(root / GROUPS / name, path)
            )


def _ancestors(top: Path, path: str) -> Iterator[Path]:
    """Yield a cgroup's folder and its ancestors; a container may see only the upper part of the path as its own."""
    names = [name for name in path.split("/") if name not in {"", ".."}]
    yield from (top.joinpath(*names[:depth]) for depth in range(len(names), -1, -1))


def _quota(text: str) -> Iterator[float]:
    quota, _, period = text.partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        yield int(quota) / int(period)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
