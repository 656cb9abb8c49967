"""Horovod: all-reduces of fused gradients. Horovod scripts run unchanged on ``counterpoint.compat.horovod``."""

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
    """Return Horovod: replicas whose gradients are fused as they become ready, and all-reduced during the backward.

    ``hierarchical_allreduce`` reduce-scatters within each host, all-reduces the shards over hosts and gathers the
    updated weights: ``data(k, update=sharded) * data(h)``. With ``op=adasum`` it averages within hosts, as Horovod
    does, and combines over hosts. A process set is an axis of the plan: in ``pipeline(2) * horovod(2)`` each stage has
    one of its own.

    Args:
        degree: number of ranks along the new axis.
        fusion_threshold: bucket size, such as ``64MiB``; 0 gives each parameter its own bucket.
        cycle_time: milliseconds; a later gradient than that after the first of a bucket starts a new bucket.
        autotune: ``on`` tries other thresholds during training, and keeps the fastest.
        hierarchical_allreduce: ``on`` reduces within hosts and between them.
        op: ``average``, or ``adasum``.
        compression: ``none`` or ``fp16``.
        per_host: number of ranks of each host; by default as launched, else all on one host.

    Promise:
        The same results as single-process training, up to rounding: the mean is over samples, where Horovod's is over
        ranks. With fp16 and adasum as data with compress=fp16 and reduce=adasum; Horovod's fp16 has no error feedback,
        and its adasum combines updates instead of gradients, for powers of two only.

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
            f"op=average, and multiply the learning rate by {degree} for a sum"
        )
    inside, hosts = split_by_host("horovod", degree, per_host)
    codec = compression if compression != "none" else ""
    buckets = uniform_buckets(fusion_threshold, cycle_ms=cycle_time, tune=autotune)
    if not hierarchical_allreduce or hosts == 1:
        return (Data(degree, compress=codec, reduce="adasum" if op == "adasum" else "sum", buckets=buckets),)
    if op == "adasum":
        return drop_trivial(
            Data(inside, buckets=buckets), Data(hosts, compress=codec, reduce="adasum", buckets=buckets)
        )
    if codec:
        return drop_trivial(Data(inside, compress=codec, buckets=buckets), Data(hosts, compress=codec, buckets=buckets))
    return drop_trivial(Data(inside, update="sharded"), Data(hosts, buckets=buckets))


UNSUPPORTED_IN_HOROVOD = {
    "backward_passes_per_step": "gradients are all-reduced once per step, after the last microbatch; pass "
    "num_microbatches=... to Trainer",
    "gradient_predivide_factor": "losses are divided by the samples of the global batch before they are summed: "
    "no sum overflows; drop it",
    "process_set": "a process set is an axis of the plan; write pipeline(2) * horovod(2), for example",
    "sparse_as_dense": "it is an option of the layer; build the embedding with sparse=False",
    "groups": "buckets are formed by size; give fusion_threshold=64MiB, for example",
    "num_groups": "buckets are formed by size; give fusion_threshold=64MiB, for example",
    "cache_capacity": "the collectives are fixed when the plan is compiled; drop it",
    "hierarchical_allgather": "only gradients are communicated, with all-reduces; drop it",
    "torus_allreduce": "write hierarchical_allreduce=on, with the same bytes per rank",
    "named_parameters": "the model's own names are used; drop it",
}
