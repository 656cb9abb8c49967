"""How much memory stays from the forward of each piece to its backward.

Seconds and bytes of every piece of a model, measured on real tensors as the runtime runs them.

Pieces are timed one by one, in the order in which a step comes to them, each in a call of its own. A stage runs its
blocks in one call; so the cost of a call is taken off, and what is left is brought to what all pieces take in one call.
The model as it is, which plans that cut nothing run, is timed in whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from statistics import fmean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from counterpoint.model.model_profile import (
    BatchSizeProfile,
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
from counterpoint.profiler.timer import Clock, RepeatPolicy, column_medians, device_clock, training_conditions
from counterpoint.program.instruction import Backward, Forward, Instruction, Update
from counterpoint.runtime.autograd.segment_executor import SegmentExecutor
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.microbatches import LossWeights, MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec


def saved_activation_bytes(compute: SegmentExecutor, batches: MicrobatchSource) -> list[int]:
    """Return for each function of a rank the bytes that its forward leaves behind for backwards.

    Parameters, buffers and the batch are there anyhow; what several functions keep counts for the first.

    Args:
        compute: whose functions are run.
        feed: whose first microbatch is run.
    """
    owned = (compute.store.params, compute.store.buffers, batches.inputs(0), batches.targets(0))
    seen = storage_sizes(owned)
    compute.begin_step(batches, LossWeights({0: 1.0}))
    found = []
    for first, (stop, _) in sorted(compute.by_first.items()):
        fresh: dict[int, int] = {}

        def note(tensor: Tensor, into: dict[int, int] = fresh) -> Tensor:
            into.update(storage_sizes(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, _identity):
            compute.forward(first, stop - 1, 0)
        fresh.update(storage_sizes([kept.value for kept in compute.values.values()]))
        found.append(sum(size for address, size in fresh.items() if address not in seen))
        seen.update(fresh)
    compute.clear()
    return found


def _identity(tensor: Tensor) -> Tensor:
    return tensor


NUM_LAYERS, WIDTH = 8, 4
"""The model that shows what calls cost: so small that it takes nothing else."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step on one rank: a microbatch forward, the first backward, what later ones take more, the rest.

    The update is one call, and so are a forward and a backward.
    """

    forward_s: float
    backward_s: float
    grad_accumulate_s: float
    update_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of each piece in a call of its own: forward, backward, a second one, and the two parts of a backward."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    second_backward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]


def measure_model(
    target: ProfileTarget, device: str, *, samples: Sequence[int], threads: int, repeat_policy: RepeatPolicy
) -> ModelProfile:
    """Return how long the pieces of a model take; the model stays as it is.

    Args:
        subject: what is timed.
        device: its name.
        samples: sizes of microbatches.
        threads: to compute with.
        effort: for each size, how often.

    Cost:
        For each size eleven microbatches forward and backward times the repetitions, two more where batch norm keeps
        statistics, and memory for two more copies of its parameters.
    """
    sizes = sorted(set(samples))
    with training_conditions(threads):
        bench, clock = build_harness(target, sizes[0]), device_clock(target.device)
        calls = measure_call_overheads(target.device, repeat_policy)
        found = [_measure_batch_size(bench, target, size, calls, repeat_policy) for size in sizes]
        split_s, whole_s = _time_updates(bench, target.batches(sizes[0]), clock, repeat_policy)
        add_s = _time_grad_accumulation(list(bench.layers.store.params.values()), clock, repeat_policy)
    update_s = median(step.update_s for _, step, _ in found)
    fixed_s = max(0.0, min(sum(split_s) - whole_s, *split_s, update_s)) if len(split_s) > 1 else 0.0
    weights = param_sizes(target.spec)
    return ModelProfile(
        model=type(target.model).__name__,
        layers=layer_keys(target.spec),
        params=weights,
        profiled_on=ProfiledOn(device, threads, target.optimizer_spec.optimizer_class.__name__),
        batch_sizes=tuple(point for point, _, _ in found),
        update_s_per_byte=(update_s - fixed_s) / sum(size for _, size in weights),
        add_s_per_byte=add_s / sum(size for _, size in weights),
        overheads=Overheads(
            calls.forward_s,
            calls.backward_s,
            fixed_s,
            median(step.overhead_s for _, step, _ in found),
            median(alone.overhead_s for _, _, alone in found),
        ),
    )


def measure_call_overheads(device: torch.device, repeat_policy: RepeatPolicy) -> Overheads:
    """Return what a call costs beside its work: what many layers take in a call each more than in one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).to(device)
    face = OptimizerSpec(partial(optim.SGD, lr=0.0), dict(model.named_parameters()))
    inputs, targets = torch.zeros(1, WIDTH, device=device), torch.zeros(1, WIDTH, device=device)
    cut = partition_model(model, (inputs,), granularity="blocks")
    tiny = ProfileTarget(model, cut, cut.spec, F.mse_loss, face, (inputs, targets))
    bench, feed, clock = build_harness(tiny, 1), tiny.batches(1), device_clock(device)
    rows = repeat_policy.repeat(lambda: (time_step(bench.layers, feed, clock), time_layers(bench, feed, clock)))
    forward_s = median(sum(lap.forward_s) - step.forward_s for step, lap in rows)
    backward_s = median(sum(lap.backward_s) - step.backward_s for step, lap in rows)
    return Overheads(max(forward_s, 0.0) / (NUM_LAYERS - 1), max(backward_s, 0.0) / (NUM_LAYERS - 1))


