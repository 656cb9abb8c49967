"""The names of store types: ``local``, ``dist_sync`` and all their spellings."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.errors import PlanError

LOCAL = ("local", "local_update_cpu", "local_allreduce_cpu")
DEVICE = ("device", "local_update_device", "local_allreduce_device")
DIST = "dist"
DIST_TYPE_WORDS = {DIST, "sync", "async", "device"}

UNSUPPORTED_TYPES = {
    "nccl": "create('device'), which sums on the device of the first value",
    "horovod": "import counterpoint.compat.horovod.torch, whose DistributedOptimizer replaces a Trainer",
    "byteps": "import counterpoint.compat.horovod.torch, or train with Trainer(strategy='data')",
    "p3": "create('dist_sync'), which sends requests in call order",
    "teststore": "create('local')",
}


@dataclass(frozen=True, slots=True)
class StoreType:
    """Type of a store.

    Args:
        name: in lower case.
        is_dist: values are on servers, for all workers.
        is_async: every push is a separate update; otherwise the pushes of all workers are summed first.
        is_device: the values of one push are summed on their device, and may be compressed.
    """

    name: str
    is_dist: bool
    is_async: bool
    is_device: bool


def parse_store_type(name: object) -> StoreType:
    """Return the type of a store by its name.

    Raises:
        PlanError: the name is unknown.

    Example:
        >>> parse_store_type("dist_device_sync")
        StoreType(name='dist_device_sync', is_dist=True, is_async=False, is_device=True)
    """
    if not isinstance(name, str):
        raise PlanError(f"create({name!r}): the type of a store is a str such as 'local' or 'dist_sync'")
    lower = name.lower()
    if lower in LOCAL or lower in DEVICE:
        return StoreType(lower, is_dist=False, is_async=False, is_device=lower in DEVICE)
    parts = lower.split("_")
    if (
        parts[0] == DIST
        and set(parts) <= DIST_TYPE_WORDS
        and len(set(parts)) == len(parts)
        and not {"sync", "async"} <= set(parts)
    ):
        return StoreType(lower, is_dist=True, is_async="async" in parts, is_device="device" in parts)
    if lower in UNSUPPORTED_TYPES:
        raise PlanError(f"create({name!r}): this store is not supported; use {UNSUPPORTED_TYPES[lower]}")
    raise PlanError(
        f"create({name!r}): the types are local, device, dist_sync, dist_async, dist_device_sync and "
        "dist_device_async; give one of these"
    )
