"""What becomes of a step and of the weights when something fails in it.

The ranks that live in this process: all of them on the local transport, or one of many processes.

A step measured word by word.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from counterpoint.compiler.compile import CompiledPlan, compile  # noqa: A004 - read as cp.compile
from counterpoint.errors import CounterpointError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.partitioning.partitioned_model import PartitionedModel
from counterpoint.partitioning.sample_independence import require_sample_independence
from counterpoint.partitioning.traced import TracedPartition
from counterpoint.partitioning.verify_tensor_parallel import verify_tensor_parallel
from counterpoint.partitioning.whole_model import WholeModel
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import PlanChoice
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    Update,
)
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Lane, Trace, TraceEvent
from counterpoint.runtime.autograd.segment_executor import BoundModel
from counterpoint.runtime.interpreter import Interpreter, rollback_step
from counterpoint.runtime.microbatches import MicrobatchSource
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import (
    RankRuntime,
    RunSpec,
    as_call_args,
    build_rank,
    communication_groups,
    has_max_norm,
    load_values,
    make_batch_norm,
    require_no_grad_hooks,
    sliced_params,
    take_slice,
)
from counterpoint.runtime.state_dict import (
    ShardMap,
    average_buffers,
    broadcast_params,
    gather_weights,
    has_full_model,
    load_weights,
)
from counterpoint.runtime.step_commit import CallTiming, StepResult
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.training.batches.in_flight import InFlightBatches, require_known_grad_norm, require_version_memory
from counterpoint.training.distributed_world import DistributedWorld, FabricWorld
from counterpoint.training.model_consistency import ParameterMutationCheck, broadcast_initial_values, require_same_model
from counterpoint.training.model_partition import (
    build_model_spec,
    partition_for_plan,
    plan_fingerprint,
    use_plan_profile,
    with_partition,
)
from counterpoint.training.options import TrainingOptions, build_step_guard
from counterpoint.training.plan_resolution import share_params_per_host
from counterpoint.training.process_memory import ReleasedParameters, RetainedMemory
from counterpoint.training.validation import check_batch_norm, require_no_shared_memory, uses_sync_batch_norm


class _RanksProtocol(Protocol):
    """The ranks of this process, with what they have under way."""

    world: FabricWorld
    ranks: dict[int, RankRuntime]
    in_flight: InFlightBatches
    released_params: ReleasedParameters

    def export_weights(self) -> None:
        """Put the trained weights into the user's model."""


@contextmanager
def annotate_errors(interpreter: Interpreter, rank: int) -> Iterator[None]:
    """Note on an error of the user's code in which step, on which rank and microbatch it came up."""
    try:
        yield
    except CounterpointError:
        raise
    except Exception as error:
        error.add_note(f"in step {interpreter.rng.step} on rank {rank}, microbatch {interpreter.rng.micro}")
        raise


@contextmanager
def rollback_on_error(
    world: FabricWorld, ranks: Mapping[int, RankRuntime], in_flight: InFlightBatches
) -> Iterator[None]:
    """Where all ranks are here, a step that fails inside is left out and others may follow; else it ends the ranks."""
    try:
        yield
    except BaseException:
        in_flight.batches.clear()
        if not isinstance(world, DistributedWorld):
            for rank in ranks.values():
                rollback_step(rank.interpreter)
        raise


def abort_training(local_ranks: _RanksProtocol, error: BaseException, entry_point: str) -> None:
    """Drop what is under way; where all ranks are here, the model gets what was learned, else the others are told.

    Where they are told, weights that only ranks in other processes train are nan here.

    Args:
        team: whose training has ended with an error.
        error: the error.
        began: what came before the training, for a note that weights may be as they were then.
    """
    local_ranks.in_flight.batches.clear()
    try:
        if isinstance(local_ranks.world, DistributedWorld):
            local_ranks.world.stop(error)
            local_ranks.released_params.poison(error)
        else:
            local_ranks.export_weights()
    except CounterpointError as also:
        error.add_note(
            f"the trained weights could not be given back: {also}; the model's are from before {entry_point}, or what some "
            "rank had come to: load a checkpoint (resume=...), or build the model again"
        )