def _measure_batch_size(
    bench: ProfileHarness, target: ProfileTarget, samples: int, overheads: Overheads, repeat_policy: RepeatPolicy
) -> tuple[BatchSizeProfile, StepTimes, StepTimes]:
    """Return what microbatches of one size take, and steps of the model as it is, of several and of one."""
    feed, clock = target.batches(samples), device_clock(target.device)
    one = target.batches(samples, 1)

    def turn() -> tuple[StepTimes, StepTimes, StepTimes, LayerTimes]:
        whole = time_warm_step(bench.whole, feed, clock)
        alone = whole if bench.single_microbatch is bench.whole else time_warm_step(bench.single_microbatch, one, clock)
        return whole, alone, time_warm_step(bench.layers, feed, clock), time_layers(bench, feed, clock)

    rows = repeat_policy.repeat(turn)
    wholes, singles, cuts, laps = zip(*rows, strict=True)
    whole, alone, cut = _median_step(wholes), _median_step(singles), _median_step(cuts)
    forward_s, _ = rescale_to([lap.forward_s for lap in laps], overheads.forward_s, cut.forward_s)
    backward_s, factor = rescale_to([lap.backward_s for lap in laps], overheads.backward_s, cut.backward_s)
    input_s = [factor * max(each - overheads.backward_s, 0.0) for each in column_medians([lap.input_s for lap in laps])]
    weight_s = [factor * each for each in column_medians([lap.weight_s for lap in laps])]
    both = zip(
        column_medians([lap.again_s for lap in laps]), column_medians([lap.backward_s for lap in laps]), strict=True
    )
    added_s = [factor * (again - first) for again, first in both]
    sizes = [float(samples * piece.output_bytes) for piece in target.spec.layers]
    kept = map(float, saved_activation_bytes(bench.separate, feed))
    pieces = tuple(map(LayerProfile, forward_s, backward_s, input_s, weight_s, sizes, kept, added_s))
    share = sum(input_s) / (sum(input_s) + sum(weight_s) or 1.0)
    (kept_whole,) = saved_activation_bytes(bench.whole.executor, feed)

    def total(step: StepTimes) -> LayerProfile:
        forward, backward = (
            max(step.forward_s - overheads.forward_s, 0.0),
            max(step.backward_s - overheads.backward_s, 0.0),
        )
        parts = share * backward, (1 - share) * backward
        return LayerProfile(forward, backward, *parts, sizes[-1], float(kept_whole), step.grad_accumulate_s)

    return BatchSizeProfile(samples, pieces, total(whole), total(alone)), whole, alone


def rescale_to(layer_times: Sequence[Sequence[float]], call_s: float, whole_s: float) -> tuple[list[float], float]:
    """Return the seconds of pieces, medians without the call of each, that add up to what one call takes, and a factor.

    Args:
        laps: of each piece, in a call of its own.
        call_s: what a call costs.
        whole_s: all pieces in one call.

    Example:
        >>> brought_to([[3.0, 5.0]], 1.0, 10.0)
        ([3.0, 6.0], 1.5)
    """
    own = [max(each - call_s, 0.0) for each in column_medians(layer_times)]
    factor = max(whole_s - call_s, 0.0) / (sum(own) or 1.0)
    return [factor * each for each in own], factor


