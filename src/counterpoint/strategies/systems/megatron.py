"""Megatron-LM's interleaved schedule, and the zero-bubble schedules that were made for it."""

from __future__ import annotations

from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RecomputeMode
from counterpoint.strategies.strategy import Strategy


def megatron_interleaved(
    degree: int,
    *,
    chunks_per_stage: int = 2,
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
) -> tuple[Strategy, ...]:
    """Return Megatron-LM's virtual pipeline: 1F1B in which every stage runs several chunks of the model in turn.

    Args:
        degree: number of stages, pipeline-model-parallel-size there.
        chunks_per_stage: chunks per stage, virtual pipeline stages there.
        balance: blocks per chunk; by default the slowest chunk is made as fast as can be.
        split_points: in place of a balance the modules with which chunks begin.
        recompute: for which microbatches forwards are computed again: ``never``, ``except_last`` or ``always``.

    Promise:
        The same numbers as on one rank, to rounding. Megatron-LM wants microbatches that divide by the stages; here any
        number will do.

    Cost:
        Bytes sent per rank and step: the activations that leave its chunks and the gradients that leave them backwards,
        v times those of 1F1B. Idle time, for n stages, m microbatches and v chunks: (n-1)/(v m+n-1). Memory:
        activations of up to n (1 + (n-1)/(n v)) microbatches.

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC 2021,
        section 2.2.
    """
    return (
        Pipeline(
            degree,
            "interleaved",
            balance=balance,
            chunks_per_stage=chunks_per_stage,
            split_points=split_points,
            recompute=recompute,
        ),
    )


_SIZES = {
    "tensor_model_parallel_size": "slices are a strategy of their own; write tensor(2) * megatron_interleaved(4)",
    "data_parallel_size": "replicas are a strategy of their own; write megatron_interleaved(4) * data(2)",
}
UNSUPPORTED_IN_MEGATRON_INTERLEAVED = {
    **_SIZES,
    "num_layers_per_virtual_pipeline_stage": "say how many chunks a stage has: all layers, over those of a chunk, over "
    "the stages; write chunks_per_stage=",
    "num_virtual_stages_per_pipeline_rank": "write chunks_per_stage=",
    "microbatch_group_size_per_vp_stage": "a group has as many microbatches as stages, or nearly; leave it out",
}


def zero_bubble(
    degree: int,
    *,
    chunks_per_stage: int = 1,
    replicas: tuple[int, ...] = (),
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
) -> tuple[Strategy, ...]:
    """Return Zero Bubble: what a gradient of weights takes waits until a stage would be idle; ZB-H1, or ZB-V for two.

    Args:
        degree: number of stages.
        chunks_per_stage: 1 for ZB-H1, 2 for ZB-V, whose second chunks go from the last stage back to the first.
        replicas: ranks per stage, among which microbatches go round; with chunks_per_stage=1.
        balance: blocks per chunk; by default the slowest chunk is made as fast as can be.
        split_points: in place of a balance the modules with which chunks begin.
        recompute: for which microbatches forwards are computed again: ``never``, ``except_last`` or ``always``.

    Promise:
        The same numbers as on one rank, to rounding. Updates are not made before it is known whether the step counts.

    Cost:
        Bytes sent per rank and step: the activations that leave its chunks and the gradients that leave them backwards.
        Idle time, for n stages and m microbatches, if a forward and both parts of a backward take equally long:
        (n-1)/(3 m+n-1) of the step, with chunks_per_stage=2 (n-1)/(6 m+n-1). Memory: activations of n microbatches on every
        stage.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, sections 2 and 6.
    """
    return (
        Pipeline(
            degree, "zero_bubble", replicas, balance, chunks_per_stage, split_points=split_points, recompute=recompute
        ),
    )


UNSUPPORTED_IN_ZERO_BUBBLE = {
    **{key: why.replace("megatron_interleaved", "zero_bubble") for key, why in _SIZES.items()},
    "zero_bubble_v_schedule": "it is the order for two chunks; write chunks_per_stage=2",
    "enable_optimizer_post_validation": "an update is made when the step is known to count; leave it out",
    "zero_bubble_max_pending_backward": "as many weight parts wait as keep memory that of 1F1B's first stage; leave it "
    "out",
}
