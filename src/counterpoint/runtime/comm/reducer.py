"""Gradient reductions that overlap with the backward that computes the gradients, bucket by bucket.

The program determines which reductions may overlap with which backward; this module decides when, as DDP's Reducer.
In the first step, every reduction runs where its instruction is, and each rank records the order in which gradients
become ready. From then on the order of the group's first member is used by all: gradients are assigned to buckets in
this order, and a bucket's reduction starts as soon as it and all buckets before it are complete. So all members start
them in the same order, also if their own gradients are ready in another order::

    backward   |  g5   g4   g3   g2   g1   g0  |
    buckets    [  0:  g5 g4  ][ 1: g3 g2 ][ 2 ]         in the order of the first member            (1)
    ready           x    x        x  x                  on_grad counts down num_waiting             (2)
    started              '--0--->    '--1---->          reductions run while backward continues     (3)
    start_remaining                            '--2->   at the instruction: the rest                (4)
    wait                                          '-->  at its wait instruction: all of them        (5)

From the interpreter's call of autograd to a collective::

    Interpreter.execute(BackwardRun)            the instructions that may overlap come with the call
      BackwardOverlap.overlap_backward          one reducer for each group of ranks
        Reducer.overlap_backward                hooks are active while backward runs
          Reducer.on_grad                       (2)
            Reducer.start_bucket                (3), through start_ranges
              FlatGrads.start_range_reduce      all_reduce or reduce_scatter, as the instruction says
    RankCommunication.start, wait               at the instructions: (4), (5)

A bucket is a set of ranges in flat gradients. Small gradients are copied there when their bucket is complete, large
ones as soon as they are ready: also those of large matrices, which the backward writes into the flat gradient without a
``.grad``, since torch calls the hook of a parameter all the same. How often a parameter gets a gradient in one backward
is known from earlier backwards; one more after its reduction has started is an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from counterpoint.device.accelerator import Event
from counterpoint.device.event_clock import DeviceSpan, EventClock
from counterpoint.device.host import HostAccelerator
from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.program.instruction import Collective, TensorRef
from counterpoint.program.text import format_tensor_ref
from counterpoint.runtime.comm.bucket_plan import (
    BucketAssignment,
    BucketPlan,
    ElementRange,
    GradSize,
    merge_ranges,
    subtract_ranges,
)
from counterpoint.runtime.kernels.weight_grad import without_torch_function
from counterpoint.runtime.params.flat_grads import CombinedWork
from counterpoint.runtime.params.flat_layout import ParamSlot, is_small
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.strategies.buckets import BucketConfig

GradHook: TypeAlias = Callable[[Tensor], None]

ClockFn: TypeAlias = Callable[[], float]

NO_BUCKET = -1
"""Bucket of a gradient that is reduced at its instruction only."""


class Reducer:
    """The reductions over one group of ranks that may overlap with one backward of a program.

    Args:
        instructions: the reductions.
        fabric: this rank's connection to the others.
        store: has the gradients.
        bucket_sizes: from the plan.
    """

    def __init__(
        self, instructions: Sequence[Collective], fabric: Fabric, store: ParamStore, bucket_sizes: BucketConfig
    ) -> None:
        self.instructions = tuple(instructions)
        self.fabric = fabric
        self.reductions = list(_find_reductions(instructions, store))
        self.grad_slots = [
            GradSlot(reduction, slot, not is_small(slot, reduction.flat_params.layout))
            for reduction in self.reductions
            for slot in reduction.flat_params.layout.slots
            if slot.name not in reduction.flat_params.own_grads.rows.slots
            and reduction.flat_params.params[slot.name].requires_grad
        ]
        self.expected_grad_counts = [0] * len(self.grad_slots)  # of each in one backward, from earlier ones
        grad_sizes = [GradSize(grad_slot.reduction.index, grad_slot.num_bytes) for grad_slot in self.grad_slots]
        label = " ".join(format_tensor_ref(instruction.tensor) for instruction in instructions)
        self.bucket_plan = BucketPlan(fabric, instructions[0].group, bucket_sizes, grad_sizes, label)
        self.bucket_of: list[int] = []  # of each gradient slot, or NO_BUCKET
        self.progress = self.new_progress()
        self.clock: ClockFn | None = None
        self.timed_reductions: list[TimedReduction] = []
        self.grad_hooks = ToggledGradHooks(
            [grad_slot.reduction.flat_params.params[grad_slot.slot.name] for grad_slot in self.grad_slots],
            [partial(self.on_grad, index) for index in range(len(self.grad_slots))],
        )

    @property
    def is_enabled(self) -> bool:
        """Whether this reducer sums gradients; those in shared memory are summed where they are needed."""
        return not any(reduction.flat_params.grads.is_shared for reduction in self.reductions)

    def new_progress(self) -> BackwardProgress:
        """Return the progress of a backward that begins now."""
        assignment, count = self.bucket_plan.assignment, len(self.grad_slots)
        self.bucket_of = [NO_BUCKET] * count
        for bucket, indices in enumerate(assignment):
            for index in indices:
                self.bucket_of[index] = bucket
        return BackwardProgress(
            assignment, [len(indices) for indices in assignment], [0] * count, [math.nan] * count, time.perf_counter()
        )

    @contextmanager
    def overlap_backward(self, clock: ClockFn | None) -> Iterator[None]:
        """Start buckets while backward runs inside."""
        self.progress, self.clock = self.new_progress(), clock
        self.timed_reductions.clear()
        with self.grad_hooks.enabled():
            yield
        self.expected_grad_counts = list(map(max, self.expected_grad_counts, self.progress.grad_counts))

    def on_grad(self, index: int, _: Tensor) -> None:
        """Count a gradient that autograd has put on a parameter, and start buckets that are now complete.

        Raises:
            DataError: its reduction has already started.
        """
        progress = self.progress
        # (2): a bucket may start only after its last gradient, which earlier backwards have shown
        progress.grad_counts[index] = count = progress.grad_counts[index] + 1
        progress.ready_s[index] = time.perf_counter() - progress.start_s
        if self.clock is not None:
            for timed in self.timed_reductions:
                timed.poll(self.clock)
        expected, bucket = self.expected_grad_counts[index], self.bucket_of[index]
        is_known, is_last = expected > 0, count >= expected
        if bucket == NO_BUCKET or not is_known or not is_last:
            return
        if bucket < progress.num_started:
            raise DataError(
                f"{self.grad_slots[index].slot.name} got gradient {count} of one backward after its reduction had "
                f"started, because no earlier backward gave it more than {expected}; a reduction that overlaps with "
                "backward must know which gradient is the last: set passes=(), so that reductions start after backward"
            )
        if count == expected:
            progress.num_waiting[bucket] -= 1
        if self.grad_slots[index].is_large or (bucket == progress.num_started and progress.num_waiting[bucket] == 0):
            with without_torch_function():
                grad_slot = self.grad_slots[index]
                if grad_slot.is_large:
                    grad_slot.reduction.flat_params.own_grads.collect(grad_slot.slot)
                self._start_complete_buckets()

    def _start_complete_buckets(self) -> None:
        """Start the next buckets, up to the first that still waits for a gradient."""
        progress = self.progress
        # (3): in order, so that all members start the same buckets in the same order
        while progress.num_started < len(progress.assignment) and progress.num_waiting[progress.num_started] == 0:
            self.start_bucket()

    def start_bucket(self) -> None:
        """Copy the small gradients of the next bucket, and start it."""
        grad_slots = [self.grad_slots[index] for index in self.progress.assignment[self.progress.num_started]]
        self.progress.num_started += 1
        grad_slots[0].reduction.flat_params.own_grads.collect_many([grad_slot.slot for grad_slot in grad_slots])
        self.start_ranges(
            grad_slots[0].reduction,
            merge_ranges((grad_slot.slot.start, grad_slot.slot.stop) for grad_slot in grad_slots),
        )

    def start_ranges(self, reduction: FlatGradReduction, ranges: Sequence[ElementRange]) -> None:
        """Start to reduce some ranges of a flat gradient."""
        progress, start_s = self.progress, self.clock() if self.clock is not None else 0.0
        grads, instruction = reduction.flat_params.own_grads, reduction.instruction
        flat, label = grads.buffer(), reduction.label
        with nullcontext(()) if self.clock is None else self.fabric.record_spans() as spans:
            works = [
                grads.start_range_reduce(self.fabric, instruction, label, flat[start:stop], start)
                for start, stop in ranges
            ]
        progress.ranges.setdefault(reduction.index, []).extend(ranges)
        progress.works.setdefault(reduction.index, []).extend(works)
        if self.clock is not None and works:
            self.timed_reductions.append(TimedReduction(instruction, works, start_s, spans))

    def start_remaining(self, instruction: Collective) -> Iterator[tuple[FlatParams, Work, Collective]]:
        """Start the rest of a reduction at its instruction; yield all of it that is in flight."""
        progress = self.progress
        if not progress.is_done:  # (4), once for all reductions of this reducer
            progress.is_done = True
            for reduction in self.reductions:
                reduction.flat_params.own_grads.collect_all()
            while progress.num_started < len(progress.assignment):
                self.start_bucket()
            self.bucket_plan.start_sync(progress.ready_s)
        for reduction in self.reductions:
            if reduction.instruction == instruction:
                grads = reduction.flat_params.own_grads
                dense = grads.rows.dense_ranges(0, grads.layout.num_elements)
                self.start_ranges(reduction, list(subtract_ranges(dense, progress.ranges.get(reduction.index, []))))
                works = progress.works.pop(reduction.index)  # each keeps the memory of the whole gradient
                yield reduction.flat_params, CombinedWork(works), instruction

    def wait(self, instruction: Collective) -> None:
        """Finish the group's synchronization; with a clock, record when each part of the reduction is complete."""
        for timed in self.timed_reductions:
            if timed.instruction.tensor == instruction.tensor and self.clock is not None:
                for work in timed.works:
                    work.wait()
                timed.stop_s = self.clock() if math.isnan(timed.stop_s) else timed.stop_s
        self.bucket_plan.finish_sync()