def time_step(interpreter: Interpreter, batches: MicrobatchSource, clock: Clock) -> StepTimes:
    """Take a step and return its seconds."""
    interpreter.clock = clock
    began = clock()
    interpreter.step(0, batches, next(reversed(interpreter.programs)))
    total = clock() - began
    taken: dict[type[Instruction], list[float]] = {Forward: [], Backward: [], Update: []}
    for note in interpreter.state.timings:
        kind = type(interpreter.program.instructions[note.start])
        if kind in taken:
            taken[kind].append(note.stop_s - note.start_s)
    first_s, *later_s = taken[Backward]
    added_s = fmean(later_s) - first_s if later_s else 0.0
    return StepTimes(fmean(taken[Forward]), first_s, added_s, sum(taken[Update]), total - sum(map(sum, taken.values())))


def time_warm_step(interpreter: Interpreter, batches: MicrobatchSource, clock: Clock) -> StepTimes:
    """Take two steps and return the seconds of the second, which finds in the caches what the first has left there."""
    time_step(interpreter, batches, clock)
    return time_step(interpreter, batches, clock)


def time_layers(bench: ProfileHarness, batches: MicrobatchSource, clock: Clock) -> LayerTimes:
    """Run all pieces with backwards in two parts, then two microbatches forward and backward; each in its own call."""
    apart, parts = bench.separate, bench.split_backward
    order = sorted(apart.by_first)
    _time_forwards(bench, parts, batches, clock)
    input_s = [_time_call(clock, partial(parts.backward_input, block, block, 0)) for block in reversed(order)]
    weight_s = [_time_call(clock, partial(parts.backward_weight, block, block, 0)) for block in reversed(order)]
    forward_s = _time_forwards(bench, apart, batches, clock)
    backward_s = [_time_call(clock, partial(apart.backward, block, block, 0)) for block in reversed(order)]
    for block in order:
        apart.forward(block, block, 1)
    again_s = [_time_call(clock, partial(apart.backward, block, block, 1)) for block in reversed(order)]
    bench.layers.store.clear_grads()
    return LayerTimes(forward_s, backward_s[::-1], again_s[::-1], input_s[::-1], weight_s[::-1])


def _time_forwards(
    bench: ProfileHarness, compute: SegmentExecutor, batches: MicrobatchSource, clock: Clock
) -> list[float]:
    """Begin a step and run all pieces forward; return the seconds of each."""
    bench.layers.store.clear_grads()
    bench.layers.store.begin_step()
    compute.begin_step(batches, LossWeights(dict.fromkeys(range(len(batches.sizes)), 1.0)))
    return [_time_call(clock, partial(compute.forward, block, block, 0)) for block in sorted(compute.by_first)]


def _time_updates(
    bench: ProfileHarness, batches: MicrobatchSource, clock: Clock, repeat_policy: RepeatPolicy
) -> tuple[list[float], float]:
    """Return the seconds of updates in two calls, if there is something for each, and of all in one."""
    interpreter = bench.layers
    units = tuple(interpreter.store.units)
    halves = [half for half in (units[: len(units) // 2], units[len(units) // 2 :]) if half]

    def update(groups: Sequence[tuple[Unit, ...]]) -> list[float]:
        _time_forwards(bench, bench.separate, batches, clock)
        for block in reversed(range(bench.num_layers)):
            bench.separate.backward(block, block, 0)
        for unit in interpreter.computed_units:
            interpreter.store.units[unit].fill_missing_grads()
        return [_time_call(clock, partial(interpreter.update, group)) for group in groups]

    rows = repeat_policy.repeat(lambda: (*update(halves), *update([units])))
    *split_s, whole_s = column_medians(rows)
    return split_s, whole_s


def _time_grad_accumulation(params: Sequence[nn.Parameter], clock: Clock, repeat_policy: RepeatPolicy) -> float:
    """Return the seconds in which a gradient of all parameters is added to another one."""
    held, fresh = ([torch.zeros_like(param) for param in params if param.requires_grad] for _ in range(2))

    def add() -> None:
        for into, more in zip(held, fresh, strict=True):
            into.add_(more)

    return median(repeat_policy.repeat(partial(_time_call, clock, add)))


def _time_call(clock: Clock, work: Callable[[], object]) -> float:
    began = clock()
    work()
    return clock() - began


def _median_step(steps: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(*column_medians([astuple(one) for one in steps]))
