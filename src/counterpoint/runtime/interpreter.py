"""The interpreter: one rank's row, word by word, on real tensors.

It knows instructions and nothing else; which strategy wrote them is not visible here.

A step that failed is left out: nothing of it is in the next one, as if it had never begun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext

import torch

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.model.spec import Unit
from counterpoint.program.instruction import Collective, Commit, Free, Pull, Push, Recv, Send, SwapGradBuffers
from counterpoint.program.recompute_sets import find_recomputed
from counterpoint.program.text import format_tensor_ref
from counterpoint.runtime.autograd.deferred_weight_grad import WeightGradQueue
from counterpoint.runtime.autograd.segment_executor import BoundModel, SegmentExecutor
from counterpoint.runtime.comm.rank_communication import RankCommunication, peer_pair, set_weights
from counterpoint.runtime.comm.server_loop import ParameterServerLoop, format_push_label
from counterpoint.runtime.lowering import (
    ApplyPushesRun,
    BackwardRun,
    CollectiveRun,
    ForwardRun,
    LoweredProgram,
    RecomputeRun,
    RuntimeCall,
    UpdateRun,
    forward_only,
    fuse,
    shift_call,
)
from counterpoint.runtime.microbatches import LossWeights, MicrobatchSource, commit_scope, compute_loss_weights
from counterpoint.runtime.optimizer_spec import clip_by_value, squared_norm
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.replica_check import ReplicaChecksum
from counterpoint.runtime.rng import ModuleRNG
from counterpoint.runtime.step_commit import (
    CallTiming,
    RankState,
    StepGuard,
    StepReport,
    StepResult,
    decide_step,
    find_unused_params,
    gather_reports,
    has_nonfinite_grad,
    has_nonfinite_loss,
    make_step_report,
    merge_results,
    require_all_used,
    require_finite,
    warn_partially_unused,
)
from counterpoint.strategies.buckets import BucketConfig


class Interpreter:
    """Runs one row.

    Args:
        scripts: the row in every kind of step, by name; the last one is the one that evaluations go by.
        model: the functions of the blocks it runs.
        store: the rank's parameters.
        fabric: its way to the other ranks.
        dice: its random state.
        guard: what is checked before updates.
        readers: for each parameter which ranks of this rank's commit compute with it.
        brought: for a group and a unit that it sums in a code the microbatches that each member brings.
        buckets: in which gradients are summed while a backward goes on.
    """

    def __init__(  # noqa: PLR0913 - the parts of one rank
        self,
        programs: Mapping[str, LoweredProgram],
        *,
        model: BoundModel,
        store: ParamStore,
        fabric: Fabric,
        rng: ModuleRNG,
        guard: StepGuard,
        computing_ranks: Mapping[str, Group],
        compressed_contributions: Mapping[tuple[Group, Unit], Sequence[Sequence[int]]],
        buckets: BucketConfig,
    ) -> None:
        self.programs = {name: (script, fuse(script.instructions, script.overlap)) for name, script in programs.items()}
        self.program, self.calls = list(self.programs.values())[-1]
        self.forward_calls = fuse(forward_only(self.program.instructions, self.program.microbatches_per_batch))
        self.recompute_sets = {
            name: find_recomputed(script.instructions, script.microbatches_per_batch)
            for name, script in programs.items()
        }
        self.step_number = 0
        self.state_before_step = (0, False)  # of the state: what a step that fails has to leave as it was
        self.swapped_units: list[Unit] = []  # whose gradients this step has exchanged
        self.delays_grads = any(isinstance(word, SwapGradBuffers) for word in self.program.instructions)
        self.store = store
        self.fabric = fabric
        self.rng = rng
        self.guard = guard
        self.computing_ranks = computing_ranks
        runs = [call for call, _, _ in self.calls if isinstance(call, ForwardRun)]
        blocks = {block for run in runs for block in range(run.first, run.last + 1)}
        self.backward_micros = {call.micro for call, _, _ in self.calls if isinstance(call, BackwardRun)}
        self.computed_units = tuple(unit for unit in store.units if not blocks.isdisjoint(unit))
        calls = [call for _, run in self.programs.values() for call, _, _ in run]
        has_parts = any(isinstance(call, BackwardRun) and call.part for call in calls)
        self.executor = SegmentExecutor(model, store, rng, WeightGradQueue() if has_parts else None)
        self.communication = RankCommunication(fabric, self.executor, store, compressed_contributions, buckets)
        self.replica_checksum = ReplicaChecksum((), store)
        self.state = RankState()
        self.clock: Callable[[], float] | None = None
        self.server_loop = ParameterServerLoop(store, fabric, self.state.push_log)

    def step(self, number: int, batch: MicrobatchSource, variant: str) -> StepResult | None:
        """Run the row of one kind of step once.

        A loss or gradient that is not finite and may not be skipped, or a parameter that got no gradient, is a
        ``DataError``, and no parameter has changed; a rank that failed is a ``PeerError`` on all others.
        """
        self.rng.step = self.step_number = number
        self.program, calls = self.programs[variant]
        if self.program.microbatches_per_batch:
            calls = tuple(
                (shift_call(call, number * self.program.microbatches_per_batch), start, stop)
                for call, start, stop in calls
            )
        self.executor.begin_step(
            batch, compute_loss_weights(self.program, number, batch.sizes), self.program.microbatches_per_batch
        )
        self.executor.recompute_store.begin_step(self.recompute_sets[variant])
        self.store.begin_step()
        self.state.result, self.state.num_commits, self.state.skip_update = None, 0, False
        self.state.timings.clear()
        self.state_before_step = (self.state.num_skipped, self.state.skip_delayed_update)
        self.swapped_units.clear()
        self.communication.completed.clear()
        with self.communication.overlap.time_step():
            self.run_calls(calls)
        return self.state.result

    def evaluate(self, batch: MicrobatchSource, model: BoundModel) -> None:
        """Run only the forwards of the row; losses are in ``compute.losses`` of the ranks with the last block."""
        training = self.executor
        self.executor = SegmentExecutor(model, self.store, self.rng)
        self.communication.executor = self.executor
        self.executor.begin_step(batch, LossWeights(dict.fromkeys(batch.sizes, 1.0)))
        try:
            with torch.no_grad():
                self.run_calls(self.forward_calls)
        finally:
            self.executor = self.communication.executor = training

    def run_calls(self, calls: Sequence[tuple[RuntimeCall, int, int]]) -> None:
        """Run calls in order, taking notes of their times if there is a clock."""
        torch.clear_autocast_cache()  # of weights that may have been changed since
        clock = self.clock
        if clock is None:
            for call, _, _ in calls:
                self.execute(call)
            return
        for call, start, stop in calls:
            began = clock()
            self.execute(call)
            self.state.timings.append(CallTiming(start, stop, began, clock()))
        for one in self.communication.overlap.reduces():
            at = self.program.instructions.index(one.instruction)
            self.state.timings.append(CallTiming(at, at + 1, one.start_s, one.stop_s, is_transfer=True))

    def execute(self, call: RuntimeCall) -> None:  # noqa: C901, PLR0912 - one case for each call
        """Run one call."""
        match call:
            case ForwardRun(first, last, micro, version):
                self.executor.forward(first, last, micro, version)
            case RecomputeRun(first, last, micro, version):
                self.executor.recompute(first, last, micro, version)
            case BackwardRun(first, last, micro, version, part="", overlapping=early):
                with self.communication.overlap.overlapping(early, self.clock) if early else nullcontext():
                    self.executor.backward(first, last, micro, version)
            case BackwardRun(first, last, micro, part="input"):
                self.executor.backward_input(first, last, micro)
            case BackwardRun(first, last, micro):
                self.executor.backward_weight(first, last, micro)
            case CollectiveRun(words):
                self.run_collectives(words)
            case Send(value, peer, code):
                self.communication.send(value, peer, code)
            case Recv(value, peer, code):
                self.communication.recv(value, peer, code)
            case Commit(group, own):
                self.commit(group, own)
            case SwapGradBuffers(unit):
                self.swap_grad_buffers(unit)
            case UpdateRun(units):
                self.update(units)
            case Free(value):
                self.communication.free(value)
            case Push():
                self.push(call)
            case Pull(value, peer):
                set_weights(self.store.units[value.blocks], self.fabric.recv(peer, format_tensor_ref(value)))
            case ApplyPushesRun(words):
                self.server_loop.apply_and_reply(words)

    def run_collectives(self, instructions: Sequence[Collective]) -> None:
        """Run collectives of one phase."""
        if instructions[0].phase == "":
            self.communication.run_collectives(instructions)
        elif instructions[0].phase == "start":
            self.communication.start(instructions[0])
        else:
            self.communication.wait(instructions[0])

    def swap_grad_buffers(self, unit: tuple[int, ...]) -> None:
        """Set a gradient aside and take back the one before; if that is not to be applied, it is gone."""
        self.store.units[unit].swap_grad_buffers()
        self.swapped_units.append(unit)
        if self.state.skip_delayed_update:
            self.store.units[unit].clear_grads()

    def commit(self, group: tuple[int, ...], loss_group: tuple[int, ...]) -> None:
        """Decide with the group whether and how the step is applied."""
        squared, norms = 0.0, self.executor.batch_norm
        if self.guard.needs_norm:
            squared = squared_norm(
                gradient for unit in self.program.owned_units for gradient in self.store.units[unit].grads()
            )
        feed, domain = self.executor.batch, commit_scope(self.program, self.step_number, self.state.num_commits)
        missing = [name for unit in self.computed_units for name in self.store.units[unit].params_without_grad()]
        sizes = feed.sizes if feed is not None else {}
        losses = {micro: loss for micro, loss in self.executor.losses.items() if micro in domain}
        first = self.step_number * self.program.microbatches_per_batch
        is_idle = not any(sizes[micro] for micro in domain if micro - first in self.backward_micros)
        ballot = make_step_report(
            losses, sizes, squared, missing, checksum=self.replica_checksum.checksum(), is_idle=is_idle
        )
        if norms is not None:
            norms.start_gather(domain)  # on its way together with the ballots
        ballots = [ballot] if len(group) == 1 else gather_reports(self.fabric, ballot, group)
        if norms is not None:
            norms.finish_gather()  # here, so that nothing is under way if the step ends in an error
        marks = {rank: one.checksum for rank, one in zip(group, ballots, strict=True)}
        self.replica_checksum.compare(marks, group, self.fabric, self.step_number)
        verdict = decide_step(ballots, group, self.guard, loss_group, self.program.microbatches_per_batch)
        self.state.result = verdict if self.state.result is None else merge_results(self.state.result, verdict)
        self.record_skips(ballots, verdict, domain)
        self.state.num_commits += 1
        self.state.num_skipped = self.state.num_skipped + 1 if verdict.skip_reason else 0
        is_stream = bool(self.program.microbatches_per_batch)
        require_finite(
            verdict.skip_reason, self.step_number, self.state.num_skipped, self.guard, is_async_pipeline=is_stream
        )
        if norms is not None:
            is_bad = has_nonfinite_loss(ballots) if self.delays_grads else bool(verdict.skip_reason)
            norms.commit(is_applied=not is_bad)
        if not self.is_skipped():
            self.fill_unused_grads(ballots, group)
        self.store.commit_error_feedback(applied=not self.is_skipped())
        self.clip_grads(verdict.scale)

    def clip_grads(self, scale: float) -> None:
        """Scale all gradients that updates will use, and then bring every number in them to the size allowed."""
        bound = self.guard.clip_value
        if (scale == 1.0 and bound is None) or self.is_skipped():
            return
        for unit in self.store.units.values():
            for gradient in unit.grads():
                if scale < 1.0:
                    gradient.mul_(scale)
                if bound is not None:
                    clip_by_value(gradient, bound)

    def record_skips(self, reports: Sequence[StepReport], result: StepResult, scope: Collection[int]) -> None:
        """Note which updates are left out: those of a fault, and of gradients that no sample had a part in."""
        state, feed = self.state, self.executor.batch
        has_samples = feed is not None and any(feed.sizes[micro] for micro in scope)
        if self.delays_grads:
            state.skip_update = state.skip_delayed_update or has_nonfinite_grad(reports)
            state.skip_delayed_update = has_nonfinite_loss(reports) or not has_samples
        else:
            state.skip_update = bool(result.skip_reason) or not has_samples

    def fill_unused_grads(self, reports: Sequence[StepReport], group: Group) -> None:
        """Check that every parameter got a gradient on some rank, unless zeros are wanted; where none is, put zeros."""
        if not any(ballot.missing_grads for ballot in reports):
            return
        if self.executor.unused_params == "error":
            require_all_used(find_unused_params(reports, self.computing_ranks), self.step_number)
            if group[0] == self.fabric.rank and not self.state.has_warned:
                self.state.has_warned = warn_partially_unused(reports, group, self.computing_ranks, self.step_number)
        for unit in self.computed_units:
            self.store.units[unit].fill_missing_grads()

    def update(self, units: tuple[tuple[int, ...], ...]) -> None:
        """Apply the optimizer to some units, unless the step is left out; what it was before stays a version."""
        self.store.begin_version(is_new=not self.is_skipped())
        if self.is_skipped():
            for unit in units:
                self.store.units[unit].clear_grads()
            return
        self.store.update(units)
        torch.clear_autocast_cache()  # of the weights before

    def is_skipped(self) -> bool:
        """Tell whether the last commit decided to leave out the updates behind it; nobody does before a commit."""
        return self.state.skip_update

    def push(self, instruction: Push) -> None:
        """Send weights or a gradient to a server; nothing but the label of a gradient that is left out here."""
        unit = self.store.units[instruction.tensor.blocks]
        if instruction.tensor.name == "weight":
            self.fabric.send(
                instruction.peer, format_push_label(instruction), [arena.weights.detach() for arena in unit.flat_params]
            )
            return
        gradients = (
            [] if self.is_skipped() else self.communication.grad_message(unit, instruction.peer, instruction.codec)
        )
        self.fabric.send(instruction.peer, format_push_label(instruction), gradients)
        for arena in unit.flat_params if instruction.codec else ():
            arena.error_feedback_for(peer_pair(instruction.peer, self.fabric.rank)).commit(applied=bool(gradients))
        unit.clear_grads()

    def optimizer_groups(self) -> list[tuple[tuple[int, ...], ...]]:
        """Return the units of every optimizer that this row steps."""
        runs = list(dict.fromkeys(call.units for call, _, _ in self.calls if isinstance(call, UpdateRun)))
        served = [call for call, _, _ in self.calls if isinstance(call, ApplyPushesRun)]
        return runs + [
            (unit,) for call in served for word in call.instructions if word.applies_gradients for unit in word.units
        ]

    def count_buffer_changes(self) -> dict[str, int]:
        """Return for every buffer that this row may change how many microbatches do so in a step."""
        changed: dict[str, int] = {}
        for call, _, _ in self.calls:
            if isinstance(call, ForwardRun):
                for segment in self.executor.segments_in(call.first, call.last):
                    for name in segment.buffers:
                        changed[name] = changed.get(name, 0) + 1
        return changed


def rollback_step(interpreter: Interpreter) -> None:
    """Forget what a step that failed has left on a rank; all ranks do so, and none of them communicates.

    Weights, optimizers and what codes have not sent are as they were before the step, because nobody updates before all
    have decided. A stream has several batches under way, of which stages may have applied some already; the others are
    lost, and the next batches meet the newest weights.
    """
    store, exchange, state = interpreter.store, interpreter.communication, interpreter.state
    restore_swapped_grads(interpreter, find_reduced_delayed_grads(exchange))
    interpreter.executor.clear()
    exchange.clear()
    interpreter.server_loop.clear()
    store.commit_error_feedback(applied=False)
    for arena in store.flat_params():
        arena.reshard_weights()
    store.unshare(None)
    store.clear_grads()
    if store.weight_versions is not None:
        store.weight_versions.reset()
    state.num_skipped, state.skip_delayed_update = interpreter.state_before_step
    interpreter.replica_checksum.next_part = 0


def find_reduced_delayed_grads(communication: RankCommunication) -> dict[int, Group]:
    """Return who has added up a gradient that was set aside, by the identity of its arena."""
    under_way = [begun for works in communication.started.values() for begun in works]
    over = [(arena, word) for arena, work, word in under_way if work.is_complete]
    return {
        id(arena): word.group
        for arena, word in (*communication.completed, *over)
        if arena is not None and word.tensor.name == "delayed_grad"
    }


def restore_swapped_grads(interpreter: Interpreter, reduced: dict[int, Group]) -> None:
    """Set aside again what was set aside before the step; where it has been summed, the first member keeps the sum."""
    for unit in interpreter.swapped_units:
        for arena in interpreter.store.units[unit].flat_params:
            arena.grad, arena.delayed_grad = None, arena.grad
    for arena in interpreter.store.flat_params():
        group = reduced.get(id(arena))
        if arena.delayed_grad is not None and group is not None and group[0] != interpreter.fabric.rank:
            arena.delayed_grad.zero_()
