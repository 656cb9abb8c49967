"""The ranks of this process, built for one plan: they take steps, evaluate, and exchange weights with the user's model.

All ranks are here on the local transport; with a launcher there is one rank in each process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.device.accelerator import Accelerator
from counterpoint.device.copy_stream import CopyStream
from counterpoint.device.select import (
    CPU,
    accelerator_for,
    require_device,
    require_param_values,
)
from counterpoint.errors import CounterpointError, DataError, PeerError, PlanError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.partitioning.compiled_modules import require_not_copied, run_eagerly
from counterpoint.partitioning.dry_run import ModuleAttributes, assign_values, kept_value_hint
from counterpoint.partitioning.module_casts import ModuleCasts
from counterpoint.partitioning.partitioned_model import PartitionedModel, as_call_args
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.partitioning.whole_model import WholeModel
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import ApplyPushes, Forward
from counterpoint.program.step_variants import StepVariant
from counterpoint.runtime.autograd.segment_executor import BoundModel
from counterpoint.runtime.batch_copies import find_batches
from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.loss.loss_parameters import find_trained_modules, model_of
from counterpoint.runtime.loss.loss_reduction import LossFunction, PartTotal
from counterpoint.runtime.microbatches import MicrobatchSource, copy_tensors
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import FirstValues
from counterpoint.runtime.rank_builder import (
    GradHookCheck,
    RankRuntime,
    RunSpec,
    StaleGradientHook,
    build_rank,
    commits_together,
    communication_groups,
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
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.terminal_text import warn
from counterpoint.training.agreement.device_facts import compare_devices
from counterpoint.training.agreement.rank_facts import CallFacts
from counterpoint.training.agreement.step_facts import submitted_parts
from counterpoint.training.agreement.weight_values import find_differing_weights
from counterpoint.training.batches.in_flight import InFlightBatches
from counterpoint.training.between_steps.model_changes import ModelChanges
from counterpoint.training.between_steps.optimizer_exchange import OptimizerExchange
from counterpoint.training.between_steps.rebuild_agreement import explain_announcement, require_same_changes
from counterpoint.training.between_steps.shared_models import SharedModel
from counterpoint.training.between_steps.stale_weights import StaleGrads, StaleWeights, without_stale_reads
from counterpoint.training.between_steps.step_gradients import StepGradients
from counterpoint.training.built_ranks import BuiltRanks
from counterpoint.training.distributed_world import DistributedWorld, FabricWorld, has_remote_ranks
from counterpoint.training.initialization.materialize import InitialValues, LocalSlice
from counterpoint.training.model_checks.divided_batch import explain_division
from counterpoint.training.model_checks.forward_state import InputReuse
from counterpoint.training.model_checks.hook_stores import require_no_kept_outputs
from counterpoint.training.model_checks.model_loss_check import ModelLossCheck, Samples
from counterpoint.training.model_checks.validation import require_no_autocast, require_values, uses_sync_batch_norm
from counterpoint.training.model_partition import partition_for_plan, plan_fingerprint, use_plan_profile
from counterpoint.training.options import TrainingOptions, use_plan_options
from counterpoint.training.plan_resolution import share_params_per_host
from counterpoint.training.ranks.device_memory import DeviceMemory, explain_full_device
from counterpoint.training.ranks.initial_values import broadcast_initial_values
from counterpoint.training.ranks.process_memory import ReleasedParameters, RetainedMemory
from counterpoint.training.ranks.run_compiler import RunCompiler

if TYPE_CHECKING:
    from counterpoint.planner.choose import PlanChoice


ReadBatch: TypeAlias = Callable[[], tuple[Any, Any, int]]
"""Returns inputs, targets and number of samples of a batch."""


class LocalRanks:
    """The ranks of this process, built for one model and plan.

    Args:
        world: the fabric of each rank.
        plan: the plan to execute.
        model: the user's model; :meth:`export_weights` loads the trained weights into it.
        loss: from the model's output and the targets to the mean loss.
        optimizer_spec: the user's optimizer.
        options: the training options.
        accelerator: that the model is on; by default that of its first parameter.
        initial_values: of a model that was on the meta device; None if it has its values.
    """

    def __init__(  # noqa: PLR0913 - what a run consists of
        self,
        world: FabricWorld,
        plan: Plan,
        model: nn.Module,
        loss: LossFunction,
        optimizer_spec: OptimizerSpec,
        options: TrainingOptions,
        accelerator: Accelerator | None = None,
        initial_values: InitialValues | None = None,
    ) -> None:
        plan.require_ranks(world.fabrics[0].num_ranks)
        self.world = world
        self.plan, self.buckets = plan, plan.buckets
        self.model = model
        self.trained = find_trained_modules(model, loss, optimizer_spec.optimizer)
        self.loss = loss
        self.accelerator = accelerator if accelerator is not None else find_accelerator(model)
        self.copy_stream = None if self.accelerator.is_host else CopyStream(self.accelerator)
        for fabric in world.fabrics:
            fabric.use_accelerator(self.accelerator)
        self.optimizer_spec = optimizer_spec
        self.options = use_plan_options(use_plan_profile(plan, options), plan)
        self.module_casts: ModuleCasts | None = None  # of a precision that casts modules, once built
        self.compiler = RunCompiler(model, self.trained, loss, optimizer_spec, self.options)
        self.retained_memory = RetainedMemory(enabled=options.retain_freed_memory)
        self.compiled: CompiledPlan | None = None
        self.global_num_microbatches = 0  # microbatches in one step of all ranks, once built
        self.run_spec: RunSpec | None = None
        # whether the model draws, and whether its forward reads values, by which it may branch, once compiled
        self.uses_rng, self.reads_values = True, False
        self.ranks: dict[int, RankRuntime] = {}
        self.model_tensors: dict[str, Tensor] = {}  # parameters and buffers of the user's model, once built
        # whether steps apply the gradients of the step before, once built, and whether some are still to be applied
        self.delays_grads = self.has_delayed_grads = False
        self.in_flight = InFlightBatches()
        self.eval_models: dict[int, BoundModel] = {}
        self.changes: ModelChanges | None = None  # between steps, once built
        self.grad_hooks: GradHookCheck | None = None  # likewise
        self.optimizer_exchange: OptimizerExchange | None = None  # once built
        self.step_gradients = StepGradients()
        self.initial_values = initial_values
        self.stale_weights = self.find_deferred_weights()
        self.stop_signals: list[int] = []  # that have asked this process to stop
        self.groups: Sequence[Group] = ()  # of ranks that communicate, once built
        self.commits_together = True  # whether every commit is one of all ranks, once built
        self.input_reuse: InputReuse | None = None  # of a forward that changes its inputs, once compiled
        self.is_in_step = False
        self.model_loss_check: ModelLossCheck | None = None  # of a loss that the model computes, once built
        self.stale_hooks: list[Any] = []  # on parameters of the user's model of which ranks train copies
        self.released_params = ReleasedParameters({})
        self.choice: PlanChoice | None = None  # the candidates of strategy="auto"
        self.observer: StepObserver | None = None
        self.shared_model = SharedModel(self)

    def find_deferred_weights(self) -> StaleWeights:
        """Return the parameters that get their first values when ranks are built, marked as out of date."""
        is_pending = self.initial_values is not None and self.initial_values.is_pending
        stale_weights = StaleWeights(
            self.initial_values.deferred if self.initial_values is not None and is_pending else {}, str(self.plan), None
        )
        if is_pending:
            stale_weights.mark()
        return stale_weights

    @property
    def keeps_model_on_meta(self) -> bool:
        """Whether the model, which is larger than a process can hold, gets trained weights only where asked for."""
        return self.initial_values is not None and bool(self.initial_values.deferred)

    def observe_steps(self, observer: StepObserver) -> None:
        """Let an observer see every step before it is taken."""
        self.observer = observer

    def use_plan(self, plan: Plan, choice: PlanChoice | None = None) -> None:
        """Execute another plan than the constructor's, before :meth:`build`; ``choice`` are the candidates for it."""
        self.plan, self.buckets, self.choice = plan, plan.buckets, choice

    def use_buckets(self, buckets: BucketConfig) -> None:
        """Group gradients for reductions during backward like this, before :meth:`build`."""
        self.buckets = buckets

    def build(
        self,
        inputs: Any,  # noqa: ANN401 - whatever the model takes
        num_samples: int,
        undivided: ReadBatch | None = None,
    ) -> CompiledPlan:
        """Partition the model, compile the plan for it, and build the ranks; once.

        Args:
            inputs: the model's inputs for one microbatch.
            num_samples: the number of samples in them.
            undivided: returns inputs, targets and number of samples of the batch; None if it cannot be read.

        Raises:
            PlanError: the model and the plan do not fit together.
        """
        require_grad_recording()
        if self.compiled is None or self.changes is None:
            require_no_autocast(self.precision)
            self.stale_weights.unmark()
            self.retained_memory.begin()
            self.shared_model.find_partners()
            memory = self.device_memory(inputs, num_samples)
            with (
                self.retained_memory.mmap_separately(),  # or what is built, and stays, would leave holes between it
                self.cast_modules(),
                run_eagerly(self.model),
                explain_full_device(self.accelerator, memory.describe, "before the first step"),
            ):
                inputs = copy_tensors(inputs, detached=True)  # which a forward may change in place
                partition = self.compile_plan(inputs, num_samples, undivided)
                self.build_ranks(partition, self.accelerator.to_device(inputs))
            if self.initial_values is not None and self.initial_values.is_pending:
                self.initial_values.finish()
                self.stale_weights.mark()
        assert self.compiled is not None, "compiled"
        return self.compiled

    @contextmanager
    def cast_modules(self) -> Iterator[None]:
        """Let the model compute in the precision of the run, until the ranks are closed, or an error inside."""
        if self.precision is not None and self.precision.casts_modules and self.module_casts is None:
            self.module_casts = ModuleCasts(self.model, self.precision)
        try:
            yield
        except BaseException:
            self.remove_casts()
            raise

    def remove_casts(self) -> None:
        """Let the model compute in the dtype of its parameters again."""
        if self.module_casts is not None:
            self.module_casts.remove()
            self.module_casts = None

    def explain_build(
        self,
        inputs: Any,  # noqa: ANN401 - whatever the model takes
        num_samples: int,
        undivided: ReadBatch,
    ) -> AbstractContextManager[None]:
        """Explain an error of :meth:`build` whose cause is that its microbatch is a part of a batch.

        Args:
            inputs: of the microbatch.
            num_samples: of the microbatch.
            undivided: returns inputs, targets and number of samples of the batch.
        """

        def read() -> tuple[Samples, Samples, str]:
            """Return the microbatch, and the batch."""
            whole_inputs, _, count = undivided()
            return Samples(inputs, None, num_samples), Samples(whole_inputs, None, count), "a microbatch"

        return explain_division(self.model, None, self.plan, read)

    def compile_plan(
        self,
        inputs: Any,  # noqa: ANN401 - what the model takes
        num_samples: int,
        undivided: ReadBatch | None = None,
    ) -> PartitionedModel:
        """Partition the model and compile the plan for it; return the partition.

        Args:
            inputs: the model's inputs for one microbatch.
            num_samples: the number of samples in them.
            undivided: returns inputs, targets and number of samples of the batch; None if it cannot be read.

        Raises:
            PlanError: the model and the plan do not fit together.
        """
        fabric = self.world.fabrics[0]
        if self.can_share_params and self.optimizer_spec.split_size is not None:
            self.plan = share_params_per_host(self.plan, fabric.hosts)
        self.sync_initial_values()
        require_values(inputs)
        to_device = self.accelerator.to_device
        read_batch = None if undivided is None else lambda: to_device(copy_tensors(undivided()[0], detached=True))
        with self.accelerator.as_current():
            run = self.compiler.compile(self.plan, self.buckets, to_device(inputs), num_samples, fabric, read_batch)
        self.compiled, self.run_spec, self.uses_rng = run.compiled, run.run_spec, run.uses_rng
        self.reads_values = run.reads_values
        self.global_num_microbatches = len(run.compiled.program.micros)
        self.delays_grads = self.plan.sync_schedule.staleness > 0
        self.in_flight = InFlightBatches.for_variant(run.compiled.step_variants[-1])
        is_kept = isinstance(run.partition, TracedPartition)
        if run.changed_inputs:
            self.input_reuse = InputReuse(
                type(self.model).__name__,
                run.changed_inputs,
                str(self.plan),
                is_kept=is_kept,
                is_kept_elsewhere=not (self.is_single_process or isinstance(run.partition, WholeModel)),
            )
        return run.partition

    def partition_copy(self, partition: PartitionedModel, model: nn.Module, inputs: Any) -> PartitionedModel:  # noqa: ANN401 - as above
        """Return the partition of a deep copy of the model; a model that stays whole is not run again for it."""
        if isinstance(partition, WholeModel):
            return partition.of_copy(model)
        return partition_for_plan(self.plan, model, inputs, self.options)

    def build_ranks(self, partition: PartitionedModel, inputs: Any) -> None:  # noqa: ANN401 - as above
        """Build this process's ranks from a partition of the model."""
        assert self.run_spec is not None, "compiled"
        assert self.compiled is not None, "compiled"
        self.model_tensors = dict((*self.trained.named_parameters(), *self.model.named_buffers()))
        # those of the ranks, whatever the model is converted to later
        self.param_dtypes = {name: param.dtype for name, param in self.trained.named_parameters()}
        first = self.world.fabrics[0].rank
        programs = [variant.program for variant in self.compiled.step_variants]
        self.groups, self.commits_together = communication_groups(programs), commits_together(programs)
        keeps_own = self.shard_map().num_replicas > 1 or self.run_spec.trains_copies
        num_local = len(self.world.fabrics)
        # a WholeModel runs its own parameters; SyncBatchNorm modules of several ranks communicate inside forward
        copies_model = isinstance(partition, WholeModel) and (keeps_own or num_local > 1)
        copies_norms = uses_sync_batch_norm(self.model, self.options) and num_local > 1
        if isinstance(partition, WholeModel) and copies_model:
            remedy = "" if keeps_own else f", or start one process per rank: counterpoint run -n {num_local} script.py"
            require_copyable_model(self.model, partition, str(self.plan), remedy)
        is_traced = isinstance(partition, TracedPartition)
        if copies_model or is_traced or not (isinstance(partition, WholeModel) or self.plan.num_ranks == 1):
            require_no_kept_outputs(
                self.model, as_call_args(inputs), str(self.plan), are_copied=copies_model, are_traced=is_traced
            )
        for fabric in self.world.fabrics:
            fabric.connect_groups(self.groups)
            own_partition, model = partition, self.trained
            if copies_model or (copies_norms and fabric.rank != first):
                model = copy.deepcopy(self.trained)  # the user's model keeps its memory
                own_partition = self.partition_copy(partition, model_of(model), inputs)
            self.ranks[fabric.rank] = build_rank(
                self.run_spec,
                own_partition,
                model,
                fabric,
                accelerator=self.accelerator,
                is_only=len(self.world.fabrics) == 1,
                state_allocator=self.retained_memory.mmap_separately,
                first_values=self.first_values_of(fabric.rank),
            )
            self.configure(self.ranks[fabric.rank].interpreter, fabric.num_ranks)
        built = BuiltRanks(
            str(self.plan), self.world, self.ranks.values(), self.shard_map(), keeps_grads=self.run_spec.keeps_grads
        )
        self.changes = ModelChanges(
            built,
            self.model,
            self.trained,
            self.loss,
            self.optimizer_spec,
            runs="trace" if is_traced else "copies" if copies_model or copies_norms else "model",
        )
        self.grad_hooks = GradHookCheck(self.trained, partition, self.plan, trains_copies=self.run_spec.trains_copies)
        self.step_gradients = StepGradients(built)
        self.hook_stale_params()
        self.stale_weights = self.find_stale_weights()
        self.model_loss_check = self.model_loss_check or self.make_model_loss_check()
        self.released_params = ReleasedParameters.for_ranks(self.trained, self.ranks, self.run_spec.model_spec)
        self.optimizer_exchange = OptimizerExchange(self.optimizer_spec, built, self.in_flight)
        self.optimizer_exchange.import_state()
        self.shared_model.open()

    def configure(self, interpreter: Interpreter, num_ranks: int) -> None:
        """Let a rank do what this process and the options ask for."""
        if self.copy_stream is not None:
            interpreter.use_copy_stream(self.copy_stream)
        if not self.options.retain_freed_memory:
            interpreter.store.keep_shards_in_place()
        if len(self.world.fabrics) < num_ranks:
            interpreter.busy_timer.count_pauses()

    def first_values_of(self, rank: int) -> FirstValues | None:
        """Return the first values of a rank's parameters; None if the model has them."""
        assert self.run_spec is not None, "compiled"
        if self.initial_values is None:
            return None
        rank_program = self.run_spec.program.rank_programs[rank]
        sharded = sliced_params(self.run_spec.model_spec).items() if rank_program.tp_degree > 1 else ()
        return self.initial_values.for_rank(
            {name: LocalSlice(dim, count, rank_program.tp_rank) for name, (dim, count) in sharded}
        )

    @property
    def can_share_params(self) -> bool:
        """Whether replicas on one host may share parameters; they would sum gradients in the gradients' own dtype."""
        casts_grads = self.precision is not None and self.precision.casts_grads
        return self.options.share_params_on_host and self.accelerator.is_host and not casts_grads

    @property
    def precision(self) -> Precision | None:
        """What the model computes in; None for the dtype of its parameters."""
        return parse_precision(self.options.precision)

    @property
    def trains_in_place(self) -> bool:
        """Whether the model's own parameters are trained, and not copies, shards or other memory."""
        has_flat_params = any(True for rank in self.ranks.values() for _ in rank.interpreter.store.flat_params())
        return self.world.fabrics[0].num_ranks == 1 and not has_flat_params and not self.stale_weights.names

    def update_model(self) -> None:
        """Load the trained weights into the model if it is out of date."""
        if self.stale_weights.is_stale:
            self.export_weights()

    def hook_stale_params(self) -> None:
        """Reject gradients that reach parameters of the user's model of which the ranks train copies."""
        trained = {id(param) for rank in self.ranks.values() for param in rank.interpreter.store.params.values()}
        for name, param in self.trained.named_parameters():
            if param.requires_grad and param.is_leaf and id(param) not in trained:
                hook = StaleGradientHook(name, self.plan, lambda: self.is_in_step)
                self.stale_hooks.append(param.register_hook(hook))  # type: ignore[no-untyped-call]

    def find_stale_weights(self) -> StaleWeights:
        """Return the parameters and buffers of the user's model whose trained values no rank of this process has.

        And the parameters whose gradients no rank of this process has.
        """
        changed = {name for rank in self.ranks.values() for name in rank.interpreter.count_buffer_changes()}
        named: list[tuple[str, Tensor]] = [pair for pair in self.trained.named_parameters() if pair[1].requires_grad]
        named += [(name, buffer) for name, buffer in self.model.named_buffers() if name in changed]
        current = {id(tensor) for tensor in self.current_tensors()} if len(self.ranks) == 1 else set()
        own_grads = self.own_grad_ids()
        return StaleWeights(
            {name: tensor for name, tensor in named if id(tensor) not in current},
            str(self.plan),
            self.export_weights if self.is_single_process else None,
            StaleGrads(
                {name: param for name, param in self.trained.named_parameters() if id(param) not in own_grads},
                str(self.plan),
                self.step_gradients.read,
                is_single_process=self.is_single_process,
            ),
        )

    def own_grad_ids(self) -> set[int]:
        """Return the parameters, by identity, in whose own ``grad`` the only rank has the gradient; and frozen ones."""
        frozen = {id(param) for param in self.trained.parameters() if not param.requires_grad}
        if self.world.fabrics[0].num_ranks > 1 or self.run_spec is None or not self.run_spec.keeps_grads:
            return frozen
        units = self.ranks[0].interpreter.store.units.values()
        return frozen | {id(param) for unit in units for param in unit.own_params.values()}

    def current_tensors(self) -> list[Tensor]:
        """Return the tensors of this process's first rank that have the trained values after every step."""
        rank, shard_map = next(iter(self.ranks.values())), self.shard_map()
        if shard_map.num_replicas > 1 or self.has_servers() or self.in_flight.lookahead:
            return []
        store = rank.interpreter.store
        sharded = {
            name for storage in store.flat_params() if storage.local_shard is not storage.weights
            for name in storage.params
        }  # fmt: skip
        return [*(param for name, param in store.params.items() if name not in sharded), *store.buffers.values()]

    def has_servers(self) -> bool:
        """Return whether servers update weights."""
        assert self.run_spec is not None, "built"
        return any(
            isinstance(instruction, ApplyPushes) and instruction.applies_gradients
            for _, instruction in self.run_spec.program.instructions()
        )

    def sync_initial_values(self) -> None:
        """Broadcast rank 0's values to all processes, which have chosen the same plan.

        Raises:
            PlanError: they have not, or have other values under ``init_sync="verify"``.
        """
        fabric = self.world.fabrics[0]
        if has_remote_ranks(self.world):
            CallFacts().require_same(fabric, [[["the plan", plan_fingerprint(self.plan, self.options.profile)]]])
            compare_devices(fabric, self.accelerator)
            deferred = self.initial_values.deferred if self.initial_values is not None else {}
            broadcast_initial_values(fabric, self.trained, self.options.init_sync, without=deferred)
        require_device(self.model, self.accelerator.device)

    def step(
        self, number: int, batch: MicrobatchSource, while_computing: Callable[[], None] | None = None
    ) -> StepResult | LateResult:
        """Run one training step on all ranks and return the result of this process's first rank.

        If the step's decision is left on the device, an error of it is raised by the next step, or by
        :meth:`finish_steps`.

        Args:
            number: of the step.
            batch: what it reads.
            while_computing: called when the step is launched; if this process has one rank, before the host waits for
                it. It may copy the next batch to the device, whose pinned memory is read until
                :meth:`finish_copies`.
        """
        # several ranks have threads and random states of their own, in which the user's dataset does not expect to run
        before_wait = while_computing if len(self.ranks) == 1 else None
        try:
            with self.accelerator.as_current():
                result = self.run_step(number, batch, before_wait)
            if while_computing is not None and before_wait is None:
                while_computing()
        finally:
            if while_computing is None:
                self.finish_copies()
        return result

    def run_step(
        self, number: int, batch: MicrobatchSource, before_wait: Callable[[], None] | None
    ) -> StepResult | LateResult:
        """Run one training step, and something on each rank before the host may wait for the device."""
        require_no_autocast(self.precision)
        replaced = None if self.observer is None else self.observer.before_step(self, batch)
        if replaced is not None:
            return replaced
        with stop_others_on_error(self.world):
            changes = self.prepare_step(batch)
            self.require_divisible(number, batch)
        for step, own in find_batches(number, batch).items():
            self.copy_ahead(step, own)  # for all ranks, before the first one computes
        variant = self.variant_at(number)
        check = self.model_loss_check
        runs_later = self.reads_values or (check is not None and check.found_own)  # the model, to check later batches
        keeps_weights = self.released_params.has_all and runs_later

        def work(fabric: Fabric) -> StepResult | LateResult | None:
            """Take the step on one rank; return its result, None if it has none."""
            interpreter = self.ranks[fabric.rank].interpreter
            changes.require_same_weights(fabric.rank)
            if not keeps_weights:
                self.released_params.release()  # in the first step, and in the first one after export_weights
            with self.explain_division(batch, fabric.rank), annotate_errors(interpreter, fabric.rank):
                if self.can_share_params:
                    interpreter.store.share_on_host(fabric)
                return interpreter.step(number, batch, variant.name, changes.step_facts, self.stop_signals, before_wait)

        self.is_in_step = True
        try:
            with (
                explain_full_device(self.accelerator, lambda: self.memory_of(batch).describe(), f"in step {number}"),
                rollback_on_error(self.world, self.ranks, self.in_flight, number),
            ):
                results = [result for result in self.world.run(work) if result is not None]
            self.stale_weights.mark()
            self.shared_model.record_step()
        except BaseException:
            if self.is_single_process:  # elsewhere the other ranks end, too, and what a rank has is all there is
                self.stale_weights.mark()
            raise
        finally:
            self.is_in_step = False
        changes.end_step()
        self.retained_memory.start()  # after the first step, so that memory freed while building is returned
        self.has_delayed_grads = self.delays_grads
        result = first_result(results)
        self.step_gradients.record_step(result)
        return result

    def copy_ahead(self, step: int, batch: MicrobatchSource) -> None:
        """Start to copy the batch of a step to the device, unless that was started; the step raises its errors."""
        for rank in self.ranks.values():
            if rank.interpreter.executor.copies is not None:
                rank.interpreter.executor.copies.start_ahead(step, batch)

    def finish_copies(self) -> None:
        """Wait until pinned tensors of batches were read, so that the caller may change them again."""
        if self.copy_stream is not None:
            self.copy_stream.wait_for_sources()

    def finish_steps(self) -> None:
        """Read the decision of the last step if it was left on the device; a collective call.

        Raises:
            DataError: the step may not be skipped; the weights are those before it.
        """
        if not any(rank.interpreter.state.pending_commits for rank in self.ranks.values()):
            return
        with rollback_on_error(self.world, self.ranks, self.in_flight):
            self.world.run(lambda fabric: self.ranks[fabric.rank].interpreter.finish_commits())

    def explain_division(self, batch: MicrobatchSource, rank: int) -> AbstractContextManager[None]:
        """Explain an error of a step or an evaluation inside whose cause is that a rank has a part of the batch."""
        if len(batch.sizes) == 1:  # then it has all
            return nullcontext()
        loss = None if self.options.loss_reduction == "batch" else self.loss
        interpreter = self.ranks[rank].interpreter

        def read() -> tuple[Samples, Samples, str]:
            """Return what the rank has computed last, and the batch."""
            rng, num_in_flight = interpreter.rng, interpreter.program.microbatches_per_batch
            micro = rng.step * num_in_flight + rng.micro
            part = Samples(batch.inputs(micro), batch.targets(micro), batch.sizes[micro])
            return part, Samples(*batch.undivided(micro)), f"microbatch {rng.micro} on rank {rank}"

        return explain_division(self.model, loss, self.plan, read)

    def device_memory(self, inputs: Any, num_samples: int, targets: Any = None) -> DeviceMemory:  # noqa: ANN401 - whatever the model and the loss take
        """Return what the ranks need of their device for microbatches like this one, without the loss if no targets."""
        return DeviceMemory(
            self.accelerator,
            self.plan,
            self.model,
            inputs,
            max(num_samples, 1),
            self.optimizer_spec,
            self.precision,
            None if targets is None else self.loss,
            targets,
        )

    def memory_of(self, batch: MicrobatchSource) -> DeviceMemory:
        """Return what the ranks need of their device for a batch."""
        interpreter = next(iter(self.ranks.values())).interpreter
        micro = interpreter.rng.step * interpreter.program.microbatches_per_batch
        return self.device_memory(batch.inputs(micro), batch.sizes[micro], batch.targets(micro))

    @property
    def knows_stop_signal(self) -> bool:
        """Whether the result of a step tells of a signal to any rank: one process, or commits of all ranks."""
        return self.commits_together or not has_remote_ranks(self.world)

    def stop_signal_of(self, result: StepResult | LateResult) -> int:
        """Return the signal that has asked any rank to stop, which the step's commit has sent to all; 0 for none."""
        return result.stop_signal if has_remote_ranks(self.world) else next(iter(self.stop_signals), 0)

    def exchange_stop_signals(self, seconds: float = 0.0) -> tuple[int, float]:
        """Return the signal that has asked any rank to stop, 0 for none, and the largest of all ranks' seconds.

        A collective call of all ranks.
        """
        everyone = tuple(range(self.world.fabrics[0].num_ranks))
        own: Any = [next(iter(self.stop_signals), 0), seconds]
        gathered: Any = self.world.run(lambda fabric: fabric.gather_values("signals", own, everyone))[0]
        numbers, durations_s = zip(*gathered, strict=True)
        return max(numbers), max(durations_s)

    def make_model_loss_check(self) -> ModelLossCheck | None:
        """Return what checks a loss that the model computes; None if ranks do not add up losses of microbatches."""
        reduction = self.options.loss_reduction
        if self.global_num_microbatches == 1 or reduction == "batch" or not self.compiler.may_cut_batches():
            return None
        return ModelLossCheck(self.model, self.loss, str(self.plan), is_sum=reduction == "sum")

    def require_model_loss(self, check: ModelLossCheck, batch: MicrobatchSource) -> None:
        """Check that a loss that the model computes adds up over microbatches.

        Raises:
            DataError: it does not.
        """
        if check.is_watched:
            check.check(batch, self.own_micros(batch), has_weights=not self.released_params.versions)

    def require_divisible(self, number: int, batch: MicrobatchSource) -> None:
        """Check that the loss and the branches of a forward are those of the whole batch.

        Args:
            number: of the step.
            batch: what it reads.

        Raises:
            DataError: a loss that the model computes does not add up over microbatches.
            PlanError: a branch depends on several samples of the batch.
        """
        if self.model_loss_check is not None:
            self.require_model_loss(self.model_loss_check, batch)
        if self.reads_values and number > 0 and number & (number - 1) == 0:
            self.require_same_branches(batch)

    def require_same_branches(self, batch: MicrobatchSource) -> None:
        """Check, in steps 1, 2, 4, 8 and so on, that no branch of the forward depends on several samples of the batch.

        Raises:
            PlanError: one does.
        """
        if self.released_params.versions:
            self.warn_unchecked_branches()
            return
        with without_stale_reads(), self.accelerator.as_current(), run_eagerly(self.model):
            for micro in self.own_micros(batch):
                self.compiler.require_sample_independence(
                    self.plan, self.accelerator.to_device(copy_tensors(batch.inputs(micro)))
                )

    def warn_unchecked_branches(self) -> None:
        """Warn once that later batches are not checked for branches, because no process has all weights."""
        if self.world.fabrics[0].rank == 0:
            warn(
                f"the forward of {type(self.model).__name__} reads values of tensors, and may branch on them; under "
                f"{self.plan} no process has all weights after the first step, so that only the first batch was "
                "checked for a branch that several samples decide on together, such as if x.mean() > 0; let each "
                "sample decide for itself, as with torch.where, or run some steps under data, which checks later "
                "batches, too",
                stacklevel=2,
            )
        self.reads_values = False

    def example_micro(self, batch: MicrobatchSource) -> int:
        """Return a microbatch that this process can read; one with samples, if it computes any."""
        return min(self.own_micros(batch), default=min(batch.sizes))

    def own_micros(self, batch: MicrobatchSource) -> list[int]:
        """Return the microbatches with samples that ranks of this process read, for the first or the last block."""
        assert self.compiled is not None, "built"
        rank_programs = self.compiled.step_variants[-1].program.rank_programs
        instructions = [instruction for rank in self.ranks for instruction in rank_programs[rank].body]
        ends = {0, len(self.compiled.model.blocks) - 1}
        own = {
            instruction.micro
            for instruction in instructions
            if isinstance(instruction, Forward) and instruction.block in ends
        }
        reads_all = own and self.in_flight.lookahead  # then micro is counted from a later batch
        return [micro for micro, size in batch.sizes.items() if size and (micro in own or reads_all)]

    def prepare_step(self, batch: MicrobatchSource) -> ModelChanges:
        """Check what the user may have changed since the last step, and give the ranks what they can take over.

        Modules in another mode, and parameters that were frozen, thawed or added to a group, need ranks that are built
        again.

        Returns:
            What finds the changes.

        Raises:
            PlanError: the optimizer has got hooks that ranks cannot run, or tensors that are not the model's.
            DataError: something was changed that ranks cannot take over.
        """
        assert self.changes is not None, "built"
        assert self.optimizer_exchange is not None, "built"
        require_grad_recording()
        self.stale_weights.grads.drop()
        self.shared_model.catch_up()
        self.changes.carry_over()
        if self.grad_hooks is not None:
            with without_stale_reads():
                self.grad_hooks.require_none_unseen()
        self.optimizer_exchange.find_changes()
        reason = self.changes.find_rebuild_reason()
        if reason:
            self.rebuild(batch, reason)
        elif self.optimizer_spec.has_new_state:
            self.optimizer_exchange.import_state()
        self.stale_weights.unmark()
        self.step_gradients.drop()
        if self.input_reuse is not None:
            self.input_reuse.check_batch(batch, submitted_parts(batch))
        changes = self.changes
        changes.begin_step(batch, lambda: self.run_example(batch))
        return changes

    def run_example(self, batch: MicrobatchSource) -> None:
        """Run the user's model once on a copy of a microbatch; its attributes stay as the forward leaves them."""
        inputs = copy_tensors(batch.inputs(self.example_micro(batch)), detached=True)
        self.compiler.run_forward(inputs, ModuleAttributes(self.model))

    def prepare_evaluation(self, batch: MicrobatchSource) -> None:
        """Check what the user may have changed since the last step, and give the ranks what they can take over.

        Args:
            batch: the first that is evaluated.

        Raises:
            DataError: something was changed that ranks cannot take over.
        """
        assert self.changes is not None, "built"
        self.finish_steps()
        self.shared_model.catch_up()
        self.changes.prepare_evaluation(lambda: self.run_example(batch))

    @property
    def is_single_process(self) -> bool:
        """Whether all ranks are in this process."""
        return len(self.world.fabrics) == self.world.fabrics[0].num_ranks

    def rebuild(self, batch: MicrobatchSource, change: str) -> None:
        """Build the ranks again for the model and the optimizer as they are now; weights, buffers and state stay.

        Args:
            batch: that of the next step.
            change: what has changed, for the error.

        Raises:
            DataError: ranks have more state than that, or weights were changed, too.
        """
        assert self.changes is not None, "built"
        assert self.optimizer_exchange is not None, "built"
        self.changes.weights.require_unchanged(str(self.plan))
        has_feedback = any(
            flat_params.error_feedbacks
            for rank in self.ranks.values()
            for flat_params in rank.interpreter.store.flat_params()
        )
        if self.delays_grads or self.in_flight.lookahead or self.shard_map().num_replicas > 1 or has_feedback:
            raise DataError(
                f"{change} between two steps, but under {self.plan} ranks have delayed gradients, batches in flight or "
                "weights of their own, which would be lost; do it before the first step, or close() and call "
                "parallelize(...) again (or make a new Trainer)"
            )
        if has_remote_ranks(self.world):
            require_same_changes(self.world.fabrics[0], self.groups, self.model, change)
        self.optimizer_exchange.keep_for_rebuild()
        micro = self.example_micro(batch)
        self.export_weights()
        self.optimizer_spec.update_groups()
        self.remove_hooks()
        for rank in self.ranks.values():
            rank.interpreter.store.close()
        self.ranks, self.eval_models, self.compiled, self.changes = {}, {}, None, None
        inputs, num_samples = batch.inputs(micro), batch.sizes[micro]
        undivided = partial(batch.undivided, micro)
        with self.explain_build(inputs, num_samples, undivided):
            self.build(inputs, num_samples, undivided)

    def variant_at(self, number: int) -> StepVariant:
        """Return the step variant of the next step, given its number."""
        assert self.compiled is not None, "built"
        return self.compiled.variant_at(number, has_delayed_grads=self.has_delayed_grads)

    @contextmanager
    def use_averaged_weights(self) -> Iterator[None]:
        """Load the mean of the replicas' weights on every rank inside, and restore each replica's own afterwards."""
        shard_map = self.shard_map()
        if shard_map.num_replicas == 1:
            yield
            return

        def take_mean(fabric: Fabric) -> list[Tensor]:
            rank = self.ranks[fabric.rank]
            local = [flat_params.weights.detach().clone() for flat_params in rank.interpreter.store.flat_params()]
            broadcast_params(shard_map, rank, fabric)
            return local

        saved = dict(zip(self.ranks, self.world.run(take_mean), strict=True))
        try:
            yield
        finally:
            for number, local in saved.items():
                for flat_params, weights in zip(self.ranks[number].interpreter.store.flat_params(), local, strict=True):
                    flat_params.weights.data.copy_(weights)

    def evaluate(
        self, batch: MicrobatchSource, metrics: Callable[[Any, Any], Any] | None, number: int
    ) -> dict[int, dict[str, PartTotal]]:
        """Run the model forward in evaluation mode; ranks with the last block call ``metrics(outputs, targets)``.

        Returns:
            Without ``metrics`` the loss of each microbatch, as ``loss``, and its parts.
        """
        require_no_autocast(self.precision)
        measured: dict[int, dict[str, PartTotal]] = {}

        def record(outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
            assert metrics is not None, "the loss is not replaced"
            metrics(outputs, targets)
            return torch.zeros(())

        def work(fabric: Fabric) -> None:
            interpreter = self.ranks[fabric.rank].interpreter
            if fabric.rank not in self.eval_models:
                self.eval_models[fabric.rank] = self.ranks[fabric.rank].bind_for_evaluation()
            model = self.eval_models[fabric.rank]
            with self.explain_division(batch, fabric.rank):
                losses = interpreter.evaluate(batch, model if metrics is None else replace(model, loss=record), number)
            measured.update({} if metrics is not None else losses)

        self.finish_steps()
        self.shared_model.catch_up()
        with self.stale_weights.unmarked(), self.accelerator.as_current():
            self.world.run(work)
        return measured

    def sync_state(self) -> None:
        """Synchronize running statistics, and weights that are on servers, to all ranks."""
        assert self.run_spec is not None, "built"
        shard_map, has_servers = self.shard_map(), self.has_servers()
        names = [name for name, tensor in self.model_tensors.items() if not isinstance(tensor, nn.Parameter)]

        def work(fabric: Fabric) -> None:
            rank = self.ranks[fabric.rank]
            if rank.interpreter.batch_norm is not None:
                rank.interpreter.batch_norm.clear()
            if has_servers:
                broadcast_params(shard_map, rank, fabric)
            if names and fabric.num_ranks > 1:
                average_buffers(rank, fabric, names, rank.interpreter.count_buffer_changes())

        self.world.run(work)

    def restore_delayed_grads(self, *, exist: bool) -> None:
        """Record whether the ranks have got delayed gradients, which the next step applies."""
        self.has_delayed_grads = exist

    def restore_state(self, restore: Callable[[], object]) -> None:
        """Let a function give the ranks other weights and optimizer state between two steps; the model gets them, too.

        All ranks call it.
        """
        self.finish_steps()
        self.shared_model.catch_up()
        self.stale_weights.unmark()
        self.step_gradients.drop()
        restore()
        for rank in self.ranks.values():
            for flat_params in rank.interpreter.store.flat_params():
                flat_params.reshard_weights()  # gathered weights are stale now
        self.optimizer_spec.take_state()  # which was read, or loaded, before
        if self.keeps_model_on_meta:
            self.stale_weights.mark()
        else:
            self.export_weights()

    def shard_map(self) -> ShardMap:
        """Return which rank owns which shard."""
        assert self.run_spec is not None, "built"
        return ShardMap(self.run_spec, self.param_dtypes)

    def full_optimizer_state(self) -> dict[str, Any]:
        """Return the ``state_dict()`` of the user's optimizer in full, as torch's own; a collective call."""
        if self.changes is None or self.optimizer_exchange is None:
            return self.optimizer_spec.optimizer.state_dict()
        self.finish_steps()
        return self.optimizer_exchange.full_state_dict()

    def export_weights(self) -> None:
        """Load the trained weights and buffers into the user's model, on every rank.

        Raises:
            DataError: the last step may not be skipped; the model has the weights before it.
        """
        if self.changes is None:  # build() did not finish
            return
        try:
            self.finish_steps()
        finally:
            self.load_weights_into_model()

    def export_at_end(self) -> None:
        """Load the trained weights into the model, unless it was on the meta device: it may be too large."""
        if self.keeps_model_on_meta:
            self.finish_steps()
        else:
            self.export_weights()

    def load_weights_into_model(self) -> None:
        """Load the trained weights and buffers into the user's model, whatever the last step has decided."""
        assert self.changes is not None, "built"
        self.shared_model.catch_up()
        self.in_flight.require_flushed("export_weights()")
        self.changes.buffers.carry_over()
        self.stale_weights.unmark()
        self.sync_state()
        shard_map, first = self.shard_map(), self.world.fabrics[0].rank
        params: Mapping[str, Tensor] = self.ranks[first].interpreter.store.params
        if not has_full_model(shard_map):
            params = self.world.run(lambda fabric: gather_weights(shard_map, self.ranks[fabric.rank], fabric))[0]
        self.step_gradients.keep_exported()
        self.world.run(lambda fabric: self.ranks[fabric.rank].interpreter.store.unshare(fabric))
        store = self.ranks[first].interpreter.store
        for flat_params in store.flat_params():
            flat_params.unshard_weights()
        with torch.no_grad():
            for name, value in (*params.items(), *store.buffers.items()):
                assign_values(self.model_tensors[name].detach(), value)
        self.retained_memory.stop()
        self.changes.record()
        self.stale_weights.mark_current()

    def import_if_current(self) -> None:
        """Load the user's model into all ranks, unless it was on the meta device and has not their weights."""
        if not (self.keeps_model_on_meta and self.stale_weights.is_stale):
            self.import_weights()

    def require_same_weights(self) -> None:
        """Check that all processes have the same weights in their models, of which each rank loads its part.

        Raises:
            DataError: one has others.
        """
        fabric = self.world.fabrics[0]
        if len(self.world.fabrics) == fabric.num_ranks or self.stale_weights.is_stale:
            return
        differing = find_differing_weights(fabric, self.trained)
        if differing is not None:
            raise DataError(
                "rank {} would load other values of {} than rank 0, each a part of them: they were changed between "
                "two steps on some ranks only, inside full_weights(writeback=True) or before import_weights(); make "
                "the same change on all ranks".format(*differing)
            )

    def import_weights(self) -> None:
        """Load the user's model, which may have been changed since :meth:`export_weights`, into all ranks."""
        self.finish_steps()
        if self.changes is not None:
            self.changes.structure.require_unchanged(str(self.plan))
        self.shared_model.update_model()
        if self.stale_weights.is_stale:
            self.export_weights()  # the model was not changed, but is out of date
        shard_map, params = self.shard_map(), dict(self.trained.named_parameters())
        buffers = dict(self.model.named_buffers())

        def work(fabric: Fabric) -> None:
            store = self.ranks[fabric.rank].interpreter.store
            load_weights(shard_map, self.ranks[fabric.rank], lambda name: params[name].detach().clone())
            for flat_params in store.flat_params():
                flat_params.unshard_weights()
                flat_params.rebind_views(flat_params.weights)  # another step may have moved the parameters
                flat_params.reshard_weights()  # gathered weights are stale now
            store.drop_delayed_grads()
            self.ranks[fabric.rank].interpreter.state.restore_delayed(is_skipped=False)
            for name, buffer in store.buffers.items():
                assign_values(buffer, buffers[name].clone())

        self.world.run(work)
        self.has_delayed_grads = False
        if self.changes is not None:
            self.changes.buffers.find_changes()
            self.changes.buffers.record()
        self.import_frozen_params()

    def import_frozen_params(self) -> None:
        """Load the model's frozen parameters into all ranks."""
        assert self.run_spec is not None, "built"
        named, sharded = dict(self.trained.named_parameters()), sliced_params(self.run_spec.model_spec)
        for number, rank in self.ranks.items():
            rank_program = self.run_spec.program.rank_programs[number]
            for name, param in rank.interpreter.store.params.items():
                if not param.requires_grad and param is not named[name]:
                    value = take_slice(
                        named[name].detach(), sharded.get(name), (rank_program.tp_rank, rank_program.tp_degree)
                    )
                    param.data.copy_(value)
        if self.changes is not None:
            self.changes.weights.record_values()

    def drop_stale_weights(self, error: BaseException | None = None) -> None:
        """Let what was not exported since the last step not be mistaken for weights: it is nan, or on the meta device.

        Args:
            error: that ended the run; it gets a note.
        """
        if self.initial_values is None or not self.keeps_model_on_meta:
            self.released_params.poison(error)
            return
        if not self.stale_weights.is_stale:
            return
        self.remove_hooks()
        self.released_params = ReleasedParameters({})
        self.initial_values.return_to_meta()
        if error is not None:
            error.add_note(f"the parameters of {type(self.model).__name__} are on the meta device again")

    def close(self) -> None:
        """Release shared memory and close the world."""
        for rank in self.ranks.values():
            rank.interpreter.store.unshare(None)
        self.retained_memory.stop()
        self.drop_stale_weights()
        self.remove_hooks()
        self.shared_model.close()
        self.optimizer_spec.allow_steps()
        if self.changes is not None and self.optimizer_exchange is not None:
            self.optimizer_exchange.close()
        for rank in self.ranks.values():
            rank.interpreter.store.close()
        self.world.close()

    def remove_hooks(self) -> None:
        """Make the parameters of the user's model plain ones again."""
        for hook in self.stale_hooks:
            hook.remove()
        self.stale_hooks.clear()
        self.remove_casts()
        self.stale_weights.unmark()
        self.step_gradients.drop()


class StepObserver(Protocol):
    """Sees the steps of ranks before they are taken, and may replace them."""

    def before_step(self, local_ranks: LocalRanks, batch: MicrobatchSource) -> StepResult | None:
        """Return the result of a step that is not to be taken; None for one that is."""
        ...

    def after_training(self) -> None:
        """Take note that no further step is to be expected."""
        ...


@contextmanager
def annotate_errors(interpreter: Interpreter, rank: int) -> Iterator[None]:
    """Add step, rank and microbatch to an error of the user's code, and the step to one about another rank."""
    try:
        yield
    except PeerError as error:
        explained = explain_announcement(error)
        explained.add_note(f"in step {interpreter.rng.step}")
        if explained is error:
            raise
        raise explained from error
    except CounterpointError:
        raise
    except Exception as error:
        error.add_note(f"in step {interpreter.rng.step} on rank {rank}, microbatch {interpreter.rng.micro}")
        raise


def stop_others_on_error(world: FabricWorld) -> AbstractContextManager[None]:
    """Return a context that tells ranks in other processes of an error, for which they would wait in the step."""
    return _stop_others_on_error(world) if isinstance(world, DistributedWorld) else nullcontext()


@contextmanager
def _stop_others_on_error(world: DistributedWorld) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        world.stop(error)
        raise


@contextmanager
def rollback_on_error(
    world: FabricWorld, ranks: Mapping[int, RankRuntime], in_flight: InFlightBatches, number: int = 0
) -> Iterator[None]:
    """Roll back a step that fails, if all ranks are in this process; otherwise the error ends the ranks.

    Args:
        world: of the ranks.
        ranks: those of this process.
        in_flight: batches, which are dropped.
        number: of the step; decisions of earlier ones stay on the device if no rank has read them.
    """
    try:
        yield
    except BaseException:
        in_flight.batches.clear()
        if not isinstance(world, DistributedWorld):
            pending = [{commit.step for commit, _ in rank.interpreter.state.pending_commits} for rank in ranks.values()]
            unread = {step for step in set.intersection(*pending) if step < number}
            for rank in ranks.values():
                rank.interpreter.rollback(unread)
        raise


def abort_training(local_ranks: LocalRanks, error: BaseException, entry_point: str) -> None:
    """Drop the batches in flight after an error; then export the weights, or stop the ranks in other processes.

    If ranks in other processes are stopped, the parameters that only they train become nan here.

    Args:
        local_ranks: the ranks whose training has ended with an error.
        error: the error.
        entry_point: the call before which the model's weights may date, for a note on the error.
    """
    local_ranks.in_flight.batches.clear()
    try:
        if isinstance(local_ranks.world, DistributedWorld):
            local_ranks.world.stop(error)
            local_ranks.drop_stale_weights(error)
        elif local_ranks.changes is not None:
            try:
                local_ranks.finish_steps()
            except DataError as late_error:  # of the step before the one that failed
                error.add_note(str(late_error))
            local_ranks.export_weights()
    except (CounterpointError, torch.OutOfMemoryError) as export_error:
        error.add_note(
            f"the trained weights could not be exported: {export_error}; the model's are from before {entry_point}, or "
            "those of some rank when it failed: load a checkpoint (resume=...), or build the model again"
        )


def find_accelerator(model: nn.Module) -> Accelerator:
    """Return the accelerator of the model's first parameter; :meth:`LocalRanks.build` checks that it is that of all.

    Raises:
        PlanError: the parameters have no values, or their device is not known.
    """
    require_param_values(model)
    return accelerator_for(next((param.device for param in model.parameters()), CPU))


def require_copyable_model(model: nn.Module, partition: WholeModel, plan: str, remedy: str) -> None:
    """Check that ranks can train copies of a model.

    Args:
        model: the user's.
        partition: of it.
        plan: of the ranks, for errors.
        remedy: another way to train a model with attributes that a loss reads.

    Raises:
        PlanError: it is a TorchScript module, whose copies have no parameters that can be trained, or compiled, which
            its copies are not, or its forward keeps a value that a loss may read.
    """
    require_not_copied(model, plan, remedy)
    scripts = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripts:
        raise PlanError(
            f"{f'module {scripts[0]!r}' if scripts[0] else type(model).__name__} is a TorchScript module, but "
            f"under {plan} ranks of one process train copies of the model, which TorchScript does not allow; "
            "pass the module that it was made from, or train in a single process (solo)"
        )
    if partition.example.kept_attributes:
        hint = kept_value_hint(model, partition.example.kept_attributes[0])
        raise PlanError(
            f"the forward of {type(model).__name__} keeps a differentiable value in its attribute "
            f"{partition.example.kept_attributes[0]}, but under {plan} ranks run copies of the model, so a loss that "
            f"reads the attribute would see another value; {hint}return the value from forward together with the "
            f"output{remedy}"
        )


def require_grad_recording() -> None:
    """Check that backwards are possible here; ``torch.no_grad()`` does not reach the ranks.

    Raises:
        DataError: in ``torch.inference_mode()``, whose tensors can never be trained with.
    """
    if torch.is_inference_mode_enabled():
        raise DataError(
            "a training step was called inside torch.inference_mode(), whose tensors autograd cannot use; call it "
            "outside of it, and make batches outside, too"
        )


def first_result(results: Sequence[StepResult | LateResult]) -> StepResult | LateResult:
    """Return the result of the first rank that has one, with the parts of the loss, which not all ranks may know."""
    if not results:
        return StepResult(float("nan"), 0, float("nan"), 1.0, "")
    parts = next((result.loss_parts for result in results if result.loss_parts), {})
    first = results[0]
    return replace(first, loss_parts=parts) if parts and isinstance(first, StepResult) else first
