"""All ranks start from the parameters and the optimizer state of one."""

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
    """The tensors hold the root's numbers, on all members.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: a rank of the whole job.
        process_set: who takes part.

    Raises:
        HorovodInternalError: the ranks have other names or shapes, or one is gone or late.
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
                f"broadcast_parameters: {name} is a {type(tensor).__name__}; it takes tensors: send other values by "
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
    """The optimizer has the root's state and options, on all members; their parameters stay as they are.

    The root may have taken steps and the others none: what is missing is made. No step is taken for it.

    Args:
        optimizer: any of torch's, or one that :func:`DistributedOptimizer` returned.
        root_rank: a rank of the whole job.
        model: Horovod's, for sparse parameters; not needed here.
        process_set: who takes part.

    Raises:
        HorovodInternalError: another rank is gone or late.
    """
    del model
    state = broadcast_object(optimizer.state_dict(), root_rank, "the state of the optimizer", process_set)
    if current_world().fabric.rank != root_rank:
        optimizer.load_state_dict(state)
