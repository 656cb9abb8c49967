"""PyTorch's DistributedDataParallel and DataParallel."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.strategies.data import Data
from counterpoint.strategies.options import require_choice
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tree_reduce import TreeReduce

CommHook: TypeAlias = Literal["none", "fp16_compress", "bf16_compress", "powerSGD"]
_MIB = 2**20
_DEFAULT_CAP_MB = 25.0


def ddp(
    degree: int,
    *,
    bucket_cap_mb: float = _DEFAULT_CAP_MB,
    comm_hook: CommHook = "none",
    matrix_approximation_rank: int = 1,
) -> tuple[Strategy, ...]:
    """Return PyTorch's DistributedDataParallel: replicas that all-reduce buckets of gradients during the backward.

    Args:
        degree: number of ranks along the new axis.
        bucket_cap_mb: bucket size in MiB; with the default of 25 the first bucket has 1 MiB.
        comm_hook: ``none``, ``fp16_compress``, ``bf16_compress`` or ``powerSGD``.
        matrix_approximation_rank: the rank of powerSGD's factors.

    Promise:
        The same results as single-process training, up to rounding: the gradient is that of the mean over the samples
        of all ranks, where DDP takes the mean over ranks. With a comm_hook as data with that codec; unlike in DDP, fp16
        and bf16 have error feedback, and powerSGD begins in the first step.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients, or of the compressed gradients.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    """
    hook: str = comm_hook
    if hook == "post_localSGD":
        raise PlanError(
            f"ddp has no comm_hook=post_localSGD: it has several kinds of steps; write data({degree}, sync_every=4, "
            "sync_first=100) to average weights after every 4th step from step 100 on"
        )
    require_choice("ddp", "comm_hook", comm_hook, get_args(CommHook))
    if matrix_approximation_rank != 1 and comm_hook != "powerSGD":
        raise PlanError(f"matrix_approximation_rank={matrix_approximation_rank} of ddp is for comm_hook=powerSGD only")
    cap = int(bucket_cap_mb * _MIB)
    buckets = BucketConfig(cap, _MIB if bucket_cap_mb == _DEFAULT_CAP_MB else cap, tune=False)
    codes = {"none": "", "powerSGD": f"powersgd:{matrix_approximation_rank}"}
    return (Data(degree, compress=codes.get(comm_hook, comm_hook.removesuffix("_compress")), buckets=buckets),)


UNSUPPORTED_IN_DDP = {
    "gradient_as_bucket_view": "gradients are always views of the flat buffers that are all-reduced; drop it",
    "static_graph": "the order in which gradients become ready is observed, and may change; drop it",
    "find_unused_parameters": "parameters without a gradient are found by name in every step; drop it, and pass "
    "unused_parameters='zero' to Trainer if some have none on purpose",
    "broadcast_buffers": "running statistics are those of the global batch on every rank; drop it",
    "forward_sync_buffers": "running statistics are those of the global batch on every rank; drop it",
    "init_sync": "all ranks always begin with the weights of rank 0; drop it",
    "process_group": "a group of ranks is an axis of the plan; write pipeline(2) * ddp(2), for example",
    "device_mesh": "a mesh is a plan; write pipeline(2) * ddp(2), for example",
    "device_ids": "the launcher chooses the device of a rank; drop it",
    "output_device": "the launcher chooses the device of a rank; drop it",
    "start_powerSGD_iter": "powerSGD begins in the first step; drop it",
}


def data_parallel(degree: int) -> tuple[Strategy, ...]:
    """Return PyTorch's DataParallel: one rank keeps the weights and sends them to the others in every step.

    Rank 0 receives all gradients, updates, and sends the weights for the next step. Ranks are processes, which do not
    share an interpreter lock. It is ``tree(n, shape=star)``.

    Args:
        degree: number of ranks along the new axis, including rank 0.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per step: rank 0 the weights n-1 times, each other rank its gradients. Optimizer state only on rank
        0. ddp sends less from its busiest rank, and overlaps it with the backward.

    Source:
        torch.nn.DataParallel.
    """
    return (TreeReduce(degree, shape="star"),)


UNSUPPORTED_IN_DATA_PARALLEL = {
    "device_ids": "ranks are given as a number; write data_parallel(4)",
    "output_device": "the output is on rank 0; drop it",
    "dim": "a batch is always split along its first dim; drop it",
}
