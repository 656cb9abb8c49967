"""PyTorch's own two ways of data parallelism."""

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
    """Return PyTorch's DistributedDataParallel: replicas that sum buckets of gradients during the backward.

    Args:
        degree: ranks along the new axis.
        bucket_cap_mb: how many MiB of gradients are summed at once; the first bucket has 1 MiB as long as this is 25.
        comm_hook: ``none``, ``fp16_compress``, ``bf16_compress`` or ``powerSGD``.
        matrix_approximation_rank: the rank of powerSGD's factors.

    Promise:
        The same numbers as on one rank, to rounding: the gradient is that of the mean over the samples of all ranks,
        where DDP takes the mean over ranks. With a comm_hook what its code promises (see data); unlike DDP's, fp16
        and bf16 keep what they have not sent, and powerSGD begins in the first step.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients, or of what the hook makes of them.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
    """
    hook: str = comm_hook
    if hook == "post_localSGD":
        raise PlanError(
            f"ddp has no comm_hook=post_localSGD: its steps are not all alike; write data({degree}, sync_every=4, "
            "sync_first=100) for a mean of weights after every 4th step from step 100 on"
        )
    require_choice("ddp", "comm_hook", comm_hook, get_args(CommHook))
    if matrix_approximation_rank != 1 and comm_hook != "powerSGD":
        raise PlanError(f"matrix_approximation_rank={matrix_approximation_rank} of ddp is for comm_hook=powerSGD only")
    cap = int(bucket_cap_mb * _MIB)
    buckets = BucketConfig(cap, _MIB if bucket_cap_mb == _DEFAULT_CAP_MB else cap, tune=False)
    codes = {"none": "", "powerSGD": f"powersgd:{matrix_approximation_rank}"}
    return (Data(degree, compress=codes.get(comm_hook, comm_hook.removesuffix("_compress")), buckets=buckets),)


UNSUPPORTED_IN_DDP = {
    "gradient_as_bucket_view": "gradients lie in buffers that are summed without a copy, always; leave it out",
    "static_graph": "the order in which gradients come is observed and agreed on, and may change; leave it out",
    "find_unused_parameters": "parameters without a gradient are found by name in every step; leave it out, and pass "
    "unused_parameters='zero' to Trainer where some are meant to have none",
    "broadcast_buffers": "running statistics are those of the batch of all ranks, the same on each; leave it out",
    "forward_sync_buffers": "running statistics are those of the batch of all ranks, the same on each; leave it out",
    "init_sync": "all ranks begin with the weights of rank 0, always; leave it out",
    "process_group": "a group of ranks is an axis of the plan; write pipeline(2) * ddp(2), for one",
    "device_mesh": "a mesh is a plan; write pipeline(2) * ddp(2), for one",
    "device_ids": "a rank computes where its launcher has put it; leave it out",
    "output_device": "a rank computes where its launcher has put it; leave it out",
    "start_powerSGD_iter": "powerSGD begins in the first step; leave it out",
}


def data_parallel(degree: int) -> tuple[Strategy, ...]:
    """Return PyTorch's DataParallel: one owner of the weights, which computes with copies of them beside it.

    The owner is rank 0: it gets all gradients, updates, and sends out the weights for the next step. Ranks are
    processes, so that no interpreter lock stands between them. It is ``tree(n, shape=star)``.

    Args:
        degree: ranks along the new axis, the owner among them.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per step: the owner the weights n-1 times, each other rank its gradients. Optimizer state on the
        owner alone. ddp sends less from its busiest rank, and does so during the backward.

    Source:
        torch.nn.DataParallel.
    """
    return (TreeReduce(degree, shape="star"),)


UNSUPPORTED_IN_DATA_PARALLEL = {
    "device_ids": "ranks are given by their number; write data_parallel(4)",
    "output_device": "the owner is rank 0; leave it out",
    "dim": "a batch is cut along its first dim, always; leave it out",
}
