"""Compile a plan for a model, its loss and its optimizer: what ranks are built of, checked before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from counterpoint.compiler.compile import CompiledPlan, compile  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.local import LocalFabric
from counterpoint.model.compilation import parse_compilation
from counterpoint.model.precision import parse_precision
from counterpoint.partitioning.compiled_modules import require_compilable
from counterpoint.partitioning.dry_run import (
    ModuleAttributes,
    explain_input_errors,
    preserve_state,
    split_call_args,
)
from counterpoint.partitioning.module_casts import autocast_dtype, torch_dtype, without_casts
from counterpoint.partitioning.partitioned_model import PartitionedModel, as_call_args
from counterpoint.partitioning.sequential import SequentialPartition, opened_modules
from counterpoint.partitioning.tracing.traced import TracedPartition
from counterpoint.partitioning.tracing.verify_tensor_parallel import verify_tensor_parallel
from counterpoint.partitioning.whole_model import WholeModel
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import ApplyPushes, Forward
from counterpoint.program.offloading import OFFLOAD_CHUNK_BYTES
from counterpoint.program.program import Program
from counterpoint.program.units import freed_weights, shard_multiple
from counterpoint.runtime.loss.loss_parameters import LossParameters
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.offload.offloaded_inputs import InputOffloadConfig
from counterpoint.runtime.offload.offloaded_state import MASTER, OffloadConfig, find_max_target_elements
from counterpoint.runtime.offload.offloaded_weights import WeightOffloadConfig
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import GradHookCheck, RunSpec, find_freed_reads, independent_replicas
from counterpoint.runtime.rng.draw_sites import DrawSites, find_draw_sites, require_keyed, warn_unkeyed
from counterpoint.runtime.sample_independence import (
    require_additive_gradients,
    require_independent_buffers,
    require_sample_independence,
)
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.terminal_text import warn
from counterpoint.training.batches.in_flight import require_known_to_stages, require_version_memory
from counterpoint.training.model_checks.embedding_checks import (
    require_no_frequency_scaling,
    require_no_max_norm,
    require_whole_bags,
)
from counterpoint.training.model_checks.forward_state import ForwardState
from counterpoint.training.model_checks.update_checks import (
    require_elementwise_optimizer,
    require_known_updates,
    require_one_bit_adam,
    require_one_state,
    require_skippable_params,
)
from counterpoint.training.model_checks.validation import (
    check_batch_norm,
    require_no_other_name,
    require_no_shared_memory,
)
from counterpoint.training.model_partition import (
    build_model_spec,
    describe_trained,
    partition_for_plan,
    warn_single_unit,
    with_loss_pass,
    with_partition,
)
from counterpoint.training.options import HOST_DEVICES, TrainingOptions, build_step_guard


@dataclass(frozen=True, slots=True)
class CompiledRun:
    """A plan compiled for a run.

    Args:
        partition: the model, as its ranks run it.
        compiled: the plan and its program.
        run_spec: what each rank is built of.
        uses_rng: whether the model draws random numbers.
        changed_inputs: the indices of the input tensors that a forward changes in place.
        reads_values: whether Python code of the forward reads values of tensors, as a condition of an ``if`` does.
    """

    partition: PartitionedModel
    compiled: CompiledPlan
    run_spec: RunSpec
    uses_rng: bool
    changed_inputs: tuple[int, ...] = ()
    reads_values: bool = False


@dataclass(frozen=True, slots=True)
class RunCompiler:
    """Compiles plans for a model, its loss and its optimizer.

    Args:
        model: the user's model.
        trained: the model with the parameters of its loss.
        loss: the user's loss.
        optimizer_spec: the user's optimizer.
        options: the training options.
    """

    model: nn.Module
    trained: nn.Module
    loss: LossFunction
    optimizer_spec: OptimizerSpec
    options: TrainingOptions

    def compile(
        self,
        plan: Plan,
        buckets: BucketConfig,
        inputs: Any,  # noqa: ANN401 - whatever the model takes
        num_samples: int,
        fabric: Fabric,
        read_batch: Callable[[], Any] | None = None,
    ) -> CompiledRun:
        """Partition the model and compile a plan for it.

        Args:
            plan: the plan.
            buckets: how gradients are grouped for reductions during the backward.
            inputs: the model's inputs for one microbatch, on its device.
            num_samples: the number of samples in them.
            fabric: of the first rank of this process.
            read_batch: returns the inputs of the whole batch; None if they cannot be read.

        Raises:
            PlanError: the model and the plan do not fit together.
        """
        whole_reasons: list[PlanError] = []
        partition, state = self.partition_model(plan, inputs, read_batch, whole_reasons.append)
        draws = (uses_rng := partition.uses_rng) or state.uses_other_generators
        draw_sites = find_draw_sites(self.model, as_call_args(inputs)) if draws else DrawSites()
        options, microbatch_size = self.options, max(num_samples, 1)
        if partition.compiler is not None:
            self.require_keyed_draws(partition, draw_sites, inputs, str(partition.compiler.compilation))
        precision = parse_precision(options.precision)
        described = describe_trained(partition, self.model, self.optimizer_spec, precision)
        spec = build_model_spec(described, plan, options.profile, microbatch_size, self.trained)
        full_plan = with_partition(with_loss_pass(plan, options), spec, options.profile)
        compiled = compile(full_plan, spec, samples_per_micro=microbatch_size)
        if whole_reasons and fabric.rank == 0 and freed_weights(one for _, one in compiled.program.instructions()):
            warn_single_unit(self.model, str(plan), whole_reasons[0])
        scaling_code = self.require_parts(plan, partition, compiled, inputs, state, fabric)
        require_version_memory(compiled, fabric.hosts, fabric.rank)
        keeps_grads = applies_one_gradient(plan, compiled)
        self.check_updates(plan, compiled, applies_one_gradient=keeps_grads)
        check_batch_norm(self.model, compiled, num_samples, options.batch_norm, fabric.rank)
        if isinstance(partition, TracedPartition) and any(block.tp is not None for block in compiled.model.blocks):
            verify_tensor_parallel(partition, compiled.model, dict(self.model.named_parameters()))
        if (num_microbatches := len(compiled.program.micros)) > 1 and fabric.rank == 0:
            warn_unkeyed(self.model, draw_sites, str(plan), num_microbatches)
        run_spec = RunSpec(
            compiled.step_variants,
            compiled.model,
            self.loss,
            self.optimizer_spec,
            build_step_guard(options),
            options.seed,
            buckets,
            options.batch_norm,
            options.unused_parameters,
            options.loss_reduction == "sum",
            not (options.cross_sample == "accept" or has_other_dims(options)),  # which may have outputs without samples
            draw_sites,
            keeps_grads,
            LossParameters.of(self.loss, self.trained),
            options.cross_sample != "accept",
            autocast=autocast_dtype(precision),
            read_dtypes=self.find_read_dtypes(partition, compiled),
            rounds_stochastically=self.rounds_stochastically(plan, applies_one_gradient=keeps_grads),
            reduce_dtype=self.find_reduce_dtype(compiled),
            scaling_code=scaling_code,
            holds_casts=compiled.model.has_masters,
            offload=self.find_offload(compiled),
            input_offload=self.find_input_offload(compiled),
            weight_offload=self.find_weight_offload(compiled),
            shard_multiple=shard_multiple(one for _, one in compiled.program.instructions()),
        )
        return CompiledRun(partition, compiled, run_spec, uses_rng, state.changed_inputs, state.reads_values)

    def partition_model(
        self,
        plan: Plan,
        inputs: Any,  # noqa: ANN401 - as above
        read_batch: Callable[[], Any] | None,
        on_whole: Callable[[PlanError], None],
    ) -> tuple[PartitionedModel, ForwardState]:
        """Partition the model for a plan; return also what its forward changes for good, if it sees parts of a batch.

        Args:
            plan: the plan.
            inputs: the model's inputs for one microbatch, on its device.
            read_batch: returns the inputs of the whole batch; None if they cannot be read.
            on_whole: called with the reason if the plan prefers blocks, but the model cannot be divided into some.

        Raises:
            PlanError: ranks cannot train it so.
            DataError: a table gets offsets of the batch, which is divided.
        """
        with explain_input_errors(self.model, inputs):
            partition = partition_for_plan(plan, self.model, inputs, self.options, on_whole)
        precision = parse_precision(self.options.precision)
        trains_copies = precision is not None and precision.holds_casts
        GradHookCheck(self.trained, partition, plan, trains_copies=trains_copies).require_none_unseen()
        is_traced = isinstance(partition, TracedPartition)
        is_divided = is_traced or plan.num_ranks > 1 or plan.global_num_microbatches > 1
        state = ForwardState.find(self.model, as_call_args(inputs)) if is_divided else ForwardState()
        require_no_shared_memory(self.trained, plan, state.attributes)
        shown = partition.example.replaced_buffers if isinstance(partition, WholeModel) else frozenset()
        require_no_other_name(self.model, state.replaced_buffers | shown)
        state.require_no_changed_params(self.model, str(plan))
        compilation = parse_compilation(self.options.compile)
        opened = opened_modules(self.model) if isinstance(partition, SequentialPartition) else ()
        require_compilable(self.model, str(plan), compilation, opened, is_traced=is_traced, draws=partition.uses_rng)
        if is_traced:
            state.require_none(self.model, str(plan), "the operations of its first call")
            state.require_no_traced_draws(self.model)
        if plan.global_num_microbatches > 1:
            require_whole_bags(self.model, inputs, plan, partial(self.run_forward, inputs))
            require_no_frequency_scaling(self.model, plan, is_used=state.scales_by_frequency)
        if self.may_cut_batches() and not state.uses_other_generators:
            reads_values = self.require_sample_independence(plan, inputs, read_batch)
            state = replace(state, reads_values=reads_values and not is_traced)
        return partition, state

    def require_keyed_draws(
        self,
        partition: PartitionedModel,
        draw_sites: DrawSites,
        inputs: Any,  # noqa: ANN401 - as above
        compilation: str,
    ) -> None:
        """Check that all random numbers are keyed by sample, as those in graphs are.

        Raises:
            PlanError: some are not.
            DataError: nothing is known of them, as the model does not run on its inputs, which a trace need not show.
        """
        if draw_sites.unkeyed and isinstance(partition, TracedPartition):
            with explain_input_errors(self.model, inputs):
                self.run_forward(inputs)
        require_keyed(self.model, draw_sites, compilation)

    def require_sample_independence(
        self,
        plan: Plan,
        inputs: Any,  # noqa: ANN401 - as above
        read_batch: Callable[[], Any] | None = None,
    ) -> bool:
        """Check that outputs for samples do not depend on others; see :func:`require_sample_independence`.

        What seems to depend in a narrower precision may be rounding, as of kernels that choose their blocks by the
        number of samples: then the model is checked in the dtype of its parameters, too, if it runs in it.

        Args:
            plan: the plan.
            inputs: the model's inputs for one microbatch.
            read_batch: returns the inputs of the whole batch; None if they cannot be read.

        Returns:
            Whether the forward reads values of tensors.
        """
        check = partial(
            require_sample_independence,
            self.model,
            as_call_args(inputs),
            str(plan),
            plan.global_num_microbatches,
            None if read_batch is None else lambda: as_call_args(read_batch()),
        )
        try:
            return check()
        except PlanError:
            with without_casts(self.model):
                try:
                    self.run_forward(inputs)
                except Exception:  # noqa: BLE001 - of any model, which takes only what is cast
                    runs = False
                else:
                    runs = True
                if runs:
                    return check()
            raise

    def may_cut_batches(self) -> bool:
        """Return whether samples are independent and along dim 0 as far as the user says, so that it can be checked."""
        options = self.options
        return not (options.cross_sample == "accept" or has_other_dims(options) or options.shared)

    def run_forward(self, inputs: Any, attributes: ModuleAttributes | None = None) -> None:  # noqa: ANN401
        """Run the user's model once in training; its state is preserved, with ``attributes`` except for these."""
        args, kwargs = split_call_args(as_call_args(inputs))
        with preserve_state(self.model, attributes=attributes):
            self.model(*args, **kwargs)

    def require_parts(
        self,
        plan: Plan,
        partition: PartitionedModel,
        compiled: CompiledPlan,
        inputs: Any,  # noqa: ANN401 - as above
        state: ForwardState,
        fabric: Fabric,
    ) -> str:
        """Check that buffers, attributes, gradients and lookups are those of a loop, if forwards see parts of a batch.

        Returns:
            The code whose gradients are not proportional to those of outputs; see :func:`require_additive_gradients`.

        Raises:
            PlanError: gradients are not the sums of those of samples, a table limits the norm of its rows, or an
                attribute depends on the division.
            DataError: a buffer depends on the division.
        """
        num_microbatches, scaling_code = len(compiled.program.micros), ""
        if self.may_cut_batches():
            num_micros = compiled.step_variants[-1].microbatches_per_batch or num_microbatches
            runs_per_rank = min(max_forwards_per_rank(compiled.program), num_micros)
            require_independent_buffers(self.model, as_call_args(inputs), str(plan), num_micros, runs_per_rank)
            scaling_code = require_additive_gradients(self.model, as_call_args(inputs), str(plan), num_micros)
            if runs_per_rank > 1:
                state.require_none(self.model, str(plan), f"it {runs_per_rank} times on one rank in a step")
            elif num_micros > 1 and isinstance(partition, SequentialPartition) and isinstance(fabric, LocalFabric):
                way = f"its modules {num_micros} times in a step, on ranks of one process that share them"
                state.require_none(self.model, str(plan), way)
            state.require_independent(self.model, as_call_args(inputs), str(plan), num_micros)
        if plan.num_ranks > 1 or num_microbatches > 1 or isinstance(partition, TracedPartition):
            require_no_max_norm(self.model, plan)
        return scaling_code

    def rounds_stochastically(self, plan: Plan, *, applies_one_gradient: bool) -> bool:
        """Return whether updated weights are rounded stochastically.

        Raises:
            PlanError: the user asks for it, but no weight is in bf16, or ranks do not update in the same steps.
        """
        precision = parse_precision(self.options.precision)
        if precision is None or precision.rounding != "stochastic":
            return False
        trained = [param.dtype for param in self.trained.parameters() if param.requires_grad]
        if torch.bfloat16 not in trained:
            kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in trained}))
            raise PlanError(
                f"precision={precision} rounds weights in bf16, but the model's are {kinds}, which need no rounding; "
                "convert the model by model.to(torch.bfloat16) before the optimizer is made, or drop "
                "rounding=stochastic, which keeps master weights"
            )
        if not applies_one_gradient:
            raise PlanError(
                f"precision={precision} rounds by the number of the step, but under {plan} ranks or servers apply "
                "gradients of several steps, or replicas have weights of their own; use data, zero, pipeline or tensor "
                "without staleness and sync_every, or float32 weights"
            )
        return True

    def find_read_dtypes(self, partition: PartitionedModel, compiled: CompiledPlan) -> Mapping[str, torch.dtype]:
        """Return the dtype of the casts of parameters that ranks hold, or gather, as casts.

        Raises:
            PlanError: the user asks for weights that are held as casts, but no parameter can be.
        """
        precision = parse_precision(self.options.precision)
        if precision is not None and precision.holds_casts:
            if not compiled.model.has_masters:
                raise PlanError(
                    f"precision={precision} holds the weights that modules read as casts only, but the model has none: "
                    "its parameters are no wider, or are looked up, or normalize, or are read without a cast, as by "
                    "iterating over parameters() in a forward; drop weights=compute"
                )
            dtype = torch_dtype(precision.compute)
            return {param.name: dtype for param in compiled.model.params if param.master_bytes}
        return find_freed_reads(compiled.program, compiled.model, partition.read_dtypes(training=True))

    def find_reduce_dtype(self, compiled: CompiledPlan) -> torch.dtype | None:
        """Return the dtype in which ranks sum gradients, if the precision names one; None for that of each gradient."""
        precision = parse_precision(self.options.precision)
        if precision is None or not precision.casts_grads or compiled.program.num_ranks == 1:
            return None
        return torch_dtype(precision.reduce)

    def find_offload(self, compiled: CompiledPlan) -> OffloadConfig | None:
        """Return how the plan offloads optimizer state; None if it does not.

        Raises:
            PlanError: the optimizer needs whole tensors, or the folder is missing.
        """
        if compiled.plan.offloading is None or compiled.plan.offloading.state is None:
            return None
        spec, options = self.optimizer_spec, self.options
        what = f"the pass offload:state={compiled.plan.offloading.state}"
        if not spec.is_elementwise:
            raise PlanError(
                f"{what} updates weights in chunks, but {spec.optimizer_class.__name__} is not known to update each "
                "element on its own; use SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD or "
                "Rprop, or drop the pass"
            )
        is_host = all(param.device.type in HOST_DEVICES for param in self.trained.parameters())
        folder = None if options.offload_folder is None else str(options.offload_folder)
        if compiled.plan.offloading.state == "host":
            if is_host:
                warn(f"{what} changes nothing: ranks compute on the host, where the state is already", stacklevel=2)
                return None
            folder = None
        elif folder is None:
            raise PlanError(f"{what} needs a folder for the state; give offload_folder=..., on a local disk")
        widened = parse_precision(options.precision)
        is_widened = widened is not None and widened.rounding == "stochastic"
        dtypes = {
            (group, torch.float32 if is_widened and dtype == torch.bfloat16 else dtype)
            for group, dtype in ((group, spec.params[name].dtype) for name, group in spec.group_index.items())
        }
        masters = [MASTER] if compiled.model.has_masters else []
        state_dtypes = [
            {**spec.list_state_dtypes(group, dtype), **dict.fromkeys(masters, dtype)} for group, dtype in dtypes
        ]
        size = find_max_target_elements(state_dtypes, OFFLOAD_CHUNK_BYTES)
        return OffloadConfig(folder, options.timeout_s, size, OFFLOAD_CHUNK_BYTES)

    def find_input_offload(self, compiled: CompiledPlan) -> InputOffloadConfig | None:
        """Return how the plan offloads the inputs of recomputed blocks; None if they stay in memory.

        Raises:
            PlanError: the folder is missing, or ranks are on a device.
        """
        if compiled.plan.offloading is None or compiled.plan.offloading.activations is None:
            return None
        what = f"the pass offload:activations={compiled.plan.offloading.activations}"
        folder = self.require_offload_folder(what, "inputs", "tensor(n) with the pass partition_activations")
        return InputOffloadConfig(folder, self.options.timeout_s)

    def find_weight_offload(self, compiled: CompiledPlan) -> WeightOffloadConfig | None:
        """Return how the plan offloads shards of weights; None if they stay in memory.

        Raises:
            PlanError: the folder is missing, or ranks are on a device.
        """
        if compiled.plan.offloading is None or compiled.plan.offloading.params is None:
            return None
        what = f"the pass offload:params={compiled.plan.offloading.params}"
        folder = self.require_offload_folder(what, "weights", "more ranks in zero(n, level=3)")
        return WeightOffloadConfig(folder, self.options.timeout_s)

    def require_offload_folder(self, what: str, content: str, remedy: str) -> str:
        """Return the folder for files of ranks that compute on the host.

        Args:
            what: needs it, for errors.
            content: of the files.
            remedy: what to use on a device.

        Raises:
            PlanError: the folder is missing, or ranks are on a device.
        """
        if any(param.device.type not in HOST_DEVICES for param in self.trained.parameters()):
            raise PlanError(
                f"{what} is for ranks that compute on CPUs, but the model is on a device; drop the pass, or use "
                f"{remedy}"
            )
        if self.options.offload_folder is None:
            raise PlanError(f"{what} needs a folder for the {content}; give offload_folder=..., on a local disk")
        return str(self.options.offload_folder)

    def check_updates(self, plan: Plan, compiled: CompiledPlan, *, applies_one_gradient: bool) -> None:
        """Check that ranks can update as the optimizer and the options ask for; merge no parameters that may differ.

        Raises:
            PlanError: they cannot.
        """
        require_known_to_stages(compiled, self.options)
        require_elementwise_optimizer(plan, compiled, self.optimizer_spec)
        require_known_updates(plan, compiled, self.optimizer_spec, applies_one_gradient=applies_one_gradient)
        require_one_state(plan, compiled, self.optimizer_spec)
        require_one_bit_adam(plan, compiled, self.optimizer_spec, self.options)
        skips_unused = self.options.unused_parameters == "skip"
        if skips_unused:
            require_skippable_params(plan, compiled, applies_one_gradient=applies_one_gradient)
        if skips_unused or not self.optimizer_spec.has_mergeable_state():
            self.optimizer_spec.update_apart()


def has_other_dims(options: TrainingOptions) -> bool:
    """Return whether samples of a part of the batch lie along another dim than 0."""
    return any((options.batch_dims or {}).values())


def applies_one_gradient(plan: Plan, compiled: CompiledPlan) -> bool:
    """Return whether each step applies one gradient, that of its own batch, to all weights."""
    variants = compiled.step_variants
    return (
        not (plan.sync_schedule.staleness > 0 or variants[-1].lookahead)
        and len(variants) == 1
        and not independent_replicas(variants[-1])
        and not any(isinstance(instruction, ApplyPushes) for _, instruction in variants[-1].program.instructions())
    )


def max_forwards_per_rank(program: Program) -> int:
    """Return the largest number of microbatches in a step whose forward runs on the same rank."""
    return max(
        len({instruction.micro for instruction in rank_program.body if isinstance(instruction, Forward)})
        for rank_program in program.rank_programs
    )
