"""PipeDream and its variants: asynchronous pipelines, and the one with a flush."""

from __future__ import annotations

from typing import Literal

from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RecomputeMode
from counterpoint.strategies.strategy import Strategy

_UNSUPPORTED_IN_ALL = {
    "stage_to_num_ranks": "give one number per stage, in order; write replicas=(3,1) for 0:3,1:1",
    "module_to_stage_map": "name the modules with which stages begin; write split_points=blocks.2+head, or balance=",
    "no_input_pipelining": "only the stages that need inputs or labels load them; drop it",
}


def pipedream(
    degree: int,
    *,
    replicas: tuple[int, ...] = (),
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
    vertical_sync: Literal["off", "on"] = "off",
) -> tuple[Strategy, ...]:
    """Return PipeDream: 1F1B without a flush, with weight stashing.

    Args:
        degree: number of stages.
        replicas: number of ranks of each stage, which take minibatches in turn (1F1B-RR).
        balance: blocks per stage; by default the slowest stage is nearly as fast as possible.
        split_points: instead of a balance the modules with which stages begin.
        recompute: which microbatches are recomputed: ``never``, ``except_last`` or ``always``.
        vertical_sync: with ``on`` all stages use weights of one moment, chosen at the first one.

    Promise:
        Not the results of single-process training. With n stages, none with replicas, stage s of 0 to n-1 computes each
        gradient on weights of n-1-s updates ago, with vertical_sync of n-1 updates ago, and applies it to the newest
        ones.

    Cost:
        Bytes sent per rank and minibatch: the activations and activation gradients that leave its stage; with r
        replicas 2 (r-1)/r of its gradient bytes. Bubble between flushes: none. Memory: w + 1 versions of its weights
        and activations of as many minibatches, for a stage whose warm-up is w.

    Source:
        Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, section 3; Harlap et
        al., PipeDream: Fast and Efficient Pipeline Parallel DNN Training, 2018.
    """
    return (
        Pipeline(
            degree,
            "pipedream",
            replicas,
            balance,
            vertical_sync=vertical_sync,
            split_points=split_points,
            recompute=recompute,
        ),
    )


UNSUPPORTED_IN_PIPEDREAM = {
    **_UNSUPPORTED_IN_ALL,
    "macrobatch": "two versions, updated once per batch, are another system; write pipedream_2bw",
}


def pipedream_2bw(
    degree: int,
    *,
    replicas: tuple[int, ...] = (),
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
) -> tuple[Strategy, ...]:
    """Return PipeDream-2BW: no flush, two versions of the weights, one update per batch.

    Args:
        degree: number of stages.
        replicas: number of ranks of each stage, which take microbatches in turn.
        balance: blocks per stage; by default the slowest stage is nearly as fast as possible.
        split_points: instead of a balance the modules with which stages begin.
        recompute: which microbatches are recomputed: ``never``, ``except_last`` or ``always``.

    Promise:
        Not the results of single-process training, but the same delay everywhere: W(t+1) = W(t) - lr * gradient at
        W(t-1).

    Cost:
        Bytes sent per rank and batch: the activations and activation gradients that leave its stage,
        for each microbatch; with r replicas 2 (r-1)/r of its gradient bytes. Bubble between flushes: none. Memory: 2
        versions of its weights, activations of w + 1 microbatches for a stage whose warm-up is w.

    Source:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.
    """
    return (Pipeline(degree, "pipedream_2bw", replicas, balance, split_points=split_points, recompute=recompute),)


UNSUPPORTED_IN_PIPEDREAM_2BW = {
    **_UNSUPPORTED_IN_ALL,
    "pipeline_no_flushes": "it never flushes between batches; write pipedream_flush for one that does",
}


def pipedream_flush(
    degree: int,
    *,
    replicas: tuple[int, ...] = (),
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
) -> tuple[Strategy, ...]:
    """Return PipeDream-Flush: 1F1B with a flush after every batch.

    Args:
        degree: number of stages.
        replicas: number of ranks of each stage, which take microbatches in turn.
        balance: blocks per stage; by default the slowest stage is nearly as fast as possible.
        split_points: instead of a balance the modules with which stages begin.
        recompute: which microbatches are recomputed: ``never``, ``except_last`` or ``always``.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step: the activations and activation gradients that leave its stage,
        for each microbatch; with r replicas 2 (r-1)/r of its gradient bytes. Bubble, for n stages and m
        microbatches: (n-1)/(m+n-1) of the step. Memory: activations of at most n - stage microbatches.

    Source:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.3.
    """
    return (Pipeline(degree, "one_f_one_b", replicas, balance, split_points=split_points, recompute=recompute),)


UNSUPPORTED_IN_PIPEDREAM_FLUSH = _UNSUPPORTED_IN_ALL
