"""Build one rank from a verified program and a partitioned model, and answer who owns which part of which unit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.device.accelerator import Accelerator
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.model.dataflow import INPUT, assign_values_to_edges
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.partitioning.module_casts import CastParameters
from counterpoint.partitioning.partitioned_model import PartitionedModel, find_embedding_tables
from counterpoint.partitioning.whole_model import WholeModel
from counterpoint.plan.plan import Plan
from counterpoint.program.grad_overlap import overlappable_reductions
from counterpoint.program.instruction import (
    ACTIVATION_GRADS,
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Group,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    SwapGradBuffers,
)
from counterpoint.program.offloading import offloaded_weights
from counterpoint.program.program import Program, weight_versions_needed
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.units import compresses_whole_grads, freed_weights
from counterpoint.runtime.autograd.segment_executor import BoundModel
from counterpoint.runtime.batch_norm.deferred import DeferredBatchNorm, find_batch_norm_buffers, find_stats_peers
from counterpoint.runtime.batch_norm.mode import BatchNormState
from counterpoint.runtime.batch_norm.sync import (
    SyncBatchNormGroups,
    find_sync_modules,
    find_sync_partners,
    require_no_deadlock,
    require_no_sync_in_async_pipeline,
    require_not_recomputed,
)
from counterpoint.runtime.commit.step_commit import StepGuard
from counterpoint.runtime.fusion import LoweredProgram, fuse, segment_boundaries
from counterpoint.runtime.gradient_hooks import is_linear_hook
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.loss.loss_parameters import LossParameters
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.offload.offloaded_inputs import InputOffloadConfig, OffloadedInputs
from counterpoint.runtime.offload.offloaded_state import OffloadConfig, OffloadedState
from counterpoint.runtime.offload.offloaded_weights import OffloadedWeights, WeightOffloadConfig
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import WHOLE, FirstValues
from counterpoint.runtime.params.grad_check import GradCheck, find_share_factor
from counterpoint.runtime.params.host_targets import HostState
from counterpoint.runtime.params.param_store import ParamStore, StateAllocator
from counterpoint.runtime.params.shared_params import SharedGradHook
from counterpoint.runtime.params.unit_roles import find_unit_roles
from counterpoint.runtime.rng.draw_sites import DrawSites
from counterpoint.runtime.rng.sample_rng import SampleRNG
from counterpoint.runtime.stochastic_rounding import StochasticRounding
from counterpoint.strategies.buckets import DEFAULT_BUCKETS, BucketConfig
from counterpoint.terminal_text import warn

BatchNormRule: TypeAlias = Literal["deferred", "microbatch", "sync", "error"]
"""When running statistics change, and which values are normalized together; see :class:`Options`."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What all ranks of a run are built from.

    Args:
        step_variants: every step variant with its program and symbolic execution, which says who updates which part.
        model_spec: the model with the program's blocks.
        loss: from output and targets to a scalar or a weighted mean.
        optimizer_spec: the user's optimizer.
        guard: what is checked before updates.
        seed: the run's seed.
        buckets: how gradients are grouped for reductions that overlap with backward.
        batch_norm: what the user asked for; None for what the plan needs.
        unused_params: what a commit does about parameters without a gradient.
        loss_is_sum: whether the loss is a sum over samples.
        checks_loss: whether the first loss is checked to add up from its samples' halves.
        checks_loss_state: whether it is checked that a loss keeps no state, if it is called several times in a step.
        draw_sites: where the model draws random numbers; None where it does not matter which.
        keeps_grads: whether ranks keep the gradients of a step until the next one.
        loss_params: evaluates the loss with a rank's parameters of it; None for one without.
        autocast: torch's dtype of an autocast around each step and evaluation; None for that of the caller.
        read_dtypes: of parameters that the model reads in a narrower dtype, if they are freed after use or held in it.
        holds_casts: whether ranks hold these in that dtype, with master weights of what they update.
        offload: how optimizer state is offloaded; None if it stays in memory.
        input_offload: how the inputs of recomputed blocks are offloaded; None if they stay in memory.
        weight_offload: how shards of weights are offloaded; None if they stay in memory.
        rounds_stochastically: whether updated weights in bf16 are rounded so.
        reduce_dtype: in which gradients are summed over ranks, unless theirs is no wider; None for theirs.
        scaling_code: code of the model whose gradients are not proportional to those of its outputs; empty for none.
        shard_multiple: shards may end within a parameter after multiples of so many elements, as codecs need.
    """

    step_variants: tuple[StepVariant, ...]
    model_spec: ModelSpec
    loss: LossFunction
    optimizer_spec: OptimizerSpec
    guard: StepGuard
    seed: int
    buckets: BucketConfig = DEFAULT_BUCKETS
    batch_norm: BatchNormRule | None = None
    unused_params: Literal["error", "zero", "skip"] = "error"
    loss_is_sum: bool = False
    checks_loss: bool = False
    draw_sites: DrawSites | None = None
    keeps_grads: bool = False
    loss_params: LossParameters | None = None
    checks_loss_state: bool = False
    autocast: torch.dtype | None = None
    read_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    rounds_stochastically: bool = False
    reduce_dtype: torch.dtype | None = None
    scaling_code: str = ""
    holds_casts: bool = False
    offload: OffloadConfig | None = None
    input_offload: InputOffloadConfig | None = None
    weight_offload: WeightOffloadConfig | None = None
    shard_multiple: int = 1

    @property
    def max_target_elements(self) -> int | None:
        """The most elements of a tensor that an optimizer updates; None for any number."""
        return None if self.offload is None else self.offload.max_target_elements

    @property
    def split_size(self) -> int | None:
        """Elements of a parameter after multiples of which a shard may end; None if it may not end within one.

        Both the optimizer and the codecs of gathers and reduce-scatters have a say.
        """
        own = self.optimizer_spec.split_size
        return None if own is None else math.lcm(own, self.shard_multiple)

    @property
    def program(self) -> Program:
        """The program of the step variant that defines evaluation."""
        return self.step_variants[-1].program

    @property
    def trains_copies(self) -> bool:
        """Whether ranks train parameters of their own, because they free them or hold them in another dtype."""
        return self.holds_casts or bool(freed_weights(one for _, one in self.program.instructions()))

    @property
    def compressed_contributions(self) -> dict[tuple[Group, Unit], Sequence[Sequence[int]]]:
        """For each group and unit with a compressed all-reduce the microbatches that each member contributes."""
        return {
            key: micros
            for variant in self.step_variants
            for key, micros in variant.symbolic.compressed_contributions.items()
        }


@dataclass(frozen=True, slots=True)
class RankRuntime:
    """One rank that is ready to run: its interpreter, and how to bind the model's functions for evaluation."""

    interpreter: Interpreter
    bind_for_evaluation: Callable[[], BoundModel]


