"""Clusters of GPU hosts by name, from public figures, for plans on GPUs that nobody has measured.

A name is ``8xh100`` for one host, ``4x8xh100`` for four hosts with InfiniBand, ``4x8xh100-ethernet`` for Ethernet.

Peaks are those of dense products (data sheets print twice as much for sparse ones). A link between GPUs of a host has
the bandwidth that NCCL counts on, per direction. Latencies are NCCL's. A network has its line rate.

Sources:
    NVIDIA A100 Tensor Core GPU Datasheet (2021): peaks, memory, NVLink. NVIDIA H100 Tensor Core GPU Datasheet (2023),
    SXM. NVIDIA H200 Tensor Core GPU Datasheet (2024), SXM. NVIDIA DGX A100, DGX H100 and DGX H200 Datasheets:
    InfiniBand of a host. Google Cloud, Networking and GPU machines (a2-highgpu-8g, a2-ultragpu-8g, a3-highgpu-8g,
    a3-ultragpu-8g): Ethernet of a host. NCCL 2.27, ``src/graph/topo.h`` (bandwidth of a NVLink) and
    ``src/graph/tuning.cc`` (latencies of rings, protocol Simple). Fractions: ``benchmarks/gpu/results`` of this
    repository. Launches: Gray, Getting Started with CUDA Graphs, NVIDIA developer blog, 2019.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from counterpoint.world.cluster import Cluster, Device, Level, Link, Roofline

GIB = 2**30
GBIT = 1e9 / 8
TERA = 1e12

GPUS_PER_HOST = 8

FLOPS_FRACTION = 0.75
"""741 of 989 TFLOP/s for products of 8192 x 8192 in bf16 on an H100."""
MEMORY_FRACTION = 0.875
"""2.93 of 3.35 TB/s for a copy on an H100."""
LAUNCH_S = 0.9e-6
"""Kernels of 2.9 us that are launched one after the other take 3.8 us each."""
RESERVE_FRACTION = 0.1
"""An assumption: CUDA's context, workspaces of cuBLAS and NCCL, and fragmentation take a tenth of the memory."""

NVLINK_LATENCY_S = 8.4e-6
NETWORK_LATENCY_S = 14e-6


@dataclass(frozen=True, slots=True)
class GpuHost:
    """A host with eight GPUs, each connected to each other by NVSwitches.

    Args:
        gpu: its name on the data sheet.
        peaks: peak FLOP/s by dtype.
        memory_gib: memory of a GPU; data sheets write GB.
        memory_bytes_per_s: its bandwidth.
        nvlink_bytes_per_s: of a GPU, per direction.
        infiniband_bytes_per_s: of the adapter of each GPU, per direction.
        ethernet_bytes_per_s: of the host, for all its GPUs together; or of the adapter of each GPU.
        shares_ethernet: whether it is that of the host.
    """

    gpu: str
    peaks: tuple[tuple[str, float], ...]
    memory_gib: int
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    infiniband_bytes_per_s: float
    ethernet_bytes_per_s: float
    shares_ethernet: bool = True

    @property
    def device(self) -> Device:
        """One of its GPUs."""
        return Device(
            cost_per_s=dict(self.peaks)["fp32"],
            memory_bytes=self.memory_gib * GIB,
            memory_bytes_per_s=self.memory_bytes_per_s,
            reserve_bytes=int(RESERVE_FRACTION * self.memory_gib * GIB),
            roofline=Roofline(self.gpu, self.peaks, FLOPS_FRACTION, MEMORY_FRACTION, LAUNCH_S),
        )

    def network(self, num_hosts: int, *, is_ethernet: bool) -> Level:
        """Return the network between hosts."""
        if is_ethernet:
            link = Link(NETWORK_LATENCY_S, self.ethernet_bytes_per_s)
            return Level("ethernet", num_hosts, link, is_shared=self.shares_ethernet)
        return Level("infiniband", num_hosts, Link(NETWORK_LATENCY_S, self.infiniband_bytes_per_s))


_A100_PEAKS = (
    *(("fp64", 19.5 * TERA), ("fp32", 19.5 * TERA), ("tf32", 156 * TERA)),
    *(("bf16", 312 * TERA), ("fp16", 312 * TERA)),
)
_H100_PEAKS = (  # also of the H200, which has the same processor
    *(("fp64", 67 * TERA), ("fp32", 67 * TERA), ("tf32", 494.7 * TERA)),
    *(("bf16", 989.4 * TERA), ("fp16", 989.4 * TERA), ("fp8", 1978.9 * TERA)),
)
_A100_NVLINK = 12 * 20.0e9  # 12 links, 25 GB/s each by the data sheet (600 GB/s in both directions), 20 GB/s by NCCL
_H100_NVLINK = 18 * 20.6e9  # 18 links, 25 GB/s each by the data sheet (900 GB/s in both directions), 20.6 GB/s by NCCL

