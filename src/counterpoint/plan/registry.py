"""The registry of strategies and systems: every name that the text of a plan may have."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from counterpoint.errors import PlanError
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.strategies.data import Data
from counterpoint.strategies.options import option_names
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.renamed import OTHER_NAMES, RENAMED
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.systems import (
    bigdl,
    caffe,
    chainermn,
    downpour,
    easgd,
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

ZERO3_OPTIONS = (
    "reshard_after_forward",
    "persistence_threshold",
    "min_num_params",
    "split_points",
    "quantized_weights",
    "quantized_gradients",
)
"""Options of ZeRO whose weights are shards."""

BuiltStrategies: TypeAlias = Strategy | tuple[Strategy, ...]


@dataclass(frozen=True, slots=True)
class StrategyEntry:
    """One name of the registry.

    Args:
        build: called with the number of ranks along the new axis and the options.
        summary: one line on what it does.
        options: names of its options.
        doc_source: the class or function whose docstring has Promise, Cost and Source, and whose annotations are the
            types of the options.
        unsupported: options of the original system that have no effect here, each with the reason and the alternative.
        example: a plan that shows it.
        optimizer: the optimizer of its paper, if that is part of the method.
    """

    build: Callable[..., BuiltStrategies]
    summary: str
    options: tuple[str, ...]
    doc_source: Callable[..., Any]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    example: str = ""
    optimizer: str = ""

    def build_strategies(self, degree: int, options: Mapping[str, Any]) -> tuple[Strategy, ...]:
        """Return the strategies of the system."""
        built = self.build(degree, **options)
        return built if isinstance(built, tuple) else (built,)


def _system_entry(
    build: Callable[..., tuple[Strategy, ...]],
    summary: str,
    unsupported: Mapping[str, str] | None = None,
    example: str = "",
) -> StrategyEntry:
    return StrategyEntry(build, summary, option_names(build), build, unsupported or {}, example)


BUCKET_OPTIONS = ("bucket", "first_bucket", "cycle", "tune")
"""The options that :class:`~counterpoint.strategies.buckets.BucketConfig` parses."""


def _build_data(degree: int, **options: Any) -> Strategy:  # noqa: ANN401 - the fields of Data, except its buckets
    buckets = BucketConfig.parse(**{name: options.pop(name) for name in BUCKET_OPTIONS if name in options})
    return Data(degree, buckets=buckets, **options)


STRATEGIES: dict[str, StrategyEntry] = {
    "data": StrategyEntry(
        _build_data,
        "replicas on their own samples, gradients all-reduced before the update",
        ("update", "compress", "compress_from", "reduce", "sync_every", "sync_first", "staleness", *BUCKET_OPTIONS),
        Data,
    ),
    "zero": StrategyEntry(
        Zero,
        "replicas that shard optimizer state, gradients or weights",
        ("level", *ZERO3_OPTIONS),
        Zero,
    ),
    "zero1": StrategyEntry(partial(Zero, level=1), "zero with sharded optimizer state", ("quantized_gradients",), Zero),
    "zero2": StrategyEntry(
        partial(Zero, level=2), "zero with sharded optimizer state and gradients", ("quantized_gradients",), Zero
    ),
    "zero3": StrategyEntry(
        partial(Zero, level=3),
        "zero with sharded optimizer state, gradients and weights",
        ZERO3_OPTIONS,
        Zero,
    ),
    "tree": StrategyEntry(
        TreeReduce,
        "replicas that reduce gradients up a tree to the first, which updates and sends weights down",
        ("shape", "send"),
        TreeReduce,
    ),
    "pipeline": StrategyEntry(
        Pipeline,
        "stages of consecutive blocks that process microbatches",
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
    "tensor": StrategyEntry(Tensor, "layers sharded along named dims", ("dims",), Tensor),
    "server": StrategyEntry(
        Server,
        "workers that push to servers and pull from them",
        ("servers", "consistency", "staleness", "compress", "pull_every"),
        Server,
    ),
    "bsp": StrategyEntry(
        partial(Server, consistency="bsp"), "a server that waits for all workers", ("servers", "compress"), Server
    ),
    "ssp": StrategyEntry(
        partial(Server, consistency="ssp", staleness=1),
        "a server that updates at every push, and bounds how far a worker may be ahead",
        ("servers", "staleness", "compress"),
        Server,
    ),
    "asp": StrategyEntry(
        partial(Server, consistency="asp"),
        "a server that updates at every push",
        ("servers", "compress", "pull_every"),
        Server,
    ),
    "ddp": _system_entry(
        pytorch.ddp,
        "PyTorch's DistributedDataParallel: buckets of gradients all-reduced during the backward",
        pytorch.UNSUPPORTED_IN_DDP,
    ),
    "data_parallel": _system_entry(
        pytorch.data_parallel,
        "PyTorch's DataParallel: one rank keeps the weights and updates",
        pytorch.UNSUPPORTED_IN_DATA_PARALLEL,
    ),
    "one_device": _system_entry(
        tensorflow.one_device,
        "tf.distribute's OneDeviceStrategy: one rank",
        example="one_device(1)",
    ),
    "mirrored": _system_entry(
        tensorflow.mirrored,
        "tf.distribute's MirroredStrategy: replicas on one host, an all-reduce, a star or a tree",
        tensorflow.UNSUPPORTED_IN_MIRRORED,
    ),
    "multi_worker_mirrored": _system_entry(
        tensorflow.multi_worker_mirrored,
        "tf.distribute's MultiWorkerMirroredStrategy: replicas on many hosts that all-reduce packs of gradients",
        tensorflow.UNSUPPORTED_IN_MULTI_WORKER_MIRRORED,
    ),
    "central_storage": _system_entry(
        tensorflow.central_storage,
        "tf.distribute's CentralStorageStrategy: variables on one rank, computation on all",
        tensorflow.UNSUPPORTED_IN_CENTRAL_STORAGE,
    ),
    "bigdl": _system_entry(
        bigdl.bigdl,
        "BigDL: shards of gradients reduced, updated and gathered, as two Spark shuffles",
        bigdl.UNSUPPORTED_IN_BIGDL,
    ),
    "horovod": _system_entry(
        horovod.horovod,
        "Horovod: fused gradients, all-reduced flat, hierarchically, or by Adasum",
        horovod.UNSUPPORTED_IN_HOROVOD,
    ),
    "chainermn": _system_entry(
        chainermn.chainermn,
        "ChainerMN: a multi-node optimizer with one of its communicators",
        chainermn.UNSUPPORTED_IN_CHAINERMN,
        "chainermn(4, communicator=hierarchical, per_host=2)",
    ),
    "gpipe": _system_entry(
        gpipe.gpipe, "GPipe and torchgpipe: a pipeline that fills and drains", gpipe.UNSUPPORTED_IN_GPIPE
    ),
    "placement": _system_entry(
        gpipe.placement,
        "modules on given ranks, as with torch.distributed.rpc",
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
        "Zero Bubble: a pipeline that delays weight gradients; chunks_per_stage=2 for a V schedule",
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
        "MPI-Caffe: a pipeline of groups of ranks, each with tensor-parallel layers",
        example="mpi_caffe(4, comm_group=2)",
    ),
    "firecaffe": _system_entry(caffe.firecaffe, "FireCaffe: a reduction tree", example="firecaffe(4)"),
    "s_caffe": _system_entry(
        caffe.s_caffe,
        "S-Caffe: chains within hosts and a tree between them, during the backward",
        example="s_caffe(4, per_host=2)",
    ),
    "intel_caffe": _system_entry(
        caffe.intel_caffe, "Intel-Caffe: the gradient of each layer all-reduced as soon as it is ready"
    ),
    "kvstore": _system_entry(
        mxnet.kvstore,
        "MXNet's KVStore: gradients pushed and weights pulled by key, on one host or by servers",
        mxnet.UNSUPPORTED_IN_KVSTORE,
    ),
    "mxnet_mpi": _system_entry(
        mxnet.mxnet_mpi,
        "MXNet-MPI: all-reduces within groups, each of which is one worker of parameter servers",
        mxnet.UNSUPPORTED_IN_MXNET_MPI,
        "mxnet_mpi(4, groups=2)",
    ),
    "downpour": replace(
        _system_entry(
            downpour.downpour,
            "DistBelief's Downpour SGD: workers push to servers with Adagrad, without waiting",
            downpour.UNSUPPORTED_IN_DOWNPOUR,
        ),
        optimizer="Adagrad",
    ),
    "project_adam": _system_entry(
        downpour.project_adam,
        "Project Adam: lock-free updates of shared weights",
        downpour.UNSUPPORTED_IN_PROJECT_ADAM,
    ),
    "parameter_server_strategy": _system_entry(
        tensorflow.parameter_server_strategy,
        "tf.distribute's ParameterServerStrategy: variables on servers",
        tensorflow.UNSUPPORTED_IN_PARAMETER_SERVER_STRATEGY,
    ),
    "easgd": _system_entry(
        easgd.easgd,
        "Elastic averaging SGD: workers exchange weights with a center every tau steps",
        easgd.UNSUPPORTED_IN_EASGD,
    ),
    "numa_caffe": _system_entry(caffe.numa_caffe, "NUMA-Caffe: one replica for each NUMA node"),
}


NEEDS_SERVERS = {
    "server", "bsp", "ssp", "asp", "kvstore", "mxnet_mpi", "downpour", "project_adam",
    "parameter_server_strategy", "easgd",
}  # fmt: skip
"""The names whose plans have ranks for servers, so that one worker needs more than one rank."""


def find_strategy(name: str) -> StrategyEntry:
    """Return the entry of a name.

    Raises:
        PlanError: there is none; the message suggests the nearest name.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    near = difflib.get_close_matches(name.lower(), [*STRATEGIES, "solo"], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    if RENAMED.get(name) in STRATEGIES:
        hint = f"{name} is now called {RENAMED[name]}; "
    if name.lower() in OTHER_NAMES:
        hint = f"here {name} is {OTHER_NAMES[name.lower()]}; "
    raise PlanError(
        f"there is no strategy {name!r}; {hint}the strategies are solo, {', '.join(STRATEGIES)}; one of your own is "
        "given as an object in Python: strategy=MyStrategy(2)"
    )
