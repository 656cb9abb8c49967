"""Measure seconds and bytes of every layer of a model on real tensors, as the runtime runs them.

Layers are timed one by one, in execution order, each in a call of its own. A stage runs its layers in one call; so the
call overhead is subtracted, and the remainder is scaled to what all layers take in one call. The unpartitioned model,
which plans without pipeline stages run, is timed in whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from statistics import fmean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from counterpoint.model.compilation import Compilation
from counterpoint.model.model_profile import (
    BatchSizeProfile,
    CompiledTimes,
    LayerProfile,
    ModelProfile,
    Overheads,
    ProfiledOn,
    layer_keys,
    param_sizes,
)
from counterpoint.model.spec import Unit
from counterpoint.partitioning.partition import partition_model
from counterpoint.profiler.profile_target import ProfileHarness, ProfileTarget, build_harness, storage_sizes
from counterpoint.profiler.timer import (
    Clock,
    RepeatPolicy,
    Stopwatch,
    column_medians,
    device_clock,
    training_conditions,
)
from counterpoint.program.instruction import Backward, Forward, Instruction, Update
from counterpoint.runtime.autograd.segment_executor import SegmentExecutor
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.loss.loss_parameters import find_loss_module
from counterpoint.runtime.loss.loss_state import preserve_loss_module
from counterpoint.runtime.microbatches import LossFactors, MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec


def saved_activation_bytes(compute: SegmentExecutor, batches: MicrobatchSource) -> list[int]:
    """Return for each segment of a rank the bytes that its forward saves for backwards.

    Parameters, buffers and the batch do not count; what several segments save counts for the first.

    Args:
        compute: the executor whose segments are run.
        batches: whose first microbatch is run.
    """
    excluded = (compute.store.params, compute.store.buffers, batches.inputs(0), batches.targets(0))
    seen = storage_sizes(excluded)
    compute.begin_step(batches, LossFactors({0: 1.0}))
    sizes = []
    for first, (stop, _) in sorted(compute.by_first.items()):
        saved: dict[int, int] = {}

        def record(tensor: Tensor, into: dict[int, int] = saved) -> Tensor:
            into.update(storage_sizes(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, _identity):
            compute.forward(first, stop - 1, 0)
        saved.update(storage_sizes([stored.value for stored in compute.values.values()]))
        sizes.append(sum(size for address, size in saved.items() if address not in seen))
        seen.update(saved)
    compute.clear()
    return sizes


def _identity(tensor: Tensor) -> Tensor:
    return tensor


NUM_LAYERS, WIDTH = 8, 4
"""Layers of the model that measures call overhead, and their width: too small to take time otherwise."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step on one rank: forward, first backward, extra time of later backwards, update, overhead.

    Forward, backward and update are one call each.
    """

    forward_s: float
    backward_s: float
    grad_accumulate_s: float
    update_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of each layer in a call of its own: forward, backward, a second one, and the two parts of a backward."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    second_backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]


def measure_model(
    target: ProfileTarget, device: str, *, samples: Sequence[int], threads: int, repeat_policy: RepeatPolicy
) -> ModelProfile:
    """Return how long the layers of a model take; the model and the loss are not modified.

    Args:
        target: what is timed.
        device: its name.
        samples: sizes of microbatches.
        threads: to compute with.
        repeat_policy: how often each size is timed.

    Cost:
        For each size eleven microbatches forward and backward times the repetitions, two more with batch-norm
        statistics, and memory for two more copies of the parameters.
    """
    sizes = sorted(set(samples))
    with training_conditions(threads), preserve_loss_module(find_loss_module(target.loss)):
        harness, clock = build_harness(target, sizes[0]), device_clock(target.device)
        overheads = measure_call_overheads(target.device, repeat_policy, target.compilation)
        measured = [_measure_batch_size(harness, target, size, overheads, repeat_policy) for size in sizes]
        split_s, whole_s = _time_updates(harness, target.batches(sizes[0]), clock, repeat_policy)
        add_s = _time_grad_accumulation(list(harness.layers.store.params.values()), clock, repeat_policy)
    update_s = median(step.update_s for _, step, _ in measured)
    overhead_s = max(0.0, min(sum(split_s) - whole_s, *split_s, update_s)) if len(split_s) > 1 else 0.0
    params = param_sizes(target.spec)
    return ModelProfile(
        model=type(target.model).__name__,
        layers=layer_keys(target.spec),
        params=params,
        profiled_on=ProfiledOn(device, threads, target.optimizer_spec.optimizer_class.__name__),
        batch_sizes=tuple(profile for profile, _, _ in measured),
        update_s_per_byte=(update_s - overhead_s) / sum(size for _, size in params),
        add_s_per_byte=add_s / sum(size for _, size in params),
        overheads=Overheads(
            overheads.forward_s,
            overheads.backward_s,
            overhead_s,
            median(step.overhead_s for _, step, _ in measured),
            median(single.overhead_s for _, _, single in measured),
        ),
    )


def measure_compiled(
    target: ProfileTarget, *, samples: Sequence[int], threads: int, repeat_policy: RepeatPolicy
) -> CompiledTimes:
    """Return how long the layers of a compiled model take, and how long compiling it does without torch's caches.

    Args:
        target: what is timed; its layers are compiled.
        samples: sizes of microbatches.
        threads: to compute with.
        repeat_policy: how often each size is timed.

    Cost:
        The compilation of the model and of each layer for each size, and what measuring a model costs.
    """
    from torch._inductor.utils import fresh_cache  # which takes a second to import

    size = min(samples)
    with fresh_cache(), training_conditions(threads), preserve_loss_module(find_loss_module(target.loss)):
        harness, batches = build_harness(target, size), target.batches(size)
        first_s, later_s = (time_step(harness.whole, batches, time.perf_counter) for _ in range(2))
        compile_s = sum(astuple(first_s)) - sum(astuple(later_s))
        measured = measure_model(target, "", samples=samples, threads=threads, repeat_policy=repeat_policy)
    return CompiledTimes(str(target.compilation), max(compile_s, 0.0), measured.batch_sizes, measured.overheads)


def measure_call_overheads(
    device: torch.device, repeat_policy: RepeatPolicy, compilation: Compilation | None = None
) -> Overheads:
    """Return the overhead of a call: by how much many layers take longer in a call each than in one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).to(device)
    optimizer_spec = OptimizerSpec(partial(optim.SGD, lr=0.0), dict(model.named_parameters()))
    inputs, targets = torch.zeros(1, WIDTH, device=device), torch.zeros(1, WIDTH, device=device)
    partitioned = partition_model(model, (inputs,), granularity="blocks", compilation=compilation)
    target = ProfileTarget(
        model, partitioned, partitioned.spec, F.mse_loss, optimizer_spec, (inputs, targets), compilation
    )
    harness, batches, clock = build_harness(target, 1), target.batches(1), device_clock(device)
    repetitions = repeat_policy.repeat(
        lambda: (time_step(harness.layers, batches, clock), time_layers(harness, batches, clock))
    )
    forward_s = median(sum(layer_times.forward_s) - step.forward_s for step, layer_times in repetitions)
    backward_s = median(sum(layer_times.backward_s) - step.backward_s for step, layer_times in repetitions)
    return Overheads(max(forward_s, 0.0) / (NUM_LAYERS - 1), max(backward_s, 0.0) / (NUM_LAYERS - 1))


