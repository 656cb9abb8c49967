"""Hooks on gradients of parameters that are there during one backward of each step, put on and taken off at once.

Sums of gradients that begin while the backward goes on which makes them, bucket by bucket.

The program says which sums may begin early; when exactly is seen here. A first step sums as the words say, and looks in
which order gradients become ready. The order that the first member of a group has seen is everybody's from then on: in
this order gradients are put together in buckets, ranges of the flat buffers they lie in, and a bucket's sum is started
as soon as it and all buckets before it are complete. So all members start them in one order, whatever the order of
their own gradients is. What is not complete when the backward is over is started where the word stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

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
from counterpoint.runtime.params.flat_layout import ParamSlot, is_small
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.params.sparse_grads import CombinedWork
from counterpoint.strategies.buckets import BucketConfig

GradHook: TypeAlias = Callable[[Tensor], None]


class _HookEntry(NamedTuple):
    hooks: MutableMapping[int, GradHook]  # all of the parameter's, as torch calls them
    number: int  # that torch has given to this one
    hook: GradHook


class ToggledGradHooks:
    """What hears of every gradient that is put on some parameters, while it listens.

    Registering a hook and removing it takes longer than many a gradient of few numbers: this does so once, and then
    writes the hook to and from its place among the parameter's others.

    Args:
        params: they keep no hook while nothing listens.
        hooks: one for each.

    Example:
        >>> import torch
        >>> param, heard = nn.Parameter(torch.ones(2)), []
        >>> listening = Listening([param], [lambda param: heard.append(param.grad.tolist())])
        >>> with listening.during():
        ...     param.sum().backward()
        >>> param.sum().backward()
        >>> heard
        [[1.0, 1.0]]
    """

    def __init__(self, params: Sequence[nn.Parameter], hooks: Sequence[GradHook]) -> None:
        self._entries = [_register(param, hook) for param, hook in zip(params, hooks, strict=True)]
        self._disable()

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Listen inside."""
        for ear in self._entries:
            ear.hooks[ear.number] = ear.hook
        try:
            yield
        finally:
            self._disable()

    def _disable(self) -> None:
        for ear in self._entries:
            ear.hooks.pop(ear.number, None)


def _register(param: Any, hook: GradHook) -> _HookEntry:  # noqa: ANN401 - torch's stubs leave out these members
    handle = param.register_post_accumulate_grad_hook(hook)
    return _HookEntry(param._post_accumulate_grad_hooks, handle.id, hook)  # noqa: SLF001 - it has no public name


ClockFn: TypeAlias = Callable[[], float]

NO_BUCKET = -1
"""Of a gradient that is summed where the word stands."""


class RangeReducer(Protocol):
    """What sums ranges of a gradient."""

    fabric: Fabric
    store: ParamStore

    def start_range_reduces(
        self, instruction: Collective, flat_params: FlatParams, label: str, ranges: Sequence[ElementRange], flat: Tensor
    ) -> list[Work]:
        """Start to add up ranges of one arena's flat gradient."""


@dataclass(frozen=True, slots=True)
class FlatGrad:
    """One flat gradient of a site.

    Args:
        word: its sum.
        arena: where it lies.
        number: among those of the site.
        label: what it is called between ranks.
    """

    instruction: Collective
    flat_params: FlatParams
    index: int
    label: str


@dataclass(frozen=True, slots=True)
class GradSlot:
    """A parameter whose gradient may be summed early.

    Args:
        flat: in which of a site's flat buffers it lies.
        slot: where in there.
        is_large: whether it moves there by itself.
    """

    flat_grad: FlatGrad
    slot: ParamSlot
    is_large: bool

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return (self.slot.stop - self.slot.start) * self.flat_grad.flat_params.layout.dtype.itemsize


@dataclass(slots=True)
class OverlappedReduce:
    """Sums that were under way, from their start until they were seen complete; changes when they are."""

    instruction: Collective
    works: Sequence[Work]
    start_s: float
    stop_s: float = math.nan

    def poll(self, clock: ClockFn) -> None:
        """Note that they are complete, if they can be seen to be."""
        if math.isnan(self.stop_s) and all(work.is_complete for work in self.works):
            self.stop_s = clock()


@dataclass(slots=True)
class BackwardProgress:
    """How far a backward is; changes with every gradient.

    Args:
        cut: its buckets.
        left: for each bucket how many gradients it waits for.
        seen: for each place how often a gradient was put on it.
        ready_s: when that was the last time; nan for never.
        num_begun: buckets that have been started, the first ones.
        works: of these, by flat gradient.
        ranges: what they sum, by flat gradient.
        is_over: whether all that can be has been started.
    """

    assignment: BucketAssignment
    num_waiting: list[int]
    hits: list[int]
    ready_s: list[float]
    start_s: float
    num_started: int = 0
    works: dict[int, list[Work]] = field(default_factory=dict)
    ranges: dict[int, list[ElementRange]] = field(default_factory=dict)
    is_done: bool = False