def _find_reductions(instructions: Sequence[Collective], store: ParamStore) -> Iterator[FlatGradReduction]:
    index = 0
    for instruction in instructions:
        label = format_tensor_ref(instruction.tensor)
        for dtype_index, flat_params in enumerate(store.units[instruction.tensor.blocks].flat_params):
            name = f"{label}[{dtype_index}]" if dtype_index else label
            yield FlatGradReduction(instruction, flat_params, index, name)
            index += 1


@dataclass(slots=True)
class BackwardProgress:
    """Progress of one backward; updated with every gradient.

    Args:
        assignment: its buckets.
        num_waiting: for each bucket the number of gradients it waits for.
        grad_counts: for each gradient slot how many gradients it got.
        ready_s: time of the last one; nan for never.
        start_s: time of the start of backward.
        num_started: buckets that have been started, in order.
        works: of these buckets, by the index of the :class:`FlatGradReduction`.
        ranges: what they reduce, likewise.
        is_done: whether everything has been started.
    """

    assignment: BucketAssignment
    num_waiting: list[int]
    grad_counts: list[int]
    ready_s: list[float]
    start_s: float
    num_started: int = 0
    works: dict[int, list[Work]] = field(default_factory=dict)
    ranges: dict[int, list[ElementRange]] = field(default_factory=dict)
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class GradSlot:
    """A parameter whose gradient may be reduced during backward.

    Args:
        reduction: of the flat gradient that its gradient is a part of.
        slot: its position there.
        is_large: whether it is copied there alone.
    """

    reduction: FlatGradReduction
    slot: ParamSlot
    is_large: bool

    @property
    def num_bytes(self) -> int:
        """Size of the gradient."""
        return (self.slot.stop - self.slot.start) * self.reduction.flat_params.layout.held_dtype.itemsize


