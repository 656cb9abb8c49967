"""HyPar-Flow: model, data or hybrid parallelism by a name and two numbers."""

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
    """Return HyPar-Flow: a pipeline of partitions, each replicated with its own all-reduce.

    Args:
        degree: total number of ranks: partitions times replicas.
        strategy: ``model`` for partitions, ``data`` for replicas, ``hybrid`` for both.
        num_partitions: number of pipeline stages; by default the ranks divided by the replicas.
        num_replicas: number of replicas of each partition; by default the ranks divided by the partitions.
        balance: number of blocks of each partition (in HyPar-Flow layers); by default balanced.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step, with r replicas: 2 (r-1)/r of the gradients of its partition, and the activations
        and activation gradients that leave it. Bubble, for n partitions and m microbatches:
        (n-1)/(m+n-1) of the step.

    Source:
        Awan et al., HyPar-Flow: Exploiting MPI and Keras for Scalable Hybrid-Parallel DNN Training with TensorFlow, ISC
        2020.
    """
    require_choice("hypar_flow", "strategy", strategy, ("model", "data", "hybrid"))
    partitions, replicas = _split(degree, strategy, num_partitions, num_replicas)
    if balance and partitions == 1:
        raise PlanError(
            f"balance={balance} of hypar_flow({degree}) needs several partitions, and there is one; drop it"
        )
    return drop_trivial(Pipeline(partitions, "gpipe", balance=balance), Data(replicas))


def _split(degree: int, strategy: str, partitions: int, replicas: int) -> tuple[int, int]:
    """Return the number of partitions and the number of replicas.

    Raises:
        PlanError: one is negative, they do not multiply to the ranks, or the strategy allows only one of the two.
    """
    for name, count in (("num_partitions", partitions), ("num_replicas", replicas)):
        if count < 0:
            raise PlanError(f"{name}={count} of hypar_flow({degree}) is a number of ranks; give 1 or more, or none")
    if strategy == "hybrid" and not (partitions or replicas):
        raise PlanError(
            f"hypar_flow({degree}, strategy=hybrid) needs a number of partitions or replicas; give "
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
            f"strategy={strategy} of hypar_flow({degree}) has partitions or replicas, not {partitions} partitions of "
            f"{replicas} replicas; give strategy=hybrid"
        )
    return partitions, replicas


UNSUPPORTED_IN_HYPAR_FLOW = {
    "num_micro_batches": "it is an option of the training run; pass num_microbatches to Trainer"
}
