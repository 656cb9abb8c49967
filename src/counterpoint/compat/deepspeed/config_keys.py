"""Every key of a DeepSpeed configuration, and what it becomes here: the only place that says so.

``docs/migration/deepspeed.md`` shows this table. A key either becomes an argument, or is ignored because it changes
nothing that is computed here, or is refused with what to use instead, unless its value asks for nothing.

Source:
    DeepSpeed 0.19, docs/_pages/config-json.md, runtime/config.py, runtime/zero/config.py, runtime/precision_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["bool", "int", "int or auto", "number", "text", "list", "dict", "any"]
Effect = Literal["becomes", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of the configuration.

    Args:
        path: the key, after those of the sections around it: ``fp16.enabled``.
        kind: what its value is in JSON.
        effect: what happens with it.
        text: what it becomes, why it is ignored, or what to use instead.
        default: DeepSpeed's value if the key is absent.
        neutral: of a refused key, the values that ask for nothing.
        switch: of a refused section, the key inside it whose value is compared with ``neutral``.
    """

    path: str
    kind: Kind
    effect: Effect
    text: str
    default: Any = None
    neutral: tuple[Any, ...] = (None, False)
    switch: str = ""

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether a refused key has a value with which DeepSpeed does nothing either."""
        if self.switch and isinstance(value, dict):
            value = value.get(self.switch)
        return value in self.neutral


def _becomes(path: str, kind: Kind, default: object, text: str) -> ConfigKey:
    return ConfigKey(path, kind, "becomes", text, default)


def _ignored(path: str, kind: Kind, text: str) -> ConfigKey:
    return ConfigKey(path, kind, "ignored", text)


def _refused(
    path: str, kind: Kind, text: str, *, neutral: tuple[Any, ...] = (None, False), switch: str = ""
) -> ConfigKey:
    return ConfigKey(path, kind, "refused", text, neutral=neutral, switch=switch)


SIZE = "ranks reduce and gather in buckets of their own size"
LAYOUT = "how states lie in memory is decided here"
LIMIT = "weights are freed after each use, or after the next one under the pass prefetch"
LOGS = "nothing is logged by this key; pass run_dir= for metrics, TensorBoard events and a report"
OFFLOAD = 'write offload_param: {"device": "nvme", "nvme_path": FOLDER} for weights on disk, or use more ranks'
WEIGHTS = "a rank's shard of each unit is read and written as one"
BUFFERS = "state is read and written in chunks of its own size, while others are updated"

BATCH_KEYS = (
    _becomes("train_batch_size", "int", None, "the samples of one step, over all ranks"),
    _becomes("train_micro_batch_size_per_gpu", "int", None, "the samples of one microbatch on one rank"),
    _becomes("gradient_accumulation_steps", "int", None, "num_microbatches"),
    _refused(
        "managed_gradient_accumulation",
        "bool",
        "updates without a fixed number of batches are step.accumulate(batch) and step.update() of cp.parallelize",
        neutral=(None, True),
    ),
    _becomes("dataloader_drop_last", "bool", False, "drop_last of the loader that initialize makes"),
)

OPTIMIZER_KEYS = (
    _becomes("optimizer.type", "text", None, "the class of make_optimizer: see the table of optimizers"),
    _becomes("optimizer.params", "dict", {}, "its arguments"),
    _ignored("optimizer.legacy_fusion", "bool", "it chooses a kernel"),
    _becomes("scheduler.type", "text", None, "the class of make_scheduler: see the table of schedules"),
    _becomes("scheduler.params", "dict", {}, "its arguments"),
    _becomes("gradient_clipping", "number", 0.0, "clip_norm; 0 clips nothing"),
    _ignored("zero_allow_untested_optimizer", "bool", "each optimizer is checked when ranks are built"),
    _ignored("zero_force_ds_cpu_optimizer", "bool", "it chooses a kernel for states in host memory"),
)

COMMUNICATION_KEYS = (
    _becomes("communication_data_type", "text", None, "reduce= of precision; by default the dtype that computes"),
    _refused(
        "seq_parallel_communication_data_type",
        "text",
        "sequences are not split; omit it",
        neutral=(None, "fp32"),
    ),
    _refused(
        "gradient_allreduce_op",
        "text",
        "gradients are those of the mean over all samples; for their sum, multiply the loss by the number of ranks",
        neutral=(None, "mean"),
    ),
    _ignored("prescale_gradients", "bool", "losses are divided by the samples of all ranks before backward"),
    _ignored("gradient_predivide_factor", "number", "losses are divided by the samples of all ranks before backward"),
    _ignored("sparse_gradients", "bool", "gradients of nn.Embedding(sparse=True) are always sent as rows"),
    _ignored("disable_allgather", "bool", "it chooses between two collectives with one result"),
)

FP16_KEYS = (
    _becomes("fp16.enabled", "bool", False, "precision: fp16(norms=compute, output=compute, reduce=fp16)"),
    _ignored("fp16.auto_cast", "bool", "inputs of modules are always cast"),
    _becomes("fp16.loss_scale", "number", 0, "loss_scale; 0 for a dynamic one"),
    _becomes("fp16.initial_scale_power", "int", 16, "init_scale=2**power of cp.DynamicLossScale"),
    _becomes(
        "fp16.loss_scale_window", "int", 1000, "growth_interval; recent versions of DeepSpeed grow one step later"
    ),
    _becomes("fp16.hysteresis", "int", 2, "hysteresis"),
    _becomes("fp16.consecutive_hysteresis", "bool", False, "consecutive_hysteresis"),
    _becomes("fp16.min_loss_scale", "number", 1, "min_scale"),
    _refused("fp16.fp16_master_weights_and_grads", "bool", "master weights are float32; omit it"),
)

BF16_KEYS = (
    _becomes("bf16.enabled", "bool", False, "precision: bf16(norms=compute, output=compute, reduce=bf16)"),
    _ignored("bf16.immediate_grad_update", "bool", "gradients are always added up at once, in float32"),
    _becomes(
        "bf16.check_grad_overflow",
        "bool",
        False,
        "nonfinite=skip; if false, a gradient that is not finite is an error here, and DeepSpeed applies it",
    ),
    _refused(
        "bf16.bf16_master_weights_and_grads",
        "bool",
        "convert the model to bf16 and pass precision='bf16(rounding=stochastic)'",
    ),
    _refused(
        "bf16.bf16_optimizer_states", "bool", "pass an optimizer of counterpoint.optim.low_bit_adam, as AdamWBf16"
    ),
    _refused("bfloat16", "dict", "write this section as bf16, which is its present name", switch="enabled"),
)

PRECISION_KEYS = (
    _becomes("torch_autocast.enabled", "bool", False, "precision: bf16(autocast=true) or fp16(autocast=true)"),
    _becomes("torch_autocast.dtype", "text", "bfloat16", "its dtype; float16 has loss_scale=dynamic"),
    _ignored("torch_autocast.lower_precision_safe_modules", "list", "all gradients are summed in their own dtype"),
    _refused("amp", "dict", "apex is not supported; write fp16, bf16 or torch_autocast", switch="enabled"),
    _refused(
        "data_types.grad_accum_dtype",
        "text",
        "gradients of microbatches are added up in the dtype of the parameters; omit it",
        neutral=(None, "fp32"),
    ),
    _refused("data_types.param_dtype", "text", "convert the model before: model.to(dtype)"),
    _refused("data_types.buffer_dtype", "text", "convert the buffers before: buffer.to(dtype)"),
)

ZERO_KEYS = (
    _becomes("zero_optimization.stage", "int", 0, "strategy: 0 data(n); 1, 2, 3 zero(n, level=1), 2 and 3"),
    _becomes(
        "zero_optimization.ignore_unused_parameters",
        "bool",
        True,
        "unused_parameters: zero if true, as gradients of zeros; error if false",
    ),
    _becomes(
        "zero_optimization.stage3_prefetch_bucket_size",
        "int or auto",
        50_000_000,
        "the pass prefetch at stage 3, one block early; 0 for none. How many blocks have so many elements depends on "
        "the model: with k of them, write prefetch:k",
    ),
    _becomes(
        "zero_optimization.stage3_param_persistence_threshold",
        "int or auto",
        100_000,
        "persistence_threshold of zero at stage 3, which counts the elements of a unit; 0 shards every weight",
    ),
    _ignored("zero_optimization.allgather_partitions", "bool", "it chooses between two collectives with one result"),
    _ignored("zero_optimization.allgather_bucket_size", "int", SIZE),
    _ignored("zero_optimization.reduce_bucket_size", "int", SIZE),
    _ignored("zero_optimization.reduce_scatter", "bool", "it chooses between two collectives with one result"),
    _ignored("zero_optimization.use_multi_rank_bucket_allreduce", "bool", "the same"),
    _ignored("zero_optimization.overlap_comm", "bool", "reductions overlap with backward; passes=() turns it off"),
    _ignored("zero_optimization.contiguous_gradients", "bool", LAYOUT),
    _ignored("zero_optimization.round_robin_gradients", "bool", LAYOUT),
    _ignored("zero_optimization.parameter_alignment", "bool", LAYOUT),
    _ignored("zero_optimization.compute_grad_norm", "bool", "norms are computed when they are asked for"),
    _ignored("zero_optimization.sub_group_size", "int", "the update is not divided"),
    _ignored("zero_optimization.load_from_fp32_weights", "bool", "checkpoints have float32 weights"),
    _ignored("zero_optimization.elastic_checkpoint", "bool", "any plan loads any checkpoint"),
    _ignored("zero_optimization.legacy_stage1", "bool", "it chooses between two implementations"),
    _ignored("zero_optimization.stage3_max_live_parameters", "int", LIMIT),
    _ignored("zero_optimization.stage3_max_reuse_distance", "int", LIMIT),
    _ignored(
        "zero_optimization.stage3_model_persistence_threshold",
        "int",
        "units within the persistence_threshold stay whole, however many they are",
    ),
    _ignored("zero_optimization.stage3_gather_16bit_weights_on_model_save", "bool", "counterpoint export gathers them"),
    _ignored("zero_optimization.stage3_gather_fp16_weights_on_model_save", "bool", "counterpoint export gathers them"),
    _ignored("zero_optimization.stage3_module_granularity_threshold", "int", "weights are gathered by blocks"),
    _ignored("zero_optimization.stage3_use_all_reduce_for_fetch_params", "bool", "it chooses a collective"),
    _ignored("zero_optimization.stage3_allgather_sequential", "bool", "weights are gathered by blocks"),
    _ignored("zero_optimization.stage3_partition_stream_chunk_size", "int", "it is about zero.Init"),
    _ignored("zero_optimization.memory_efficient_linear", "bool", "it chooses a kernel"),
    _ignored("zero_optimization.override_module_apply", "bool", "it is about zero.Init"),
    _ignored("zero_optimization.pipeline_loading_checkpoint", "bool", "each rank reads what it has"),
    _ignored("zero_optimization.log_trace_cache_warnings", "bool", "it prints"),
    _ignored("zero_optimization.enable_sanity_checks", "bool", "every program is verified"),
    _ignored("zero_optimization.leaf_module", "dict", "weights are gathered by blocks, whichever experts are active"),
    _ignored("zero_optimization.save_muon_momentum_buffer_in_memory", "bool", "it is about offload"),
    _ignored("zero_optimization.cpu_offload_use_pin_memory", "bool", "it is about offload"),
    _becomes(
        "zero_optimization.offload_optimizer.device",
        "text",
        "none",
        "the pass offload: cpu is offload:state=host, nvme is offload:state=disk",
    ),
    _becomes("zero_optimization.offload_optimizer.nvme_path", "text", None, "offload_folder"),
    _ignored("zero_optimization.offload_optimizer.pin_memory", "bool", "what travels is always copied so"),
    _ignored("zero_optimization.offload_optimizer.buffer_count", "int", BUFFERS),
    _ignored("zero_optimization.offload_optimizer.buffer_size", "int", BUFFERS),
    _ignored("zero_optimization.offload_optimizer.pipeline_read", "bool", BUFFERS),
    _ignored("zero_optimization.offload_optimizer.pipeline_write", "bool", BUFFERS),
    _ignored("zero_optimization.offload_optimizer.fast_init", "bool", BUFFERS),
    _ignored("zero_optimization.offload_optimizer.super_offload", "bool", BUFFERS),
    _ignored("zero_optimization.offload_optimizer.cpuadam_cores_perc", "number", "it chooses the cores of the update"),
    _refused(
        "zero_optimization.offload_optimizer.ratio",
        "number",
        "the state of all parameters is offloaded, or of none; omit it",
        neutral=(None, 1),
    ),
    _becomes(
        "zero_optimization.offload_param.device",
        "text",
        "none",
        "the pass offload at stage 3: nvme is offload:params=disk, for ranks on CPUs; cpu is refused",
    ),
    _becomes("zero_optimization.offload_param.nvme_path", "text", None, "offload_folder"),
    _ignored("zero_optimization.offload_param.pin_memory", "bool", "it is about copies to a device"),
    _ignored("zero_optimization.offload_param.buffer_count", "int", WEIGHTS),
    _ignored("zero_optimization.offload_param.buffer_size", "int", WEIGHTS),
    _ignored("zero_optimization.offload_param.max_in_cpu", "int", WEIGHTS),
    _refused("zero_optimization.cpu_offload", "bool", 'write offload_optimizer: {"device": "cpu"}'),
    _refused("zero_optimization.cpu_offload_param", "bool", OFFLOAD),
    _refused("zero_optimization.zenflow", "dict", "each step applies its whole gradient; omit it", neutral=(None,)),
    _refused(
        "zero_optimization.zero_hpz_partition_size",
        "int",
        "write zero(n, level=3) * data(m): shards within n ranks, m replicas of them; both may be quantized",
        neutral=(None, 0, 1),
    ),
    _becomes(
        "zero_optimization.zero_quantized_weights",
        "bool",
        False,
        "quantized_weights=int8 of zero at stage 3, with one scale for 1024 elements",
    ),
    _refused("zero_optimization.zero_quantized_nontrainable_weights", "bool", "gather casts: precision='bf16'"),
    _becomes(
        "zero_optimization.zero_quantized_gradients",
        "bool",
        False,
        "quantized_gradients=int4 of zero at stage 3, added up in float32 and rounded once, also between hosts",
    ),
    _refused(
        "zero_optimization.zeropp_loco_param",
        "dict",
        "what zero_quantized_gradients drops is not kept; omit it",
        neutral=(None,),
    ),
    _refused(
        "zero_optimization.mics_shard_size",
        "int",
        "write zero(n, level=3) * data(m): shards within n ranks, m replicas of them",
        neutral=(None, -1, 0),
    ),
    _refused("zero_optimization.mics_hierarchical_params_gather", "bool", "omit it; collectives go by host anyway"),
)

MODEL_KEYS = (
    _refused(
        "activation_checkpointing.partition_activations",
        "bool",
        "write tensor(n), and pass passes=('overlap', 'recompute', 'partition_activations')",
    ),
    _refused(
        "activation_checkpointing.cpu_checkpointing",
        "bool",
        "pass passes=('overlap', 'recompute'); on CPUs 'offload:activations=disk' keeps inputs on disk",
    ),
    _ignored("activation_checkpointing.contiguous_memory_optimization", "bool", LAYOUT),
    _ignored("activation_checkpointing.number_checkpoints", "int", LAYOUT),
    _ignored("activation_checkpointing.synchronize_checkpoint_boundary", "bool", "it is about timing"),
    _ignored("activation_checkpointing.profile", "bool", "it prints"),
    _refused("pipeline", "dict", "write pipeline(p), or pipeline(p) * zero(n, level=1)", neutral=(None, {})),
    _refused("tensor_parallel", "dict", "write tensor(n) * zero(m)", neutral=(None, 0, 1), switch="autotp_size"),
    _refused("sequence_parallel_size", "int", "sequences are not split; omit it", neutral=(None, 1)),
    _refused("expert_parallel", "dict", "experts stay in the model that every rank has; omit it", switch="enabled"),
    _ignored("use_data_before_expert_parallelism", "bool", "it is about expert_parallel"),
    _refused("sparse_attention", "dict", "write the attention into the model", neutral=(None,)),
    _refused("compile", "dict", "pass compile='segments' or 'blocks'", switch="deepcompile"),
    _refused("compression_training", "dict", "quantize or prune in the model, as torchao does", neutral=(None, {})),
    _refused("weight_quantization", "dict", "quantize in the model, as torchao does", neutral=(None,)),
    _refused("quantize_training", "dict", "quantize in the model, as torchao does", switch="enabled"),
    _refused("eigenvalue", "dict", "it is about quantize_training; omit it", switch="enabled"),
    _refused("progressive_layer_drop", "dict", "drop layers in the model's forward", switch="enabled"),
    _refused("hybrid_engine", "dict", "generate with the model of step.export_weights()", switch="enabled"),
    _ignored("graph_harvesting", "bool", "it is about CUDA graphs"),
    _ignored("vocabulary_size", "int", "DeepSpeed only warns about it"),
)

DATA_KEYS = (
    _refused("curriculum_learning", "dict", "choose the samples in the script's own sampler", switch="enabled"),
    _refused("data_efficiency", "dict", "choose the samples in the script's own sampler", switch="enabled"),
)

RUN_KEYS = (
    _refused("elasticity", "dict", "use cp.ElasticTrainer, or give the batch sizes", switch="enabled"),
    _refused("autotuning", "dict", "run counterpoint plan script.py --measure 3", switch="enabled"),
    _ignored("aio", "dict", "it is about offload"),
    _refused("nebula", "dict", "save with step.save(folder)", switch="enabled"),
    _refused("datastates_ckpt", "dict", "save with step.save(folder)", switch="enabled"),
    _ignored("checkpoint.tag_validation", "text", "ranks always compare what they save"),
    _ignored("checkpoint.load_universal", "bool", "any plan loads any checkpoint of this library"),
    _refused("checkpoint.use_node_local_storage", "bool", "save to a folder that all hosts see"),
    _ignored("checkpoint.parallel_write", "dict", "each rank writes what it has"),
    _ignored("checkpoint.writer", "dict", "each rank writes what it has"),
    _ignored("checkpoint.checkpoint_serialization", "bool", "checkpoints are safetensors"),
)

LOG_KEYS = (
    _ignored("steps_per_print", "number", LOGS),
    _ignored("wall_clock_breakdown", "bool", LOGS),
    _ignored("memory_breakdown", "bool", LOGS),
    _ignored("dump_state", "bool", LOGS),
    _ignored("log_level", "any", LOGS),
    _ignored("timers", "dict", LOGS),
    _ignored("flops_profiler", "dict", LOGS),
    _ignored("comms_logger", "dict", LOGS),
    _ignored("tensorboard", "dict", LOGS),
    _ignored("wandb", "dict", LOGS),
    _ignored("comet", "dict", LOGS),
    _ignored("csv_monitor", "dict", LOGS),
    _ignored("disable_python_gc", "bool", "Python's own settings of garbage collection hold"),
)

CONFIG_KEYS: tuple[ConfigKey, ...] = (
    *BATCH_KEYS,
    *OPTIMIZER_KEYS,
    *COMMUNICATION_KEYS,
    *FP16_KEYS,
    *BF16_KEYS,
    *PRECISION_KEYS,
    *ZERO_KEYS,
    *MODEL_KEYS,
    *DATA_KEYS,
    *RUN_KEYS,
    *LOG_KEYS,
)
"""All keys, in the order of the docs page."""


def format_config_table() -> str:
    """Return the table as Markdown, for the docs page: one row for each key."""
    rows = [f"| `{key.path}` | {_describe_effect(key)} |" for key in CONFIG_KEYS]
    return "\n".join(["| key | here |", "|---|---|", *rows])


def _describe_effect(key: ConfigKey) -> str:
    match key.effect:
        case "becomes":
            default = "" if key.default in (None, {}) else f" (default {str(key.default).lower()})"
            return f"{key.text}{default}"
        case "ignored":
            return f"ignored: {key.text}"
        case "refused":
            return f"refused: {key.text}"