@dataclass(frozen=True, slots=True)
class FlatGradReduction:
    """The reduction of one flat gradient, of one dtype of a unit, which buckets are parts of.

    Args:
        instruction: says all-reduce or reduce-scatter, and over which ranks.
        flat_params: whose gradient it is.
        index: among those of the reducer.
        label: of its collectives.
    """

    instruction: Collective
    flat_params: FlatParams
    index: int
    label: str


@dataclass(slots=True)
class TimedReduction:
    """What was started at once, where times are measured: when it started, and was seen to be complete.

    On a device these are times of the host, and ``spans`` tell when it executes them.
    """

    instruction: Collective
    works: Sequence[Work]
    start_s: float
    spans: Sequence[DeviceSpan] = ()
    stop_s: float = math.nan

    def poll(self, clock: ClockFn) -> None:
        """Record the current time if they are complete."""
        if math.isnan(self.stop_s) and all(work.is_complete for work in self.works):
            self.stop_s, self.works = clock(), ()


class BackwardOverlap:
    """All reducers of a rank; the interpreter enters :meth:`overlap_backward` around a backward.

    Args:
        fabric: this rank's connection to the others.
        store: has the gradients.
        bucket_sizes: from the plan.
    """

    def __init__(self, fabric: Fabric, store: ParamStore, bucket_sizes: BucketConfig) -> None:
        self.fabric = fabric
        self.store = store
        self.bucket_sizes = bucket_sizes
        self.reducers: dict[tuple[Collective, ...], list[Reducer]] = {}
        self.active: dict[TensorRef, Reducer] = {}
        self.clock: EventClock | None = None  # of steps that try bucket sizes, once there is one

    @contextmanager
    def overlap_backward(self, instructions: tuple[Collective, ...], clock: ClockFn | None) -> Iterator[None]:
        """Allow these reductions to start during the backward that runs inside."""
        if instructions not in self.reducers:
            groups = dict.fromkeys(instruction.group for instruction in instructions)
            self.reducers[instructions] = [
                Reducer(
                    [instruction for instruction in instructions if instruction.group == group],
                    self.fabric,
                    self.store,
                    self.bucket_sizes,
                )
                for group in groups
            ]
        with ExitStack() as stack:
            for reducer in self.reducers[instructions]:
                if reducer.is_enabled:
                    self.active.update((instruction.tensor, reducer) for instruction in reducer.instructions)
                    stack.enter_context(reducer.overlap_backward(clock))
            yield

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Record the time of the step that runs inside, for reducers that try bucket sizes."""
        tuning = [
            reducer.bucket_plan
            for reducers in self.reducers.values()
            for reducer in reducers
            if reducer.bucket_plan.is_tuning
        ]
        self.active.clear()
        if not tuning:
            yield
            return
        if self.clock is None:
            self.clock = EventClock(self.store.accelerator or HostAccelerator())
        began = self.clock()
        yield
        step_time = partial(read_span, self.clock, began, self.clock())
        for bucket_plan in tuning:
            bucket_plan.autotuner.record(step_time)

    def wait(self, instruction: Collective) -> None:
        """Wait for a reducer's synchronization, before the wait for its reduction."""
        reducer = self.active.pop(instruction.tensor, None)
        if reducer is not None:
            reducer.wait(instruction)

    def timed_reductions(self) -> list[TimedReduction]:
        """Return the overlapped reductions of the last step, if there was a clock."""
        return [
            timed for reducers in self.reducers.values() for reducer in reducers for timed in reducer.timed_reductions
        ]


