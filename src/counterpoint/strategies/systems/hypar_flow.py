"""HyPar-Flow: one word and two numbers for any model."""

from __future__ import annotations

from typing import Literal

from counterpoint.errors import PlanError
from counterpoint.strategies.data import Data
from counterpoint.strategies.options import require_choice
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import drop_trivial


def hypar_flow(
    degree: int,
    *,
    strategy: Literal["model", "data", "hybrid"] = "hybrid",
    num_partitions: int = 0,
    num_replicas: int = 0,
    balance: tuple[int, ...] = (),
) -> tuple[Strategy, ...]:
    """Return HyPar-Flow: a model in partitions that are replicated, each summing its gradients with its own replicas.

    Args:
        degree: all ranks: partitions times replicas.
        strategy: ``model`` for partitions alone, ``data`` for replicas alone, ``hybrid`` for both.
        num_partitions: stages of the model; by default what the ranks and the replicas leave.
        num_replicas: replicas of each partition; by default what the ranks and the partitions leave.
        balance: blocks per partition (layers per partition there); by default the slowest is as fast as can be.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step, with r replicas: 2 (r-1)/r of the gradients of its partition, and the activations
        that leave it and the gradients that leave it backwards. Idle time, for n partitions and m microbatches:
        (n-1)/(m+n-1) of the step.

    Source:
        Awan et al., HyPar-Flow: Exploiting MPI and Keras for Scalable Hybrid-Parallel DNN Training with TensorFlow, ISC
        2020.
    """
    require_choice("hypar_flow", "strategy", strategy, ("model", "data", "hybrid"))
    partitions, replicas = _split(degree, strategy, num_partitions, num_replicas)
    if balance and partitions == 1:
        raise PlanError(f"balance={balance} of hypar_flow({degree}) is for partitions, and there is one; leave it out")
    return drop_trivial(Pipeline(partitions, "gpipe", balance=balance), Data(replicas))


def _split(degree: int, strategy: str, partitions: int, replicas: int) -> tuple[int, int]:
    """Return how many partitions and how many replicas there are.

    Raises:
        PlanError: one is negative, they do not multiply to the ranks, or the strategy has only one of the two.
    """
    for name, count in (("num_partitions", partitions), ("num_replicas", replicas)):
        if count < 0:
            raise PlanError(f"{name}={count} of hypar_flow({degree}) is a number of ranks; give 1 or more, or none")
    if strategy == "hybrid" and not (partitions or replicas):
        raise PlanError(
            f"hypar_flow({degree}, strategy=hybrid) does not say how many of its ranks are partitions; give "
            "num_partitions= or num_replicas="
        )
    partitions = partitions or (1 if strategy == "data" else degree // max(1, replicas))
    replicas = replicas or (1 if strategy == "model" else degree // partitions)
    if partitions * replicas != degree:
        raise PlanError(
            f"hypar_flow({degree}) has {partitions} partitions of {replicas} replicas each, which take "
            f"{partitions * replicas} ranks; give num_partitions and num_replicas whose product is {degree}"
        )
    if (strategy == "model" and replicas > 1) or (strategy == "data" and partitions > 1):
        raise PlanError(
            f"strategy={strategy} of hypar_flow({degree}) has partitions or replicas, not {partitions} of the one and "
            f"{replicas} of the other; give strategy=hybrid"
        )
    return partitions, replicas


UNSUPPORTED_IN_HYPAR_FLOW = {"num_micro_batches": "it is said of the run; pass num_microbatches to Trainer"}
