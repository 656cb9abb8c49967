"""PipeDream and what came of it: pipelines that never flush, and the one that does."""

from __future__ import annotations

from typing import Literal

from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.recomputation import RecomputeMode
from counterpoint.strategies.strategy import Strategy

_UNSUPPORTED_IN_ALL = {
    "stage_to_num_ranks": "it is one number per stage, in order; write replicas=(3,1) for 0:3,1:1",
    "module_to_stage_map": "name the modules with which stages begin; write split_points=blocks.2+head, or balance=",
    "no_input_pipelining": "only the stages that need inputs or labels load them; leave it out",
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
    """Return PipeDream: one forward, one backward without a flush, on weights of the version each forward has met.

    Args:
        degree: number of stages.
        replicas: ranks per stage, among which minibatches go round (1F1B-RR).
        balance: blocks per stage; by default the slowest stage is made as fast as can be.
        split_points: in place of a balance the modules with which stages begin.
        recompute: for which microbatches forwards are computed again: ``never``, ``except_last`` or ``always``.
        vertical_sync: ``on`` has all stages use weights of one moment, chosen at the first one.

    Promise:
        Not solo's numbers. With n stages, none with replicas, stage s of 0 to n-1 computes each gradient on weights of
        n-1-s updates ago, with vertical_sync of n-1 updates ago, and applies it to the newest ones.

    Cost:
        Bytes sent per rank and minibatch: the activations that leave its stage and the gradients that leave it
        backwards; with r replicas 2 (r-1)/r of its gradient bytes. Idle time between flushes: none. Memory: w + 1
        versions of its weights and activations of as many minibatches, for a stage whose warm-up is w.

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
    "macrobatch": "two versions, updated once per batch, are a system of their own; write pipedream_2bw",
}


def pipedream_2bw(
    degree: int,
    *,
    replicas: tuple[int, ...] = (),
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
) -> tuple[Strategy, ...]:
    """Return PipeDream-2BW: no flush, two versions of the weights, one update of all stages per batch.

    Args:
        degree: number of stages.
        replicas: ranks per stage, among which microbatches go round.
        balance: blocks per stage; by default the slowest stage is made as fast as can be.
        split_points: in place of a balance the modules with which stages begin.
        recompute: for which microbatches forwards are computed again: ``never``, ``except_last`` or ``always``.

    Promise:
        Not solo's numbers, but the same delay everywhere: W(t+1) = W(t) - lr * gradient at W(t-1).

    Cost:
        Bytes sent per rank and batch: the activations that leave its stage and the gradients that leave it backwards,
        for each microbatch; with r replicas 2 (r-1)/r of its gradient bytes. Idle time between flushes: none. Memory: 2
        versions of its weights, activations of w + 1 microbatches for a stage whose warm-up is w.

    Source:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.
    """
    return (Pipeline(degree, "pipedream_2bw", replicas, balance, split_points=split_points, recompute=recompute),)


UNSUPPORTED_IN_PIPEDREAM_2BW = {
    **_UNSUPPORTED_IN_ALL,
    "pipeline_no_flushes": "it never flushes while batches come; write pipedream_flush for one that does",
}


def pipedream_flush(
    degree: int,
    *,
    replicas: tuple[int, ...] = (),
    balance: tuple[int, ...] = (),
    split_points: tuple[str, ...] = (),
    recompute: RecomputeMode = "never",
) -> tuple[Strategy, ...]:
    """Return PipeDream-Flush: one forward, one backward, and a flush after every batch; 1F1B to everybody since.

    Args:
        degree: number of stages.
        replicas: ranks per stage, among which microbatches go round.
        balance: blocks per stage; by default the slowest stage is made as fast as can be.
        split_points: in place of a balance the modules with which stages begin.
        recompute: for which microbatches forwards are computed again: ``never``, ``except_last`` or ``always``.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step: the activations that leave its stage and the gradients that leave it backwards,
        for each microbatch; with r replicas 2 (r-1)/r of its gradient bytes. Idle time, for n stages and m
        microbatches: (n-1)/(m+n-1) of the step. Memory: activations of at most n - stage microbatches.

    Source:
        Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, section 3.3.
    """
    return (Pipeline(degree, "one_f_one_b", replicas, balance, split_points=split_points, recompute=recompute),)


UNSUPPORTED_IN_PIPEDREAM_FLUSH = _UNSUPPORTED_IN_ALL
