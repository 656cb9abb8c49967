"""Give all processes the same weights to start with."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.terminal_text import warn


def broadcast_initial_values(fabric: Fabric, model: nn.Module, init_sync: str, without: Collection[str] = ()) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks; a collective call.

    Args:
        fabric: this rank's fabric.
        model: this rank's model.
        init_sync: ``broadcast`` warns if a rank had other values, ``verify`` raises.
        without: parameters that have no values yet, and will get the same on all ranks.

    Raises:
        PlanError: a rank had other values, and ``init_sync`` is ``verify``.
    """
    everyone = tuple(range(fabric.num_ranks))
    differing: list[str] = []
    named = [pair for pair in (*model.named_parameters(), *model.named_buffers()) if pair[0] not in without]
    for name, tensor in named:
        local = tensor.detach()
        values = local.contiguous() if fabric.rank == 0 else local.clone(memory_format=torch.contiguous_format)
        fabric.broadcast(f"first {name}", values, everyone, 0).wait()
        if fabric.rank and not torch.equal(values, local):
            differing.append(name)
            if init_sync != "verify":
                assign_values(local, values)
    names_by_rank = cast("list[list[str]]", fabric.gather_values("first values", differing[:1], everyone))
    differing_ranks = [rank for rank, names in enumerate(names_by_rank) if names]
    if not differing_ranks:
        return
    message = (
        f"{format_ranks(differing_ranks)} started with other values than rank 0, the first in "
        f"{names_by_rank[differing_ranks[0]][0]}; all ranks train one model"
    )
    if init_sync == "verify":
        raise PlanError(
            f"{message}; call torch.manual_seed(0) before the model is built, or load one checkpoint, on all"
        )
    if fabric.rank == 0:
        warn(
            f"{message} and now have rank 0's values; call torch.manual_seed(0) before the model is built, on all "
            "ranks, or pass init_sync='verify' to make this an error",
            stacklevel=2,
        )
