"""From a proved program and a cut model to one rank that can run.

Which rule the norms of a run follow, and which plans they refuse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.model.dataflow import INPUT, assign_values_to_edges
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.partitioning.partitioned_model import PartitionedModel
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
    Recv,
)
from counterpoint.program.program import Program, weight_versions_needed
from counterpoint.program.step_variants import StepVariant
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
from counterpoint.runtime.interpreter import Interpreter
from counterpoint.runtime.lowering import LoweredProgram, fuse, segment_boundaries
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.params.sparse_grads import find_embedding_tables
from counterpoint.runtime.params.unit_roles import find_unit_roles
from counterpoint.runtime.replica_check import ReplicaChecksum
from counterpoint.runtime.rng import ModuleRNG
from counterpoint.runtime.step_commit import StepGuard
from counterpoint.strategies.buckets import DEFAULT_BUCKETS, BucketConfig


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What all ranks of a run are built from.

    Args:
        turns: every kind of step with its rows and their proof, which says who answers for which part of which unit.
        spec: the model with the program's blocks.
        loss: from output and targets to a scalar.
        face: the user's optimizer.
        guard: what is checked before updates.
        seed: the run's seed.
        buckets: in which gradients are summed while a backward goes on.
    """

    step_variants: tuple[StepVariant, ...]
    model_spec: ModelSpec
    loss: Callable[[Any, Any], Tensor]
    optimizer_spec: OptimizerSpec
    guard: StepGuard
    seed: int
    buckets: BucketConfig = DEFAULT_BUCKETS

    @property
    def program(self) -> Program:
        """One row per rank: that of the kind of step that evaluations go by."""
        return self.step_variants[-1].program


@dataclass(frozen=True, slots=True)
class RankRuntime:
    """One rank, ready: its interpreter, and the model's functions for training and for evaluation."""

    interpreter: Interpreter
    bind_for_evaluation: Callable[[], BoundModel]


def build_rank(
    run_spec: RunSpec, partition: PartitionedModel, model: nn.Module, fabric: Fabric, *, is_only: bool = False
) -> RankRuntime:
    """Return the rank that ``fabric`` belongs to.

    Args:
        parts: what all ranks share.
        cut: the model's functions; a whole cut must be of this rank's own copy.
        model: the model whose values the rank starts with.
        fabric: the rank's way to the others.
        is_only: whether no other rank of this process has the model, so that it may be trained in its own memory.
    """
    rank = fabric.rank
    row = run_spec.program.rank_programs[rank]
    words = [word for turn in run_spec.step_variants for word in turn.program.rank_programs[rank].body]
    roles = find_unit_roles(rank, words, run_spec.model_spec)
    needed = {name for unit in roles for name in run_spec.model_spec.units[unit]}
    params = build_local_params(
        run_spec.model_spec, partition, model, (row.tp_rank, row.tp_degree), needed, is_only=is_only
    )
    own_buffers = isinstance(partition, WholeModel)
    buffers = {name: buffer if own_buffers else buffer.clone() for name, buffer in model.named_buffers()}
    store = ParamStore(
        roles,
        params,
        buffers,
        run_spec.model_spec.units,
        run_spec.optimizer_spec,
        fabric.empty,
        find_embedding_tables(model),
    )
    store.keep_weight_versions(weight_versions_needed(row.body))
    interpreter = Interpreter(
        {turn.name: lower_step(run_spec, turn, rank) for turn in run_spec.step_variants},
        model=bind_segments(run_spec, partition, words, training=True),
        store=store,
        fabric=fabric,
        rng=ModuleRNG(run_spec.seed),
        guard=run_spec.guard,
        computing_ranks=computing_ranks(run_spec, rank),
        compressed_contributions={
            place: micros
            for turn in run_spec.step_variants
            for place, micros in turn.symbolic.compressed_contributions.items()
        },
        buckets=run_spec.buckets,
    )
    if not has_max_norm(model):
        interpreter.replica_checksum = ReplicaChecksum(replica_groups(run_spec, run_spec.step_variants[-1]), store)
    return RankRuntime(interpreter, lambda: bind_segments(run_spec, partition, row.body, training=False))


