"""Megatron-LM's interleaved schedule, and the zero-bubble schedules that are implemented in it."""

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
    """Return Megatron-LM's virtual pipeline: interleaved 1F1B with several chunks of the model on every stage.

    Args:
        degree: number of stages, Megatron-LM's pipeline-model-parallel-size.
        chunks_per_stage: number of chunks of each stage, Megatron-LM's virtual pipeline stages.
        balance: blocks per chunk; by default the slowest chunk is nearly as fast as possible.
        split_points: instead of a balance the modules with which chunks begin.
        recompute: which microbatches are recomputed: ``never``, ``except_last`` or ``always``.

    Promise:
        The same results as single-process training, up to rounding. Megatron-LM requires a number of microbatches that
        is divisible by the number of stages; here any number works.

    Cost:
        Bytes sent per rank and step: the activations and activation gradients that leave its chunks,
        v times those of 1F1B. Bubble, for n stages, m microbatches and v chunks: (n-1)/(v m+n-1). Memory:
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
    "tensor_model_parallel_size": "it is a strategy of its own; write tensor(2) * megatron_interleaved(4)",
    "data_parallel_size": "it is a strategy of its own; write megatron_interleaved(4) * data(2)",
}
UNSUPPORTED_IN_MEGATRON_INTERLEAVED = {
    **_SIZES,
    "num_layers_per_virtual_pipeline_stage": "give the number of chunks of a stage: layers, divided by the layers "
    "of a chunk and by the stages; write chunks_per_stage=",
    "num_virtual_stages_per_pipeline_rank": "write chunks_per_stage=",
    "microbatch_group_size_per_vp_stage": "a group has about as many microbatches as stages; drop it",
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
    """Return Zero Bubble: weight gradients are delayed until a stage would be idle; ZB-H1, or ZB-V with two chunks.

    Args:
        degree: number of stages.
        chunks_per_stage: 1 for ZB-H1; 2 for ZB-V, whose second chunks are assigned from the last stage to the first.
        replicas: number of ranks of each stage, which take microbatches in turn; only with ZB-H1.
        balance: blocks per chunk; by default the slowest chunk is nearly as fast as possible.
        split_points: instead of a balance the modules with which chunks begin.
        recompute: which microbatches are recomputed: ``never``, ``except_last`` or ``always``.

    Promise:
        The same results as single-process training, up to rounding. Updates wait for the commit of the step.

    Cost:
        Bytes sent per rank and step: the activations and activation gradients that leave its chunks.
        Bubble, for n stages and m microbatches, if a forward and both parts of a backward take equally long:
        (n-1)/(3 m+n-1) of the step, with two chunks (n-1)/(6 m+n-1). Memory: activations of n microbatches on every
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
    "zero_bubble_v_schedule": "it is the schedule for two chunks; write chunks_per_stage=2",
    "enable_optimizer_post_validation": "updates wait for the commit of the step; drop it",
    "zero_bubble_max_pending_backward": "the peak memory of every stage is that of 1F1B's first; leave it out",
}
