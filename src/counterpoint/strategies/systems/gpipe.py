"""GPipe with the options of torchgpipe, and modules placed on given ranks as with torch.distributed.rpc."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.options import MicrobatchCount, require_choice
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RECOMPUTE_MODES, RecomputeMode
from counterpoint.strategies.strategy import Strategy

AUTO_CHUNKS = MicrobatchCount(0)


def gpipe(
    degree: int,
    *,
    balance: tuple[int, ...] = (),
    chunks: MicrobatchCount = AUTO_CHUNKS,
    checkpoint: RecomputeMode = "never",
    split_points: tuple[str, ...] = (),
    replicas: tuple[int, ...] = (),
    chunks_per_stage: int = 1,
) -> tuple[Strategy, ...]:
    """Return GPipe: all microbatches run forward, then all backward, then weights are updated.

    Args:
        degree: number of stages, called partitions by torchgpipe.
        balance: number of blocks of each stage; a block is a child with parameters and those after it without. By
            default the slowest stage is nearly as fast as possible.
        chunks: number of microbatches; by default as many as divide the batch, up to four for each stage.
        checkpoint: which microbatches are recomputed: ``never``, ``except_last`` or ``always``.
        split_points: instead of a balance the modules with which stages begin.
        replicas: number of ranks of each stage; microbatch m is run by replica m mod r.
        chunks_per_stage: number of chunks of each stage, run one after the other.

    Promise:
        The same results as single-process training, up to rounding; only batch norm sees microbatches.

    Cost:
        Bytes sent per rank and step: the activations and activation gradients that leave its stage.
        Bubble, for n stages and m microbatches: (n-1)/(m+n-1) of the step. Memory: activations of m microbatches.

    Source:
        Huang et al., GPipe, NeurIPS 2019; Kim et al., torchgpipe, 2020, its guide.
    """
    del chunks  # it is the plan's number of microbatches
    require_choice("gpipe", "checkpoint", checkpoint, RECOMPUTE_MODES)
    return (
        Pipeline(degree, "gpipe", replicas, balance, chunks_per_stage, split_points=split_points, recompute=checkpoint),
    )


UNSUPPORTED_IN_GPIPE = {
    "devices": "ranks are given as a number; write gpipe(4)",
    "deferred_batch_norm": "it is an option of the run, and its default; pass batch_norm='deferred' to Trainer",
}


def placement(
    degree: int, *, modules: tuple[str, ...] = (), chunks: MicrobatchCount = AUTO_CHUNKS
) -> tuple[Strategy, ...]:
    """Return a placement of modules on given ranks, as written by hand with torch.distributed.rpc.

    ``placement(2, modules=embed:0+blocks.0:1+head:0)`` runs ``embed`` and the modules after it on rank 0, ``blocks.0``
    and those after it on rank 1, and ``head`` on rank 0 again. Modules are named in the order in which they run, from
    the first one of the model. Activations are sent from rank to rank, without a master.

    Args:
        degree: number of ranks along the new axis.
        modules: ``path:rank`` of each module that is on another rank than the one before it.
        chunks: number of microbatches; all run forward, then all backward. By default as many as divide the batch,
            up to four for each rank.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step: the activations and activation gradients that leave its modules. Bubble: with one
        chunk one rank computes at a time; with m chunks and n ranks with equal work, (n-1)/(m+n-1) of the step. Memory:
        activations of m microbatches.

    Source:
        Shen et al., Distributed Pipeline Parallelism Using RPC, PyTorch tutorials; Damania et al., PyTorch RPC:
        Distributed Deep Learning Built on Tensor-Optimized Remote Procedure Calls, MLSys 2023.
    """
    del chunks  # it is the plan's number of microbatches
    if not modules or any(":" not in module for module in modules):
        raise PlanError(
            f"placement({degree}) needs the rank of its modules; write placement({degree}, "
            "modules=embed:0+blocks.0:1), with the paths of your modules"
        )
    return (Pipeline(degree, "gpipe", split_points=modules),)


UNSUPPORTED_IN_PLACEMENT = {
    "workers": "ranks are given as a number; write modules=embed:0+blocks.0:1",
    "num_split": "it is the number of microbatches; write chunks=",
}