def lower_step(run_spec: RunSpec, variant: StepVariant, rank: int) -> LoweredProgram:
    """Return what a rank does in one kind of step."""
    program, words = variant.program, variant.program.rank_programs[rank].body
    if variant.async_pipeline is None:
        return LoweredProgram(
            words,
            owned_units(run_spec, rank, variant),
            loss_scopes(program, rank),
            overlappable_reductions(program, rank),
        )
    return LoweredProgram(  # autograd puts gradients on parameters of older versions, where no sum could see them come early
        words,
        owned_units(run_spec, rank, variant),
        loss_scopes(program, rank),
        upstream_scopes=upstream_scopes(program, rank),
        microbatches_per_batch=variant.microbatches_per_batch,
    )


def has_max_norm(model: nn.Module) -> bool:
    """Tell whether a forward changes weights, as an embedding's with ``max_norm``: replicas would collide."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return any(table.max_norm is not None for table in tables)


def require_no_grad_hooks(model: nn.Module, partition: PartitionedModel, plan: Plan) -> None:
    """Check that no parameter has gradient hooks where ranks compute with copies of it, or sum its gradient later.

    Raises:
        PlanError: one has.
    """
    if plan.num_ranks == 1 and isinstance(partition, WholeModel):
        return
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:  # noqa: SLF001 - there is no other way to see them
            raise PlanError(
                f"{name} has a gradient hook, which under {plan} would not see the gradient that trains it: ranks have "
                "parts and copies of the parameter, and add up their gradients afterwards; remove the hook and change "
                "the loss or the model in its place (clip_norm=... clips the summed gradient), or train under solo"
            )


def bind_segments(
    run_spec: RunSpec, partition: PartitionedModel, instructions: Sequence[Any], *, training: bool
) -> BoundModel:
    """Return the functions for the blocks that a row runs."""
    segments = {}
    for first, stop in segment_boundaries(fuse(instructions)):
        last = run_spec.model_spec.blocks[stop - 1]
        pieces = (run_spec.model_spec.blocks[first].first_layer, last.first_layer + len(last.layers))
        read = tuple(dict.fromkeys(name for block in run_spec.model_spec.blocks[first:stop] for name in block.params))
        segments[first, stop] = replace(partition.segment(*pieces, training=training), params=read)
    values, mode = partition.values(training=training), "training" if training else "evaluation"
    return BoundModel(
        segments=segments,
        num_blocks=run_spec.model_spec.num_blocks,
        num_inputs=sum(value.producer == INPUT for value in values),
        edge_values=assign_values_to_edges(values, run_spec.model_spec.edges, run_spec.model_spec.block_of_layer, mode),
        flatten=lambda inputs: partition.flatten_inputs(as_call_args(inputs), training=training),
        unflatten=lambda values: partition.unflatten_output(values, training=training),
        loss=run_spec.loss,
        uses_rng=partition.uses_rng and training,
    )


def as_call_args(inputs: Any) -> Any:  # noqa: ANN401 - whatever the model takes
    """Return inputs as the arguments of a call: a tuple of positional or a dict of keyword arguments."""
    return inputs if isinstance(inputs, tuple | dict) else (inputs,)


def build_local_params(
    spec: ModelSpec,
    partition: PartitionedModel,
    model: nn.Module,
    slice_position: tuple[int, int],
    needed: Container[str],
    *,
    is_only: bool,
) -> dict[str, nn.Parameter]:
    """Return a rank's parameters: the model's own for a whole cut, else what it needs, sliced.

    These are copies but for whole parameters of the only rank here: they are other tensors, with a count of changes of
    their own, in the same memory.
    """
    named = dict(model.named_parameters())
    if isinstance(partition, WholeModel):
        return named
    sliced, own = sliced_params(spec), {}
    for name, param in named.items():
        if name in needed or not param.requires_grad:
            value = take_slice(param.data, sliced.get(name), slice_position)
            stays = is_only and value.numel() == param.numel() and param.is_contiguous() and not param.is_shared()  # type: ignore[no-untyped-call]
            own[name] = nn.Parameter(value if stays else value.clone(), requires_grad=param.requires_grad)
    return own


def sliced_params(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return for each sliced parameter its sliced dim and the number of slices."""
    return {
        name: (dim, block.tp_degree)
        for block in spec.blocks
        if block.tp is not None
        for name, dim in block.tp.sharded_dims
    }