def read_span(clock: EventClock, began: Event, ended: Event) -> float:
    """Return the seconds of a device from one event to another; wait for it if necessary."""
    began_s, ended_s = clock.read([began, ended])
    return ended_s - began_s


class ToggledGradHooks:
    """Post-accumulate-grad hooks on some parameters, active only inside :meth:`enabled`.

    Registering and removing a hook takes longer than a small gradient: this registers each once, and then writes it to
    and removes it from its place in the parameter's hook dictionary.

    Args:
        params: they have no hook outside of :meth:`enabled`.
        hooks: one for each.

    Example:
        >>> import torch
        >>> param, grads = nn.Parameter(torch.ones(2)), []
        >>> grad_hooks = ToggledGradHooks([param], [lambda param: grads.append(param.grad.tolist())])
        >>> with grad_hooks.enabled():
        ...     param.sum().backward()
        >>> param.sum().backward()
        >>> grads
        [[1.0, 1.0]]
    """

    def __init__(self, params: Sequence[nn.Parameter], hooks: Sequence[GradHook]) -> None:
        self._entries = [_register(param, hook) for param, hook in zip(params, hooks, strict=True)]
        self._disable()

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Activate the hooks inside."""
        for entry in self._entries:
            entry.hooks[entry.number] = entry.hook
        try:
            yield
        finally:
            self._disable()

    def _disable(self) -> None:
        for entry in self._entries:
            entry.hooks.pop(entry.number, None)


class _HookEntry(NamedTuple):
    hooks: MutableMapping[int, GradHook]  # all hooks of the parameter, by number
    number: int  # of this one
    hook: GradHook


def _register(param: Any, hook: GradHook) -> _HookEntry:  # noqa: ANN401 - torch's stubs omit these members
    handle = param.register_post_accumulate_grad_hook(hook)
    return _HookEntry(param._post_accumulate_grad_hooks, handle.id, hook)  # noqa: SLF001 - it has no public name
