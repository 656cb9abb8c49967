"""Training options, which every plan obeys equally."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from counterpoint.device.select import DeviceArgument
from counterpoint.errors import PlanError
from counterpoint.model.compilation import CompilationArgument, parse_compilation
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.option_text import merge_option
from counterpoint.model.precision import PrecisionArgument, parse_precision
from counterpoint.optim.validation import MAX_SECONDS, renamed_hint
from counterpoint.plan.plan import Plan
from counterpoint.runtime.commit.step_commit import StepGuard
from counterpoint.runtime.loss.loss_scale import DynamicLossScale, LossScale, parse_loss_scale
from counterpoint.runtime.rank_builder import BatchNormRule
from counterpoint.world.cluster import Cluster

InitWeights: TypeAlias = Callable[[nn.Module], object]
"""Initializes the parameters and buffers of one module in place."""

HOST_DEVICES = frozenset({"cpu", "meta"})
"""Of parameters whose ranks compute on the host; models that no process can hold stay on the meta device."""
RENAMED_OPTIONS = {
    "deadline_s": "timeout_s",
    "init": "init_sync (broadcast or verify)",
    "keep_freed": "retain_freed_memory",
    "measure": "num_measured_plans",
    "mixing": "cross_sample",
    "one_copy": "share_params_on_host",
    "schedule": "lr_scheduler",
    "timing": "profile",
    "unused": "unused_parameters",
    "watch": "check_finite",
}
"""Former names of keyword options of ``Trainer`` and ``parallelize``, for an error that has the new one."""

RENAMED_FIT_OPTIONS = {
    "evaluation": "eval_dataset",
    "keep": "keep_last",
    "measure": "metrics",
    "prefetch": "prefetch_factor",
    "save_by": "checkpoint_mode (synchronous or per_stage)",
    "save_to": "checkpoint_dir",
    "workers": "num_workers",
}
"""Former names of keyword options of ``Trainer.fit``."""

OTHER_FIT_OPTIONS = {
    "shuffle": "samples of a dataset come in a new order in every epoch; for their own order give a DataLoader, whose "
    "batches are the global ones, in place of batch_size: fit(DataLoader(dataset, batch_size=..., shuffle=False))",
    "sampler": "give a DataLoader that has it, whose batches are the global ones, in place of batch_size: "
    "fit(DataLoader(dataset, batch_size=..., sampler=...))",
    "batch_sampler": "give a DataLoader that has it, whose batches are the global ones, in place of batch_size: "
    "fit(DataLoader(dataset, batch_sampler=...))",
    "drop_last": "the last batch of an epoch may have fewer samples; to leave it out give a DataLoader in place of "
    "batch_size: fit(DataLoader(dataset, batch_size=..., drop_last=True))",
    **dict.fromkeys(("eval_data", "valid_dataset", "validation_data", "val_data", "val_loader"), "write eval_dataset="),
    "compute_metrics": "write metrics=, a function that returns a dict of cp.MeanMetric",
    **dict.fromkeys(("eval_steps", "eval_interval"), "write evaluate_every=, a number of steps"),
    **dict.fromkeys(("save_steps", "save_interval"), "write save_every=, a number of steps"),
    **dict.fromkeys(
        ("log_dir", "logdir", "log_every", "logging_dir", "logging_steps", "output_dir", "tensorboard"),
        "run_dir=FOLDER writes metrics, TensorBoard events, a report and checkpoints, checkpoint_dir=FOLDER only "
        "checkpoints",
    ),
    **dict.fromkeys(
        ("ckpt_path", "load", "resume_from", "resume_from_checkpoint"), "write resume='auto', or resume=FOLDER"
    ),
    **dict.fromkeys(
        ("early_stopping", "load_best_model_at_end", "patience", "save_best"),
        "call fit(...) for one epoch after another, and compare what evaluate(...) returns, as the how-to page about "
        "logs does",
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "train_batch_size"),
        "write batch_size=, the samples of a step on all ranks together",
    ),
}
"""What is given instead, by options that other libraries have for what ``Trainer.fit`` does."""

OTHER_OPTIONS = {
    **dict.fromkeys(
        (
            "accumulate", "accumulate_grad_batches", "accumulation_steps", "grad_accum_steps",
            "gradient_accumulation", "gradient_accumulation_steps",
        ),
        "with num_microbatches=4 each rank computes the gradients of its samples in 4 parts and adds them up before "
        "the update: write that, and make batches 4 times as large; a loop of your own may also call "
        "step.accumulate(batch) and step.update()",
    ),
    **dict.fromkeys(
        ("clip_grad", "clip_grad_norm", "grad_clip", "gradient_clip_val", "gradient_clipping", "max_grad_norm"),
        "write clip_norm=, the largest norm of all gradients together",
    ),
    **dict.fromkeys(
        ("amp", "autocast", "bf16", "fp16", "mixed_precision", "use_amp"),
        "write precision='bf16' or 'fp16', or 'bf16(autocast=true)' for the lists of torch.autocast; fp16 scales the "
        "loss by itself",
    ),
    **dict.fromkeys(
        ("learning_rate", "lr", "weight_decay"),
        "the optimizer has it: optimizer=partial(torch.optim.AdamW, lr=1e-3)",
    ),
    **dict.fromkeys(
        ("devices", "n_gpus", "num_gpus", "num_processes", "num_ranks", "world_size"),
        "the strategy says how many ranks there are, as strategy='data(2)', and `counterpoint run -n 2` or torchrun "
        "starts a process for each",
    ),
    **dict.fromkeys(("accelerator", "use_cuda"), "write device='cuda', or 'cpu'"),
    **dict.fromkeys(
        ("activation_checkpointing", "checkpoint_activations", "gradient_checkpointing"),
        "recomputing activations is a pass of the program: write passes=(\"overlap\", \"recompute\")",
    ),
}  # fmt: skip
"""What is given instead, by options that other libraries have for what ``Trainer`` and ``parallelize`` do."""

RENAMED_VALUES = {
    "batches=own": "batches=per_rank",
    "batches=same": "batches=global",
    "checkpoint_mode=run": "checkpoint_mode=synchronous",
    "checkpoint_mode=stage": "checkpoint_mode=per_stage",
    "init_sync=rank0": "init_sync=broadcast",
    "init_sync=same": "init_sync=verify",
}
"""Former values of options, whatever the options were called at that time."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of a training run, independent of its plan.

    Args:
        seed: of the sample order and of all random numbers.
        clip_norm: global norm to which gradients are scaled down; None for no clipping.
        clip_by: whose norm is clipped: that of the whole ``model``, or each ``stage``'s own, which is all that the
            stages of an asynchronous pipeline know.
        clip_value: largest absolute value of a gradient element, applied after ``clip_norm``; None for no clipping.
        check_finite: ``gradients`` checks the losses and the gradients of a step, ``loss`` only its losses.
        nonfinite: ``error`` ends the run at a loss or gradient that is not finite, ``skip`` skips the step.
        loss_scale: factor of the losses in backward, so that gradients do not underflow in fp16: a number, ``dynamic``
            for a factor that starts with 65536, grows, and shrinks when gradients are not finite, which skips the step
            on all ranks, or a ``cp.DynamicLossScale`` with its parameters. Losses, norms and updates are those of
            unscaled gradients. None for 1, or ``dynamic`` where ``precision`` computes or reduces in fp16.
        precision: what the model computes in, while its parameters and their updates stay in their own dtype: ``bf16``,
            ``fp16`` or ``fp32``, or with options ``bf16(autocast=true)``, ``bf16(reduce=bf16)``, or a ``cp.Precision``.
            None for the dtype of its parameters.
        compile: whether ``torch.compile`` compiles what ranks run of the model: ``segments`` compiles what a rank runs
            between two instructions that communicate as one graph, ``blocks`` each block of the model, so that
            identical ones share a graph. With options ``segments(backend=inductor, mode=max-autotune)``. None runs the
            model eagerly.
        loss_reduction: whether the loss is the ``mean`` over its samples, or over tokens as a ``cp.WeightedMean``, or
            the ``sum``; ``batch`` for a loss that compares samples with each other: the outputs of the whole batch are
            gathered, and it is evaluated once on all of them.
        unused_parameters: what happens if a trainable parameter gets no gradient in a step: ``error``, ``zero`` for a
            gradient of zeros, or ``skip``, which leaves it and its optimizer state as they are, as torch does.
        batch_dims: the dim along which samples lie, by name of an argument of the model's forward, of a key of a dict
            of targets, or ``targets``; for sequence-first inputs ``{"x": 1, "targets": 1}``. 0 for other names.
        shared: the names of inputs that belong to all samples, as an adjacency matrix: every microbatch and replica
            gets them whole.
        dims: names of the (out, in) dims of linear layers by pattern of module path, for tensor(...).
        device: what ranks compute on: ``cpu``, ``cuda`` (the GPU of the local rank's number), ``cuda:1``, or ``auto``,
            which is ``cuda`` where there is one and ``cpu`` elsewhere. The model, a loss that is a module and the
            optimizer's state are moved there, batches in every step. None leaves the model where it is.
        timeout_s: the longest that any rank waits for another, or for a chunk of offloaded state, in seconds.
        offload_folder: under the passes ``offload:state=disk``, ``offload:activations=disk`` and
            ``offload:params=disk``, where each rank has a file with the optimizer state of what it updates, one with
            the inputs of what it recomputes, and one with its shards of weights; on a local disk. The files have no
            names, and are gone when the process ends.
        share_params_on_host: whether replicas on one host share one copy of parameters and optimizer state, if
            possible.
        init_sync: what happens if a rank's initial parameters differ from rank 0's: ``broadcast`` gives all ranks rank
            0's and warns, ``verify`` is an error.
        batch_norm: what batch norm does with several microbatches or replicas. ``deferred``: each microbatch is
            normalized by its own statistics, and running statistics change once per batch, by those of the whole batch;
            ``microbatch``: they change after every microbatch, and replicas average them; ``sync``: like ``deferred``,
            but microbatches that replicas run concurrently are normalized together; ``error``: normalizing less than
            the whole batch is an error. By default ``deferred``, with a warning if a replica has several microbatches.
        cross_sample: what happens if a loss is not what the losses of its samples' halves add up to, or if a model's
            output for a sample depends on other samples of its microbatch: ``error``, or ``accept`` for microbatches
            that are batches of their own.
        profile: measured times of the model's layers, by which stages are balanced and ``auto`` chooses; the same on
            all ranks. Without it, counted FLOPs are used.
        retain_freed_memory: whether memory that a step frees stays with the process for the next one, which is faster;
            otherwise large blocks are returned at once, and a process has no more memory than it uses. glibc only.
        num_measured_plans: under ``auto``, how many of the plans that are predicted to be fastest are measured for some
            steps before the first one, in addition to data parallelism; the fastest is used. They train copies of the
            model, on the first batch, without side effects. 0 measures none.
        init_weights: called with each module of a model on the meta device, children first, after its
            ``reset_parameters()``, to initialize it in place, as with ``nn.Module.apply``.
        weights: a safetensors file, its index, or a folder of either, with the parameters and buffers of a model on the
            meta device.
        cluster: the cluster for the predictions of ``auto``, or the path of its file; None for one laptop core per
            rank.
    """

    seed: int = 0
    clip_norm: float | None = None
    clip_by: Literal["model", "stage"] = "model"
    clip_value: float | None = None
    check_finite: Literal["loss", "gradients"] = "gradients"
    nonfinite: Literal["error", "skip"] = "error"
    loss_scale: LossScale | None = None
    precision: PrecisionArgument = None
    compile: CompilationArgument = None
    loss_reduction: Literal["mean", "sum", "batch"] = "mean"
    unused_parameters: Literal["error", "zero", "skip"] = "error"
    batch_dims: Mapping[str, int] | None = None
    shared: Sequence[str] = ()
    dims: Mapping[str, tuple[str, str]] | None = None
    device: DeviceArgument | None = None
    timeout_s: float = 60.0
    offload_folder: str | PathLike[str] | None = None
    share_params_on_host: bool = True
    init_sync: Literal["broadcast", "verify"] = "broadcast"
    cross_sample: Literal["error", "accept"] = "error"
    retain_freed_memory: bool = True
    batch_norm: BatchNormRule | None = None
    num_measured_plans: int = 0
    cluster: Cluster | None = None
    profile: ModelProfile | None = None
    init_weights: InitWeights | None = None
    weights: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        self._require_types()
        for name in ("clip_norm", "clip_value", "timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool | str) or not isinstance(value, float | int | None):
                raise PlanError(f"{name}={value!r} is a {type(value).__name__}; give a positive number")
        parse_loss_scale(self.loss_scale)
        parse_precision(self.precision)
        parse_compilation(self.compile)
        require_device(self.device)
        require_profile(self.profile)
        require_first_values(self.init_weights, self.weights)
        require_sample_layout(self.batch_dims, self.shared)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise PlanError(f"clip_norm={self.clip_norm} would leave no gradient; give a positive norm, or None")
        if self.clip_value is not None and not self.clip_value > 0:
            raise PlanError(f"clip_value={self.clip_value} would leave no gradient; give a positive number, or None")
        if not 0 < self.timeout_s <= MAX_SECONDS:
            raise PlanError(
                f"timeout_s={self.timeout_s} is not a time to wait; give a positive number of seconds, "
                f"{MAX_SECONDS:.0f} at most"
            )
        for name, allowed in (
            ("clip_by", ("model", "stage")),
            ("check_finite", ("loss", "gradients")),
            ("nonfinite", ("error", "skip")),
            ("loss_reduction", ("mean", "sum", "batch")),
            ("unused_parameters", ("error", "zero", "skip")),
            ("init_sync", ("broadcast", "verify")),
            ("batch_norm", (None, *get_args(BatchNormRule))),
            ("cross_sample", ("error", "accept")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                hint = renamed_hint(f"{name}={value}", RENAMED_VALUES)
                raise PlanError(f"{name}={value!r} is not one of {', '.join(filter(None, allowed))}{hint}")

    def _require_types(self) -> None:
        for name, expected in (
            ("share_params_on_host", bool),
            ("retain_freed_memory", bool),
            ("seed", int),
            ("num_measured_plans", int),
        ):
            value = getattr(self, name)
            if type(value) is not expected:
                hint = "True or False" if expected is bool else "a whole number"
                raise PlanError(f"{name}={value!r} is a {type(value).__name__}; give {hint}")
        folder: Any = self.offload_folder
        if not isinstance(folder, str | PathLike | None):
            raise PlanError(
                f"offload_folder={folder!r} is a {type(folder).__name__}; give the path of a folder, or None"
            )
        if self.num_measured_plans < 0:
            raise PlanError(
                f"num_measured_plans={self.num_measured_plans} is negative; give how many to measure, or 0 for none"
            )


def require_sample_layout(batch_dims: Any, shared: Any) -> None:  # noqa: ANN401 - whatever was given
    """Check the types of the options that say where samples are.

    Raises:
        PlanError: a name is not a text, a dim no number from 0 on, or a name is in both.
    """
    is_mapping = batch_dims is None or (
        isinstance(batch_dims, Mapping)
        and all(isinstance(name, str) and type(dim) is int and dim >= 0 for name, dim in batch_dims.items())
    )
    if not is_mapping:
        raise PlanError(
            f"batch_dims={batch_dims!r} is not a dict from names to dims; give the dim of the samples by name of an "
            'argument of forward, as batch_dims={"x": 1}'
        )
    if isinstance(shared, str) or not isinstance(shared, Sequence) or not all(isinstance(name, str) for name in shared):
        raise PlanError(f'shared={shared!r} is not a sequence of names; give it as shared=("adjacency",)')
    both = sorted(set(shared) & set(batch_dims or {}))
    if both:
        raise PlanError(
            f"{', '.join(both)} is in batch_dims and in shared; what is shared has no dim of samples: omit one"
        )


def require_device(device: object) -> None:
    """Check the type of a device.

    Raises:
        PlanError: it is something else.
    """
    if device is not None and not isinstance(device, DeviceArgument):
        raise PlanError(f"device={device!r} is a {type(device).__name__}; give 'cpu', 'cuda', 'cuda:1' or 'auto'")


def require_profile(profile: object) -> None:
    """Check the type of a model profile.

    Raises:
        PlanError: it is something else.
    """
    if profile is not None and not isinstance(profile, ModelProfile):
        raise PlanError(
            f"profile={profile!r} is a {type(profile).__name__}; give what counterpoint.profile(...) returns"
        )


def require_first_values(init_weights: object, weights: object) -> None:
    """Check the types of the options that give a model its first values.

    Raises:
        PlanError: they are others.
    """
    if init_weights is not None and not callable(init_weights):
        raise PlanError(
            f"init_weights={init_weights!r} is a {type(init_weights).__name__}; give a function of a module, as for "
            "model.apply(...)"
        )
    if weights is not None and not isinstance(weights, str | PathLike):
        raise PlanError(
            f"weights={weights!r} is a {type(weights).__name__}; give the path of a safetensors file or of a folder"
        )


def use_plan_options(options: TrainingOptions, plan: Plan) -> TrainingOptions:
    """Return the options with what they or the plan give: precision, with the loss scale that it needs, and compile.

    Raises:
        PlanError: they and the plan give different ones.
    """
    compilation = merge_option("compile", parse_compilation(options.compile), plan.compile)
    options = options if compilation is None else replace(options, compile=compilation)
    precision = merge_option("precision", parse_precision(options.precision), plan.precision)
    if precision is None:
        return options
    needs_scale = options.loss_scale is None and precision.uses_fp16
    return replace(options, precision=precision, loss_scale="dynamic" if needs_scale else options.loss_scale)


def build_step_guard(options: TrainingOptions) -> StepGuard:
    """Return the checks and the clipping that these options ask for before every update.

    Raises:
        PlanError: the loss scale is dynamic, but gradients are not checked.
    """
    loss_scale = parse_loss_scale(options.loss_scale)
    if isinstance(loss_scale, DynamicLossScale) and options.check_finite == "loss":
        raise PlanError(
            "a dynamic loss scale changes with gradients that are not finite, but check_finite='loss' does not check "
            "gradients; drop check_finite, or give a number as loss_scale"
        )
    return StepGuard(
        options.clip_norm, options.check_finite, options.nonfinite, options.clip_value, loss_scale=loss_scale
    )
