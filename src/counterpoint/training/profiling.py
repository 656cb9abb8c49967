"""Profile the layers of a user's model: measured once on a machine, then cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from counterpoint.errors import PlanError
from counterpoint.launchers.machine import processor_name
from counterpoint.model.compilation import Compilation, CompilationArgument, parse_compilation
from counterpoint.model.model_profile import ModelProfile, layer_keys, param_sizes
from counterpoint.model.precision import PrecisionArgument, parse_precision
from counterpoint.optim.validation import renamed_parameters, require_counts
from counterpoint.partitioning.dry_run import Inputs
from counterpoint.partitioning.module_casts import cast_modules
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.partitioning.seed_hooks import copy_without_seed_hooks
from counterpoint.profiler.cache import load_or_measure
from counterpoint.profiler.measure import measure_compiled, measure_model
from counterpoint.profiler.profile_target import ProfileTarget
from counterpoint.profiler.roofline import estimate_model
from counterpoint.profiler.timer import RepeatPolicy
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.microbatches import slice_samples as first_of
from counterpoint.runtime.optimizer_spec import OptimizerSpec, TorchOptimizerFactory
from counterpoint.runtime.sample_layout import SampleLayout, first_length
from counterpoint.training.model_checks.validation import min_microbatch_size, wrap_optimizer
from counterpoint.training.model_partition import assign_unused_params, drop_frozen_params, finest_partition
from counterpoint.training.options import require_sample_layout
from counterpoint.training.plan_resolution import MAX_TRACE_SAMPLES
from counterpoint.world.cluster import Device
from counterpoint.world.cluster_file import resolve_cluster

RENAMED_PROFILE_OPTIONS = {
    "anew": "remeasure",
    "folder": "cache_dir",
    "roof": "roofline_device",
    "samples": "microbatch_sizes",
    "threads": "num_threads",
}
"""Former names of keyword options of :func:`profile`."""


@renamed_parameters(RENAMED_PROFILE_OPTIONS)
def profile(  # noqa: PLR0913 - what is timed, and how, all by keyword
    model: nn.Module,
    inputs: Inputs,
    targets: Any = None,  # noqa: ANN401 - whatever the loss takes
    *,
    loss: LossFunction | None = None,
    optimizer: optim.Optimizer | TorchOptimizerFactory = optim.AdamW,
    microbatch_sizes: Sequence[int] = (),
    batch_dims: Mapping[str, int] | None = None,
    shared: Sequence[str] = (),
    compile: CompilationArgument = None,  # noqa: A002 - as of a plan
    num_threads: int | None = None,
    roofline_device: Device | str | None = None,
    precision: PrecisionArgument = None,
    cache_dir: str | Path | None = None,
    remeasure: bool = False,
) -> ModelProfile:
    """Measure how long every layer of a model takes, forward, backward and to update; the model is not changed.

    Args:
        model: as it would be trained.
        inputs: arguments of the model for some samples: a tensor, a tuple, or a dict by name.
        targets: the second argument of the loss.
        loss: from output and targets to the mean loss; by default the mean of the output.
        optimizer: an optimizer on the model's parameters, or a factory.
        microbatch_sizes: sizes of microbatches; by default the number of inputs, a quarter and a sixteenth of it.
        batch_dims: the dim of the samples by name, as for ``parallelize``.
        shared: the names of what belongs to all samples.
        compile: a compilation, as of a plan, whose times are measured too, with the seconds that compiling takes.
        num_threads: to compute with; those of this process by default.
        roofline_device: a device, or the name of a cluster, as ``8xh100``, for one of its devices: operations are then
            counted and cost what they would at its roofline, and nothing is computed, so that the model may be on
            ``meta``.
        precision: with ``roofline_device``, what the model computes in, as for ``parallelize``.
        cache_dir: where profiles are cached, see ``profiler/cache.py``; None to measure without a cache.
        remeasure: whether to measure even if the cache has it.

    Raises:
        PlanError: the model does not take the inputs, a number is not positive, there is no such cluster, or a
            precision is to be measured.

    Example:
        >>> import torch, counterpoint as cp
        >>> profile = cp.profile(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), torch.zeros(4, 2))
        >>> [layer.name for layer in profile.layers], profile.at_microbatch_size(4).unpartitioned.seconds > 0
        (['0', '1'], True)

    Cost:
        Some dozens of steps for each size of microbatch, within seconds for models of seconds; memory for two more
        copies of the parameters.
    """
    require_counts(optional=True, threads=num_threads)
    for microbatch_size in microbatch_sizes:
        require_counts(samples=microbatch_size)
    require_sample_layout(batch_dims, shared)
    inputs, targets = SampleLayout(model, batch_dims or {}, shared).mark(inputs, targets)
    computed_in = parse_precision(precision)
    if computed_in is not None and roofline_device is None:
        raise PlanError(
            f"precision={computed_in} was given, but profiles are measured in the model's own dtypes; omit it, or give "
            "roofline_device"
        )
    build_target = partial(
        build_profile_target,
        inputs=as_call_args(inputs),
        targets=targets,
        loss=loss or mean_output_loss,
        optimizer_spec=wrap_optimizer(optimizer, model, loss),
    )
    compilation = parse_compilation(compile)
    compiled_target = None
    if compilation is not None:
        compiled_target = build_target(copy_without_seed_hooks(model), compilation=compilation)
    with cast_modules(model, computed_in):
        target = build_target(model)
    sizes = sorted(set(microbatch_sizes)) or default_microbatch_sizes(first_length(inputs), min_microbatch_size(model))
    if roofline_device is not None:
        own_device = resolve_cluster(roofline_device).device if isinstance(roofline_device, str) else roofline_device
        name = own_device.roofline.name if own_device.roofline is not None else ""
        with cast_modules(model, computed_in):
            return estimate_model(target, name or "counted", own_device, samples=sizes, precision=computed_in)
    device, threads = device_name(target.device), num_threads or torch.get_num_threads()
    measure_profile = partial(measure_both, target, compiled_target, device, sizes, threads)
    if cache_dir is None:
        return measure_profile()
    key = profile_cache_key(target, sizes, device, threads)
    if compilation is not None:
        key["compile"] = str(compilation)
    return load_or_measure(Path(cache_dir), key, measure_profile, must_measure=remeasure)


def measure_both(
    target: ProfileTarget, compiled_target: ProfileTarget | None, device: str, sizes: Sequence[int], threads: int
) -> ModelProfile:
    """Return the profile of a model, with the times of the compiled one if there is any."""
    measured = measure_model(target, device, samples=sizes, threads=threads, repeat_policy=RepeatPolicy())
    if compiled_target is None:
        return measured
    compiled = measure_compiled(compiled_target, samples=sizes, threads=threads, repeat_policy=RepeatPolicy())
    return replace(measured, compiled=compiled)


def build_profile_target(
    model: nn.Module,
    inputs: Inputs,
    targets: Any,  # noqa: ANN401 - whatever the loss takes
    *,
    loss: LossFunction,
    optimizer_spec: OptimizerSpec,
    compilation: Compilation | None = None,
) -> ProfileTarget:
    """Prepare a model for profiling, in the layers that a pipeline of it would have, if it can be partitioned at all.

    Raises:
        PlanError: the model cannot even be called with these inputs.
    """
    sample_inputs = first_of(inputs, 0, min(first_length(inputs), MAX_TRACE_SAMPLES))
    partition = finest_partition(model, sample_inputs, ("blocks", "tensor_parallel"), compilation=compilation)
    return ProfileTarget(
        model,
        partition,
        assign_unused_params(drop_frozen_params(partition.spec, optimizer_spec)),
        loss,
        optimizer_spec,
        (inputs, targets),
        compilation,
    )


def default_microbatch_sizes(num_samples: int, min_size: int) -> list[int]:
    """Return the default microbatch sizes: all samples, a quarter and a sixteenth of them.

    Example:
        >>> default_microbatch_sizes(64, 1), default_microbatch_sizes(2, 1)
        ([4, 16, 64], [1, 2])
    """
    return sorted({max(min_size, 1, num_samples // divisor) for divisor in (1, 4, 16)})


def mean_output_loss(output: Any, targets: Any) -> Tensor:  # noqa: ANN401 - whatever a model gives
    """Return the mean of the output, if no loss is given."""
    del targets
    means = [leaf.mean() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not means:
        raise PlanError("the model returns no floating-point tensor, so its backward cannot be profiled; give a loss")
    return torch.stack(means).sum()


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return processor_name() if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def profile_cache_key(target: ProfileTarget, samples: Sequence[int], device: str, threads: int) -> dict[str, object]:
    """Return all that the figures of a profile depend on."""
    leaves = [leaf for leaf in tree_leaves(target.batch) if isinstance(leaf, Tensor)]
    return {
        "model": type(target.model).__name__,
        "pieces": [[layer.name, layer.cost, layer.output_bytes] for layer in layer_keys(target.spec)],
        "weights": param_sizes(target.spec),
        "samples": [list(samples), *([list(leaf.shape[1:]), str(leaf.dtype)] for leaf in leaves)],
        "loss": getattr(target.loss, "__qualname__", type(target.loss).__name__),
        "optimizer": [target.optimizer_spec.optimizer_class.__name__, str(target.optimizer_spec.optimizer.defaults)],
        "device": device,
        "threads": threads,
        "torch": torch.__version__,
    }
