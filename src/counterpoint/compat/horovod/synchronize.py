"""``poll``, ``synchronize``, ``join`` and ``barrier``."""

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
    """Wait for the result of an operation and return it."""
    return current_world().handles.finish(handle)


def wait_tensor(handle: HorovodHandle) -> Tensor:
    """Wait for an operation with one tensor as result and return it."""
    result = wait_result(handle)
    assert isinstance(result, Tensor)
    return result


def wait_tensors(handle: HorovodHandle) -> list[Tensor]:
    """Wait for the tensors that an operation returns."""
    result = wait_result(handle)
    return [result] if isinstance(result, Tensor) else list(result or [])


def synchronize(handle: HorovodHandle | Callable[[], Tensor]) -> Any:  # noqa: ANN401 - a tensor, or several
    """Wait for the result of an asynchronous operation and return it.

    Raises:
        HorovodInternalError: another rank disagrees, has exited or is late.
    """
    return wait_result(handle) if isinstance(handle, HorovodHandle) else handle()


def poll(handle: HorovodHandle) -> bool:
    """Return whether the operation is complete, so that ``synchronize`` returns at once.

    Raises:
        HorovodInternalError: another rank disagrees or has exited, or the operation was polled longer than the timeout.
    """
    with translate_peer_errors():
        return current_world().join_state.poll(handle)


def join(device: int = -1) -> int:
    """Take part in the other ranks' operations with zeros until all ranks have joined; return the last rank to join.

    After a rank has joined, the others may call ``allreduce``, ``grouped_allreduce`` and ``barrier`` of all ranks, and
    step a ``DistributedOptimizer`` with dense gradients. As in Horovod, a mean still divides by the number of all
    ranks, so the last gradients are smaller than those of the remaining ranks.

    Args:
        device: ignored; where Horovod would allocate the zeros.

    Raises:
        HorovodInternalError: the others call something else, or nothing before the timeout.

    Cost:
        none in programs that do not call it. The first operation after a rank has joined waits 20 ms until that is
        noticed; every later one costs each rank one write to a store on rank 0, until all have joined.
    """
    del device
    return current_world().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have called this.

    Raises:
        HorovodInternalError: one has not before the timeout.
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
