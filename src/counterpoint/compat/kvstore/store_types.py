"""The names of stores: ``local``, ``dist_sync`` and all their spellings."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import PlanError

LOCAL = ("local", "local_update_cpu", "local_allreduce_cpu")
DEVICE = ("device", "local_update_device", "local_allreduce_device")
DIST = "dist"
DIST_TYPE_WORDS = {DIST, "sync", "async", "device"}

UNSUPPORTED_TYPES = {
    "nccl": "create('device'), which adds up on the device of the first value",
    "horovod": "import counterpoint.compat.horovod.torch, whose DistributedOptimizer takes the place of a Trainer",
    "byteps": "import counterpoint.compat.horovod.torch, or train with Trainer(strategy='data')",
    "p3": "create('dist_sync'): requests go to the servers in the order of the calls",
    "teststore": "create('local')",
}


@dataclass(frozen=True, slots=True)
class StoreType:
    """What a store is.

    Args:
        name: as it was asked for, in small letters.
        is_dist: values are kept by servers, for all workers.
        is_async: every push is an update of its own; otherwise those of all workers are added up first.
        is_device: the values of one push are added up on their device, and may be compressed on the way.
    """

    name: str
    is_dist: bool
    is_async: bool
    is_device: bool


def parse_store_type(name: object) -> StoreType:
    """Return what a store of this name is.

    Raises:
        PlanError: there is none.

    Example:
        >>> parse_store_type("dist_device_sync")
        StoreType(name='dist_device_sync', is_dist=True, is_async=False, is_device=True)
    """
    if not isinstance(name, str):
        raise PlanError(f"create({name!r}): the kind of a store is a name, such as 'local' or 'dist_sync'")
    lower = name.lower()
    if lower in LOCAL or lower in DEVICE:
        return StoreType(lower, is_dist=False, is_async=False, is_device=lower in DEVICE)
    words = lower.split("_")
    if (
        words[0] == DIST
        and set(words) <= DIST_TYPE_WORDS
        and len(set(words)) == len(words)
        and not {"sync", "async"} <= set(words)
    ):
        return StoreType(lower, is_dist=True, is_async="async" in words, is_device="device" in words)
    if lower in UNSUPPORTED_TYPES:
        raise PlanError(f"create({name!r}): there is no such store here; write {UNSUPPORTED_TYPES[lower]}")
    raise PlanError(
        f"create({name!r}): a store is one of local, device, dist_sync, dist_async, dist_device_sync and "
        "dist_device_async; give one of these"
    )