def take_slice(tensor: Tensor, slicing: tuple[int, int] | None, position: tuple[int, int]) -> Tensor:
    """Return the slice that the rank at ``place`` (index, count) holds; all of it when it is not sliced."""
    if slicing is None or position[1] == 1:
        return tensor
    return tensor.chunk(slicing[1], dim=slicing[0])[position[0]]


def owned_units(run_spec: RunSpec, rank: int, variant: StepVariant | None = None) -> list[Unit]:
    """Return the units whose part on this rank is counted here in norms and saved from here, and nowhere else."""
    return [holding.unit for holding in find_shard_owners(run_spec, variant) if holding.rank == rank]


@dataclass(frozen=True, slots=True)
class ShardOwner:
    """Who answers for a part of a unit.

    Args:
        rank: who.
        unit: of what.
        span: which part of it.
        slice_index: of which slice; matters only for sliced units.
        replica: of which of the replicas that update apart.
    """

    rank: int
    unit: Unit
    span: tuple[Any, Any]
    slice_index: int
    replica: int = 0


def find_shard_owners(run_spec: RunSpec, variant: StepVariant | None = None) -> list[ShardOwner]:
    """Return one holding for every part of every unit of each replica: the first rank that updates it."""
    chosen = run_spec.step_variants[-1] if variant is None else variant
    sliced = sliced_params(run_spec.model_spec)
    replicas = {own: index for index, own in enumerate(independent_replicas(chosen))}
    found: dict[tuple[Unit, Any, int, int], ShardOwner] = {}
    for entry in chosen.symbolic.updates:
        is_sliced = any(name in sliced for name in run_spec.model_spec.units[entry.unit])
        at = chosen.program.rank_programs[entry.rank].tp_rank if is_sliced else 0
        key = (entry.unit, entry.shard, at, replicas.get(entry.replica, 0))
        known = found.get(key)
        if known is None or entry.rank < known.rank:
            found[key] = ShardOwner(entry.rank, *key)
    drawn = [
        ShardOwner(rank, unit, WHOLE, 0, replicas[chosen.server_ranks])
        for rank in chosen.server_ranks
        for word in chosen.program.rank_programs[rank].body
        if isinstance(word, ApplyPushes)
        for unit in word.units
    ]
    return [*(found[key] for key in sorted(found)), *drawn]


def replica_groups(run_spec: RunSpec, variant: StepVariant) -> list[Group]:
    """Return the groups of ranks that update the same parts of the same units, and so should hold the same weights."""
    sliced = sliced_params(run_spec.model_spec)
    held: defaultdict[int, set[object]] = defaultdict(set)
    for entry in variant.symbolic.updates:
        is_sliced = any(name in sliced for name in run_spec.model_spec.units[entry.unit])
        at = variant.program.rank_programs[entry.rank].tp_rank if is_sliced else 0
        held[entry.rank].add((entry.unit, entry.shard, at, entry.replica))
    groups: defaultdict[frozenset[object], list[int]] = defaultdict(list)
    for rank in sorted(held):
        groups[frozenset(held[rank])].append(rank)
    return [tuple(members) for members in groups.values() if len(members) > 1]


def independent_replicas(variant: StepVariant) -> list[Group]:
    """Return the groups of ranks that update apart from each other; none where all ranks update alike.

    Servers that draw all of them together have weights of their own as well, and stand last.
    """
    apart = sorted({entry.replica for entry in variant.symbolic.updates if entry.replica})
    return [*apart, *([variant.server_ranks] if variant.server_ranks else [])]


def commit_group(program: Program, rank: int) -> Group:
    """Return the ranks that decide together with this one; none for a rank that commits nothing."""
    return next((word.group for word in program.rank_programs[rank].body if isinstance(word, Commit)), ())


def communication_groups(programs: Iterable[Program]) -> list[tuple[int, ...]]:
    """Return every group that the words of programs name, and that of all ranks, in the same order on every rank."""
    found: set[tuple[int, ...]] = set()
    for program in programs:
        found.add(tuple(range(program.num_ranks)))
        found.update(word.group for _, word in program.instructions() if isinstance(word, Collective | Commit))
    return sorted(found)