def build_rank(  # noqa: PLR0913 - the parts of one rank
    run_spec: RunSpec,
    partition: PartitionedModel,
    model: nn.Module,
    fabric: Fabric,
    *,
    accelerator: Accelerator,
    is_only: bool = False,
    state_allocator: StateAllocator = nullcontext,
    first_values: FirstValues | None = None,
) -> RankRuntime:
    """Return the rank that ``fabric`` belongs to.

    Args:
        run_spec: what all ranks share.
        partition: the model's functions; an unpartitioned model must be this rank's own copy.
        model: provides the initial values.
        fabric: the rank's connection to the others.
        accelerator: that the model is on.
        is_only: whether no other rank of this process uses the model, so that it may be trained in its own memory.
        state_allocator: active while optimizer state is allocated.
        first_values: of parameters that have none; None if the model has them.

    Raises:
        PlanError: batch norm modules would have to synchronize where they cannot.
    """
    rank, rank_program = fabric.rank, run_spec.program.rank_programs[fabric.rank]
    instructions = [one for variant in run_spec.step_variants for one in variant.program.rank_programs[rank].body]
    roles, units = find_unit_roles(rank, instructions, run_spec.model_spec), run_spec.model_spec.units
    needed, place = {name for unit in roles for name in units[unit]}, (rank_program.tp_rank, rank_program.tp_degree)
    params = build_local_params(run_spec.model_spec, partition, model, place, needed, is_only=is_only)
    store = ParamStore(
        roles,
        params,
        build_local_buffers(partition, model),
        units,
        run_spec.optimizer_spec,
        fabric.empty if accelerator.is_host else lambda count, dtype: accelerator.empty(count, dtype=dtype),
        find_embedding_tables(model),
        weight_versions_needed(rank_program.body),
        state_allocator,
        make_grad_check(run_spec, params, accelerator, find_linear_weights(model)),
        keeps_grads=run_spec.keeps_grads,
        read_dtypes=run_spec.read_dtypes,
        rounding=StochasticRounding(run_spec.seed, place[0]) if run_spec.rounds_stochastically else None,
        reduce_dtype=run_spec.reduce_dtype,
        holds_casts=run_spec.holds_casts,
        first_values=first_values,
        offloaded=make_offloaded(run_spec.offload, rank),
        accelerator=accelerator,
        offloaded_weights=make_offloaded_weights(run_spec, instructions, rank),
        split_size=run_spec.split_size,
    )
    if isinstance(partition, WholeModel):
        replace_params(model, params, store.params)
    bound_model = bind_segments(run_spec, partition, instructions, training=True)
    bound_model = replace(bound_model, num_loss_calls=count_loss_calls(run_spec.program, fabric, is_only=is_only))
    interpreter = Interpreter(
        {variant.name: lower_step(run_spec, variant, rank) for variant in run_spec.step_variants},
        model=bound_model,
        store=store,
        fabric=fabric,
        accelerator=accelerator,
        rng=SampleRNG(run_spec.seed, accelerator, run_spec.draw_sites),
        guard=run_spec.guard,
        computing_ranks=computing_ranks(run_spec, rank),
        compressed_contributions=run_spec.compressed_contributions,
        buckets=run_spec.buckets,
        batch_norm=make_batch_norm(run_spec, model, bound_model, store, fabric),
        unused_params=run_spec.unused_params,
        replica_groups=replica_groups(run_spec, run_spec.step_variants[-1]),
        decides_on_device=can_decide_on_device(run_spec, model, accelerator),
    )
    open_offloaded(interpreter, run_spec, rank)
    return RankRuntime(interpreter, lambda: bind_segments(run_spec, partition, rank_program.body, training=False))


