"""GPipe, as the users of torchgpipe know it, and placements of modules on ranks, as those of torch.distributed.rpc."""

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
    """Return GPipe: all microbatches go forward through the stages, then all backward, then weights change.

    Args:
        degree: number of stages, called partitions by torchgpipe.
        balance: blocks per stage; a block is a child with parameters and what runs behind it. By default the slowest
            stage is made as fast as can be.
        chunks: microbatches of a batch; by default as many as divide the batch, up to four for each stage.
        checkpoint: for which microbatches activations are computed again: ``never``, ``except_last`` or ``always``.
        split_points: in place of a balance the modules with which stages begin.
        replicas: ranks per stage; microbatch m goes to replica m mod r.
        chunks_per_stage: runs of blocks per stage, one after the other.

    Promise:
        The same numbers as on one rank, to rounding; batch norm alone sees microbatches.

    Cost:
        Bytes sent per rank and step: the activations that leave its stage and the gradients that leave it backwards.
        Idle time, for n stages and m microbatches: (n-1)/(m+n-1) of the step. Memory: activations of m microbatches.

    Source:
        Huang et al., GPipe, NeurIPS 2019; Kim et al., torchgpipe, 2020, its guide.
    """
    del chunks  # it is said of the plan, which has as many microbatches
    require_choice("gpipe", "checkpoint", checkpoint, RECOMPUTE_MODES)
    return (
        Pipeline(degree, "gpipe", replicas, balance, chunks_per_stage, split_points=split_points, recompute=checkpoint),
    )


UNSUPPORTED_IN_GPIPE = {
    "devices": "ranks are given by their number; write gpipe(4)",
    "deferred_batch_norm": "it is said of the run, and what it does by itself; pass batch_norm='deferred' to Trainer",
}


def placement(
    degree: int, *, modules: tuple[str, ...] = (), chunks: MicrobatchCount = AUTO_CHUNKS
) -> tuple[Strategy, ...]:
    """Return a placement of modules on ranks that are told, as torch.distributed.rpc's users write by hand.

    ``placement(2, modules=embed:0+blocks.0:1+head:0)`` runs ``embed`` and what follows on rank 0, ``blocks.0`` and what
    follows on rank 1, and ``head`` on rank 0 again. Modules are named in the order in which they run, the first one of
    the model first. Values go from rank to rank, without a master.

    Args:
        degree: ranks along the new axis.
        modules: ``path:rank`` of each module with which a run begins that lies on another rank than the one before.
        chunks: microbatches of a batch; all go forward, then all backward. By default as many as divide the batch, up
            to four for each rank.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step: the activations that leave its modules, and the gradients that leave them
        backwards. Idle time: with one chunk all ranks but one at any time; with m chunks and n ranks, each with a run
        as long as the others', (n-1)/(m+n-1) of the step. Memory: activations of m microbatches.

    Source:
        Shen et al., Distributed Pipeline Parallelism Using RPC, PyTorch tutorials; Damania et al., PyTorch RPC:
        Distributed Deep Learning Built on Tensor-Optimized Remote Procedure Calls, MLSys 2023.
    """
    del chunks  # it is said of the plan, which has as many microbatches
    if not modules or any(":" not in module for module in modules):
        raise PlanError(
            f"placement({degree}) needs the rank of every run of modules; write placement({degree}, "
            "modules=embed:0+blocks.0:1), with the paths of your modules"
        )
    return (Pipeline(degree, "gpipe", split_points=modules),)


UNSUPPORTED_IN_PLACEMENT = {
    "workers": "ranks are given by their number; write modules=embed:0+blocks.0:1",
    "num_split": "it is the number of microbatches; write chunks=",
}
