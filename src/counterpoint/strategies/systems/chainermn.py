"""ChainerMN: its multi-node optimizer with each of its communicators."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.strategies.data import Data
from counterpoint.strategies.options import require_choice
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import PER_PARAMETER, SINGLE_BUCKET, drop_trivial, split_by_host
from counterpoint.strategies.tree_reduce import TreeReduce

Communicator: TypeAlias = Literal[
    "pure_nccl", "pure", "naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"
]
_FLOATS = ("float32", "float16")


def chainermn(
    degree: int,
    *,
    communicator: Communicator = "pure_nccl",
    double_buffering: bool = False,
    allreduce_grad_dtype: Literal["float32", "float16"] = "float32",
    per_host: int = 0,
) -> tuple[Strategy, ...]:
    """Return ChainerMN's create_multi_node_optimizer with one of its communicators.

    ``naive`` all-reduces each gradient separately; ``flat``, ``non_cuda_aware``, ``single_node`` and ``pure_nccl``
    all gradients at once. ``hierarchical`` reduces within each host to its first rank, all-reduces over those, and
    sends the updated weights back: ``tree(k, shape=star) * data(h)``. ``two_dimensional`` reduce-scatters within each
    host, all-reduces the shards over hosts, and gathers the updated weights: ``data(k, update=sharded) * data(h)``.
    Both send weights instead of gradients within a host, with as many bytes and fewer updates.

    Args:
        degree: number of ranks along the new axis.
        communicator: ``pure_nccl`` (or ``pure``), ``naive``, ``flat``, ``hierarchical``, ``two_dimensional``,
            ``single_node`` or ``non_cuda_aware``.
        double_buffering: ``on`` applies gradients one step late; only with pure_nccl.
        allreduce_grad_dtype: ``float32`` or ``float16``, the dtype of the all-reduce; only with pure_nccl.
        per_host: number of ranks of each host; by default as launched, else all on one host.

    Promise:
        The same results as single-process training, up to rounding; with double_buffering or float16 as
        data with staleness=1 or compress=fp16.

    Cost:
        Bytes sent per rank and step, of P: 2 (n-1)/n P. With k ranks on each of h hosts: hierarchical P, and from the
        first rank of a host k-1 + 2 (h-1)/h times P; two_dimensional 2 (k-1)/k + 2 (h-1)/(h k) times P.

    Source:
        Akiba et al., ChainerMN: Scalable Distributed Deep Learning Framework, 2017.
    """
    require_choice("chainermn", "communicator", communicator, get_args(Communicator))
    require_choice("chainermn", "allreduce_grad_dtype", allreduce_grad_dtype, _FLOATS)
    is_pure = communicator in {"pure", "pure_nccl"}
    if not is_pure and (double_buffering or allreduce_grad_dtype != "float32"):
        raise PlanError(
            f"communicator={communicator} of chainermn has neither double_buffering nor allreduce_grad_dtype; give "
            "communicator=pure_nccl, or drop these"
        )
    inside, hosts = split_by_host("chainermn", degree, per_host)
    if communicator == "hierarchical":
        return drop_trivial(TreeReduce(inside, shape="star"), Data(hosts, buckets=SINGLE_BUCKET))
    if communicator == "two_dimensional":
        return drop_trivial(Data(inside, update="sharded"), Data(hosts, buckets=SINGLE_BUCKET))
    if communicator == "single_node" and hosts > 1:
        raise PlanError(
            f"communicator=single_node of chainermn needs all ranks on one host, but these {degree} are on {hosts}; "
            "give "
            "communicator=hierarchical or two_dimensional"
        )
    if double_buffering:
        return (Data(degree, staleness=1, compress=_codec(allreduce_grad_dtype)),)
    buckets = PER_PARAMETER if communicator == "naive" else SINGLE_BUCKET
    return (Data(degree, compress=_codec(allreduce_grad_dtype), buckets=buckets),)


def _codec(dtype: str) -> str:
    return "fp16" if dtype == "float16" else ""


UNSUPPORTED_IN_CHAINERMN = {
    "mpi_comm": "the launcher assigns ranks, and a subset of them is an axis of the plan; drop it",
    "batched_copy": "gradients are always views of the flat buffers that are all-reduced; drop it",
    "zero_fill": "it is an option of the training run; pass unused_parameters='zero' to Trainer",
}
