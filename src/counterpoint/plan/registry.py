"""The strategies by name: what a user may write in a plan."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.options import option_names
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems import (
    bigdl,
    caffe,
    chainermn as chainer,
    downpour as distbelief,
    easgd as elastic_averaging,
    gpipe,
    horovod,
    hypar_flow,
    megatron,
    mxnet,
    pipedream,
    pytorch,
    tensorflow,
)
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.tree_reduce import TreeReduce
from counterpoint.strategies.zero import Zero

BuiltStrategies: TypeAlias = Strategy | tuple[Strategy, ...]


@dataclass(frozen=True, slots=True)
class StrategyEntry:
    """One name of the table.

    Args:
        make: called with the ranks along the new axis and the options.
        summary: what it is, in one line.
        options: the options it takes.
        parent: the class or function whose docstring says promise, cost and source, and whose annotations say of what
            kind its options are.
        instead: options that its users know and that say nothing here: why, and what to write instead.
        example: a plan that shows it.
        optimizer: the one that it is published with, where that is a part of it.
    """

    build: Callable[..., BuiltStrategies]
    summary: str
    options: tuple[str, ...]
    doc_source: Callable[..., Any]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    example: str = ""
    optimizer: str = ""

    def build_strategies(self, degree: int, options: Mapping[str, Any]) -> tuple[Strategy, ...]:
        """Return what it amounts to for so many ranks."""
        made = self.build(degree, **options)
        return made if isinstance(made, tuple) else (made,)


def _system_entry(
    build: Callable[..., tuple[Strategy, ...]],
    summary: str,
    unsupported: Mapping[str, str] | None = None,
    example: str = "",
) -> StrategyEntry:
    """Return the line of a system, whose options are what its function takes."""
    return StrategyEntry(build, summary, option_names(build), build, unsupported or {}, example)


BUCKET_OPTIONS = ("bucket", "first_bucket", "cycle", "tune")
"""The options that :class:`Buckets` reads."""


def _build_data(degree: int, **options: Any) -> Strategy:  # noqa: ANN401 - the fields of Data, but for its buckets
    buckets = BucketConfig.parse(**{name: options.pop(name) for name in BUCKET_OPTIONS if name in options})
    return Data(degree, buckets=buckets, **options)


STRATEGIES: dict[str, StrategyEntry] = {
    "data": StrategyEntry(
        _build_data,
        "replicas on their own samples, gradients summed before the update",
        ("update", "compress", "reduce", "sync_every", "sync_first", "staleness", *BUCKET_OPTIONS),
        Data,
    ),
    "zero": StrategyEntry(Zero, "replicas that share out optimizer state, gradients or weights", ("level",), Zero),
    "zero1": StrategyEntry(partial(Zero, level=1), "zero with shared optimizer state", (), Zero),
    "zero2": StrategyEntry(partial(Zero, level=2), "zero with shared optimizer state and gradients", (), Zero),
    "zero3": StrategyEntry(partial(Zero, level=3), "zero with shared optimizer state, gradients and weights", (), Zero),
    "tree": StrategyEntry(
        TreeReduce,
        "replicas whose gradients go up a tree to the first, which updates, and weights down again",
        ("shape", "send"),
        TreeReduce,
    ),
    "pipeline": StrategyEntry(
        Pipeline,
        "stages of blocks, microbatches flow through them",
        ("schedule", "replicas", "balance", "split_points", "chunks_per_stage", "vertical_sync", "recompute"),
        Pipeline,
    ),
    "one_f_one_b": StrategyEntry(
        partial(Pipeline, schedule="one_f_one_b"),
        "a pipeline that alternates forward and backward",
        ("replicas", "balance", "split_points", "recompute"),
        Pipeline,
    ),
    "interleaved": StrategyEntry(
        partial(Pipeline, schedule="interleaved", chunks_per_stage=2),
        "one_f_one_b with several chunks of the model on every stage",
        ("balance", "split_points", "chunks_per_stage", "recompute"),
        Pipeline,
    ),
    "tensor": StrategyEntry(Tensor, "layers sliced along named dims", ("dims",), Tensor),
    "server": StrategyEntry(
        Server,
        "workers that push to servers and pull from them",
        ("servers", "consistency", "staleness", "compress", "fetch_every"),
        Server,
    ),
    "bsp": StrategyEntry(
        partial(Server, consistency="bsp"), "a server that waits for all workers", ("servers", "compress"), Server
    ),
    "ssp": StrategyEntry(
        partial(Server, consistency="ssp", staleness=1),
        "a server that updates at every push, and lets no worker run too far ahead",
        ("servers", "staleness", "compress"),
        Server,
    ),
    "asp": StrategyEntry(
        partial(Server, consistency="asp"),
        "a server that updates at every push",
        ("servers", "compress", "fetch_every"),
        Server,
    ),
    "ddp": _system_entry(
        pytorch.ddp,
        "PyTorch's DistributedDataParallel: buckets of gradients summed during the backward",
        pytorch.UNSUPPORTED_IN_DDP,
    ),
    "data_parallel": _system_entry(
        pytorch.data_parallel,
        "PyTorch's DataParallel: one rank has the weights and updates",
        pytorch.UNSUPPORTED_IN_DATA_PARALLEL,
    ),
    "one_device": _system_entry(
        tensorflow.one_device,
        "tf.distribute's OneDeviceStrategy: one rank",
        example="one_device(1)",
    ),
    "mirrored": _system_entry(
        tensorflow.mirrored,
        "tf.distribute's MirroredStrategy: replicas on one host, a sum, a star or a tree",
        tensorflow.UNSUPPORTED_IN_MIRRORED,
    ),
    "multi_worker_mirrored": _system_entry(
        tensorflow.multi_worker_mirrored,
        "tf.distribute's MultiWorkerMirroredStrategy: replicas on many hosts that sum packs of gradients",
        tensorflow.UNSUPPORTED_IN_MULTI_WORKER_MIRRORED,
    ),
    "central_storage": _system_entry(
        tensorflow.central_storage,
        "tf.distribute's CentralStorageStrategy: variables on one rank, computation on all",
        tensorflow.UNSUPPORTED_IN_CENTRAL_STORAGE,
    ),
    "bigdl": _system_entry(
        bigdl.bigdl,
        "BigDL: slices of gradients added up, updated and handed out, as two shuffles of Spark's",
        bigdl.UNSUPPORTED_IN_BIGDL,
    ),
    "horovod": _system_entry(
        horovod.horovod,
        "Horovod: gradients fused as they come, summed flat or host by host, or by Adasum",
        horovod.UNSUPPORTED_IN_HOROVOD,
    ),
    "chainermn": _system_entry(
        chainer.chainermn,
        "ChainerMN: one optimizer with a communicator that knows hosts",
        chainer.UNSUPPORTED_IN_CHAINERMN,
        "chainermn(4, communicator=hierarchical, per_host=2)",
    ),
    "gpipe": _system_entry(
        gpipe.gpipe, "GPipe and torchgpipe: a pipeline that fills and drains", gpipe.UNSUPPORTED_IN_GPIPE
    ),
    "placement": _system_entry(
        gpipe.placement,
        "modules on ranks that are told, as with torch.distributed.rpc",
        gpipe.UNSUPPORTED_IN_PLACEMENT,
        "placement(2, modules=block0:0+block1:1+block2:0)",
    ),
    "pipedream": _system_entry(
        pipedream.pipedream,
        "PipeDream: a pipeline that never flushes, on stashed weights",
        pipedream.UNSUPPORTED_IN_PIPEDREAM,
    ),
    "pipedream_2bw": _system_entry(
        pipedream.pipedream_2bw,
        "PipeDream-2BW: a pipeline that never flushes, on two versions of the weights",
        pipedream.UNSUPPORTED_IN_PIPEDREAM_2BW,
    ),
    "pipedream_flush": _system_entry(
        pipedream.pipedream_flush,
        "PipeDream-Flush: 1F1B with a flush after every batch",
        pipedream.UNSUPPORTED_IN_PIPEDREAM_FLUSH,
    ),
    "megatron_interleaved": _system_entry(
        megatron.megatron_interleaved,
        "Megatron-LM's virtual pipeline: 1F1B with several chunks on every stage",
        megatron.UNSUPPORTED_IN_MEGATRON_INTERLEAVED,
    ),
    "zero_bubble": _system_entry(
        megatron.zero_bubble,
        "Zero Bubble: a pipeline that puts off the weight parts of backwards; chunks_per_stage=2 for chunks in a V",
        megatron.UNSUPPORTED_IN_ZERO_BUBBLE,
    ),
    "hypar_flow": _system_entry(
        hypar_flow.hypar_flow,
        "HyPar-Flow: partitions of the model, replicas, or both",
        hypar_flow.UNSUPPORTED_IN_HYPAR_FLOW,
        "hypar_flow(4, num_partitions=2)",
    ),
    "mpi_caffe": _system_entry(
        caffe.mpi_caffe,
        "MPI-Caffe: groups of ranks that share the layers they hold, one group behind the other",
        example="mpi_caffe(4, comm_group=2)",
    ),
    "firecaffe": _system_entry(caffe.firecaffe, "FireCaffe: a reduction tree", example="firecaffe(4)"),
    "s_caffe": _system_entry(
        caffe.s_caffe,
        "S-Caffe: chains inside hosts and a tree between them, begun during the backward",
        example="s_caffe(4, per_host=2)",
    ),
    "intel_caffe": _system_entry(caffe.intel_caffe, "Intel-Caffe: each layer summed as soon as it is there"),
    "kvstore": _system_entry(
        mxnet.kvstore,
        "MXNet's KVStore: gradients pushed and weights pulled by key, on one host or by servers",
        mxnet.UNSUPPORTED_IN_KVSTORE,
    ),
    "mxnet_mpi": _system_entry(
        mxnet.mxnet_mpi,
        "MXNet-MPI: sums inside groups, each of which is one worker of parameter servers",
        mxnet.UNSUPPORTED_IN_MXNET_MPI,
        "mxnet_mpi(4, groups=2)",
    ),
    "downpour": replace(
        _system_entry(
            distbelief.downpour,
            "DistBelief's Downpour SGD: workers push to servers with Adagrad, and wait for nobody",
            distbelief.UNSUPPORTED_IN_DOWNPOUR,
        ),
        optimizer="Adagrad",
    ),
    "project_adam": _system_entry(
        distbelief.project_adam,
        "Project Adam: updates of weights that all share, without locks",
        distbelief.UNSUPPORTED_IN_PROJECT_ADAM,
    ),
    "parameter_server_strategy": _system_entry(
        tensorflow.parameter_server_strategy,
        "tf.distribute's ParameterServerStrategy: variables on servers",
        tensorflow.UNSUPPORTED_IN_PARAMETER_SERVER_STRATEGY,
    ),
    "easgd": _system_entry(
        elastic_averaging.easgd,
        "Elastic averaging SGD: workers that are drawn to a center every tau steps",
        elastic_averaging.UNSUPPORTED_IN_EASGD,
    ),
    "numa_caffe": _system_entry(caffe.numa_caffe, "NUMA-Caffe: one replica for each NUMA node"),
}


HAS_STEP_VARIANTS = (Data, Server, ElasticAveraging)
"""The strategies whose steps need not be alike."""
NEEDS_SERVERS = {
    "server", "bsp", "ssp", "asp", "kvstore", "mxnet_mpi", "downpour", "project_adam",
    "parameter_server_strategy", "easgd",
}  # fmt: skip
"""The names whose plans have ranks beside those that compute, so that one worker is no plan for one rank."""


def find_strategy(name: str) -> StrategyEntry:
    """Return the strategy of that name.

    Raises:
        PlanError: there is none; the message suggests the nearest name.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(name.lower(), [*STRATEGIES, "solo"], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PlanError(f"there is no strategy {name!r}; {hint}the strategies are solo, {', '.join(STRATEGIES)}")
