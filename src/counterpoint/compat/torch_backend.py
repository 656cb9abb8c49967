"""``torch.distributed.init_process_group("counterpoint")``: DDP, FSDP2 and all that torch builds on process groups.

An installed package needs no import for it: torch calls :func:`register` at the end of ``import torch``, because it is
an entry point of the group ``torch.backends``. That must cost nothing and may not fail; so all that is heavy is
imported by the first group that is made.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.fabric.c10d import Store
    from counterpoint.fabric.torch_backend.process_group import FabricProcessGroup

NAME = "counterpoint"


def register() -> None:
    """Torch knows the backend ``counterpoint`` for tensors on the CPU; nothing where torch has no distributed package.

    Example:
        >>> import torch.distributed as dist
        >>> register()
        >>> dist.is_backend_available("counterpoint")
        True
    """
    import torch

    distributed = torch.distributed  # noqa: TID251 - it is told of the backend, and no peer is talked to
    if not distributed.is_available() or NAME in distributed.Backend.backend_list:
        return
    distributed.Backend.register_backend(NAME, create, devices=["cpu"])


def create(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> FabricProcessGroup:
    """Return the group of this rank, for torch."""
    from counterpoint.fabric.torch_backend.process_group import create_process_group as create_group

    return create_group(store, rank, num_ranks, timeout)