class LocalRanks:
    """The ranks of this process, built for one model and plan.

    Args:
        world: where they run.
        plan: who does what.
        model: the user's model; it gets the trained weights back from :meth:`export_weights`.
        loss: from the model's output and the targets to the mean loss.
        face: the user's optimizer.
        options: how the run trains.
    """

    def __init__(
        self,
        world: FabricWorld,
        plan: Plan,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        optimizer_spec: OptimizerSpec,
        options: TrainingOptions,
    ) -> None:
        plan.require_ranks(world.fabrics[0].num_ranks)
        self.world = world
        self.plan = plan
        self.buckets = plan.buckets  # as they are when the ranks are built
        self.model = model
        self.loss = loss
        self.can_share_params = options.share_params_on_host and not has_max_norm(
            model
        )  # whether replicas may have one copy of weights
        self.optimizer_spec = optimizer_spec
        self.options = use_plan_profile(plan, options)
        self.retained_memory = RetainedMemory(enabled=options.retain_freed_memory)
        self.compiled: CompiledPlan | None = None
        self.global_num_microbatches = 0  # microbatches in one step of all ranks, once built
        self.run_spec: RunSpec | None = None
        self.uses_rng = True
        self.ranks: dict[int, RankRuntime] = {}
        self.has_delayed_grads = False  # whether gradients are set aside that are still to be applied
        self.in_flight = InFlightBatches()
        self.eval_models: dict[int, BoundModel] = {}
        self.mutation_check: ParameterMutationCheck | None = None
        self.released_params = ReleasedParameters({})
        self.choice: PlanChoice | None = None  # what the plan was weighed against, where that was left open

    def build(self, inputs: Any, num_samples: int) -> CompiledPlan:  # noqa: ANN401 - whatever the model takes
        """Cut the model, compile the plan for it, and make the ranks; once.

        Args:
            inputs: the model's inputs for one microbatch.
            num_samples: how many samples these are.

        Raises:
            PlanError: the model and the plan do not fit together, or ranks hold different models.
        """
        if self.compiled is not None and self.mutation_check is not None:
            return self.compiled
        if self.can_share_params and self.optimizer_spec.is_elementwise:
            self.plan = share_params_per_host(self.plan, self.world.fabrics[0].hosts)
        self.check_model_consistency()
        cut = partition_for_plan(self.plan, self.model, inputs, self.options)
        require_no_grad_hooks(self.model, cut, self.plan)
        require_no_shared_memory(self.model, self.plan)
        if self.options.cross_sample == "error" and any(
            isinstance(strategy, Pipeline) for strategy in self.plan.strategies
        ):
            require_sample_independence(
                self.model, as_call_args(inputs), str(self.plan), self.plan.global_num_microbatches
            )
        self.uses_rng = cut.uses_rng
        timing, samples = self.options.profile, max(num_samples, 1)
        spec = build_model_spec(cut, self.optimizer_spec, self.plan, timing, samples)
        self.compiled = compile(with_partition(self.plan, spec, timing), spec, samples_per_micro=samples)
        self.global_num_microbatches = len(self.compiled.program.micros)
        self.in_flight = InFlightBatches.for_variant(self.compiled.step_variants[-1])
        require_known_grad_norm(self.compiled, self.options)
        require_version_memory(self.compiled, self.world.fabrics[0].hosts, self.world.fabrics[0].rank)
        self.require_elementwise_optimizer()
        check_batch_norm(self.model, self.compiled, num_samples, self.options.batch_norm, self.world.fabrics[0].rank)
        if isinstance(cut, TracedPartition) and any(block.tp is not None for block in self.compiled.model.blocks):
            verify_tensor_parallel(cut, self.compiled.model, dict(self.model.named_parameters()))
        compiled, guard = self.compiled, build_step_guard(self.options)
        self.run_spec = RunSpec(
            compiled.step_variants,
            compiled.model,
            self.loss,
            self.optimizer_spec,
            guard,
            self.options.seed,
            self.buckets,
        )
        self.build_ranks(cut, inputs)
        return self.compiled

    def build_ranks(self, partition: PartitionedModel, inputs: Any) -> None:  # noqa: ANN401 - as above
        """Make this process's ranks from a cut of the model."""
        assert self.run_spec is not None, "compiled"
        assert self.compiled is not None, "compiled"
        first, groups = (
            self.world.fabrics[0].rank,
            communication_groups(turn.program for turn in self.compiled.step_variants),
        )
        words = [word for _, word in self.compiled.program.instructions() if isinstance(word, Free)]
        keeps_own = self.shard_map().num_replicas > 1 or any(word.tensor.name == "weight" for word in words)
        needs_own = isinstance(partition, WholeModel) or uses_sync_batch_norm(
            self.model, self.options
        )  # ranks meet inside
        for fabric in self.world.fabrics:
            fabric.connect_groups(groups)
            own_cut, model = partition, self.model
            if (isinstance(partition, WholeModel) and keeps_own) or (needs_own and fabric.rank != first):
                model = copy.deepcopy(self.model)  # whatever happens, the user's own keeps its memory
                own_cut = partition_for_plan(self.plan, model, inputs, self.options)
            rank = build_rank(self.run_spec, own_cut, model, fabric, is_only=len(self.world.fabrics) == 1)
            rank.interpreter.executor.unused_params = self.options.unused_parameters
            rank.interpreter.executor.batch_norm = make_batch_norm(
                self.run_spec, model, rank.interpreter, self.options.batch_norm
            )
            rank.interpreter.store.state_allocator = self.retained_memory.mmap_separately
            self.ranks[fabric.rank] = rank
        self.mutation_check = ParameterMutationCheck(self.model, self.ranks.values(), self.world.fabrics[0].num_ranks)
        self.released_params = ReleasedParameters.for_ranks(self.model, self.ranks, self.run_spec.model_spec)

    def require_elementwise_optimizer(self) -> None:
        """Check that nobody slices what the optimizer has to see in one piece.

        Raises:
            PlanError: the plan does.
        """
        assert self.compiled is not None, "compiled"
        names = [name for block in self.compiled.model.blocks if block.tp for name, _ in block.tp.sharded_dims]
        if names and not self.optimizer_spec.is_elementwise:
            raise PlanError(
                f"{self.optimizer_spec.optimizer_class.__name__} may look at whole tensors, but under {self.plan} a rank has only a slice "
                f"of {names[0]} and {len(names) - 1} others; its updates would be others than without the plan: take "
                "an optimizer that treats every number apart (AdamW, SGD), or data, zero or pipeline"
            )

    def check_model_consistency(self) -> None:
        """Check that all processes hold the same model and plan, and give all of them rank 0's values.

        Raises:
            PlanError: they differ, as :mod:`counterpoint.training.model_consistency` says.
        """
        fabric = self.world.fabrics[0]
        if len(self.world.fabrics) < fabric.num_ranks:
            plan = plan_fingerprint(self.plan, self.options.profile)
            require_same_model(fabric, self.model, plan, self.optimizer_spec.optimizer)
            broadcast_initial_values(fabric, self.model, self.options.init_sync)

    def step(self, number: int, batch: MicrobatchSource) -> StepResult:
        """Run one training step on all ranks and return what the first of this process's ranks decided."""
        turn, is_alone = self.variant_at(number), len(self.world.fabrics) == self.world.fabrics[0].num_ranks
        if self.mutation_check is not None and is_alone:
            self.mutation_check.require_unchanged(self.plan, "")

        def work(fabric: Fabric) -> StepResult | None:
            """Take the step on one rank; return its verdict, None where it has none."""
            interpreter = self.ranks[fabric.rank].interpreter
            if self.mutation_check is not None and not is_alone:
                self.mutation_check.require_unchanged(self.plan, f"on rank {fabric.rank} ")
            self.released_params.release()  # in the first step, and where a model given back is trained further
            with annotate_errors(interpreter, fabric.rank):
                if self.can_share_params:
                    interpreter.store.share_on_host(fabric)
                return interpreter.step(number, batch, turn.name)

        with rollback_on_error(self.world, self.ranks, self.in_flight):
            found = [verdict for verdict in self.world.run(work) if verdict is not None]
        self.retained_memory.start()  # what building and the first step have freed is gone, what later ones free is not
        self.has_delayed_grads = self.plan.sync_schedule.staleness > 0
        return found[0] if found else StepResult(float("nan"), 0, float("nan"), 1.0, "")

    def variant_at(self, number: int) -> StepVariant:
        """Return what kind of step the next one is, if it has this number."""
        assert self.compiled is not None, "built"
        return self.compiled.variant_at(number, has_delayed_grads=self.has_delayed_grads)

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Have the model's weights on every rank inside, where replicas have their own, and these afterwards."""
        book = self.shard_map()
        if book.num_replicas == 1:
            yield
            return

        def take_mean(fabric: Fabric) -> list[Tensor]:
            rank = self.ranks[fabric.rank]
            own = [arena.weights.detach().clone() for arena in rank.interpreter.store.flat_params()]
            broadcast_params(book, rank, fabric)
            return own

        kept = dict(zip(self.ranks, self.world.run(take_mean), strict=True))
        try:
            yield
        finally:
            for number, own in kept.items():
                for arena, weights in zip(self.ranks[number].interpreter.store.flat_params(), own, strict=True):
                    arena.weights.data.copy_(weights)

    def evaluate(self, batch: MicrobatchSource, metrics: Callable[[Any, Any], Any], number: int) -> None:
        """Run the model forward in evaluation mode; ``measure`` gets outputs and targets where the last block is."""

        def watch(outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
            metrics(outputs, targets)
            return torch.zeros(())

        def work(fabric: Fabric) -> None:
            interpreter = self.ranks[fabric.rank].interpreter
            if fabric.rank not in self.eval_models:
                self.eval_models[fabric.rank] = replace(self.ranks[fabric.rank].bind_for_evaluation(), loss=watch)
            interpreter.rng.step = number
            interpreter.evaluate(batch, replace(self.eval_models[fabric.rank], loss=watch))

        self.world.run(work)

    def sync_state(self) -> None:
        """Bring running statistics, and weights that live on servers, to the same state on all ranks."""
        assert self.run_spec is not None, "built"
        book = self.shard_map()
        has_servers = any(
            isinstance(word, ApplyPushes) and word.applies_gradients for _, word in self.run_spec.program.instructions()
        )
        names = [name for name, _ in self.model.named_buffers()]

        def work(fabric: Fabric) -> None:
            """One rank has the newest weights and running statistics."""
            rank = self.ranks[fabric.rank]
            if rank.interpreter.executor.batch_norm is not None:
                rank.interpreter.executor.batch_norm.clear()
            if has_servers:
                broadcast_params(book, rank, fabric)
            if names and fabric.num_ranks > 1:
                average_buffers(rank, fabric, names, rank.interpreter.count_buffer_changes())

        self.world.run(work)

    def shard_map(self) -> ShardMap:
        """Return who answers for what."""
        assert self.run_spec is not None, "built"
        return ShardMap(self.run_spec, {name: param.dtype for name, param in self.model.named_parameters()})

    def export_weights(self) -> None:
        """Put the trained weights and buffers into the user's model, on every rank."""
        if self.mutation_check is None:  # it was never built whole
            return
        self.sync_state()
        self.in_flight.require_flushed("export_weights()")
        book, first = self.shard_map(), self.world.fabrics[0].rank
        full: Mapping[str, Tensor] = self.ranks[first].interpreter.store.params
        if not has_full_model(book):
            full = self.world.run(lambda fabric: gather_weights(book, self.ranks[fabric.rank], fabric))[0]
        self.world.run(lambda fabric: self.ranks[fabric.rank].interpreter.store.unshare(fabric))
        store = self.ranks[first].interpreter.store
        for arena in store.flat_params():
            arena.unshard_weights()
        with torch.no_grad():
            load_values(self.model, full)
            load_values(self.model, store.buffers)
        self.retained_memory.stop()
        if self.mutation_check is not None:
            self.mutation_check.record_versions()

    def import_weights(self) -> None:
        """Bring the user's model, which may have been changed since :meth:`export_weights`, to all ranks."""
        book, params = self.shard_map(), dict(self.model.named_parameters())
        buffers = dict(self.model.named_buffers())

        def work(fabric: Fabric) -> None:
            """One rank has the model's values as its newest, and nothing of before."""
            store = self.ranks[fabric.rank].interpreter.store
            load_weights(book, self.ranks[fabric.rank], lambda name: params[name].detach().clone())
            for arena in store.flat_params():
                arena.reshard_weights()  # where shares are joined, what was joined before is old now
                arena.delayed_grad = None
            self.ranks[fabric.rank].interpreter.state.skip_delayed_update = False
            for name, buffer in store.buffers.items():
                buffer.copy_(buffers[name].clone())

        self.world.run(work)
        self.has_delayed_grads = False
        self.import_frozen_params()

    def import_frozen_params(self) -> None:
        """Bring the parameters that are not trained, which are the model's own, to all ranks."""
        assert self.run_spec is not None, "built"
        named, sliced = dict(self.model.named_parameters()), sliced_params(self.run_spec.model_spec)
        for number, rank in self.ranks.items():
            row = self.run_spec.program.rank_programs[number]
            for name, param in rank.interpreter.store.params.items():
                if not param.requires_grad and param is not named[name]:
                    value = take_slice(named[name].detach(), sliced.get(name), (row.tp_rank, row.tp_degree))
                    param.data.copy_(value)
        if self.mutation_check is not None:
            self.mutation_check.record_versions()

    def close(self) -> None:
        """Leave the world; nothing of it is left running."""
        for rank in self.ranks.values():
            rank.interpreter.store.unshare(None)
        self.retained_memory.stop()
        self.released_params.poison()
        self.world.close()


def trace_step(local_ranks: LocalRanks, number: int, batch: MicrobatchSource) -> tuple[StepResult, Trace]:
    """Take a step with a clock on every rank and return its trace, the same on all of them.

    Ranks of one process take turns, so their times say what each did, not what they would do side by side.
    """
    assert local_ranks.compiled is not None, "built"
    rows = local_ranks.variant_at(number).program.rank_programs
    for rank in local_ranks.ranks.values():
        rank.interpreter.clock = time.perf_counter
    try:
        verdict = local_ranks.step(number, batch)
    finally:
        for rank in local_ranks.ranks.values():
            rank.interpreter.clock = None
    notes = {at: _to_floats(rank.interpreter.state.timings) for at, rank in local_ranks.ranks.items()}
    first: Fabric = local_ranks.world.fabrics[0]
    if len(local_ranks.world.fabrics) < first.num_ranks:
        everyone = first.gather_values("trace", notes[first.rank], tuple(range(first.num_ranks)))
        notes = dict(enumerate(everyone))  # type: ignore[arg-type]  # what every rank sends
    events = [event for rank, times in notes.items() for event in _events(rank, rows[rank].body, times)]
    return verdict, Trace.from_events(events, len(rows), "measured")


def _to_floats(notes: list[CallTiming]) -> list[list[float]]:
    """Return notes as numbers, counted from the first one."""
    began = notes[0].start_s if notes else 0.0
    return [
        [note.start, note.stop, note.start_s - began, note.stop_s - began, float(note.is_transfer)] for note in notes
    ]


def _events(rank: int, instructions: tuple[Instruction, ...], times: list[list[float]]) -> list[TraceEvent]:
    return [
        TraceEvent(
            rank,
            int(start),
            " ".join(map(format_instruction, instructions[int(start) : int(stop)])),
            began,
            ended,
            "link" if is_transfer else trace_lane(instructions[int(start)]),
        )
        for start, stop, began, ended, is_transfer in times
    ]


def trace_lane(instruction: Instruction) -> Lane:
    """Return where the time of an instruction goes."""
    match instruction:
        case Forward() | Recompute() | Backward() | Update():
            return "compute"
        case Send() | Push() | Free() | ApplyPushes() | SwapGradBuffers():
            return "link"
        case Recv() | Pull() | Commit() | Collective():
            return "wait"
