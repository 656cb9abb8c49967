"""Backends of the process groups that move tensors: NCCL between CUDA devices, gloo between hosts' memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from counterpoint.fabric.c10d import GLOO_TIMEOUT, GlooProcessGroup, PrefixStore, Store
from counterpoint.fabric.gloo.connections import Rendezvous


@dataclass(frozen=True, slots=True)
class ProcessGroupBackend:
    """A kind of c10d process groups.

    Attributes:
        name: as torch names it.
        device_type: of the tensors that it takes; tensors of other devices are staged through host memory.
        waits_on_host: whether a wait blocks the host; otherwise it makes the current stream wait.
    """

    name: str
    device_type: str
    waits_on_host: bool

    def own_device(self) -> torch.device:
        """Return this rank's device."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())


GLOO: Final = ProcessGroupBackend("gloo", "cpu", True)
NCCL: Final = ProcessGroupBackend("nccl", "cuda", False)


def nccl_rendezvous(rendezvous: Rendezvous) -> Rendezvous:
    """Return a rendezvous at which process groups of NCCL are opened; their ends prove nothing."""
    return replace(rendezvous, connect=connect_nccl, abort=abort_process_groups, secret=None)


def device_backend_name() -> str:
    """Return the name of the backend between this host's devices; empty if it has none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "nccl" if accelerator is not None and accelerator.type == "cuda" and dist.is_nccl_available() else ""


def connect_nccl(store: Store, name: str, group: tuple[int, ...], rank: int, timeout_s: float) -> GlooProcessGroup:
    """Return a process group of NCCL among the ranks of the group, on the current device of each; all of them call it.

    Its deadline is the fabric's, which counts from when a collective could run, and not from when it was started.
    """
    del timeout_s
    nccl: Any = _distributed_c10d.ProcessGroupNCCL  # absent from builds for the CPU
    options = nccl.Options()
    options._timeout = GLOO_TIMEOUT  # noqa: SLF001 - it has no public name
    process_group = nccl(PrefixStore(name, store), group.index(rank), len(group), options)
    device = torch.device("cuda", torch.accelerator.current_device_index())
    process_group.eager_connect_single_device(device)  # otherwise the first collective would
    connection: GlooProcessGroup = process_group
    return connection


def abort_process_groups(connections: Sequence[Any]) -> None:
    """End all that is pending on these process groups; their kernels on devices end, too."""
    for connection in connections:
        connection.abort()