def _measure_batch_size(
    harness: ProfileHarness, target: ProfileTarget, samples: int, overheads: Overheads, repeat_policy: RepeatPolicy
) -> tuple[BatchSizeProfile, StepTimes, StepTimes]:
    """Return the profile of one microbatch size, and steps of the whole model with several microbatches and one."""
    batches, clock = target.batches(samples), device_clock(target.device)
    single_batch = target.batches(samples, 1)

    def measure_once() -> tuple[StepTimes, StepTimes, StepTimes, LayerTimes]:
        whole = time_warm_step(harness.whole, batches, clock)
        single = (
            whole
            if harness.single_microbatch is harness.whole
            else time_warm_step(harness.single_microbatch, single_batch, clock)
        )
        return whole, single, time_warm_step(harness.layers, batches, clock), time_layers(harness, batches, clock)

    repetitions = repeat_policy.repeat(measure_once)
    wholes, singles, layered, layer_times = zip(*repetitions, strict=True)
    whole, single, in_layers = _median_step(wholes), _median_step(singles), _median_step(layered)
    forward_s, _ = rescale_to([times.forward_s for times in layer_times], overheads.forward_s, in_layers.forward_s)
    backward_s, factor = rescale_to(
        [times.backward_s for times in layer_times], overheads.backward_s, in_layers.backward_s
    )
    input_s = [
        factor * max(seconds - overheads.backward_s, 0.0)
        for seconds in column_medians([times.input_s for times in layer_times])
    ]
    weight_s = [factor * seconds for seconds in column_medians([times.weight_s for times in layer_times])]
    pairs = zip(
        column_medians([times.second_backward_s for times in layer_times]),
        column_medians([times.backward_s for times in layer_times]),
        strict=True,
    )
    accumulate_s = [factor * (second - first) for second, first in pairs]
    sizes = [float(samples * layer.output_bytes) for layer in target.spec.layers]
    saved_bytes = map(float, saved_activation_bytes(harness.separate, batches))
    layers = tuple(map(LayerProfile, forward_s, backward_s, input_s, weight_s, sizes, saved_bytes, accumulate_s))
    input_fraction = sum(input_s) / (sum(input_s) + sum(weight_s) or 1.0)
    (whole_saved_bytes,) = saved_activation_bytes(harness.whole.executor, batches)

    def total(step: StepTimes) -> LayerProfile:
        forward, backward = (
            max(step.forward_s - overheads.forward_s, 0.0),
            max(step.backward_s - overheads.backward_s, 0.0),
        )
        parts = input_fraction * backward, (1 - input_fraction) * backward
        return LayerProfile(forward, backward, *parts, sizes[-1], float(whole_saved_bytes), step.grad_accumulate_s)

    return BatchSizeProfile(samples, layers, total(whole), total(single)), whole, single