GPU_HOSTS = {
    "a100-40gb": GpuHost(
        "NVIDIA A100 SXM 40GB", _A100_PEAKS, 40, 1.555e12, _A100_NVLINK, 200 * GBIT, 100 * GBIT
    ),
    "a100-80gb": GpuHost(
        "NVIDIA A100 SXM 80GB", _A100_PEAKS, 80, 2.039e12, _A100_NVLINK, 200 * GBIT, 100 * GBIT
    ),
    "h100": GpuHost(
        "NVIDIA H100 SXM 80GB", _H100_PEAKS, 80, 3.35e12, _H100_NVLINK, 400 * GBIT, 4 * 200 * GBIT
    ),
    "h200": GpuHost(
        "NVIDIA H200 SXM 141GB", _H100_PEAKS, 141, 4.8e12, _H100_NVLINK, 400 * GBIT, 400 * GBIT, shares_ethernet=False
    ),
}  # fmt: skip
"""Hosts with eight GPUs, by the names of GPUs in names of clusters."""

CLUSTER_NAMES = tuple(f"{GPUS_PER_HOST}x{gpu}" for gpu in GPU_HOSTS)
"""Names of clusters of one host."""

_NAME = re.compile(
    rf"(?:(?P<hosts>[1-9][0-9]{{0,4}})x)?{GPUS_PER_HOST}x(?P<gpu>{'|'.join(GPU_HOSTS)})(?P<ethernet>-ethernet)?"
)
_PREFIX = re.compile(rf"(?:[0-9]+x)?(?={GPUS_PER_HOST}x)", re.IGNORECASE)


def find_known_cluster(name: str) -> Cluster | None:
    """Return the cluster of a name, in lower or upper case; None if there is none.

    Example:
        >>> cluster = find_known_cluster("2x8xH100")
        >>> cluster.num_ranks, cluster.device.roofline.name
        (16, 'NVIDIA H100 SXM 80GB')
    """
    found = _NAME.fullmatch(name.lower())
    if found is None:
        return None
    host, num_hosts = GPU_HOSTS[found["gpu"]], int(found["hosts"] or 1)
    levels = [Level("host", GPUS_PER_HOST, Link(NVLINK_LATENCY_S, host.nvlink_bytes_per_s))]
    if num_hosts > 1:
        levels.append(host.network(num_hosts, is_ethernet=found["ethernet"] is not None))
    return Cluster(host.device, levels=tuple(levels))


def find_gpu_name(gpu: str, memory_bytes: int) -> str | None:
    """Return the name of the cluster of one host with the GPUs that a driver names so; None if it is not known.

    Args:
        gpu: as the driver names it.
        memory_bytes: that torch sees, which is a little less than the data sheet says.

    Example:
        >>> find_gpu_name("NVIDIA H100 80GB HBM3", 85_017_493_504), find_gpu_name("NVIDIA H100 PCIe", 85_017_493_504)
        ('8xh100', None)
    """
    if "PCIE" in gpu.upper() or "NVL" in gpu.upper():  # other peaks, memory and links
        return None
    for name, host in GPU_HOSTS.items():
        is_named = re.search(rf"\b{name.partition('-')[0]}\b", gpu, re.IGNORECASE) is not None
        if is_named and 0.9 * host.memory_gib * GIB < memory_bytes <= host.memory_gib * GIB:
            return f"{GPUS_PER_HOST}x{name}"
    return None


def suggest_names(name: str) -> str:
    """Return the names of clusters that are nearest to a wrong one, and how names are made.

    Example:
        >>> suggest_names("8xh10")
        'did you mean 8xh100? names are 8xa100-40gb, 8xa100-80gb, 8xh100 and 8xh200, for several hosts as in 4x8xh100 \
or 4x8xh100-ethernet'
    """
    lower = name.lower()
    prefix = _PREFIX.match(lower)
    hosts = prefix[0] if prefix is not None else ""
    given = lower.removeprefix(hosts).removesuffix("-ethernet")
    longer = [known for known in CLUSTER_NAMES if given and known.startswith(given)]
    near = longer[:2] or get_close_matches(given, CLUSTER_NAMES, n=2)
    meant = f"did you mean {' or '.join(hosts + match for match in near)}? " if near else ""
    *others, last = CLUSTER_NAMES
    return f"{meant}names are {', '.join(others)} and {last}, for several hosts as in 4x8xh100 or 4x8xh100-ethernet"
