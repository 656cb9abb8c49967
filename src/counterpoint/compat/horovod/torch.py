"""Horovod's API for PyTorch: ``import counterpoint.compat.horovod.torch as hvd``.

Start ranks with ``counterpoint run -n 2 train.py`` or torchrun. Names, arguments and results are Horovod's;
``docs/migration/horovod.md`` lists the differences. All ranks of a process set must start collectives in the same
order; if they do not, the error names the ranks and what each of them started, before anything is reduced.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path

from counterpoint.compat.horovod import elastic
from counterpoint.compat.horovod.batch_norm import SyncBatchNorm
from counterpoint.compat.horovod.broadcast import broadcast_optimizer_state, broadcast_parameters
from counterpoint.compat.horovod.compression import Compression
from counterpoint.compat.horovod.errors import HorovodInternalError
from counterpoint.compat.horovod.gather_ops import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from counterpoint.compat.horovod.objects import allgather_object, broadcast_object
from counterpoint.compat.horovod.optimizer import DistributedOptimizer
from counterpoint.compat.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    reset_process_sets,
)
from counterpoint.compat.horovod.reduce_ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from counterpoint.compat.horovod.reductions import ReductionOp
from counterpoint.compat.horovod.synchronize import barrier, join, poll, synchronize
from counterpoint.compat.horovod.timeline import HorovodTimeline
from counterpoint.compat.horovod.world import PROCESS, current_world, open_process_world
from counterpoint.errors import PlanError

Average, Sum, Adasum, Min, Max, Product = (
    ReductionOp.AVERAGE,
    ReductionOp.SUM,
    ReductionOp.ADASUM,
    ReductionOp.MIN,
    ReductionOp.MAX,
    ReductionOp.PRODUCT,
)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async", "allgather_object",
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic",
    "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
    "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "poll", "rank",
    "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "shutdown", "size",
    "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the ranks that the launcher started; a single rank without a launcher. A second call does nothing.

    Args:
        comm: ranks that take part: all of them, or None for all.
        process_sets: sets to add; ``"dynamic"`` is accepted and ignored, since sets can always be added.

    Raises:
        LaunchError: the launcher's variables contradict each other.
        PeerError: the other ranks do not arrive before the timeout.
        PlanError: ``comm`` is not all ranks.
    """
    if PROCESS.world is None:
        world = open_process_world()
        if comm and sorted(comm) != list(world.all_ranks):
            raise PlanError(
                f"init(comm={list(comm)}) among {len(world.all_ranks)} ranks: all ranks must take part; start as many "
                "as you need, or use a ProcessSet for some of them"
            )
        PROCESS.world = world
        atexit.register(shutdown)
        reset_process_sets(
            world, process_sets if process_sets is not None and not isinstance(process_sets, str) else ()
        )


def shutdown() -> None:
    """Leave the ranks and complete the timeline; ``init`` may be called again.

    It does not wait: synchronize pending operations first. A second call does nothing.
    """
    world, PROCESS.world = PROCESS.world, None
    atexit.unregister(shutdown)
    reset_process_sets(None, ())
    if world is not None:
        world.close_timeline()
        PROCESS.closed_worlds.append(world)


def is_initialized() -> bool:
    """Return whether ``init`` was called, and ``shutdown`` was not called after it."""
    return PROCESS.world is not None


def rank() -> int:
    """Return the rank of this process."""
    return current_world().fabric.rank


def size() -> int:
    """Return the number of ranks."""
    return current_world().fabric.num_ranks


def local_rank() -> int:
    """Return the index of this rank on its host."""
    topology = current_world().topology
    return topology.local_ranks[topology.rank]


def local_size() -> int:
    """Return the number of ranks on this host."""
    topology = current_world().topology
    return topology.local_sizes[topology.rank]


def cross_rank() -> int:
    """Return the index of this rank among those with the same local rank."""
    topology = current_world().topology
    return topology.cross_ranks.index(topology.rank)


def cross_size() -> int:
    """Return the number of hosts that have this rank's local rank."""
    return len(current_world().topology.cross_ranks)


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len(set(current_world().topology.local_sizes)) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Start to write a Chrome trace of all operations on rank 0.

    Args:
        file_path: of the file, which is replaced.
        mark_cycles: ignored; there are no cycles.

    Raises:
        PlanError: a timeline is active already.
    """
    del mark_cycles
    outstanding = current_world().handles
    if outstanding.timeline is not None:
        raise PlanError("start_timeline: a timeline is active already; call stop_timeline first")
    if rank() == 0:
        outstanding.start_timeline(HorovodTimeline(file_path, rank()))


def stop_timeline() -> None:
    """Complete the timeline, if there is one."""
    current_world().close_timeline()


def mpi_threads_supported() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_enabled() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Return True: scripts read it as not needing MPI."""
    return True


def gloo_built() -> bool:
    """Return True: scripts read it as not needing MPI."""
    return True


def nccl_built() -> int:
    """Return 0: NCCL is not used."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: tensors are reduced in host memory."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