def rescale_to(layer_times: Sequence[Sequence[float]], call_s: float, whole_s: float) -> tuple[list[float], float]:
    """Return the seconds of layers, scaled to add up to those of one call, and the factor.

    Args:
        layer_times: of each layer in a call of its own, by repetition.
        call_s: overhead of a call.
        whole_s: all layers in one call.

    Example:
        >>> rescale_to([[3.0, 5.0]], 1.0, 10.0)
        ([3.0, 6.0], 1.5)
    """
    seconds = [max(value - call_s, 0.0) for value in column_medians(layer_times)]
    factor = max(whole_s - call_s, 0.0) / (sum(seconds) or 1.0)
    return [factor * value for value in seconds], factor


def time_step(interpreter: Interpreter, batches: MicrobatchSource, clock: Clock) -> StepTimes:
    """Run a step and return its times."""
    interpreter.use_clock(clock)
    watch = Stopwatch(clock)
    watch.time_all([lambda: interpreter.step(0, batches, next(reversed(interpreter.programs)))])
    (total,) = watch.read()
    seconds: dict[type[Instruction], list[float]] = {Forward: [], Backward: [], Update: []}
    for timing in interpreter.read_timings():
        kind = type(interpreter.program.instructions[timing.start])
        if kind in seconds:
            seconds[kind].append(timing.stop_s - timing.start_s)
    first_s, *later_s = seconds[Backward]
    accumulate_s = fmean(later_s) - first_s if later_s else 0.0
    return StepTimes(
        fmean(seconds[Forward]), first_s, accumulate_s, sum(seconds[Update]), total - sum(map(sum, seconds.values()))
    )


