"""MXNet's KVStore in all its types, and MXNet-MPI, whose workers are groups of ranks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.ps.consistency import ConsistencyName
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.options import require_choice
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems.composition import PER_PARAMETER, split_by_host
from counterpoint.strategies.systems.easgd import format_alpha
from counterpoint.strategies.tree_reduce import TreeReduce

KVStoreMode: TypeAlias = Literal["host", "devices", "sync", "async"]

KVSTORE_TYPES: dict[str, KVStoreMode] = {
    "local": "host",
    "local_update_cpu": "host",
    "local_allreduce_cpu": "host",
    "device": "devices",
    "local_allreduce_device": "devices",
    "nccl": "devices",
    "dist": "sync",
    "dist_sync": "sync",
    "dist_device": "sync",
    "dist_sync_device": "sync",
    "dist_device_sync": "sync",
    "dist_async": "async",
    "dist_async_device": "async",
    "dist_device_async": "async",
}
"""Where each documented type sums gradients; MXNet itself looks for ``dist``, ``device`` and ``_async`` in any name."""

_OTHER_SYSTEMS = {"horovod": "horovod(...)", "byteps": "data(...)", "p3": "data(..., bucket=...)"}


def kvstore(
    degree: int,
    *,
    type: str = "local",  # noqa: A002 - MXNet's name
    update_on_kvstore: bool = True,
    gradient_compression: str = "",
    servers: int = 0,
    devices: int = 1,
) -> tuple[Strategy, ...]:
    """Return MXNet's KVStore: gradients are pushed by key, and weights pulled.

    * ``local``, ``local_update_cpu``, ``local_allreduce_cpu``: one rank keeps the weights and updates, which is
      ``tree(n, shape=star)``.
    * ``device``, ``local_allreduce_device``, ``nccl``: each key is updated on one of the ranks, which is
      ``data(n, update=sharded)``.
    * ``dist``, ``dist_sync``, ``dist_device``, ``dist_sync_device``, ``dist_device_sync``: servers wait for all
      workers, which is ``server(n, consistency=bsp)``.
    * ``dist_async``, ``dist_async_device``, ``dist_device_async``: servers apply each push when it arrives, which is
      ``server(n, consistency=asp)``.

    With ``update_on_kvstore=off`` the store only sums and every rank updates, ``data(n)`` with one reduction per key;
    ``dist_async`` has no such form, there or here. A worker with several devices adds up over these first:
    ``data(k) * server(n/k)``, for types with ``device`` in their name and for others alike.

    Args:
        degree: number of ranks that compute, over all workers.
        type: one of those above.
        update_on_kvstore: ``off`` for updates on every rank.
        gradient_compression: ``2bit`` or ``2bit:0.5`` with the threshold, of gradients sent to
            servers or between devices, with error feedback.
        servers: for ``dist`` types, their number; 1 by default.
        devices: for ``dist`` types, number of ranks of each worker.

    Promise:
        The same results as single-process training, up to rounding; dist_async as asp,
        and with gradient_compression as server or data with ``compress``.

    Cost:
        Bytes sent per step, of P: local the first rank n-1 times P, each other rank P; device, nccl and
        update_on_kvstore=off 2 (n-1)/n P on every rank; dist each worker P, 1/16 of it in 2 bits, each server its
        weights once per worker.

    Source:
        MXNet, src/kvstore/kvstore.cc and kvstore_dist_server.h; its FAQ on distributed training and on gradient
        compression.
    """
    if type not in KVSTORE_TYPES:
        raise PlanError(_unknown_type_message(type))
    place, codec = KVSTORE_TYPES[type], _codec(gradient_compression)
    if place in {"host", "devices"}:
        _check_single_worker(degree, type, servers, devices)
        return (_single_host_strategy(degree, type, codec, updates=update_on_kvstore),)
    _check_even_workers(degree, devices)
    if not update_on_kvstore:
        _check_sum_only(type, servers)
        return (Data(degree, compress=codec, buckets=PER_PARAMETER),)
    consistency: ConsistencyName = "asp" if place == "async" else "bsp"
    store = Server(degree // devices, servers or 1, consistency, compress=codec)
    return (store,) if devices == 1 else (Data(devices, buckets=PER_PARAMETER), store)


def _check_single_worker(degree: int, kind: str, servers: int, devices: int) -> None:
    if servers or devices != 1:
        raise PlanError(
            f"kvstore({degree}, type={kind}) is one worker without servers; drop servers= and devices=, or give "
            "type=dist_sync"
        )


def _check_even_workers(degree: int, devices: int) -> None:
    if devices < 1 or degree % devices:
        raise PlanError(
            f"kvstore({degree}, devices={devices}) cannot have the same number of ranks in each worker; give devices= "
            "that "
            f"divides {degree}"
        )


def _check_sum_only(kind: str, servers: int) -> None:
    """Check that there are no servers: without updates on servers the ranks all-reduce gradients themselves."""
    if KVSTORE_TYPES[kind] == "async":
        raise PlanError(
            f"kvstore(type={kind}, update_on_kvstore=off) has no optimizer on the server, which applies each "
            "push when it arrives; drop update_on_kvstore=off, or give type=dist_sync"
        )
    if servers:
        raise PlanError(
            f"servers={servers} of kvstore with update_on_kvstore=off would only sum gradients, which the ranks do "
            "themselves; drop it"
        )


def _single_host_strategy(degree: int, kind: str, codec: str, *, updates: bool) -> Strategy:
    if codec and (KVSTORE_TYPES[kind] == "host" or kind == "nccl"):
        raise PlanError(
            f"gradient_compression of kvstore needs type=device or a dist type, as in MXNet; {kind} has none: "
            "drop it, or give type=device"
        )
    if codec or not updates:
        return Data(degree, compress=codec, buckets=PER_PARAMETER)
    return TreeReduce(degree, shape="star") if KVSTORE_TYPES[kind] == "host" else Data(degree, update="sharded")


def _unknown_type_message(kind: str) -> str:
    if kind in _OTHER_SYSTEMS:
        return f"type={kind} of kvstore is a system of its own here; write {_OTHER_SYSTEMS[kind]}"
    return f"kvstore has no type={kind}; give one of {', '.join(KVSTORE_TYPES)}"


def _codec(compression: str) -> str:
    name, colon, threshold = compression.partition(":")
    if name in {"", "none"} and not colon:
        return ""
    if name != "2bit":
        raise PlanError(
            f"gradient_compression={compression} of kvstore is not documented by MXNet; give 2bit:0.5 with the "
            "threshold, or write server(..., compress=sign) for one bit"
        )
    return f"twobit:{threshold}" if colon else "twobit:0.5"


UNSUPPORTED_IN_KVSTORE = {
    "optimizer": "the trainer's optimizer runs where the weights are; pass optimizer=... to Trainer",
    "bigarray_bound": "a unit is kept by one server as a whole; drop it, and give more servers= for more layers",
    "priority": "gradients are sent as soon as they are complete, the last layer's first; drop it",
    "row_sparse": "of embeddings with sparse=True only the used rows are sent; drop it",
}


def mxnet_mpi(
    degree: int,
    *,
    groups: int = 0,
    servers: int = 1,
    mode: Literal["sgd", "asgd", "esgd"] = "sgd",
    alpha: float = 0.0,
    tau: int = 1,
    per_host: int = 0,
) -> tuple[Strategy, ...]:
    """Return MXNet-MPI: ranks of a group all-reduce gradients, and each group is one worker of parameter servers.

    ``data(k) * server(g)`` with g groups of k ranks. The first rank of a group communicates with the servers and
    broadcasts weights to the others. The gradient of a group is that of the mean loss over its samples, whatever its
    size.

    Args:
        degree: number of ranks that compute.
        groups: number of groups; by default one for each host.
        servers: number of ranks that keep weights; 0 with one group and mode=sgd, which is an all-reduce.
        mode: ``sgd`` waits for all groups; ``asgd`` applies each group's gradient when it arrives; with ``esgd`` groups
            update independently and exchange weights with the servers every tau steps.
        alpha: with esgd, the moving rate; by default 0.9 divided by the number of groups.
        tau: with esgd, number of steps between two exchanges.
        per_host: number of ranks of each host; by default as launched, else all on one host.

    Promise:
        sgd: the same results as single-process training, up to rounding. asgd as asp with g workers. esgd as easgd.

    Cost:
        Bytes sent per step, of P: 2 (k-1)/k P on every rank; from the first rank of a group P to the servers and (k-1)
        P to the others; from the servers g P. With esgd to and from servers only in every tau-th step.

    Source:
        Mamidala et al., MXNET-MPI: Embedding MPI Parallelism in Parameter Server Task Model, 2018.
    """
    require_choice("mxnet_mpi", "mode", mode, ("sgd", "asgd", "esgd"))
    count = groups or split_by_host("mxnet_mpi", degree, per_host)[1]
    if count < 1 or degree % count:
        raise PlanError(
            f"mxnet_mpi({degree}, groups={count}) cannot have the same number of ranks in each group; give groups= "
            "that divides "
            f"{degree}"
        )
    if mode != "esgd" and (alpha or tau != 1):
        raise PlanError(f"alpha and tau of mxnet_mpi need mode=esgd; drop them from mode={mode}")
    inside = Data(degree // count)
    if not servers:
        if count > 1 or mode != "sgd":
            raise PlanError(
                f"mxnet_mpi({degree}, groups={count}, servers=0, mode={mode}) has no server for its weights; give "
                "servers=1, or groups=1 and mode=sgd, which is an all-reduce over all ranks"
            )
        return (inside,)
    if mode == "esgd":
        outside: Strategy = ElasticAveraging(count, servers, format_alpha("mxnet_mpi", count, alpha), tau)
    else:
        outside = Server(count, servers, "asp" if mode == "asgd" else "bsp")
    return (outside,) if inside.degree == 1 else (inside, outside)


UNSUPPORTED_IN_MXNET_MPI = {
    "kvstore": "it is the mode; write mode=sgd, mode=asgd or mode=esgd",
    "num_workers": "ranks come first and groups= is the number of workers; write mxnet_mpi(8, groups=2)",
}