def open_offloaded(interpreter: Interpreter, run_spec: RunSpec, rank: int) -> None:
    """Let a rank's optimizer state, and the inputs of what it recomputes, be where the plan offloads them."""
    interpreter.store.open_offloaded(interpreter.optimizer_groups())
    if run_spec.input_offload is not None:
        interpreter.use_offloaded_inputs(OffloadedInputs(run_spec.input_offload, rank))


def make_offloaded(config: OffloadConfig | None, rank: int) -> OffloadedState | HostState | None:
    """Return a rank's offloaded optimizer state; None if it is not offloaded."""
    if config is None:
        return None
    return HostState(config) if config.folder is None else OffloadedState(config, config.folder, rank)


def make_offloaded_weights(
    run_spec: RunSpec, instructions: Iterable[Instruction], rank: int
) -> tuple[OffloadedWeights, Collection[Unit]] | None:
    """Return a rank's file of weights, and whose they are; None if none are offloaded."""
    if run_spec.weight_offload is None:
        return None
    return OffloadedWeights(run_spec.weight_offload, rank), offloaded_weights(instructions).keys()


def find_linear_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights of linear layers, whose gradients are products of two matrices."""
    modules = (module for module in model.modules() if isinstance(module, nn.Linear))
    weights = {id(module._parameters.get("weight")) for module in modules}  # noqa: SLF001 - a parametrized one is computed
    return frozenset(name for name, param in model.named_parameters() if id(param) in weights)


def make_grad_check(
    run_spec: RunSpec, params: Mapping[str, nn.Parameter], accelerator: Accelerator, products: Collection[str]
) -> GradCheck:
    """Return the check of a rank's gradients, of which those of some parameters are products of matrices."""
    share_factor = find_share_factor((param.dtype for param in params.values()), run_spec.reduce_dtype)
    is_enabled = run_spec.guard.check_finite == "gradients"
    return GradCheck(is_enabled=is_enabled, accelerator=accelerator, share_factor=share_factor, products=products)