def computing_ranks(run_spec: RunSpec, rank: int) -> dict[str, Group]:
    """Return for each parameter which ranks of this rank's commit compute with it."""
    found: dict[str, Group] = {}
    units = run_spec.model_spec.units
    for member in commit_group(run_spec.program, rank):
        blocks = {word.block for word in run_spec.program.rank_programs[member].body if isinstance(word, Forward)}
        for name in (name for unit, names in units.items() if not blocks.isdisjoint(unit) for name in names):
            found[name] = (*found.get(name, ()), member)
    return found


def loss_scopes(program: Program, rank: int) -> list[list[int]]:
    """Return for each commit of a rank the microbatches over whose samples its loss is a mean: those of its group."""
    commits = [word for word in program.rank_programs[rank].body if isinstance(word, Commit)]
    groups = [commit.loss_group or commit.group for commit in commits]
    between = {member: _between_commits(program, member) for group in groups for member in group}
    return [
        sorted({micro for member in group for micro in between[member][index]}) for index, group in enumerate(groups)
    ]


def _between_commits(program: Program, rank: int) -> list[set[int]]:
    """Return the microbatches that a rank goes backward on before each of its commits."""
    found: list[set[int]] = [set()]
    for word in program.rank_programs[rank].body:
        if isinstance(word, Backward):
            found[-1].add(word.micro)
        elif isinstance(word, Commit):
            found.append(set())
    return found


def upstream_scopes(program: Program, rank: int) -> dict[tuple[int, int], list[int]]:
    """Return what is decided on with a microbatch on a rank that sends its gradient, if this rank decides on others."""
    own = loss_scopes(program, rank)
    found: dict[tuple[int, int], list[int]] = {}
    for word in program.rank_programs[rank].body:
        if isinstance(word, Recv) and word.tensor.name in ACTIVATION_GRADS and word.tensor.micro is not None:
            theirs = next(domain for domain in loss_scopes(program, word.peer) if word.tensor.micro in domain)
            if theirs not in own:
                found[word.tensor.micro, word.peer] = theirs
    return found


def load_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put values by name into a model's parameters and buffers."""
    targets = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in values.items():
        targets[name].detach().copy_(value)


BatchNormRule: TypeAlias = Literal["deferred", "microbatch", "sync", "error"]
"""When running statistics change, and whose values are normalized together; see :class:`Options`."""


def make_batch_norm(
    run_spec: RunSpec, model: nn.Module, interpreter: Interpreter, rule: BatchNormRule | None
) -> BatchNormState | None:
    """Return what a rank's modules of batch norm do; None for a model without any that a plan could change.

    Args:
        parts: what all ranks share.
        model: the one whose buffers the rank began with.
        interpreter: of the rank.
        rule: what was asked for.

    Raises:
        PlanError: norms would have to meet where they cannot.
    """
    fabric, store = interpreter.fabric, interpreter.store
    used = {name for segment in interpreter.executor.model.segments.values() for name in segment.buffers}
    kept = [one for one in find_batch_norm_buffers(model) if one.mean in used]
    meeting = find_sync_modules(model, all_modules=rule == "sync")
    together = None
    if meeting:
        if run_spec.step_variants[-1].async_pipeline is None:
            require_no_deadlock(run_spec.program, meeting)
            require_not_recomputed(run_spec.program, meeting)
        else:
            require_no_sync_in_async_pipeline(run_spec.program, meeting)
        together = SyncBatchNormGroups(meeting, store, fabric, find_sync_partners(run_spec.program, fabric.rank))
    if not kept and together is None:
        return None
    is_cut = any(len(domain) > 1 for domain in loss_scopes(run_spec.program, fabric.rank))
    deferred = None
    if kept and rule != "microbatch" and (is_cut or run_spec.guard.nonfinite == "skip"):
        deferred = DeferredBatchNorm(kept, store.buffers, fabric, find_stats_peers(run_spec.program, fabric.rank))
    return BatchNormState(kept, store, together, deferred)
