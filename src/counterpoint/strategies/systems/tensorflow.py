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
    """Return tf.distribute's OneDeviceStrategy: one rank, to try a program before it is spread.

    Args:
        degree: 1.

    Promise:
        It is what all others promise to equal: solo.

    Cost:
        Bytes sent: none.

    Source:
        tf.distribute.OneDeviceStrategy.
    """
    if degree != 1:
        raise PlanError(
            f"one_device is one rank and cannot take {degree}; write one_device(1), or mirrored({degree}) to use them"
        )
    return ()


def mirrored(degree: int, *, cross_device_ops: CrossDeviceOps = "nccl", num_packs: int = 1) -> tuple[Strategy, ...]:
    """Return tf.distribute's MirroredStrategy: replicas on one host that sum their gradients.

    ``nccl`` is a sum, ``reduction_to_one_device`` a star in which rank 0 adds up, and ``hierarchical_copy`` a
    binomial tree. In the last two rank 0 updates, and weights instead of gradients come back.

    Args:
        degree: ranks along the new axis.
        cross_device_ops: ``nccl``, ``hierarchical_copy`` or ``reduction_to_one_device``.
        num_packs: with ``nccl`` 1 sums all gradients at once, 0 each parameter's alone.

    Promise:
        The same numbers as on one rank, to rounding. TensorFlow adds up gradients of losses that the user has divided
        by the global batch; here the loss is a mean, and ranks are weighted by their samples.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients with nccl, else those of tree.

    Source:
        tf.distribute.MirroredStrategy; its cross_device_ops.py.
    """
    require_choice("mirrored", "cross_device_ops", cross_device_ops, get_args(CrossDeviceOps))
    if cross_device_ops != "nccl":
        if num_packs != 1:
            raise PlanError(f"num_packs={num_packs} of mirrored is for cross_device_ops=nccl only; leave it out")
        return (TreeReduce(degree, shape="star" if cross_device_ops == "reduction_to_one_device" else "binomial"),)
    if num_packs not in {0, 1}:
        raise PlanError(
            f"num_packs={num_packs} of mirrored: gradients are put together by bytes here, not into a number of packs; "
            f"give num_packs=0 or 1, or write data({degree}, bucket=16MiB)"
        )
    return (Data(degree, buckets=SINGLE_BUCKET if num_packs else PER_PARAMETER),)


UNSUPPORTED_IN_MIRRORED = {"devices": "ranks are given by their number; write mirrored(4)"}


def multi_worker_mirrored(
    degree: int, *, bytes_per_pack: ByteSize = _AUTOMATIC, implementation: Literal["auto", "ring", "nccl"] = "auto"
) -> tuple[Strategy, ...]:
    """Return tf.distribute's MultiWorkerMirroredStrategy: replicas on many hosts that sum packs of gradients.

    Args:
        degree: ranks along the new axis.
        bytes_per_pack: how much is summed at once; 0 leaves it to measurements while training.
        implementation: ``auto``; what adds up, a ring or another algorithm, is chosen by what joins the ranks.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per rank and step: 2 (n-1)/n of the gradients.

    Source:
        tf.distribute.MultiWorkerMirroredStrategy; tf.distribute.experimental.CommunicationOptions.
    """
    require_choice("multi_worker_mirrored", "implementation", implementation, ("auto", "ring", "nccl"))
    if implementation != "auto":
        raise PlanError(
            f"implementation={implementation} of multi_worker_mirrored: what joins the ranks chooses the algorithm; "
            "leave it out, and give counterpoint run --transport=... where another transport is wanted"
        )
    return (Data(degree, buckets=uniform_buckets(bytes_per_pack) if bytes_per_pack > 0 else DEFAULT_BUCKETS),)


UNSUPPORTED_IN_MULTI_WORKER_MIRRORED = {
    "timeout_seconds": "how long ranks wait for each other is said where they start; write counterpoint run "
    "--deadline=..., or Trainer(..., deadline_s=...)",
    "cluster_resolver": "the launcher tells each process its rank; use counterpoint run or torchrun",
}


def central_storage(degree: int) -> tuple[Strategy, ...]:
    """Return tf.distribute's CentralStorageStrategy: variables on one device, computation on all.

    The device is that of rank 0, which computes as well; ``tree(n, shape=star)``. For a rank that does nothing but
    keep variables write ``server(n)``.

    Args:
        degree: ranks along the new axis, the one with the variables among them.

    Promise:
        The same numbers as on one rank, to rounding.

    Cost:
        Bytes sent per step: rank 0 the weights n-1 times, each other rank its gradients. Optimizer state on rank 0
        alone.

    Source:
        tf.distribute.experimental.CentralStorageStrategy.
    """
    return (TreeReduce(degree, shape="star"),)


UNSUPPORTED_IN_CENTRAL_STORAGE = {
    "compute_devices": "ranks are given by their number; write central_storage(4)",
    "parameter_device": "it is that of rank 0; leave it out, or write server(4) for one more rank",
}


def parameter_server_strategy(
    degree: int, *, servers: int = 1, mode: Literal["async", "sync"] = "async"
) -> tuple[Strategy, ...]:
    """Return tf.distribute's ParameterServerStrategy: variables on servers, each step on one of the workers.

    Args:
        degree: number of workers along the new axis.
        servers: ranks that keep variables.
        mode: ``async`` as in TensorFlow 2, where every gradient is applied when it comes, or ``sync`` as in TensorFlow
            1 with SyncReplicasOptimizer, where servers wait for all workers.

    Promise:
        sync: the same numbers as on one rank, to rounding. async what asp promises.

    Cost:
        Bytes sent per step: each worker its gradients once; each server its variables once per worker. Optimizer state
        only on the servers.

    Source:
        tf.distribute.ParameterServerStrategy; tf.compat.v1.train.SyncReplicasOptimizer.
    """
    require_choice("parameter_server_strategy", "mode", mode, ("async", "sync"))
    return (Server(degree, servers, "asp" if mode == "async" else "bsp"),)


UNSUPPORTED_IN_PARAMETER_SERVER_STRATEGY = {
    "variable_partitioner": "the parameters of a unit lie on one server as a whole, and units go to the server with "
    "the fewest bytes; leave it out, and give servers= as many as there are large layers",
    "cluster_resolver": "the launcher tells each process its rank; use counterpoint run or torchrun",
    "coordinator": "every worker knows its own batches, and no coordinator schedules them; leave it out",
}
