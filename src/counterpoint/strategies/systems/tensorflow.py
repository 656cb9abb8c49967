"""The synchronous strategies of tf.distribute; its parameter servers are ``server``."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import DEFAULT_BUCKETS
from counterpoint.strategies.data import Data
from counterpoint.strategies.options import ByteSize, require_choice
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import PER_PARAMETER, SINGLE_BUCKET, uniform_buckets
from counterpoint.strategies.tree_reduce import TreeReduce

CrossDeviceOps: TypeAlias = Literal["nccl", "hierarchical_copy", "reduction_to_one_device"]
_AUTOMATIC = ByteSize(0)


def one_device(degree: int) -> tuple[Strategy, ...]:
    """Return tf.distribute's OneDeviceStrategy: one rank.

    Args:
        degree: 1.

    Promise:
        Single-process training, the reference of all others.

    Cost:
        Bytes sent: none.

    Source:
        tf.distribute.OneDeviceStrategy.
    """
    if degree != 1:
        raise PlanError(f"one_device is one rank, not {degree}; write one_device(1), or mirrored({degree}) to use them")
    return ()


def mirrored(degree: int, *, cross_device_ops: CrossDeviceOps = "nccl", num_packs: int = 1) -> tuple[Strategy, ...]:
    """Return tf.distribute's MirroredStrategy: replicas on one host that all-reduce gradients.

    ``nccl`` is an all-reduce, ``reduction_to_one_device`` a star that reduces to rank 0, and ``hierarchical_copy`` a
    binomial tree. In the last two rank 0 updates, and sends weights instead of gradients.

    Args:
        degree: number of ranks along the new axis.
        cross_device_ops: ``nccl``, ``hierarchical_copy`` or ``reduction_to_one_device``.
        num_packs: with ``nccl``, 1 all-reduces all gradients at once, 0 each separately.

    Promise:
        The same results as single-process training, up to rounding. TensorFlow sums gradients of
        losses that the user has divided by the global batch size; here the loss is a mean, and ranks are weighted by
        their samples.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients with nccl, else those of tree.

    Source:
        tf.distribute.MirroredStrategy; its cross_device_ops.py.
    """
    require_choice("mirrored", "cross_device_ops", cross_device_ops, get_args(CrossDeviceOps))
    if cross_device_ops != "nccl":
        if num_packs != 1:
            raise PlanError(f"num_packs={num_packs} of mirrored needs cross_device_ops=nccl; drop it")
        return (TreeReduce(degree, shape="star" if cross_device_ops == "reduction_to_one_device" else "binomial"),)
    if num_packs not in {0, 1}:
        raise PlanError(
            f"num_packs={num_packs} of mirrored: buckets have a size here, not a number; "
            f"give num_packs=0 or 1, or write data({degree}, bucket=16MiB)"
        )
    return (Data(degree, buckets=SINGLE_BUCKET if num_packs else PER_PARAMETER),)


UNSUPPORTED_IN_MIRRORED = {"devices": "ranks are given as a number; write mirrored(4)"}


def multi_worker_mirrored(
    degree: int, *, bytes_per_pack: ByteSize = _AUTOMATIC, implementation: Literal["auto", "ring", "nccl"] = "auto"
) -> tuple[Strategy, ...]:
    """Return tf.distribute's MultiWorkerMirroredStrategy: replicas on many hosts that all-reduce packs of gradients.

    Args:
        degree: number of ranks along the new axis.
        bytes_per_pack: bucket size; 0 chooses it by measurements during training.
        implementation: ``auto``; the transport chooses the algorithm of the all-reduce.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients.

    Source:
        tf.distribute.MultiWorkerMirroredStrategy; tf.distribute.experimental.CommunicationOptions.
    """
    require_choice("multi_worker_mirrored", "implementation", implementation, ("auto", "ring", "nccl"))
    if implementation != "auto":
        raise PlanError(
            f"implementation={implementation} of multi_worker_mirrored: the transport chooses the algorithm; "
            "drop it, or give counterpoint run --transport=... for another transport"
        )
    return (Data(degree, buckets=uniform_buckets(bytes_per_pack) if bytes_per_pack > 0 else DEFAULT_BUCKETS),)


UNSUPPORTED_IN_MULTI_WORKER_MIRRORED = {
    "timeout_seconds": "it is an option of the launcher; write counterpoint run "
    "--deadline=..., or Trainer(..., deadline_s=...)",
    "cluster_resolver": "the launcher assigns ranks; use counterpoint run or torchrun",
}


def central_storage(degree: int) -> tuple[Strategy, ...]:
    """Return tf.distribute's CentralStorageStrategy: variables on one device, computation on all.

    The device is that of rank 0, which computes as well; ``tree(n, shape=star)``. For a separate rank that keeps
    variables write ``server(n)``.

    Args:
        degree: number of ranks along the new axis, including the one with the variables.

    Promise:
        The same results as single-process training, up to rounding.

    Cost:
        Bytes sent per step: rank 0 the weights n-1 times, each other rank its gradients. Optimizer state only on
        rank 0.

    Source:
        tf.distribute.experimental.CentralStorageStrategy.
    """
    return (TreeReduce(degree, shape="star"),)


UNSUPPORTED_IN_CENTRAL_STORAGE = {
    "compute_devices": "ranks are given as a number; write central_storage(4)",
    "parameter_device": "it is that of rank 0; drop it, or write server(4) for one more rank",
}


def parameter_server_strategy(
    degree: int, *, servers: int = 1, mode: Literal["async", "sync"] = "async"
) -> tuple[Strategy, ...]:
    """Return tf.distribute's ParameterServerStrategy: variables on servers, each step on one of the workers.

    Args:
        degree: number of workers along the new axis.
        servers: number of ranks that keep variables.
        mode: ``async`` as in TensorFlow 2, every gradient is applied when it arrives; ``sync`` as in TensorFlow 1 with
            SyncReplicasOptimizer, servers wait for all workers.

    Promise:
        sync: the same results as single-process training, up to rounding. async as asp.

    Cost:
        Bytes sent per step: each worker its gradients once; each server its variables once per worker. Optimizer state
        only on the servers.

    Source:
        tf.distribute.ParameterServerStrategy; tf.compat.v1.train.SyncReplicasOptimizer.
    """
    require_choice("parameter_server_strategy", "mode", mode, ("async", "sync"))
    return (Server(degree, servers, "asp" if mode == "async" else "bsp"),)


UNSUPPORTED_IN_PARAMETER_SERVER_STRATEGY = {
    "variable_partitioner": "a unit is kept by one server as a whole, the one with the fewest bytes; drop it, "
    "and give as many servers= as there are large layers",
    "cluster_resolver": "the launcher assigns ranks; use counterpoint run or torchrun",
    "coordinator": "every worker knows its own batches without a coordinator; drop it",
}
