"""Horovod's face for PyTorch: ``import counterpoint.compat.horovod.torch as hvd``, and a script of Horovod runs.

Ranks are started by ``counterpoint run -n 2 train.py`` or by torchrun. Names, arguments and results are Horovod's;
``docs/horovod.md`` lists what differs. Collectives are started in the same order on all ranks of a process set; ranks
that do not are both named, with what each of them started, before anything is added up.
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
    """This process is a rank among those that its launcher started; alone where none did. A second call does nothing.

    Args:
        comm: ranks that take part; all of them, or none for all.
        process_sets: sets that are known from the start; ``"dynamic"`` is understood, and changes nothing: sets can
            always be added.

    Raises:
        LaunchError: what the launcher told contradicts itself.
        PeerError: the other ranks do not come within the deadline.
        PlanError: ``comm`` is not all ranks.
    """
    if PROCESS.world is None:
        world = open_process_world()
        if comm and sorted(comm) != list(world.all_ranks):
            raise PlanError(
                f"init(comm={list(comm)}) among {len(world.all_ranks)} ranks: all ranks take part here; start as many "
                "as you need, or name some of them by a ProcessSet"
            )
        PROCESS.world = world
        atexit.register(shutdown)
        reset_process_sets(
            world, process_sets if process_sets is not None and not isinstance(process_sets, str) else ()
        )


def shutdown() -> None:
    """The functions act on no ranks any more, and the timeline is written; ``init`` may follow.

    Nobody is waited for: what should be complete is to be synchronized before. A second call does nothing.
    """
    world, PROCESS.world = PROCESS.world, None
    atexit.unregister(shutdown)
    reset_process_sets(None, ())
    if world is not None:
        world.close_timeline()
        PROCESS.closed_worlds.append(world)


def is_initialized() -> bool:
    """Return whether ``init`` was called, and ``shutdown`` not since then."""
    return PROCESS.world is not None


def rank() -> int:
    """Return which rank this process is."""
    return current_world().fabric.rank


def size() -> int:
    """Return the number of ranks."""
    return current_world().fabric.num_ranks


def local_rank() -> int:
    """Return the place of this rank among those of its host."""
    places = current_world().topology
    return places.local_ranks[places.rank]


def local_size() -> int:
    """Return the number of ranks on this host."""
    places = current_world().topology
    return places.local_sizes[places.rank]


def cross_rank() -> int:
    """Return the place of this rank among those that have its place on their hosts."""
    places = current_world().topology
    return places.cross_ranks.index(places.rank)


def cross_size() -> int:
    """Return the number of hosts that have a rank at this one's place."""
    return len(current_world().topology.cross_ranks)


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len(set(current_world().topology.local_sizes)) == 1


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Rank 0 writes from now on when each operation was started and finished, as a Chrome trace.

    Args:
        file_path: the file, which is replaced.
        mark_cycles: Horovod's; there are no cycles here, so nothing is marked.

    Raises:
        PlanError: a timeline is being written already.
    """
    del mark_cycles
    outstanding = current_world().handles
    if outstanding.timeline is not None:
        raise PlanError("start_timeline: a timeline is being written already; call stop_timeline before")
    if rank() == 0:
        outstanding.timeline = HorovodTimeline(file_path, rank())


def stop_timeline() -> None:
    """The timeline is complete; nothing where there is none."""
    current_world().close_timeline()


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI here."""
    return False


def mpi_enabled() -> bool:
    """Return False: ranks talk through Counterpoint's fabric."""
    return False


def mpi_built() -> bool:
    """Return False: there is no MPI here."""
    return False


def gloo_enabled() -> bool:
    """Return True: scripts take it to mean that no MPI is needed."""
    return True


def gloo_built() -> bool:
    """Return True: scripts take it to mean that no MPI is needed."""
    return True


def nccl_built() -> int:
    """Return 0: no NCCL is used."""
    return 0


def ddl_built() -> bool:
    """Return False."""
    return False


def ccl_built() -> bool:
    """Return False."""
    return False


def cuda_built() -> bool:
    """Return False: tensors are reduced in the memory of the host."""
    return False


def rocm_built() -> bool:
    """Return False."""
    return False
