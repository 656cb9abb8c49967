"""Distributed variants of Caffe."""

from __future__ import annotations

from counterpoint.errors import PlanError
from counterpoint.strategies.data import Data
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import PER_PARAMETER, drop_trivial, split_by_host
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.tree_reduce import TreeReduce


def firecaffe(degree: int) -> tuple[Strategy, ...]:
    """Return FireCaffe: gradients are reduced along a tree instead of at a parameter server.

    Args:
        degree: number of ranks along the new axis.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per step: the first rank ceil(log2 n) times the weights, where a server would send them n times;
        each other rank its gradients, and the weights to its children. Optimizer state only on the first rank.

    Source:
        Iandola et al., FireCaffe: near-linear acceleration of deep neural network training on compute clusters, CVPR
        2016.
    """
    return (TreeReduce(degree),)


def s_caffe(degree: int, *, per_host: int = 0) -> tuple[Strategy, ...]:
    """Return S-Caffe: reduction along a chain within each host and a tree between hosts, during the backward.

    Each gradient is sent as soon as it is complete, layer by layer, and forwarded along the chain one backward later.
    Weights are sent back in the same step; in S-Caffe the next forward begins before all of them have arrived.

    Args:
        degree: number of ranks along the new axis.
        per_host: number of ranks of each host; by default as launched, else all on one host.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per step, k ranks on each of h hosts: the first rank of a host at most 1 + ceil(log2 h) times the
        weights, every other rank at most twice. Optimizer state only on the first rank.

    Source:
        Awan et al., S-Caffe: Co-designing MPI Runtimes and Caffe for Scalable Deep Learning on Modern GPU Clusters,
        PPoPP 2017.
    """
    inside, hosts = split_by_host("s_caffe", degree, per_host)
    return drop_trivial(
        TreeReduce(inside, shape="chain", send="during_backward"), TreeReduce(hosts, send="during_backward")
    )


def intel_caffe(degree: int) -> tuple[Strategy, ...]:
    """Return multi-node Intel-Caffe: the gradient of each layer is all-reduced as soon as it is ready.

    Intel-Caffe runs one thread on each core of a node: see ``counterpoint run --bind=core``.

    Args:
        degree: number of ranks along the new axis.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients, one all-reduce for each parameter.

    Source:
        Intel Distribution of Caffe, its multinode solver.
    """
    return (Data(degree, buckets=PER_PARAMETER),)


def numa_caffe(degree: int) -> tuple[Strategy, ...]:
    """Return NUMA-Caffe: one replica for each NUMA node, with its threads and its memory on that node.

    The binding is the launcher's: ``counterpoint run -n 2 --bind=numa`` on a host of two nodes. Replicas on one host
    share one copy of the weights by default, which is then on one of the nodes; pass ``share_params_on_host=False`` to
    Trainer for a copy on each.

    Args:
        degree: number of ranks along the new axis: one for each NUMA node.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients.

    Source:
        Roy et al., NUMA-Caffe: NUMA-Aware Deep Learning Neural Networks, TACO 2018.
    """
    return (Data(degree),)


def mpi_caffe(degree: int, *, comm_group: int = 0, split_points: tuple[str, ...] = ()) -> tuple[Strategy, ...]:
    """Return MPI-Caffe: groups of ranks, each of which runs consecutive layers and shards them among its ranks.

    In MPI-Caffe a layer runs on the ranks of its ``comm_group``; ``MPIBroadcast`` sends its input to all of them and
    sums their gradients, ``MPIGather`` concatenates their outputs. Here the layers that can be sharded are, and all
    others run on each rank of the group: ``tensor(k) * pipeline(n/k, schedule=gpipe)``.

    Args:
        degree: total number of ranks.
        comm_group: number of ranks of a group; all by default.
        split_points: the modules with which all groups but the first begin; by default balanced.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step, k ranks in each group: 2 (k-1)/k of the outputs and inputs of sharded layers, and
        the activations between groups. Bubble, for g groups and m microbatches: (g-1)/(m+g-1) of the step; MPI-Caffe
        itself has one microbatch. Memory: the layers of its group, 1/k of those that are sharded.

    Source:
        Lee et al., Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks, 2015; the README of
        MPI-Caffe.
    """
    inside = comm_group or degree
    if inside > degree or degree % inside:
        raise PlanError(
            f"mpi_caffe({degree}, comm_group={comm_group}) cannot have the same number of ranks in each group; give a "
            "comm_group "
            f"that divides {degree}"
        )
    if split_points and inside == degree:
        raise PlanError(
            f"split_points={'+'.join(split_points)} of mpi_caffe({degree}) needs several groups; also give a comm_group"
        )
    return drop_trivial(Tensor(inside), Pipeline(degree // inside, "gpipe", split_points=split_points))