def can_decide_on_device(run_spec: RunSpec, model: nn.Module, accelerator: Accelerator) -> bool:
    """Return whether commits can leave their decision on the device, for the update there; the same on all ranks.

    The host has to know it where it sends or keeps something else for a step that is skipped: servers, asynchronous
    pipelines, delayed gradients, codecs, running statistics of batch norm; where ranks commit in several groups; and
    where the optimizer cannot skip a step on the device.
    """
    if accelerator.is_host or run_spec.offload is not None or any(find_embedding_tables(model).values()):
        return False
    programs = [variant.program for variant in run_spec.step_variants]
    bodies = [rank_program.body for program in programs for rank_program in program.rank_programs]
    commits = [[one for one in body if isinstance(one, Commit)] for body in bodies]
    if any(len(found) != 1 or found[0].loss_group for found in commits) or not commits_together(programs):
        return False
    if any(variant.async_pipeline is not None or variant.server_ranks for variant in run_spec.step_variants):
        return False
    if any(
        isinstance(one, Push | Pull | ApplyPushes | SwapGradBuffers) or compresses_whole_grads(one)
        for body in bodies
        for one in body
    ):
        return False
    if find_batch_norm_buffers(model) and defers_batch_norm(run_spec, 0):
        return False
    return run_spec.optimizer_spec.use_fused_kernels(accelerator.device)


def lower_step(run_spec: RunSpec, variant: StepVariant, rank: int) -> LoweredProgram:
    """Return what a rank runs in one step variant."""
    program, instructions = variant.program, variant.program.rank_programs[rank].body
    if variant.async_pipeline is None:
        return LoweredProgram(
            instructions,
            owned_units(run_spec, rank, variant),
            loss_scopes(program, rank),
            overlappable_reductions(program, rank),
        )
    return LoweredProgram(  # gradients on older versions of parameters cannot start reductions, so there is no overlap
        instructions,
        owned_units(run_spec, rank, variant),
        loss_scopes(program, rank),
        upstream_scopes=upstream_scopes(program, rank),
        microbatches_per_batch=variant.microbatches_per_batch,
    )


class StaleGradientHook:
    """A hook on a parameter of the user's model of which ranks train a copy: it rejects a gradient in a step.

    A loss that reads such a parameter would have the values of an earlier step, and its gradient would be lost.

    Args:
        name: of the parameter.
        plan: for the error.
        is_in_step: returns whether a step is running.
    """

    def __init__(self, name: str, plan: Plan, is_in_step: Callable[[], bool]) -> None:
        self.name, self.plan, self.is_in_step = name, plan, is_in_step

    def __call__(self, _: Tensor) -> None:
        """Raise in a step.

        Raises:
            DataError: always, in a step.
        """
        if self.is_in_step():
            raise DataError(
                f"the loss reads {self.name} of the model, but under {self.plan} ranks train copies of it, so the loss "
                "would use values of an earlier step, and its gradient would be lost; write a penalty on weights as "
                "the optimizer's weight_decay, return what the loss needs from forward, read it there as an attribute "
                "of its module if a function keeps it (a closure), or use a strategy that trains the model itself "
                "(solo, or data with one rank in each process)"
            )


OWN_HOOKS = (StaleGradientHook, SharedGradHook)
"""Hooks that ranks register themselves."""
BACKWARD_HOOKS_OF, POST_HOOKS_OF = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


