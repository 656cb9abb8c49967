"""Run one rank's program on real tensors, instruction by instruction.

The interpreter knows instructions and nothing else: which strategy wrote the program is not visible here.
:class:`Interpreter` owns the parts of a rank and passes each call to one of them::

    LoweredProgram --fuse--> calls --execute--> SegmentExecutor      forwards, recomputation, backwards     (1)
                                           |--> RankCommunication    sends, receives, collectives           (2)
                                           |--> ParameterServerLoop  pushes of workers, on servers          (3)
                                           |--> commit               step report -> all-gather -> result    (4)
                                           '--> ParamStore           optimizer updates                      (5)

A rank updates only after its commit (4), so a step that fails before it changes nothing: :meth:`Interpreter.rollback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.copy_stream import CopyStream
from counterpoint.device.event_clock import DeviceSpan, EventClock
from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.shm.magnitudes import find_magnitudes, magnitude_tensor
from counterpoint.model.spec import Unit
from counterpoint.program.compression import exchanges_momentum
from counterpoint.program.instruction import (
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Offload,
    Pull,
    Push,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
)
from counterpoint.program.recompute_sets import find_recomputed
from counterpoint.program.text import format_tensor_ref
from counterpoint.runtime.autograd.deferred_weight_grad import WeightGradQueue
from counterpoint.runtime.autograd.recompute import mismatch_error
from counterpoint.runtime.autograd.segment_executor import BoundModel, SegmentExecutor
from counterpoint.runtime.batch_copies import BatchCopies, MicrobatchRead
from counterpoint.runtime.batch_norm.mode import BatchNormState
from counterpoint.runtime.busy_time import BusyTimer
from counterpoint.runtime.comm.rank_communication import RankCommunication, peer_pair, set_weights
from counterpoint.runtime.comm.server_loop import ParameterServerLoop, format_push_label
from counterpoint.runtime.commit.device_commit import (
    NUM_HOST_COMMITS,
    DecideStep,
    DeviceLossScale,
    DeviceReport,
    LateResult,
    PendingCommit,
    add_losses,
    add_names,
    decide_on_device,
    first_nonfinite,
    gather_rows,
)
from counterpoint.runtime.commit.replica_check import ReplicaChecksum
from counterpoint.runtime.commit.step_commit import (
    PARTS,
    GivenValues,
    StepGuard,
    StepReport,
    StepResult,
    decide_skips,
    decide_step,
    find_unused_params,
    gather_parts,
    gather_reports,
    has_unusable_grads,
    make_step_report,
    may_overflow,
    require_all_used,
    require_finite,
    warn_partially_unused,
)
from counterpoint.runtime.fusion import (
    ApplyPushesRun,
    BackwardRun,
    CollectiveRun,
    FetchRun,
    ForwardRun,
    FusedCall,
    LoweredProgram,
    OffloadRun,
    RecomputeRun,
    RuntimeCall,
    UpdateRun,
    forward_only,
    fuse,
    shift_call,
)
from counterpoint.runtime.loss.loss_check import LateLossCheck
from counterpoint.runtime.loss.loss_reduction import PartTotal
from counterpoint.runtime.loss.loss_scale import DynamicLossScale, LossScaler
from counterpoint.runtime.microbatches import LossFactors, MicrobatchSource, commit_scope, compute_loss_factors
from counterpoint.runtime.offload.offloaded_inputs import OffloadedInputs
from counterpoint.runtime.optimizer_spec import squared_norm, squared_norm_tensor
from counterpoint.runtime.params.grad_check import DeviceGradReport
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.rank_state import CallTiming, EventTiming, RankState, read_event_timings
from counterpoint.runtime.rng.sample_rng import SampleRNG
from counterpoint.strategies.buckets import BucketConfig

COMMUNICATING_CALLS = frozenset({CollectiveRun, Send, Recv, Push, Pull, ApplyPushesRun})
"""Calls that may wait for other ranks; commits, which wait as well, stop the timer themselves."""


def too_late_to_scale(scale: Tensor | float) -> DataError:
    """Return the error for a factor of summed gradients, where ranks sum momenta."""
    return DataError(
        f"gradients are multiplied with {float(scale):g} after they are summed, as for a mean by weights or a sum over "
        "samples, but ranks with compress=onebit sum momenta; use a loss that is a mean over samples, or omit "
        "compress=onebit"
    )


class Interpreter:
    """One rank's parts, and the loop that runs its program.

    Args:
        programs: the rank's program for every step variant, by name; the last one also defines evaluation.
        model: the functions of the blocks that the rank runs.
        store: the rank's parameters.
        fabric: the rank's connection to the other ranks.
        accelerator: that the rank computes on.
        rng: the rank's random state.
        guard: what is checked before updates.
        computing_ranks: for each parameter the ranks of this rank's commit group that compute with it.
        compressed_contributions: for each group and unit with a compressed all-reduce the microbatches that each member
            contributes.
        buckets: how gradients are grouped for reductions that overlap with backward.
        batch_norm: the rank's batch norm modules; None where the plan changes nothing about them.
        unused_params: what a commit does about parameters without a gradient.
        replica_groups: the groups of ranks whose weights are compared.
        decides_on_device: whether commits may leave their decision on the device; the same on all ranks.

    Attributes:
        offloaded_inputs: where the inputs of blocks that are recomputed are on disk; None if they stay in memory.
    """

    offloaded_inputs: OffloadedInputs | None = None

    def __init__(  # noqa: PLR0913 - the parts of one rank
        self,
        programs: Mapping[str, LoweredProgram],
        *,
        model: BoundModel,
        store: ParamStore,
        fabric: Fabric,
        accelerator: Accelerator,
        rng: SampleRNG,
        guard: StepGuard,
        computing_ranks: Mapping[str, Group],
        compressed_contributions: Mapping[tuple[Group, Unit], Sequence[Sequence[int]]],
        buckets: BucketConfig,
        batch_norm: BatchNormState | None = None,
        unused_params: Literal["error", "zero", "skip"] = "error",
        replica_groups: Sequence[Group] = (),
        decides_on_device: bool = False,
    ) -> None:
        self.programs = {
            name: (program, fuse(program.instructions, program.overlap)) for name, program in programs.items()
        }
        self.program, self.calls = list(self.programs.values())[-1]  # `step` chooses another
        self.forward_calls = fuse(forward_only(self.program.instructions, self.program.microbatches_per_batch))
        self.recompute_sets = {
            name: find_recomputed(program.instructions, program.microbatches_per_batch)
            for name, program in programs.items()
        }
        self.step_number, self.has_warned = 0, False  # of partially unused parameters
        self.given: GivenValues | None = None
        self.stop_signals: Sequence[int] = ()
        self.while_computing: Callable[[], None] | None = None
        self.delays_grads = any(isinstance(instruction, SwapGradBuffers) for instruction in self.program.instructions)
        self.store = store
        self.fabric = fabric
        self.accelerator, self.rng = accelerator, rng
        self.guard, self.decides_on_device = guard, decides_on_device
        self.computing_ranks = computing_ranks
        forwards = [call for call, _, _ in self.calls if isinstance(call, ForwardRun)]
        blocks = {block for forward in forwards for block in range(forward.first, forward.last + 1)}
        self.backward_micros = {call.micro for call, _, _ in self.calls if isinstance(call, BackwardRun)}
        self.computed_units = tuple(unit for unit in store.units if not blocks.isdisjoint(unit))
        self.pushed_units = {
            instruction.tensor.blocks
            for instruction in self.program.instructions
            if isinstance(instruction, Push) and instruction.tensor.name != "weight"
        }
        all_calls = [call for _, calls in self.programs.values() for call, _, _ in calls]
        self.splits_backward = any(isinstance(call, BackwardRun) and call.part for call in all_calls)
        self.model = model
        self.compressed_contributions = compressed_contributions
        self.buckets = buckets
        self.batch_norm = batch_norm
        self.unused_params = unused_params
        self.replica_groups = replica_groups
        self.copy_stream: CopyStream | None = None  # on which batches are copied to a device
        self.state = RankState(loss_scaler=LossScaler(guard.loss_scale))
        self.clock: Callable[[], float] | EventClock | None = None
        self.busy_timer = BusyTimer()
        self.server_loop = ParameterServerLoop(store, fabric, self.state.push_log)
        self.build_parts()

    def build_parts(self) -> None:
        """Build the parts that hold what is in flight in a step; what lasts is in the store and the state."""
        queue = WeightGradQueue() if self.splits_backward else None
        self.executor = SegmentExecutor(
            self.model, self.store, self.rng, queue, self.batch_norm, accelerator=self.accelerator
        )
        self.executor.offloaded_inputs = self.offloaded_inputs
        self.executor.copies = None if self.copy_stream is None else self.make_batch_copies(self.copy_stream)
        self.communication = RankCommunication(
            self.fabric, self.executor, self.store, self.compressed_contributions, self.buckets
        )
        self.replica_checksum = ReplicaChecksum(self.replica_groups, self.store)

    def make_batch_copies(self, stream: CopyStream) -> BatchCopies:
        """Return the copies of what this rank reads of batches."""
        segments = self.model.segments
        needed = {index for segment in segments.values() for index in segment.inputs if index < self.model.num_inputs}
        first_blocks = {
            first for (first, _), segment in segments.items() if any(index in needed for index in segment.inputs)
        }
        reads: list[MicrobatchRead] = []
        for program, calls in self.programs.values():
            for run in (call for call, _, _ in calls if isinstance(call, ForwardRun)):
                index = run.micro % program.microbatches_per_batch if program.microbatches_per_batch else run.micro
                blocks = range(run.first, run.last + 1)
                reads += [MicrobatchRead("inputs", index)] if not first_blocks.isdisjoint(blocks) else []
                reads += [MicrobatchRead("targets", index)] if run.last + 1 == self.model.num_blocks else []
        is_all = len(needed) == self.model.num_inputs  # a whole model may have more of them than in the first batch
        return BatchCopies(stream, reads, self.model.flatten, None if is_all else needed)

    def rollback(self, unread_steps: Collection[int] = ()) -> None:
        """Discard what a failed step left on this rank; all ranks do so, and none of them communicates.

        Weights, optimizer states and error feedback are those from before the step, because no rank updates before all
        have committed. An asynchronous pipeline has several batches in flight, and some stages may have applied some of
        them already: the others are lost, and the next batches use the newest weights.

        Args:
            unread_steps: earlier steps whose decisions stay on the device, because no rank has read them.
        """
        self.executor.clear()
        self.server_loop.clear()
        self.store.rollback(self.communication.delayed_grads_summed_elsewhere())
        self.state.rollback(unread_steps)
        self.build_parts()

    def use_copy_stream(self, stream: CopyStream) -> None:
        """Copy batches to the device on a stream, ahead of the steps that read them."""
        self.copy_stream = stream
        self.executor.copies = self.make_batch_copies(stream)

    def use_clock(self, clock: Callable[[], float] | EventClock | None) -> None:
        """Record the time of each call from now on, or of none; on a device also of collectives and copies."""
        self.clock = clock
        if self.executor.copies is not None:
            self.executor.copies.record_spans(enabled=isinstance(clock, EventClock))

    def read_timings(self) -> Sequence[CallTiming]:
        """Return the times of the calls of the last step; wait for a device that has not reached its end."""
        if not isinstance(self.clock, EventClock):
            return self.state.timings
        copies = () if self.executor.copies is None else self.executor.copies.spans
        forwards = [
            (one.micro, index) for index, one in enumerate(self.program.instructions) if isinstance(one, Forward)
        ]
        readers = dict(reversed(forwards))  # the first one of each microbatch
        timings = [
            EventTiming(index := readers.get(read.micro, 0), index + 1, [span], is_transfer=True, text=str(read))
            for read, span in copies
        ]
        return read_event_timings(self.clock, [*self.state.event_timings, *timings])

    def step(
        self,
        number: int,
        batch: MicrobatchSource,
        variant: str,
        given: GivenValues | None = None,
        stop_signals: Sequence[int] = (),
        while_computing: Callable[[], None] | None = None,
    ) -> StepResult | LateResult | None:
        """Run the program of one step variant once.

        Args:
            number: of the step.
            batch: what it reads.
            variant: its name.
            given: what the user has given, which the members of a commit compare; None where there is one process.
            stop_signals: those that have asked this rank to stop, also during the step; a commit tells all members.
            while_computing: called once before the host may wait for what it has launched: before the first commit if
                the host decides it, otherwise after the update.

        A loss or gradient that is not finite and may not be skipped, or a parameter without a gradient, raises
        ``DataError``, and no parameter has changed; a failed rank raises ``PeerError`` on all others. If decisions are
        left on the device, the error is raised by the next step, or by :meth:`finish_commits`.
        """
        self.busy_timer.begin_step()
        self.step_number, self.given, self.stop_signals = number, given, stop_signals
        self.while_computing = while_computing
        self.rng.begin_step(number)
        if self.executor.copies is not None:
            self.executor.copies.start_step(number, batch)
        self.program, calls = self.programs[variant]
        if self.program.microbatches_per_batch:
            calls = tuple(
                FusedCall(shift_call(call, number * self.program.microbatches_per_batch), start, stop)
                for call, start, stop in calls
            )
        loss_scale = self.current_loss_scale()
        loss_factors = compute_loss_factors(self.program, number, batch.sizes, self.state.weight_unit, loss_scale)
        self.executor.begin_step(batch, loss_factors, self.program.microbatches_per_batch)
        self.executor.recompute_store.begin_step(self.recompute_sets[variant])
        self.store.begin_step()
        self.state.begin_step()
        self.communication.begin_step()
        with self.communication.overlap.time_step(), self.autocast():
            self.run_calls(calls)
        self.busy_timer.end_step()
        self.state.end_step()
        if self.executor.copies is not None:
            self.executor.copies.end_step(number)
        self.call_while_computing()
        self.finish_commits(before=number)
        return self.state.result if self.state.late_result is None else self.state.late_result

    def evaluate(self, batch: MicrobatchSource, model: BoundModel, number: int) -> dict[int, dict[str, PartTotal]]:
        """Run only the program's forwards in the mode of ``model``, with the random numbers of one step.

        Returns:
            The loss of each microbatch, as ``loss``, and its parts; of a sum, the mean over the samples.
        """
        training = self.executor, self.communication
        self.rng.begin_step(number)
        self.executor = SegmentExecutor(model, self.store, self.rng, accelerator=self.accelerator)
        self.communication = RankCommunication(self.fabric, self.executor, self.store, {}, self.buckets)
        self.executor.begin_step(batch, LossFactors(dict.fromkeys(batch.sizes, 1.0), frozenset(batch.sizes)))
        try:
            with torch.no_grad(), self.autocast():
                self.run_calls(self.forward_calls)
            totals: dict[int, dict[str, PartTotal]] = {}
            loss_weights, parts = self.executor.read_loss_weights(), self.executor.loss_parts
            for micro, loss in self.executor.read_losses().items():
                loss_weight = loss_weights.get(micro, batch.sizes[micro])
                own = {
                    name: part._replace(weight=loss_weight) if model.loss_is_sum else part
                    for name, part in parts.get(micro, {}).items()
                }
                totals[micro] = {**own, "loss": PartTotal(loss * loss_weight, loss_weight)}
            return totals
        finally:
            self.executor, self.communication = training

    def call_while_computing(self) -> None:
        """Do what the caller of this step wants to be done while the device computes, once."""
        while_computing, self.while_computing = self.while_computing, None
        if while_computing is not None:
            while_computing()

    def autocast(self) -> AbstractContextManager[object]:
        """Enter the plan's autocast, if it has one; casts of weights are kept until an update, over microbatches."""
        dtype = self.model.autocast
        return nullcontext() if dtype is None else torch.autocast(self.accelerator.device.type, dtype)

    def run_calls(self, calls: Sequence[FusedCall]) -> None:
        """Run calls in order, and record their times if there is a clock."""
        torch.clear_autocast_cache()  # weights may have changed since they were cast
        clock = self.clock
        if isinstance(clock, EventClock):
            self.run_between_events(calls, clock)
            return
        if clock is None:
            for call, _, _ in calls:
                if type(call) in COMMUNICATING_CALLS:
                    start_s = perf_counter()
                    self.execute(call)
                    self.busy_timer.add_wait(perf_counter() - start_s)
                else:
                    self.execute(call)
            return
        for call, start, stop in calls:
            start_s = clock()
            self.execute(call)
            timing = CallTiming(start, stop, start_s, clock())
            self.state.timings.append(timing)
            if type(call) in COMMUNICATING_CALLS:
                self.busy_timer.add_wait(timing.stop_s - timing.start_s)
        for timed in self.communication.overlap.timed_reductions():
            index = self.program.instructions.index(timed.instruction)
            self.state.timings.append(CallTiming(index, index + 1, timed.start_s, timed.stop_s, is_transfer=True))

    def run_between_events(self, calls: Sequence[tuple[RuntimeCall, int, int]], clock: EventClock) -> None:
        """Run calls in order, each between two events of the stream, and record when the device runs collectives."""
        timings = self.state.event_timings
        for call, start, stop in calls:
            start_s, began = perf_counter(), clock()
            with self.fabric.record_spans() as spans:
                self.execute(call)
            timings.append(EventTiming(start, stop, [DeviceSpan(began, clock())]))
            if isinstance(call, CollectiveRun):
                timings.append(EventTiming(start, stop, spans, is_transfer=True))
            if type(call) in COMMUNICATING_CALLS:
                self.busy_timer.add_wait(perf_counter() - start_s)
        for timed in self.communication.overlap.timed_reductions():
            index = self.program.instructions.index(timed.instruction)
            timings.append(EventTiming(index, index + 1, timed.spans, is_transfer=True))

    def execute(self, call: RuntimeCall) -> None:  # noqa: C901, PLR0912 - one case for each call
        """Run one call."""
        match call:
            case ForwardRun(first, last, micro, version):
                self.executor.forward(first, last, micro, version)
            case RecomputeRun(first, last, micro, version):
                self.executor.recompute(first, last, micro, version)
            case BackwardRun(first, last, micro, version, "", overlapping, accumulates):
                with (
                    self.communication.overlap.overlap_backward(
                        overlapping, perf_counter if isinstance(self.clock, EventClock) else self.clock
                    )
                    if overlapping
                    else nullcontext()
                ):
                    self.executor.backward(first, last, micro, version, accumulates=accumulates)
            case BackwardRun(first, last, micro, part="input"):
                self.executor.backward_input(first, last, micro)
            case BackwardRun(first, last, micro, accumulates=accumulates):
                self.executor.backward_weight(first, last, micro, accumulates=accumulates)
            case CollectiveRun(instructions):
                self.run_collectives(instructions)
            case Send(tensor, peer, codec):
                self.communication.send(tensor, peer, codec)
            case Recv(tensor, peer, codec):
                self.communication.recv(tensor, peer, codec)
            case Commit(group, loss_group):
                if not self.decides_on_device:
                    self.call_while_computing()
                self.commit(group, loss_group)
            case SwapGradBuffers(unit):
                self.swap_grad_buffers(unit)
            case UpdateRun(units):
                self.update(units)
            case FetchRun() | OffloadRun() | Fetch() | Offload():
                self.move_offloaded(call)
            case Free(tensor):
                self.communication.free(tensor)
            case Push():
                self.push(call)
            case Pull(tensor, peer):
                set_weights(self.store.units[tensor.blocks], self.fabric.recv(peer, format_tensor_ref(tensor)))
            case ApplyPushesRun(instructions):
                self.server_loop.apply_and_reply(instructions)

    def move_offloaded(self, call: FetchRun | OffloadRun | Fetch | Offload) -> None:
        """Fetch or offload optimizer state, weights, or the input of a block."""
        match call:
            case FetchRun(units):
                self.fetch(units)
            case OffloadRun(units):
                self.store.offload(units)
            case Fetch(TensorRef("weight", unit)):
                self.store.fetch_weights(unit)
            case Offload(TensorRef("weight", unit)):
                self.store.offload_weights(unit)
            case Fetch() | Offload():
                self.executor.move_input(call)

    def use_offloaded_inputs(self, inputs: OffloadedInputs) -> None:
        """Keep the inputs of blocks that are recomputed on disk."""
        self.offloaded_inputs = self.executor.offloaded_inputs = inputs

    def run_collectives(self, instructions: Sequence[Collective]) -> None:
        """Run collectives of one phase: blocking ones, or the start of one, or the wait for one."""
        if instructions[0].tensor.name == "out":
            self.communication.gather_outputs(instructions[0])
        elif instructions[0].phase == "":
            self.communication.run_collectives(instructions)
        elif instructions[0].phase == "start":
            self.communication.start(instructions[0])
        else:
            self.communication.wait(instructions[0])

    def swap_grad_buffers(self, unit: Unit) -> None:
        """Delay this step's gradient and take back that of the step before; clear the latter if it is to be skipped."""
        self.store.swap_grad_buffers(unit)
        if self.state.skip_delayed_update:
            self.store.units[unit].clear_grads()

    def commit(self, group: Group, loss_group: Group) -> None:
        """Agree with the group on whether and how the step is applied."""
        scope = commit_scope(self.program, self.step_number, self.state.num_commits)
        batch, batch_norm = self.executor.batch, self.batch_norm
        decide = self.bind_decide_step(scope, group, loss_group)

        # 1. Report this rank's losses and gradients; gather the reports and the statistics of batch norm together.
        if self.may_decide_on_device(scope):
            pending = self.gather_on_device(scope, group, decide)
            if not any(report.missing_grads or report.loss_kinds & PARTS for report in pending.reports):
                self.apply_on_device(pending)
                return
            self.finish_commits()
            reports = self.read_reports(pending)
        else:
            self.finish_commits()
            report = self.make_report(scope)
            if batch_norm is not None:
                batch_norm.start_gather(scope)
            reports = [report] if len(group) == 1 else gather_reports(self.fabric, report, group)
        parts = self.gather_parts(reports, scope, group)
        if may_overflow(reports):
            reports = self.add_overflows(reports, group)
        if batch_norm is not None:
            batch_norm.finish_gather()  # here, so that nothing is in flight if the step raises
        self.busy_timer.restart()

        # 2. Check that the members were given the same, and that replicas hold the same weights.
        self.require_same_given(reports, group)
        self.compare_replicas(reports, group, self.step_number)

        # 3. Decide. All members have the same reports, so that they reach the same result.
        result = decide(reports, loss_scale=self.state.loss_scaler.scale)
        skip_update, skip_delayed_update = decide_skips(
            reports,
            result,
            has_samples=batch is not None and any(batch.sizes[micro] for micro in scope),
            delays_grads=self.delays_grads,
            skip_delayed=self.state.skip_delayed_update,
        )
        result = replace(result, loss_parts=parts) if parts else result
        self.state.record_commit(result, skip_update=skip_update, skip_delayed_update=skip_delayed_update)
        require_finite(
            result,
            self.step_number,
            self.state.num_skipped,
            self.guard,
            may_shrink=self.state.loss_scaler.may_shrink,
            is_async_pipeline=bool(self.program.microbatches_per_batch),
        )

        # 4. Apply the decision to everything that changes with a step; weights follow in `update`.
        if batch_norm is not None:
            is_bad = has_unusable_grads(reports) if self.delays_grads else bool(result.skip_reason)
            batch_norm.commit(is_applied=not is_bad)
        if not self.is_skipped():
            self.store.num_host_commits += 1
            self.fill_unused_grads(reports, group)
        self.store.commit_error_feedback(applied=not self.is_skipped())
        self.clip_grads(result.scale)

    def bind_decide_step(self, scope: frozenset[int], group: Group, loss_group: Group) -> DecideStep:
        """Return what decides a commit from the reports of all members."""
        batch = self.executor.batch
        return partial(
            decide_step,
            group=group,
            guard=self.guard,
            loss_group=loss_group,
            microbatches_per_batch=self.program.microbatches_per_batch,
            weight_unit=self.weight_unit_of(scope),
            delayed_mean_factor=self.state.delayed_mean_factor if self.delays_grads else None,
            num_samples=0 if batch is None else sum(batch.sizes[micro] for micro in scope),
        )

    def current_loss_scale(self) -> Tensor | float:
        """Return the factor of this step's losses in backward; a tensor if a device has decided it."""
        pending = self.state.pending_commits
        on_device = pending[-1][0].decision.next_loss_scale if pending else None
        return on_device.scale if on_device else self.state.loss_scaler.scale

    def weight_unit_of(self, scope: frozenset[int]) -> float:
        """Return the unit of the weights of a commit; 0 if its gradients are those of the weighted mean already."""
        loss_factors = self.executor.loss_factors
        return 0.0 if not loss_factors.is_whole.isdisjoint(scope) else loss_factors.weight_unit

    def require_same_given(self, reports: Sequence[StepReport], group: Group) -> None:
        """Raise unless all members were given the same for this step."""
        if self.given is not None and len({report.given_digest for report in reports if report.given_digest}) > 1:
            self.given.require_same(self.fabric, group, self.step_number)

    def compare_replicas(self, reports: Sequence[StepReport], group: Group, step: int) -> None:
        """Raise unless replicas hold the same weights."""
        if not self.replica_checksum.groups:
            return
        checksums = {rank: member_report.checksum for rank, member_report in zip(group, reports, strict=True)}
        self.replica_checksum.compare(checksums, group, self.fabric, step)

    def may_decide_on_device(self, scope: frozenset[int]) -> bool:
        """Return whether the decision of a commit may be left on the device; the same on all ranks."""
        batch = self.executor.batch
        return (
            self.decides_on_device
            and self.store.num_host_commits >= NUM_HOST_COMMITS
            and batch is not None
            and any(batch.sizes[micro] for micro in scope)
        )

    def gather_on_device(self, scope: frozenset[int], group: Group, decide: DecideStep) -> PendingCommit:
        """Gather what members report: what the host knows over the hosts, and rows of what the device knows."""
        executor, copy = self.executor, self.accelerator.start_copy_to_host
        sizes = executor.batch.sizes if executor.batch is not None else {}
        losses: dict[int, Tensor | float] = {**executor.losses, **executor.pending_losses.on_device}
        loss_weights: dict[int, Tensor | float] = {**executor.loss_weights, **executor.pending_loss_weights.on_device}
        report = make_step_report(
            {micro: 0.0 for micro in losses if micro in scope},
            sizes,
            0.0,
            self.store.params_without_grad(self.computed_units),
            loss_weights=dict.fromkeys(loss_weights, 0.0),
            is_sum=self.model.loss_is_sum,
            has_parts=not scope.isdisjoint(executor.loss_parts),
            given_digest=0 if self.given is None else self.given.digest,
            is_idle=not any(sizes[micro] for micro in scope if micro in self.backward_micros),
            busy_s=self.busy_timer.read(),
            stop_signal=next(iter(self.stop_signals), 0),
        )
        grads = self.store.grad_check.take_device_report(self.accelerator)
        outputs = executor.recompute_store.take_matches() if executor.recompute_store.pending_matches else None
        late_checks = executor.take_late_checks()
        matches = [] if outputs is None else [outputs[1]]
        row = self.make_device_report(
            add_losses(losses, sizes, loss_weights, scope, self.accelerator),
            grads,
            [*(~match.all() for match in matches), *(late_check.is_bad for late_check in late_checks)],
        )
        reports = [report] if len(group) == 1 else gather_reports(self.fabric, report, group)
        rows = gather_rows(self.fabric, self.accelerator, row, group)
        self.busy_timer.restart()
        pending = self.state.pending_commits
        loss_scale = self.device_loss_scale(row.loss_sum)
        decision = decide_on_device(
            rows,
            reports,
            self.guard,
            weight_unit=self.weight_unit_of(scope),
            num_samples=sum(sizes[micro] for micro in scope),
            loss_scale=loss_scale,
            num_skipped=pending[-1][0].decision.num_skipped
            if pending
            else torch.full_like(row.loss_sum, self.state.num_skipped),
        )
        copied_outputs = None if outputs is None else (outputs[0], copy(outputs[1]))
        copied_scale = loss_scale if isinstance(loss_scale, float) else copy(loss_scale.scale)
        return PendingCommit(
            self.step_number,
            group,
            reports,
            copy(rows),
            grads,
            copied_outputs,
            [(late_check, copy(late_check.pack())) for late_check in late_checks],
            decision,
            decide,
            copied_scale,
        )

    def device_loss_scale(self, like: Tensor) -> DeviceLossScale | float:
        """Return the loss scale of this step, with what the next one depends on if it is dynamic.

        Args:
            like: a number on the device.
        """
        scaler, pending = self.state.loss_scaler, self.state.pending_commits
        if not isinstance(scaler.config, DynamicLossScale):
            return scaler.scale
        on_device = pending[-1][0].decision.next_loss_scale if pending else None
        return on_device or DeviceLossScale(*(torch.full_like(like, float(number)) for number in scaler.state()))

    def make_device_report(
        self, losses: tuple[Tensor, Tensor, Tensor], grads: DeviceGradReport, failures: Sequence[Tensor]
    ) -> DeviceReport:
        """Return this rank's report as numbers on the device.

        Args:
            losses: what :func:`add_losses` returned.
            grads: of this rank.
            failures: whether recomputed outputs are others than at first, and whether each check of the loss fails.
        """
        device = self.accelerator.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        owned = [grad for unit in self.program.owned_units for grad in self.store.units[unit].grads()]
        has_overflow = zero
        if self.store.grad_check.is_enabled and owned:
            magnitudes = torch.stack([magnitude_tensor(grad).double() for grad in owned])
            has_overflow = (~magnitudes.isfinite().all()).double()
        total, loss_weight, nonfinite_micro = losses
        return DeviceReport(
            total,
            loss_weight,
            squared_norm_tensor(owned, device) if self.guard.needs_norm else zero,
            nonfinite_micro,
            self.replica_checksum.checksum_tensor(device),
            first_nonfinite(grads.shares, self.accelerator),
            grads.share,
            has_overflow,
            torch.stack([*failures]).any().double() if failures else zero,
        )

    def apply_on_device(self, pending: PendingCommit) -> None:
        """Apply a decision that stays on the device; the host reads it after the next step."""
        self.require_same_given(pending.reports, pending.group)
        result = LateResult(pending.reports, pending.group, lambda: pending.result_of(pending.read()))
        self.state.record_late_commit(pending, result)
        self.store.skips = pending.decision.skips
        self.clip_grads(1.0 if pending.decision.scale is None else pending.decision.scale)

    def read_reports(self, pending: PendingCommit) -> list[StepReport]:
        """Return the complete reports of a commit; a collective call, which waits for the device.

        Raises:
            DataError: a recomputed output of this rank is another one than at first, or a check of its loss has failed.
        """
        location = pending.read_unequal_output()
        if location:
            raise mismatch_error(location, "other values")
        for late_check, copy in pending.late_checks:
            self.require_good_loss(late_check, copy.wait(), pending.step)
        return add_names(self.fabric, pending.read(), pending.grads.read_name, pending.group)

    def require_good_loss(self, late_check: LateLossCheck, numbers: Tensor, step: int) -> None:
        """Raise if a check of the loss on the device has failed.

        Args:
            late_check: the check.
            numbers: what it has packed, in host memory.
            step: its number, which the error names.

        Raises:
            DataError: it has failed.
        """
        assert self.executor.loss_check is not None, "it has checked"
        try:
            self.executor.loss_check.require_good(late_check, numbers.tolist())
        except DataError as error:
            raise DataError(f"step {step} cannot be applied: {error}") from None

    def finish_commits(self, before: int | None = None) -> None:
        """Read the decisions that were left on the device; a collective call.

        Args:
            before: a step; by default those of all steps are read.

        Raises:
            DataError: a step may not be skipped; weights and optimizer state are those before it.
        """
        while self.state.pending_commits and (before is None or self.state.pending_commits[0][0].step < before):
            pending, late_result = self.state.pending_commits.pop(0)
            reports = self.read_reports(pending)
            self.compare_replicas(reports, pending.group, pending.step)
            result = pending.result_of(reports)
            late_result.resolve(result)
            may_shrink = self.state.loss_scaler.may_shrink
            self.state.record_late_result(result)
            require_finite(result, pending.step, self.state.num_skipped, self.guard, may_shrink=may_shrink)

    def gather_parts(self, reports: Sequence[StepReport], scope: frozenset[int], group: Group) -> dict[str, PartTotal]:
        """Return the parts of the group's loss if any member has some; then all of them gather these."""
        if not any(report.loss_kinds & PARTS for report in reports):
            return {}
        own = [found for micro, found in self.executor.loss_parts.items() if micro in scope]
        return gather_parts(self.fabric, own, group)

    def make_report(self, scope: frozenset[int]) -> StepReport:
        """Return this rank's report on the microbatches of a commit."""
        own_squared_norm = 0.0
        self.store.grad_check.start_copy_to_host()
        if self.guard.needs_norm:
            own_squared_norm = squared_norm(
                [
                    *(grad for unit in self.program.owned_units for grad in self.store.units[unit].grads()),
                    *(tensor for unit in self.pushed_units for tensor in self.pushed_values(unit)),
                ]
            )
        # what is computed last is read first: when it is there, so are the copies that were started before
        self.executor.recompute_store.require_same_outputs()
        for late_check in self.executor.take_late_checks():
            self.require_good_loss(late_check, late_check.pack().cpu(), self.step_number)
        checksum = self.replica_checksum.checksum()
        grads = self.store.grad_check.take_report(scope)
        sizes = self.executor.batch.sizes if self.executor.batch is not None else {}
        first = self.step_number * self.program.microbatches_per_batch
        return make_step_report(
            {micro: loss for micro, loss in self.executor.read_losses().items() if micro in scope},
            sizes,
            own_squared_norm,
            self.store.params_without_grad(self.computed_units),
            grads=grads,
            loss_weights=self.executor.read_loss_weights(),
            is_sum=self.model.loss_is_sum,
            has_parts=not scope.isdisjoint(self.executor.loss_parts),
            checksum=checksum,
            given_digest=0 if self.given is None else self.given.digest,
            is_idle=not any(sizes[micro] for micro in scope if micro - first in self.backward_micros),
            busy_s=self.busy_timer.read(),
            stop_signal=next(iter(self.stop_signals), 0),
        )

    def add_overflows(self, reports: Sequence[StepReport], group: Group) -> list[StepReport]:
        """Return the reports of a group with the sums of gradients that are not finite, although all terms are."""
        sums = [grad for unit in self.program.owned_units for grad in self.store.units[unit].grads()]
        has_overflow = not all(map(math.isfinite, find_magnitudes(sums)))
        gathered = self.fabric.gather_values("overflows", has_overflow, group) if len(group) > 1 else [has_overflow]
        return [replace(report, has_overflow=bool(value)) for report, value in zip(reports, gathered, strict=True)]

    def clip_grads(self, scale: Tensor | float) -> None:
        """Scale all gradients that updates will use, then clip each element to the guard's value."""
        bound = self.guard.clip_value
        if (not isinstance(scale, Tensor) and scale == 1.0 and bound is None) or self.is_skipped():
            return
        if self.exchanges_momentum:
            raise too_late_to_scale(scale)
        for unit in self.store.units.values():
            unit.clip_grads(scale, bound)

    @cached_property
    def exchanges_momentum(self) -> bool:
        """Whether ranks sum momenta in some steps, in place of gradients."""
        instructions = (one for program, _ in self.programs.values() for one in program.instructions)
        return any(isinstance(one, Collective) and exchanges_momentum(one.codec) for one in instructions)

    def pushed_values(self, unit: Unit) -> list[Tensor]:
        """Return what is pushed of a unit's gradient, without indices of rows."""
        packed = [tensor for one in self.store.units[unit].flat_params for tensor in one.own_grads.pack()]
        return [tensor for tensor in packed if tensor.is_floating_point()]

    def fill_unused_grads(self, reports: Sequence[StepReport], group: Group) -> None:
        """Fill missing gradients with zeros, unless no rank has a gradient: then raise or skip it, as was asked for."""
        if not any(report.missing_grads for report in reports):
            return
        unused = find_unused_params(reports, self.computing_ranks) if self.unused_params != "zero" else ()
        if self.unused_params == "error":
            require_all_used(unused, self.step_number)
            if group[0] == self.fabric.rank and not self.has_warned:
                self.has_warned = warn_partially_unused(reports, group, self.computing_ranks, self.step_number)
        for unit_params in self.store.units.values():
            unit_params.skip_params(unused)
        for unit in self.computed_units:
            self.store.units[unit].fill_missing_grads()

    def update(self, units: tuple[Unit, ...]) -> None:
        """Apply the optimizer to some units unless the step is skipped; the old weights stay readable as a version."""
        self.store.begin_version(is_new=not self.is_skipped())
        if self.is_skipped():
            for unit in units:
                self.store.units[unit].clear_grads()
            return
        self.store.update(units, self.rng.step)
        torch.clear_autocast_cache()  # it holds casts of the old weights

    def fetch(self, units: tuple[Unit, ...]) -> None:
        """Start to read offloaded optimizer state, unless the update is skipped."""
        if not self.is_skipped():
            self.store.fetch(units)

    def is_skipped(self) -> bool:
        """Return whether the last commit decided to skip the updates that follow it; False before any commit."""
        return self.state.skip_update

    def push(self, instruction: Push) -> None:
        """Send weights or a gradient to a server; for a skipped gradient only the label, without tensors."""
        unit = self.store.units[instruction.tensor.blocks]
        if instruction.tensor.name == "weight":
            self.fabric.send(
                instruction.peer,
                format_push_label(instruction),
                [flat_params.weights.detach() for flat_params in unit.flat_params],
            )
            return
        grads = (
            []
            if self.is_skipped()
            else self.communication.grad_message(unit, instruction.peer, instruction.codec, scale=self.state.scale)
        )
        self.fabric.send(instruction.peer, format_push_label(instruction), grads)
        for flat_params in unit.flat_params if instruction.codec else ():
            flat_params.error_feedback_for(peer_pair(instruction.peer, self.fabric.rank)).commit(applied=bool(grads))
        unit.clear_grads()

    def optimizer_groups(self) -> list[tuple[Unit, ...]]:
        """Return the units of every optimizer that this rank steps."""
        groups = list(dict.fromkeys(call.units for call, _, _ in self.calls if isinstance(call, UpdateRun)))
        apply_calls = [call for call, _, _ in self.calls if isinstance(call, ApplyPushesRun)]
        return groups + [
            (unit,)
            for call in apply_calls
            for instruction in call.instructions
            if instruction.applies_gradients
            for unit in instruction.units
        ]

    def count_buffer_changes(self) -> dict[str, int]:
        """Return for every buffer that this rank may change the number of microbatches per step that change it."""
        changed: dict[str, int] = {}
        for call, _, _ in self.calls:
            if isinstance(call, ForwardRun):
                for segment in self.executor.segments_in(call.first, call.last):
                    for name in segment.buffers:
                        changed[name] = changed.get(name, 0) + 1
        return changed
