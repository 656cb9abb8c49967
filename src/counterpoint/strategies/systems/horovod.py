"""Horovod: sums of fused gradients. Its scripts run unchanged on ``counterpoint.compat.horovod``."""

from __future__ import annotations

from typing import Literal

from counterpoint.errors import PlanError
from counterpoint.strategies.data import Data
from counterpoint.strategies.options import ByteSize, require_choice
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import drop_trivial, split_by_host, uniform_buckets

_THRESHOLD = ByteSize(128 * 2**20)


def horovod(
    degree: int,
    *,
    fusion_threshold: ByteSize = _THRESHOLD,
    cycle_time: float = 1.0,
    autotune: bool = False,
    hierarchical_allreduce: bool = False,
    op: Literal["average", "sum", "adasum"] = "average",
    compression: Literal["none", "fp16"] = "none",
    per_host: int = 0,
) -> tuple[Strategy, ...]:
    """Return Horovod: replicas whose gradients are put together as they come, and summed during the backward.

    ``hierarchical_allreduce`` shares out the sum inside each host, sums the shares over hosts and joins what they have
    become: ``data(k, update=sharded) * data(h)``. With ``op=adasum`` it averages inside, as Horovod does, and combines
    over hosts. A process set is an axis of the plan: in ``pipeline(2) * horovod(2)`` each stage has one of its own.

    Args:
        degree: ranks along the new axis.
        fusion_threshold: how much is summed at once, such as ``64MiB``; 0 sums each parameter's gradient alone.
        cycle_time: milliseconds; gradients that come later than the first of their bucket by more wait for the next.
        autotune: ``on`` tries other thresholds while training, and keeps the fastest.
        hierarchical_allreduce: ``on`` for sums inside hosts and between them.
        op: ``average``, or ``adasum``.
        compression: ``none`` or ``fp16``.
        per_host: ranks on each host; by default as they have been started, and all on one where none were.

    Promise:
        The same numbers as on one rank, to rounding: the mean is over samples, where Horovod's is over ranks. With fp16
        and adasum what data promises with compress=fp16 and reduce=adasum; Horovod's fp16 drops what it has not sent,
        and its adasum is of updates, not of gradients, and for powers of two only.

    Cost:
        Bytes sent per rank and step, of P: 2 (n-1)/n P; half of it with fp16; n-1 times P with adasum. Hierarchical,
        with k ranks on each of h hosts: 2 (k-1)/k + 2 (h-1)/(h k) times P.

    Source:
        Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, 2018.
    """
    require_choice("horovod", "op", op, ("average", "sum", "adasum"))
    require_choice("horovod", "compression", compression, ("none", "fp16"))
    if op == "sum":
        raise PlanError(
            "op=sum of horovod: the gradient is always that of the mean loss over the samples of all ranks; write "
            f"op=average, and multiply the learning rate by {degree} where a sum is meant"
        )
    inside, hosts = split_by_host("horovod", degree, per_host)
    code = compression if compression != "none" else ""
    buckets = uniform_buckets(fusion_threshold, cycle_ms=cycle_time, tune=autotune)
    if not hierarchical_allreduce or hosts == 1:
        return (Data(degree, compress=code, reduce="adasum" if op == "adasum" else "sum", buckets=buckets),)
    if op == "adasum":
        return drop_trivial(Data(inside, buckets=buckets), Data(hosts, compress=code, reduce="adasum", buckets=buckets))
    if code:
        return drop_trivial(Data(inside, compress=code, buckets=buckets), Data(hosts, compress=code, buckets=buckets))
    return drop_trivial(Data(inside, update="sharded"), Data(hosts, buckets=buckets))


UNSUPPORTED_IN_HOROVOD = {
    "backward_passes_per_step": "gradients are summed once per step, after all its microbatches; pass "
    "num_microbatches=... to Trainer",
    "gradient_predivide_factor": "losses are divided by the samples of the whole batch before anything is added up, so "
    "that no sum is larger than the gradient; leave it out",
    "process_set": "a process set is an axis of the plan; write pipeline(2) * horovod(2), for one",
    "sparse_as_dense": "it is said of the layer; build the embedding with sparse=False",
    "groups": "gradients are put together by bytes; give fusion_threshold=64MiB, for one",
    "num_groups": "gradients are put together by bytes; give fusion_threshold=64MiB, for one",
    "cache_capacity": "who sums what is agreed on once, when the plan is compiled; leave it out",
    "hierarchical_allgather": "it has nothing to say, since only gradients are summed; leave it out",
    "torus_allreduce": "write hierarchical_allreduce=on, which sends the same from each rank",
    "named_parameters": "names are the model's own; leave it out",
}
