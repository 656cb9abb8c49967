"""ChainerMN: one optimizer, and communicators that know how ranks are spread over hosts."""

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

    ``naive`` sums each parameter's gradient alone; ``flat``, ``non_cuda_aware``, ``single_node`` and ``pure_nccl``
    sum all at once. ``hierarchical`` adds up inside each host on its first rank, then over those, which update and
    hand out the weights: ``tree(k, shape=star) * data(h)``. ``two_dimensional`` shares out the sum inside each host,
    sums the shares over hosts, and joins what they have become: ``data(k, update=sharded) * data(h)``. In both, what
    comes back inside a host is weights, not gradients: as many bytes, and fewer updates.

    Args:
        degree: ranks along the new axis.
        communicator: ``pure_nccl`` (or ``pure``), ``naive``, ``flat``, ``hierarchical``, ``two_dimensional``,
            ``single_node`` or ``non_cuda_aware``.
        double_buffering: ``on`` applies gradients one step late, and sums them meanwhile; with pure_nccl only.
        allreduce_grad_dtype: ``float32`` or ``float16``, in which gradients travel; with pure_nccl only.
        per_host: ranks on each host; by default as they have been started, and all on one where none were.

    Promise:
        The same numbers as on one rank, to rounding; with double_buffering or float16 what data promises with
        staleness=1 or compress=fp16.

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
            "communicator=pure_nccl, or leave these out"
        )
    inside, hosts = split_by_host("chainermn", degree, per_host)
    if communicator == "hierarchical":
        return drop_trivial(TreeReduce(inside, shape="star"), Data(hosts, buckets=SINGLE_BUCKET))
    if communicator == "two_dimensional":
        return drop_trivial(Data(inside, update="sharded"), Data(hosts, buckets=SINGLE_BUCKET))
    if communicator == "single_node" and hosts > 1:
        raise PlanError(
            f"communicator=single_node of chainermn is for ranks of one host, but these {degree} are on {hosts}; give "
            "communicator=hierarchical or two_dimensional"
        )
    if double_buffering:
        return (Data(degree, staleness=1, compress=_codec(allreduce_grad_dtype)),)
    buckets = PER_PARAMETER if communicator == "naive" else SINGLE_BUCKET
    return (Data(degree, compress=_codec(allreduce_grad_dtype), buckets=buckets),)


def _codec(dtype: str) -> str:
    return "fp16" if dtype == "float16" else ""


UNSUPPORTED_IN_CHAINERMN = {
    "mpi_comm": "the launcher tells each process its rank, and a part of them is an axis of the plan; leave it out",
    "batched_copy": "gradients lie in buffers that are summed without a copy, always; leave it out",
    "zero_fill": "it is said of the training, not of the plan; pass unused_parameters='zero' to Trainer",
}
