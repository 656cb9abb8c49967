"""What ranks compute on, compared before the first step: a GPU that two share, cards and drivers that differ."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch

from counterpoint.device.accelerator import Accelerator, DeviceIdentity
from counterpoint.device.select import require_transport
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.process_group.backends import device_backend_name
from counterpoint.launchers.variables import shares_gpus
from counterpoint.terminal_text import warn

GIB = 1 << 30


class RankDevice(NamedTuple):
    """The device of one rank.

    Args:
        host: its host.
        device: its identity.
    """

    host: str
    device: DeviceIdentity

    @property
    def card(self) -> str:
        """Name and memory of the hardware."""
        return f"{self.device.name} with {self.device.total_bytes / GIB:.0f} GiB"


def compare_devices(fabric: Fabric, accelerator: Accelerator) -> None:
    """Check that ranks can compute on their devices together; a collective call.

    Rank 0 warns of what costs time or may fail, but need not.

    Raises:
        PlanError: the transport does not take tensors of a device, or takes one rank of each device, and two ranks
            have the same.
    """
    missing = "" if device_backend_name() else f"torch {torch.__version__} has no NCCL here"
    require_transport(
        accelerator.device, fabric.num_ranks, takes_device_tensors=fabric.takes_device_tensors, missing=missing
    )
    identity = accelerator.identity()
    own: list[Json] | None = None if identity is None else [socket.gethostname(), *identity]
    found = cast("list[list[str] | None]", fabric.gather_values("devices", own, tuple(range(fabric.num_ranks))))
    devices = {
        rank: RankDevice(values[0], DeviceIdentity(*values[1:]))  # type: ignore[arg-type]  # as they were gathered
        for rank, values in enumerate(found)
        if values is not None
    }
    if fabric.needs_own_device and not shares_gpus():
        require_own_devices(devices)
    for text in describe_differences(devices) if fabric.rank == 0 else ():
        warn(text, RuntimeWarning, stacklevel=2)


def require_own_devices(devices: Mapping[int, RankDevice]) -> None:
    """Raise if two ranks compute on one device.

    Raises:
        PlanError: they do.
    """
    for ranks in group_ranks({rank: one.device.unique_id for rank, one in devices.items()}).values():
        if len(ranks) > 1:
            one = devices[ranks[0]]
            num_gpus = len({other.device.unique_id for other in devices.values() if other.host == one.host})
            raise PlanError(
                f"{format_ranks(ranks)} of host {one.host} compute on the same GPU, {one.device.unique_id} "
                f"({one.card}), and NCCL takes one rank of each; start as many processes as there are GPUs (these use "
                f"{num_gpus}), let CUDA_VISIBLE_DEVICES show all of them to each process or another one to each, or "
                "train all ranks in one process, without a launcher"
            )


def describe_differences(devices: Mapping[int, RankDevice]) -> Iterator[str]:
    """Yield what differs between the devices of ranks, with the rule and the remedy."""
    cards = group_ranks({rank: one.card for rank, one in devices.items()})
    if len(cards) > 1:
        yield (
            f"the ranks compute on different GPUs: {join_groups(cards)}; ranks of equal parts wait for the slowest, "
            "and the smallest memory limits all: choose equal ones with CUDA_VISIBLE_DEVICES, or give the slower ones "
            "less by a pipeline with stages of your own"
        )
    for what, remedy in (
        ("driver", "install the same driver on all hosts"),
        ("library", "install the same build of torch on all hosts, and no NCCL of LD_PRELOAD or LD_LIBRARY_PATH"),
    ):
        texts = {rank: f"{getattr(one.device, what) or 'none'} on {one.host}" for rank, one in devices.items()}
        if len({getattr(one.device, what) for one in devices.values()}) > 1:
            name = "drivers of the GPUs" if what == "driver" else "libraries between the GPUs"
            found = join_groups(group_ranks(texts))
            yield f"the {name} differ: {found}; NCCL may fail or be slower between them: {remedy}"


def group_ranks(facts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return for each fact the ranks that have it, in order of the lowest rank.

    Example:
        >>> group_ranks({0: "a", 1: "b", 2: "a"})
        {'a': [0, 2], 'b': [1]}
    """
    groups: dict[str, list[int]] = {}
    for rank, fact in facts.items():
        groups.setdefault(fact, []).append(rank)
    return groups


def join_groups(groups: Mapping[str, Sequence[int]]) -> str:
    """Return each fact with its ranks, as text."""
    return ", ".join(f"{fact} ({format_ranks(ranks)})" for fact, ranks in groups.items())