class GradHookCheck:
    """Checks that gradient hooks of the user's, which may be registered between any two steps, see what is applied.

    They do if one rank runs the whole model on the whole batch. On each of several microbatches they see a part of the
    gradient, so that only a linear one is exact: another is refused, and a warning says what they see, once. One that
    runs after gradients are accumulated would see sums over some microbatches, and is refused.

    Args:
        model: whose parameters may have hooks.
        partition: of it.
        plan: of the ranks.
        trains_copies: whether ranks train parameters of their own.
    """

    def __init__(
        self, model: nn.Module, partition: PartitionedModel, plan: Plan, *, trains_copies: bool = False
    ) -> None:
        self.params, self.plan = list(model.named_parameters()), plan
        self.tensors = [param for _, param in self.params]
        self.has_warned = False
        self.allowed: list[tuple[int, ...]] = []  # the ids of the hooks at the last call, of each parameter with some
        self.are_called = plan.num_ranks == 1 and isinstance(partition, WholeModel) and not trains_copies
        self.is_exact = self.are_called and plan.global_num_microbatches == 1

    def require_none_unseen(self) -> None:
        """Raise if a parameter has gradient hooks but ranks compute with copies of it, or sum its gradient later.

        Raises:
            PlanError: one has, or has a hook on parts of the gradient that is not linear.
        """
        if self.is_exact:
            return
        found = [*filter(None, chain(map(BACKWARD_HOOKS_OF, self.tensors), map(POST_HOOKS_OF, self.tensors)))]
        hook_ids = [*map(tuple, found)]  # of handles, each of which has an id of its own in this process
        if hook_ids == self.allowed:
            return
        for name, param in self.params:
            # there is no other way to see them
            hooks, post_hooks = (
                [hook for hook in (hooks or {}).values() if not isinstance(hook, OWN_HOOKS)]
                for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks)  # noqa: SLF001
            )
            if not hooks and not post_hooks:
                continue
            if not self.are_called:
                raise PlanError(
                    f"{name} has a gradient hook, which under {self.plan} would not see the gradient that is applied: "
                    "ranks have shards and copies of the parameter, and sum their gradients later; remove the hook and "
                    "change the loss or the model instead (clip_norm=... clips the summed gradient), or train in a "
                    "single process"
                )
            num_microbatches = self.plan.global_num_microbatches
            if post_hooks:
                raise PlanError(
                    f"{name} has a hook that runs after its gradient is accumulated, but under {self.plan} that is "
                    f"done in {num_microbatches} microbatches, so that it would see sums over some of them; pass "
                    "num_microbatches=1, or remove the hook and read step.gradients() after the step"
                )
            if not all(is_linear_hook(hook, param) for hook in hooks):
                raise PlanError(
                    f"{name} has a gradient hook that is not linear, such as a clipping, a sign or a norm: for the sum "
                    "of two gradients it does not give the sum of what it gives for each; but under "
                    f"{self.plan} it is called for each of {num_microbatches} microbatches, with a part of the "
                    "gradient of the batch; pass num_microbatches=1, or clip the gradient of the batch (clip_norm=..., "
                    "clip_value=...)"
                )
            if not self.has_warned:
                warn(
                    f"{name} has a gradient hook, which is called for each of {num_microbatches} microbatches, with a "
                    "part of the gradient of the batch; if it depends on values of the gradient (a log, a maximum), "
                    "pass num_microbatches=1",
                    stacklevel=2,
                )
            self.has_warned = True
        self.allowed = hook_ids  # after an error they are looked at again


def bind_segments(
    run_spec: RunSpec, partition: PartitionedModel, instructions: Sequence[Any], *, training: bool
) -> BoundModel:
    """Return the functions of the blocks that a rank runs."""
    segments, read_dtypes = {}, partition.read_dtypes(training=training)
    for first, stop in segment_boundaries(fuse(instructions)):
        blocks = run_spec.model_spec.blocks[first:stop]
        bounds = [(block.first_layer, block.first_layer + len(block.layers)) for block in blocks]
        segment = partition.segment(bounds[0][0], bounds[-1][1], training=training)
        if run_spec.holds_casts and not isinstance(partition, WholeModel):  # whose casts are checked when they are read
            require_read_as_held(segment.params, read_dtypes, run_spec.read_dtypes)
        segments[first, stop] = replace(
            segment,
            params=tuple(dict.fromkeys(name for block in blocks for name in block.params)),
            parts=tuple(partition.segment(*layers, training=training) for layers in bounds)
            if partition.compiles_blocks
            else (),
        )
    values, mode = partition.values(training=training), "training" if training else "evaluation"
    return BoundModel(
        segments=segments,
        num_blocks=run_spec.model_spec.num_blocks,
        num_inputs=sum(value.producer == INPUT for value in values),
        edge_values=assign_values_to_edges(values, run_spec.model_spec.edges, run_spec.model_spec.block_of_layer, mode),
        flatten=partial(partition.flatten_inputs, training=training),
        unflatten=partial(partition.unflatten_output, training=training),
        loss=run_spec.loss,
        loss_params=run_spec.loss_params,
        uses_rng=partition.uses_rng and training,
        loss_is_sum=run_spec.loss_is_sum,
        checks_loss=run_spec.checks_loss and training,
        checks_loss_state=run_spec.checks_loss_state and training,
        gathers_outputs=any(isinstance(one, Collective) and one.tensor.name == "out" for one in instructions),
        autocast=run_spec.autocast,
        scaling_code=run_spec.scaling_code if training else "",
        read_dtypes=read_dtypes,
    )


