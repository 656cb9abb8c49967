"""Backend ``counterpoint`` of ``torch.distributed``, for DDP, FSDP2 and everything built on process groups.

An installed package needs no import: torch calls :func:`register` at the end of ``import torch``, through the entry
point group ``torch.backends``. Registration must be cheap and must not fail, so heavy modules are imported when the
first process group is created.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.fabric.c10d import Store
    from counterpoint.fabric.torch_backend.process_group import FabricProcessGroup

NAME = "counterpoint"


def register() -> None:
    """Register the backend ``counterpoint`` for CPU tensors; do nothing if torch has no distributed package.

    Example:
        >>> import torch.distributed as dist
        >>> register()
        >>> dist.is_backend_available("counterpoint")
        True
    """
    import torch

    distributed = torch.distributed  # noqa: TID251 - only registers the backend
    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> FabricProcessGroup:
    """Return the process group of this rank; called by torch."""
    from counterpoint.fabric.torch_backend.process_group import create_process_group as create_group

    return create_group(store, rank, num_ranks, timeout)