class Reducer:
    """One backward of a row, and the sums of one group that may begin during it.

    Args:
        words: the sums.
        summing: what sums ranges.
        sizes: how large buckets are, as the plan says.
    """

    def __init__(
        self, instructions: Sequence[Collective], range_reducer: RangeReducer, bucket_sizes: BucketConfig
    ) -> None:
        self.instructions = tuple(instructions)
        self.range_reducer = range_reducer
        self.flat_grads = list(_find_flat_grads(instructions, range_reducer.store))
        self.grad_slots = [
            GradSlot(flat, slot, not is_small(slot, flat.flat_params.layout))
            for flat in self.flat_grads
            for slot in flat.flat_params.layout.slots
            if slot.name not in flat.flat_params.sparse_grads.slots and flat.flat_params.params[slot.name].requires_grad
        ]
        self.expected_hits = [0] * len(self.grad_slots)  # how often a gradient is put on each in one backward
        weighed = [GradSize(place.flat_grad.index, place.num_bytes) for place in self.grad_slots]
        label = " ".join(format_tensor_ref(word.tensor) for word in instructions)
        self.bucket_plan = BucketPlan(range_reducer.fabric, instructions[0].group, bucket_sizes, weighed, label)
        self.bucket_of: list[int] = []  # for each place, or that it has none
        self.progress = self.new_progress()
        self.clock: ClockFn | None = None
        self.reduces: list[OverlappedReduce] = []
        self.grad_hooks = ToggledGradHooks(
            [place.flat_grad.flat_params.params[place.slot.name] for place in self.grad_slots],
            [partial(self.on_grad, at) for at in range(len(self.grad_slots))],
        )

    @property
    def is_enabled(self) -> bool:
        """Whether gradients are summed at all: in memory in common, they are not."""
        return all(flat.flat_params.shared is None for flat in self.flat_grads)

    def new_progress(self) -> BackwardProgress:
        """Return how far a backward is that has just begun."""
        cut, count = self.bucket_plan.assignment, len(self.grad_slots)
        self.bucket_of = [NO_BUCKET] * count
        for bucket, places in enumerate(cut):
            for at in places:
                self.bucket_of[at] = bucket
        return BackwardProgress(
            cut, [len(places) for places in cut], [0] * count, [math.nan] * count, time.perf_counter()
        )

    @contextmanager
    def overlapping(self, clock: ClockFn | None) -> Iterator[None]:
        """Buckets are started while the backward goes on inside."""
        self.progress, self.clock = self.new_progress(), clock
        self.reduces.clear()
        with self.grad_hooks.enabled():
            yield
        self.expected_hits = list(map(max, self.expected_hits, self.progress.hits))

    def on_grad(self, at: int, _: Tensor) -> None:
        """A gradient has been put on a parameter; a bucket that waited for it alone is started.

        Raises:
            DataError: its sum has begun without it.
        """
        now = self.progress
        now.hits[at] = seen = now.hits[at] + 1
        now.ready_s[at] = time.perf_counter() - now.start_s
        if self.clock is not None:
            for transfer in self.reduces:
                transfer.poll(self.clock)
        often, bucket = self.expected_hits[at], self.bucket_of[at]
        if bucket == NO_BUCKET or not 0 < often <= seen:
            return
        if bucket < now.num_started:
            raise DataError(
                f"{self.grad_slots[at].slot.name} got gradient number {seen} of one backward after its sum had begun, "
                f"because in no backward before it got more than {often}; a sum that begins early has to "
                "know which one is the last: give passes=(), so that sums begin after the backward"
            )
        now.num_waiting[bucket] -= seen == often
        if self.grad_slots[at].is_large or (bucket == now.num_started and now.num_waiting[bucket] == 0):
            with without_torch_function():
                self._collect(self.grad_slots[at])

    def _collect(self, grad_slot: GradSlot) -> None:
        """Move a gradient that is too large to wait for others, and start the buckets that are complete."""
        if grad_slot.is_large:
            grad_slot.flat_grad.flat_params.collect_grad(grad_slot.slot)
        now = self.progress
        while now.num_started < len(now.assignment) and now.num_waiting[now.num_started] == 0:
            self.start_bucket()

    def start_bucket(self) -> None:
        """Start the next bucket, whose gradients are there; the small ones go to their flat buffer together."""
        places = [self.grad_slots[at] for at in self.progress.assignment[self.progress.num_started]]
        self.progress.num_started += 1
        places[0].flat_grad.flat_params.collect_many_grads([place.slot for place in places])
        self.start_ranges(places[0].flat_grad, merge_ranges((place.slot.start, place.slot.stop) for place in places))

    def start_ranges(self, flat_grad: FlatGrad, ranges: Sequence[ElementRange]) -> None:
        """Start to add up some ranges of a flat gradient."""
        now, began_s = self.progress, self.clock() if self.clock is not None else 0.0
        works = self.range_reducer.start_range_reduces(
            flat_grad.instruction, flat_grad.flat_params, flat_grad.label, ranges, flat_grad.flat_params.grad_buffer()
        )
        now.ranges.setdefault(flat_grad.index, []).extend(ranges)
        now.works.setdefault(flat_grad.index, []).extend(works)
        if self.clock is not None and works:
            self.reduces.append(OverlappedReduce(flat_grad.instruction, works, began_s))

    def start_remaining(self, instruction: Collective) -> Iterator[tuple[FlatParams, Work, Collective]]:
        """Start what is left of a sum where it stands in the row; yield what is under way of it."""
        now = self.progress
        if not now.is_done:
            now.is_done = True
            for flat in self.flat_grads:
                flat.flat_params.collect_flat_grad()
            while now.num_started < len(now.assignment):
                self.start_bucket()
            self.bucket_plan.start_sync(now.ready_s)
        for flat in self.flat_grads:
            if flat.instruction == instruction:
                strewn = flat.flat_params.sparse_grads
                if strewn.slots:
                    strewn.all_gather(self.range_reducer.fabric, instruction.group, flat.label, reduced_already=False)
                dense = strewn.dense_ranges(0, flat.flat_params.layout.num_elements)
                self.start_ranges(flat, list(subtract_ranges(dense, now.ranges.get(flat.index, []))))
                yield flat.flat_params, CombinedWork(now.works[flat.index]), instruction

    def wait(self, instruction: Collective) -> None:
        """What the group has agreed on is known; with a clock, also when the parts of the sum were complete."""
        for transfer in self.reduces:
            if transfer.instruction.tensor == instruction.tensor and self.clock is not None:
                for work in transfer.works:
                    work.wait()
                transfer.stop_s = self.clock() if math.isnan(transfer.stop_s) else transfer.stop_s
        self.bucket_plan.finish_sync()


