"""The descendants of Caffe: trees of GPUs, and processors with many cores."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import PER_PARAMETER, drop_trivial, split_by_host
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.tree_reduce import TreeReduce


def firecaffe(degree: int) -> tuple[Strategy, ...]:
    """Return FireCaffe: gradients are added up along a tree in place of a parameter server.

    Args:
        degree: ranks along the new axis.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per step: the first rank ceil(log2 n) times the weights, where a server sends them n times; each
        other rank its gradients, and the weights to those below it. Optimizer state on the first rank alone.

    Source:
        Iandola et al., FireCaffe: near-linear acceleration of deep neural network training on compute clusters, CVPR
        2016.
    """
    return (TreeReduce(degree),)


def s_caffe(degree: int, *, per_host: int = 0) -> tuple[Strategy, ...]:
    """Return S-Caffe: a chain inside each host and a tree between hosts, begun during the backward.

    Each gradient is sent as soon as it is complete, layer by layer, and handed on along the chain one backward later.
    Weights come back in the same step; S-Caffe's next forward begins before all of them are there.

    Args:
        degree: ranks along the new axis.
        per_host: ranks on each host; by default as they have been started, and all on one where none were.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per step, k ranks on each of h hosts: the first rank of a host at most 1 + ceil(log2 h) times the
        weights, every other rank at most twice. Optimizer state on the first rank alone.

    Source:
        Awan et al., S-Caffe: Co-designing MPI Runtimes and Caffe for Scalable Deep Learning on Modern GPU Clusters,
        PPoPP 2017.
    """
    inside, hosts = split_by_host("s_caffe", degree, per_host)
    return drop_trivial(
        TreeReduce(inside, shape="chain", send="during_backward"), TreeReduce(hosts, send="during_backward")
    )


def intel_caffe(degree: int) -> tuple[Strategy, ...]:
    """Return Intel-Caffe on several nodes: the gradient of each layer is summed as soon as it is there.

    On each node Intel-Caffe has one thread on each core: ``counterpoint run --bind=core`` does that.

    Args:
        degree: ranks along the new axis.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients, one sum for each parameter.

    Source:
        Intel Distribution of Caffe, its multinode solver.
    """
    return (Data(degree, buckets=PER_PARAMETER),)


def numa_caffe(degree: int) -> tuple[Strategy, ...]:
    """Return NUMA-Caffe: one replica for each NUMA node, with its threads and its memory near.

    The binding is the launcher's: ``counterpoint run -n 2 --bind=numa`` on a host of two nodes. Replicas on one host
    have one copy of the weights by default, which then lies on one of the nodes; pass ``share_params_on_host=False`` to Trainer for
    a copy on each.

    Args:
        degree: ranks along the new axis, as many as NUMA nodes.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients.

    Source:
        Roy et al., NUMA-Caffe: NUMA-Aware Deep Learning Neural Networks, TACO 2018.
    """
    return (Data(degree),)


def mpi_caffe(degree: int, *, comm_group: int = 0, split_points: tuple[str, ...] = ()) -> tuple[Strategy, ...]:
    """Return MPI-Caffe: model parallel groups, each of which holds a run of layers and shares them among its ranks.

    There, a layer runs on the ranks of its ``comm_group``; ``MPIBroadcast`` gives all of them its input, and sums their
    gradients, ``MPIGather`` puts together what they have made. Here the layers of a group that can be sliced are, and
    all others run on each of its ranks: ``tensor(k) * pipeline(n/k, schedule=gpipe)``.

    Args:
        degree: all ranks.
        comm_group: ranks of a group; all of them by default, 1 for layers on ranks of their own.
        split_points: the modules with which the second group begins, and so on; by default the slowest is as fast as can be.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step, k ranks in each group: 2 (k-1)/k of the outputs and inputs of sliced layers, and
        what goes from group to group. Idle time, for g groups and m microbatches: (g-1)/(m+g-1) of the step; MPI-Caffe
        itself has one microbatch. Memory: the layers of its group, 1/k of those that are sliced.

    Source:
        Lee et al., Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks, 2015; the README of
        MPI-Caffe.
    """
    inside = comm_group or degree
    if inside > degree or degree % inside:
        raise PlanError(
            f"mpi_caffe({degree}, comm_group={comm_group}) cannot have as many ranks in each group; give a comm_group "
            f"that divides {degree}"
        )
    if split_points and inside == degree:
        raise PlanError(
            f"split_points={'+'.join(split_points)} of mpi_caffe({degree}) is for several groups; give a comm_group, too"
        )
    return drop_trivial(Tensor(inside), Pipeline(degree // inside, "gpipe", split_points=split_points))