def require_read_as_held(
    names: Iterable[str], read_dtypes: Mapping[str, torch.dtype], held_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Check that a mode of the model reads casts of the parameters that ranks hold as casts.

    Args:
        names: of the parameters that it reads.
        read_dtypes: of those that it reads in the same narrower dtype everywhere.
        held_dtypes: of those that ranks hold as casts.

    Raises:
        PlanError: it reads another one.
    """
    name = next((name for name in names if name in held_dtypes and read_dtypes.get(name) != held_dtypes[name]), None)
    if name is not None:
        raise PlanError(
            f"the model reads {name} without a cast in evaluation, but not in training, so that with "
            f"precision(weights=compute) ranks hold it in {held_dtypes[name]}; read it by its module's attribute, or "
            "drop weights=compute"
        )


def find_freed_reads(
    program: Program, model_spec: ModelSpec, read_dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Return those of the parameters that are read in a narrower dtype whose weights are freed after each use (ZeRO-3).

    Args:
        program: of all ranks.
        model_spec: has the units.
        read_dtypes: of the parameters that are read in a narrower dtype.
    """
    freed = freed_weights(one for _, one in program.instructions())
    names = [name for unit in model_spec.units if unit in freed for name in model_spec.units[unit]]
    return {name: read_dtypes[name] for name in names if name in read_dtypes}


def count_loss_calls(program: Program, fabric: Fabric, *, is_only: bool) -> int:
    """Return how often a rank, or all ranks unless it is the only one of its process, compute the loss in a step."""
    num_calls, last_block = 0, max(one.block for _, one in program.instructions() if isinstance(one, Forward))
    for rank in [fabric.rank] if is_only else range(fabric.num_ranks):
        instructions = program.rank_programs[rank].body
        is_last = [one for one in instructions if isinstance(one, Forward | Recompute) and one.block == last_block]
        gathers = any(isinstance(one, Collective) and one.tensor.name == "out" for one in instructions)
        num_calls += min(len(is_last), 1) if gathers else len(is_last)
    return num_calls


def build_local_params(
    spec: ModelSpec,
    partition: PartitionedModel,
    model: nn.Module,
    slice_position: tuple[int, int],
    needed: Container[str],
    *,
    is_only: bool,
) -> dict[str, nn.Parameter]:
    """Return a rank's parameters: the model's own if it is not partitioned, else those it needs, sharded.

    They are copies, except whole parameters of the only rank in this process: these are new tensors with version
    counters of their own, in the same memory.
    """
    params = dict(model.named_parameters())
    if isinstance(partition, WholeModel):
        return params
    sliced, local_params = sliced_params(spec), {}
    for name, param in params.items():
        if name in needed or not param.requires_grad:
            value = take_slice(param.data, sliced.get(name), slice_position)
            is_whole = value.numel() == param.numel() and param.is_contiguous()
            shares_memory = is_only and is_whole and not (param.is_cpu and param.is_shared())  # type: ignore[no-untyped-call]
            local_params[name] = nn.Parameter(
                value if shares_memory else value.clone(), requires_grad=param.requires_grad
            )
    return local_params


def build_local_buffers(partition: PartitionedModel, model: nn.Module) -> dict[str, Tensor]:
    """Return a rank's buffers: the model's own if it is not partitioned, else copies."""
    is_own = isinstance(partition, WholeModel)
    return {name: buffer if is_own else buffer.clone() for name, buffer in model.named_buffers()}


def replace_params(model: nn.Module, old: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> None:
    """Let modules have other parameters in the places of those that differ.

    Args:
        model: whose modules.
        old: those that they have, by name.
        new: the others, by the same names.
    """
    by_id = {id(param): new[name] for name, param in old.items() if new[name] is not param}
    for module in model.modules() if by_id else ():
        table = vars(module)["_parameters"]
        items = table.raw_items() if isinstance(table, CastParameters) else table.items()
        for name, param in list(items):
            if id(param) in by_id:
                table[name] = by_id[id(param)]


def sliced_params(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the sharded dim and the number of shards of every tensor-parallel parameter."""
    return {
        name: (dim, block.tp_degree)
        for block in spec.blocks
        if block.tp is not None
        for name, dim in block.tp.sharded_dims
    }


def take_slice(tensor: Tensor, slicing: tuple[int, int] | None, position: tuple[int, int]) -> Tensor:
    """Return the shard that the rank at ``position`` (index, count) has; the whole tensor if it is not sharded."""
    if slicing is None or position[1] == 1:
        return tensor
    return tensor.chunk(slicing[1], dim=slicing[0])[position[0]]


def owned_units(run_spec: RunSpec, rank: int, variant: StepVariant | None = None) -> list[Unit]:
    """Return the units whose part on this rank is counted in norms and saved here, and on no other rank."""
    return [owner.unit for owner in find_shard_owners(run_spec, variant) if owner.rank == rank]


@dataclass(frozen=True, slots=True)
class ShardOwner:
    """The rank that saves a part of a unit and counts it in norms.

    Args:
        rank: the owner.
        unit: of which unit.
        span: which part of it.
        tp_rank: of which tensor-parallel shard; used for sharded units only.
        replica: of which independently updated replica.
    """

    rank: int
    unit: Unit
    span: tuple[Any, Any]
    tp_rank: int
    replica: int = 0


def find_shard_owners(run_spec: RunSpec, variant: StepVariant | None = None) -> list[ShardOwner]:
    """Return one owner for every part of every unit of each replica: the first rank that updates it."""
    chosen = run_spec.step_variants[-1] if variant is None else variant
    sharded = sliced_params(run_spec.model_spec)
    replicas = {group: index for index, group in enumerate(independent_replicas(chosen))}
    owners: dict[tuple[Unit, Any, int, int], ShardOwner] = {}
    for update in chosen.symbolic.updates:
        is_sharded = any(name in sharded for name in run_spec.model_spec.units[update.unit])
        tp_rank = chosen.program.rank_programs[update.rank].tp_rank if is_sharded else 0
        key = (update.unit, update.shard, tp_rank, replicas.get(update.replica, 0))
        known = owners.get(key)
        if known is None or update.rank < known.rank:
            owners[key] = ShardOwner(update.rank, *key)
    servers = [
        ShardOwner(rank, unit, WHOLE, 0, replicas[chosen.server_ranks])
        for rank in chosen.server_ranks
        for instruction in chosen.program.rank_programs[rank].body
        if isinstance(instruction, ApplyPushes)
        for unit in instruction.units
    ]
    return [*(owners[key] for key in sorted(owners)), *servers]


def replica_groups(run_spec: RunSpec, variant: StepVariant) -> list[Group]:
    """Return the groups of ranks that update the same parts of the same units, and so should have equal weights."""
    sharded = sliced_params(run_spec.model_spec)
    shards_of_rank: defaultdict[int, set[object]] = defaultdict(set)
    for update in variant.symbolic.updates:
        is_sharded = any(name in sharded for name in run_spec.model_spec.units[update.unit])
        tp_rank = variant.program.rank_programs[update.rank].tp_rank if is_sharded else 0
        shards_of_rank[update.rank].add((update.unit, update.shard, tp_rank, update.replica))
    groups: defaultdict[frozenset[object], list[int]] = defaultdict(list)
    for rank in sorted(shards_of_rank):
        groups[frozenset(shards_of_rank[rank])].append(rank)
    return [tuple(members) for members in groups.values() if len(members) > 1]


def independent_replicas(variant: StepVariant) -> list[Group]:
    """Return the groups of ranks that update independently of each other; none if all ranks update together.

    Servers of elastic averaging have weights of their own, too, and are the last group.
    """
    groups = sorted({update.replica for update in variant.symbolic.updates if update.replica})
    return [*groups, *([variant.server_ranks] if variant.server_ranks else [])]


def commit_group(program: Program, rank: int) -> Group:
    """Return the ranks of a rank's commits; empty for a rank without commits."""
    return next(
        (instruction.group for instruction in program.rank_programs[rank].body if isinstance(instruction, Commit)), ()
    )


def commits_together(programs: Iterable[Program]) -> bool:
    """Return whether every commit of the programs is one of all their ranks."""
    return all(
        commit_group(program, rank) == tuple(range(program.num_ranks))
        for program in programs
        for rank in range(program.num_ranks)
    )


def communication_groups(programs: Iterable[Program]) -> list[tuple[int, ...]]:
    """Return the groups of all ranks and of every collective and commit, in the same order on every rank."""
    groups: set[tuple[int, ...]] = set()
    for program in programs:
        groups.add(tuple(range(program.num_ranks)))
        groups.update(
            instruction.group
            for _, instruction in program.instructions()
            if isinstance(instruction, Collective | Commit)
        )
    return sorted(groups)


def computing_ranks(run_spec: RunSpec, rank: int) -> dict[str, Group]:
    """Return for each parameter the ranks of this rank's commit group that compute with it."""
    ranks: dict[str, Group] = {}
    units = run_spec.model_spec.units
    for member in commit_group(run_spec.program, rank):
        blocks = {
            instruction.block
            for instruction in run_spec.program.rank_programs[member].body
            if isinstance(instruction, Forward)
        }
        for name in (name for unit, names in units.items() if not blocks.isdisjoint(unit) for name in names):
            ranks[name] = (*ranks.get(name, ()), member)
    return ranks


def loss_scopes(program: Program, rank: int) -> list[list[int]]:
    """Return for each commit of a rank the microbatches of its group: the loss is the mean over their samples."""
    commits = [instruction for instruction in program.rank_programs[rank].body if isinstance(instruction, Commit)]
    groups = [commit.loss_group or commit.group for commit in commits]
    between = {member: _between_commits(program, member) for group in groups for member in group}
    return [
        sorted({micro for member in group for micro in between[member][index]}) for index, group in enumerate(groups)
    ]


def _between_commits(program: Program, rank: int) -> list[set[int]]:
    """Return the microbatches whose backward runs on a rank before each of its commits."""
    micros: list[set[int]] = [set()]
    for instruction in program.rank_programs[rank].body:
        if isinstance(instruction, Backward):
            micros[-1].add(instruction.micro)
        elif isinstance(instruction, Commit):
            micros.append(set())
    return micros


def upstream_scopes(program: Program, rank: int) -> dict[tuple[int, int], list[int]]:
    """Return, by microbatch and sender of its gradient, the sender's loss scope if this rank has a different one."""
    own_scopes = loss_scopes(program, rank)
    scopes: dict[tuple[int, int], list[int]] = {}
    for instruction in program.rank_programs[rank].body:
        if (
            isinstance(instruction, Recv)
            and instruction.tensor.name in ACTIVATION_GRADS
            and instruction.tensor.micro is not None
        ):
            sender_scope = next(
                scope for scope in loss_scopes(program, instruction.peer) if instruction.tensor.micro in scope
            )
            if sender_scope not in own_scopes:
                scopes[instruction.tensor.micro, instruction.peer] = sender_scope
    return scopes


def load_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values by name into a model's parameters and buffers."""
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        assign_values(targets[name].detach(), value)


def defers_batch_norm(run_spec: RunSpec, rank: int) -> bool:
    """Return whether running statistics are updated at the commit, and not by each microbatch."""
    is_split = any(len(scope) > 1 for scope in loss_scopes(run_spec.program, rank))
    return run_spec.batch_norm != "microbatch" and (is_split or run_spec.guard.nonfinite == "skip")


def make_batch_norm(
    run_spec: RunSpec, model: nn.Module, bound_model: BoundModel, store: ParamStore, fabric: Fabric
) -> BatchNormState | None:
    """Return the state of a rank's batch norm modules; None for a model without any that a plan could change.

    Args:
        run_spec: what all ranks share.
        model: the one that provided the initial buffers.
        bound_model: the functions that the rank runs.
        store: the rank's parameters and buffers.
        fabric: the rank's connection to the others.

    Raises:
        PlanError: modules would have to synchronize where they cannot.
    """
    rule = run_spec.batch_norm
    used = {name for segment in bound_model.segments.values() for name in segment.buffers}
    modules = [module for module in find_batch_norm_buffers(model) if module.mean in used]
    sync_modules = find_sync_modules(model, all_modules=rule == "sync")
    sync_groups = None
    if sync_modules:
        if run_spec.step_variants[-1].async_pipeline is None:
            require_no_deadlock(run_spec.program, sync_modules)
            require_not_recomputed(run_spec.program, sync_modules)
        else:
            require_no_sync_in_async_pipeline(run_spec.program, sync_modules)
        sync_groups = SyncBatchNormGroups(
            sync_modules, store, fabric, find_sync_partners(run_spec.program, fabric.rank)
        )
    if not modules and sync_groups is None:
        return None
    deferred = None
    if modules and defers_batch_norm(run_spec, fabric.rank):
        deferred = DeferredBatchNorm(modules, store.buffers, fabric, find_stats_peers(run_spec.program, fabric.rank))
    is_recomputed = any(isinstance(one, Recompute) for _, one in run_spec.program.instructions())
    is_changed = deferred is not None or sync_groups is not None or is_recomputed
    if is_changed and any(segment.is_compiled for segment in bound_model.segments.values()):
        raise PlanError(
            "compile= compiles batch norm as it is, but under this plan its statistics are collected over microbatches "
            "or ranks, or it is recomputed; drop compile=, give batch_norm='microbatch', or use norms without running "
            "statistics (LayerNorm, GroupNorm)"
        )
    return BatchNormState(modules, store, sync_groups, deferred)