def _find_flat_grads(instructions: Sequence[Collective], store: ParamStore) -> Iterator[FlatGrad]:
    number = 0
    for word in instructions:
        label = format_tensor_ref(word.tensor)
        for index, arena in enumerate(store.units[word.tensor.blocks].flat_params):
            yield FlatGrad(word, arena, number, f"{label}[{index}]" if index else label)
            number += 1


class BackwardOverlap:
    """All sums of a rank that may begin early.

    Args:
        summing: what sums ranges.
        sizes: how large buckets are, as the plan says.
    """

    def __init__(self, range_reducer: RangeReducer, bucket_sizes: BucketConfig) -> None:
        self.range_reducer = range_reducer
        self.bucket_sizes = bucket_sizes
        self.reducers: dict[tuple[Collective, ...], list[Reducer]] = {}
        self.active: dict[TensorRef, Reducer] = {}

    @contextmanager
    def overlapping(self, instructions: tuple[Collective, ...], clock: ClockFn | None) -> Iterator[None]:
        """These sums may begin during the backward inside."""
        if instructions not in self.reducers:
            groups = dict.fromkeys(word.group for word in instructions)
            self.reducers[instructions] = [
                Reducer([word for word in instructions if word.group == group], self.range_reducer, self.bucket_sizes)
                for group in groups
            ]
        with ExitStack() as stack:
            for site in self.reducers[instructions]:
                if site.is_enabled:
                    self.active.update((word.tensor, site) for word in site.instructions)
                    stack.enter_context(site.overlapping(clock))
            yield

    @contextmanager
    def time_step(self) -> Iterator[None]:
        """Tell those who try sizes of buckets how long the step inside takes."""
        trying = [site.bucket_plan for sites in self.reducers.values() for site in sites if site.bucket_plan.is_tuning]
        self.active.clear()
        began = time.perf_counter()
        yield
        for agreement in trying:
            agreement.autotuner.record(time.perf_counter() - began)

    def clear(self) -> None:
        """Forget all sums, and in which order and in what buckets they begin."""
        self.reducers.clear()
        self.active.clear()

    def wait(self, instruction: Collective) -> None:
        """A sum is about to be waited for."""
        site = self.active.pop(instruction.tensor, None)
        if site is not None:
            site.wait(instruction)

    def reduces(self) -> list[OverlappedReduce]:
        """Return the sums of the last step that were under way while there was a clock."""
        return [transfer for sites in self.reducers.values() for site in sites for transfer in site.reduces]
