"""The GPUs of this host and what is between them, from torch and from the kernel's files in ``/proc`` and ``/sys``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

DRIVER = Path("proc/driver/nvidia")
PCI = Path("sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU that this process sees.

    Args:
        name: of the hardware.
        total_bytes: its memory.
        free_bytes: what no process uses of it.
        pci_address: where it is, as the kernel names it; None if torch does not say.
    """

    name: str
    total_bytes: int
    free_bytes: int
    pci_address: str | None = None


class PciLanes(NamedTuple):
    """The width of a GPU's link to its host.

    Args:
        used: lanes that are in use.
        possible: lanes that the card has.
    """

    used: int
    possible: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLibraries:
    """What torch's build has for GPUs, and how it computes on them.

    Args:
        runtime: such as ``CUDA 13.0``.
        cudnn: its version; None for a build without, or if it cannot be loaded.
        uses_cudnn: False if ``torch.backends.cudnn.enabled`` is.
        nccl: its version; None for a build without.
        matmul: how float32 matrices are multiplied: ``ieee``, ``tf32`` or ``none``, which is as ``ieee``.
        has_tf32: whether a GPU that this process uses can multiply in TF32.
    """

    runtime: str
    cudnn: str | None = None
    uses_cudnn: bool = True
    nccl: str | None = None
    matmul: str = "none"
    has_tf32: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInventory:
    """The GPUs of a host.

    Args:
        gpus: those that this process sees, by index.
        num_on_host: how many the driver has; None if it does not say.
        driver: its version; None without one.
        runtime: of torch's build, such as ``CUDA 13.0``; None for a build without.
        nccl: its version; None for a build without.
        visible: variables that choose among the GPUs, by name.
        without_peer_access: pairs of indices whose GPUs cannot access each other's memory.
        lanes: by index, if the kernel says.
    """

    gpus: Sequence[GpuInfo] = ()
    num_on_host: int | None = None
    driver: str | None = None
    runtime: str | None = None
    nccl: str | None = None
    visible: Sequence[tuple[str, str]] = ()
    without_peer_access: Sequence[tuple[int, int]] = ()
    lanes: Sequence[PciLanes | None] = ()


def read_driver(root: Path) -> tuple[str | None, int | None]:
    """Return the driver's version and its number of GPUs, according to the kernel's files below ``root``.

    Args:
        root: of ``proc``: ``/`` or a folder with copies.
    """
    try:
        found = re.search(r"Module\s.*?(\d+(?:\.\d+)+)", (root / DRIVER / "version").read_text(encoding="utf-8"))
        num_gpus = sum(1 for _ in (root / DRIVER / "gpus").iterdir())
    except OSError:
        return None, None
    return found[1] if found is not None else "of an unknown version", num_gpus


def read_lanes(root: Path, pci_address: str | None) -> PciLanes | None:
    """Return the lanes of a PCI device, according to the kernel's files below ``root``.

    The speed of a lane is not included: an idle GPU lowers it.
    """
    if pci_address is None:
        return None
    try:
        used, possible = (
            int((root / PCI / pci_address / name).read_text(encoding="ascii"))
            for name in ("current_link_width", "max_link_width")
        )
    except (OSError, ValueError):
        return None
    return PciLanes(used, possible)
