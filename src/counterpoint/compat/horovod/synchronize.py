"""``poll`` and ``synchronize``, and what else waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.errors import translate_peer_errors
from counterpoint.compat.horovod.handles import HorovodHandle, Result
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.reductions import ReductionOp, ScaledReduction
from counterpoint.compat.horovod.world import current_world


def wait_result(handle: HorovodHandle) -> Result:
    """Return the result of the operation, when it is there."""
    return current_world().handles.finish(handle)


def wait_tensor(handle: HorovodHandle) -> Tensor:
    """Return the one tensor that the operation results in."""
    result = wait_result(handle)
    assert isinstance(result, Tensor)
    return result


def wait_tensors(handle: HorovodHandle) -> list[Tensor]:
    """Return the tensors that the operation results in."""
    result = wait_result(handle)
    return [result] if isinstance(result, Tensor) else list(result or [])


def synchronize(handle: HorovodHandle | Callable[[], Tensor]) -> Any:  # noqa: ANN401 - a tensor, or several
    """Return the result of an asynchronous operation, when it is there.

    Raises:
        HorovodInternalError: another rank disagrees, is gone or late.
    """
    return wait_result(handle) if isinstance(handle, HorovodHandle) else handle()


def poll(handle: HorovodHandle) -> bool:
    """Return whether the operation is over, so that ``synchronize`` returns at once; it goes on while it is asked.

    Raises:
        HorovodInternalError: another rank disagrees or is gone, or this was asked for longer than the deadline.
    """
    with translate_peer_errors():
        return current_world().join_state.poll(handle)


def join(device: int = -1) -> int:
    """Return the rank that was last to call this: this one has no more data, and takes part with zeros until then.

    While ranks have joined, the others may call ``allreduce``, ``grouped_allreduce`` and ``barrier`` of all ranks, and
    step a ``DistributedOptimizer`` with dense gradients; a mean still divides by the number of all ranks, as Horovod's
    does, so the last gradients are smaller than those of the ranks that are left.

    Args:
        device: where Horovod would make the zeros.

    Raises:
        HorovodInternalError: the others do what this rank cannot follow, or nothing within the deadline.

    Cost:
        nothing in programs that do not call it. The first operation after a rank has joined waits 20 ms until that is
        seen; every later one costs each rank one word on a board that rank 0 keeps, until all have joined.
    """
    del device
    return current_world().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """All members have come to this point.

    Raises:
        HorovodInternalError: one of them has not within the deadline.
    """
    arrived = torch.zeros(1, dtype=torch.int32)
    wait_result(
        collectives.all_reduce(
            current_world(),
            [arrived],
            NamedGroup("barrier", member_group(process_set)),
            ScaledReduction(ReductionOp.SUM),
        )
    )