def time_warm_step(interpreter: Interpreter, batches: MicrobatchSource, clock: Clock) -> StepTimes:
    """Run two steps and return the times of the second, which finds the caches warm."""
    time_step(interpreter, batches, clock)
    return time_step(interpreter, batches, clock)


def time_layers(harness: ProfileHarness, batches: MicrobatchSource, clock: Clock) -> LayerTimes:
    """Run all layers with split backwards, then two microbatches forward and backward; each in its own call."""
    separate, split = harness.separate, harness.split_backward
    blocks, watch = sorted(separate.by_first), Stopwatch(clock)
    last_first = blocks[::-1]
    _time_forwards(harness, split, batches, watch)
    inputs = watch.time_all(partial(split.backward_input, block, block, 0) for block in last_first)
    weights = watch.time_all(partial(split.backward_weight, block, block, 0) for block in last_first)
    forwards = _time_forwards(harness, separate, batches, watch)
    backwards = watch.time_all(partial(separate.backward, block, block, 0) for block in last_first)
    for block in blocks:
        separate.forward(block, block, 1)
    second_backwards = watch.time_all(partial(separate.backward, block, block, 1) for block in last_first)
    harness.layers.store.clear_grads()
    seconds = watch.read()
    backward_s, second_backward_s, input_s, weight_s = (
        seconds[times][::-1] for times in (backwards, second_backwards, inputs, weights)
    )
    return LayerTimes(seconds[forwards], backward_s, second_backward_s, input_s, weight_s)


def _time_forwards(
    harness: ProfileHarness, compute: SegmentExecutor, batches: MicrobatchSource, watch: Stopwatch
) -> slice:
    """Begin a step and run all layers forward; return where the seconds of each are."""
    harness.layers.store.clear_grads()
    harness.layers.store.begin_step()
    compute.begin_step(batches, LossFactors(dict.fromkeys(range(len(batches.sizes)), 1.0)))
    return watch.time_all(partial(compute.forward, block, block, 0) for block in sorted(compute.by_first))


def _time_updates(
    harness: ProfileHarness, batches: MicrobatchSource, clock: Clock, repeat_policy: RepeatPolicy
) -> tuple[list[float], float]:
    """Return the seconds of updates in two calls, and of all in one."""
    interpreter = harness.layers
    units = tuple(interpreter.store.units)
    halves = [half for half in (units[: len(units) // 2], units[len(units) // 2 :]) if half]

    def update(groups: Sequence[tuple[Unit, ...]]) -> list[float]:
        watch = Stopwatch(clock)
        _time_forwards(harness, harness.separate, batches, watch)
        for block in reversed(range(harness.num_layers)):
            harness.separate.backward(block, block, 0)
        for unit in interpreter.computed_units:
            interpreter.store.units[unit].fill_missing_grads()
        updates = watch.time_all(partial(interpreter.update, group) for group in groups)
        return watch.read()[updates]

    repetitions = repeat_policy.repeat(lambda: (*update(halves), *update([units])))
    *split_s, whole_s = column_medians(repetitions)
    return split_s, whole_s


def _time_grad_accumulation(params: Sequence[nn.Parameter], clock: Clock, repeat_policy: RepeatPolicy) -> float:
    """Return the seconds of adding a gradient of all parameters to another one."""
    accumulated, new = ([torch.zeros_like(param) for param in params if param.requires_grad] for _ in range(2))

    def add() -> None:
        for target, grad in zip(accumulated, new, strict=True):
            target.add_(grad)

    def time_once() -> float:
        watch = Stopwatch(clock)
        watch.time_all([add])
        return watch.read()[0]

    return median(repeat_policy.repeat(time_once))


def _median_step(steps: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(*column_medians([astuple(step) for step in steps]))
