"""Broadcast of parameters and optimizer state from one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.objects import broadcast_object
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.synchronize import wait_result
from counterpoint.compat.horovod.world import current_world
from counterpoint.errors import PlanError


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's values into the tensors of all members.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: a global rank.
        process_set: members.

    Raises:
        HorovodInternalError: the ranks have other names or shapes, or one has exited or is late.
        PlanError: ``params`` is something else.
    """
    named = sorted(params.items()) if isinstance(params, Mapping) else list(_iter_named_tensors(params))
    world, group = current_world(), member_group(process_set)
    handles = []
    for name, tensor in named:
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"broadcast_parameters: {name} is a {type(tensor).__name__}; it takes tensors: send other values with "
                "broadcast_object"
            )
        handles.append(collectives.broadcast(world, tensor.detach(), root_rank, NamedGroup(name, group)))
    for handle in handles:
        wait_result(handle)


def _iter_named_tensors(params: object) -> Iterable[tuple[str, Any]]:
    if not isinstance(params, Iterable) or isinstance(params, Tensor | str):
        raise PlanError(
            f"broadcast_parameters: params is a {type(params).__name__}; give model.state_dict(), "
            "model.named_parameters() or model.parameters()"
        )
    for index, item in enumerate(params):
        yield item if isinstance(item, tuple) else (f"parameter {index}", item)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int = 0,
    model: object = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and options to all members; parameters are not changed.

    State that exists only on the root is created; no step is taken for that.

    Args:
        optimizer: any of torch's, or one returned by :func:`DistributedOptimizer`.
        root_rank: a global rank.
        model: ignored; Horovod needs it for sparse parameters.
        process_set: members.

    Raises:
        HorovodInternalError: another rank has exited or is late.
    """
    del model
    state = broadcast_object(optimizer.state_dict(), root_rank, "the state of the optimizer", process_set)
    if current_world().fabric.rank != root_rank:
        optimizer.load_state_dict(state)
