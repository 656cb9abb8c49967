"""``DistributedOptimizer``: a torch optimizer whose gradients are reduced over all ranks.

The gradients are reduced in buckets while the backward pass still runs, in an order that all ranks agree on in the
first step:

    backward        grad 3 | grad 2 | grad 1 | grad 0
    buckets                 [3, 2] starts     [1, 0] starts
    step                                             waits for both, then updates
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import NamedGroup
from counterpoint.compat.horovod.compression import Compression, Compressor
from counterpoint.compat.horovod.errors import CallOrderError
from counterpoint.compat.horovod.gather_ops import sparse_allreduce_async
from counterpoint.compat.horovod.handles import HorovodHandle
from counterpoint.compat.horovod.process_sets import ProcessSet, global_process_set, member_group
from counterpoint.compat.horovod.reductions import ReductionOp, ScaledReduction
from counterpoint.compat.horovod.synchronize import wait_result, wait_tensor, wait_tensors
from counterpoint.compat.horovod.world import BUCKET_ORDER_LABEL, current_world
from counterpoint.errors import PlanError
from counterpoint.fabric.fingerprint import digest, dtype_name, format_ranks
from counterpoint.runtime.commit.replica_check import sum_bits
from counterpoint.terminal_text import warn

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class ReductionSettings:
    """How gradients are reduced.

    Args:
        compression: of each gradient.
        reduce: reduction of a bucket.
        process_set: members.
        groups: indices of parameters to reduce together; None fills buckets up to the fusion threshold.
        sparse_as_dense: whether sparse gradients are sent as dense.
    """

    compression: type[Compressor]
    reduce: ScaledReduction
    process_set: ProcessSet
    groups: tuple[tuple[int, ...], ...] | None = None
    sparse_as_dense: bool = False


@dataclass(slots=True)
class GradientBucket:
    """Gradients that are reduced in one flat tensor.

    Args:
        members: parameter indices, in the order in which their gradients become ready.
        flat: the compressed gradients, concatenated.
        slots: view of each gradient in ``flat``, in its compressed shape.
        name: for errors and the timeline.
    """

    members: list[int]
    flat: Tensor
    slots: dict[int, Tensor]
    name: str
    pending: set[int] = field(default_factory=set)
    contexts: dict[int, object] = field(default_factory=dict)
    handle: HorovodHandle | None = None


class GradientReducer:
    """Reducer of an optimizer's gradients over the members of a process set.

    In the first step they are reduced after the backward pass; by then the order in which they become ready and which
    are sparse is known, and the ranks agree on buckets. Later, a bucket starts as soon as it is full and all buckets
    before it have started. A gradient that a rank does not have counts as zeros.

    Args:
        named_parameters: with distinct names.
        settings: of the reduction.
    """

    def __init__(self, named_parameters: NamedParameters, settings: ReductionSettings) -> None:
        self.passes = 1
        self._named = [(name, param) for name, param in named_parameters if param.requires_grad]
        self._known_ids = {id(param) for _, param in self._named}
        self._settings = settings
        self._passes_left = [1] * len(self._named)
        self._ready: list[int] = []
        self._buckets: list[GradientBucket] | None = None
        self._bucket_of: dict[int, GradientBucket] = {}
        self._sparse: list[int] = []
        self._next = 0
        self.has_accumulated = False
        descriptions = [(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in self._named]
        first_and_last = f"{descriptions[0][0]} to {descriptions[-1][0]}, " if descriptions else ""
        self._label = (
            f"{BUCKET_ORDER_LABEL} of {len(descriptions)} parameters, {first_and_last}{digest(*descriptions).hex()[:8]}"
        )
        weak_self = weakref.ref(self)
        for index, (_, param) in enumerate(self._named):
            param.register_post_accumulate_grad_hook(_make_hook(weak_self, index))  # type: ignore[no-untyped-call]

    def check_known(self, params: Iterable[Tensor]) -> None:
        """Check that all trained parameters are registered.

        Raises:
            CallOrderError: some were added later, and their gradients would not be reduced.
        """
        unknown = [param for param in params if param.requires_grad and id(param) not in self._known_ids]
        if unknown:
            raise CallOrderError(
                f"{len(unknown)} parameters, the first with shape {tuple(unknown[0].shape)}, were added to the "
                "optimizer or unfrozen after DistributedOptimizer was called; their gradients would stay those of this "
                "rank: call hvd.DistributedOptimizer again, on a new optimizer with all parameters"
            )

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step, and reset their counts."""
        self.passes = passes
        self._passes_left = [passes] * len(self._named)

    def reset(self) -> None:
        """Reset to the state before a step."""
        self._passes_left = [self.passes] * len(self._named)
        self._ready.clear()
        self._next = 0
        self.has_accumulated = False
        for bucket in self._buckets or []:
            bucket.pending = set(bucket.members)
            bucket.handle = None

    def on_grad_accumulated(self, index: int) -> None:
        """Count a backward pass that has accumulated this gradient; start its bucket when that is full.

        Raises:
            CallOrderError: there were more passes than ``backward_passes_per_step``.
        """
        if self._passes_left[index] <= 0:
            raise CallOrderError(
                f"the gradient of {self._named[index][0]} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(); it is already being reduced, so this pass would be lost: call "
                "step() or synchronize() first, or raise backward_passes_per_step to accumulate gradients locally"
            )
        self.has_accumulated = True
        self._passes_left[index] -= 1
        if self._passes_left[index] == 0:
            self._ready.append(index)
            bucket = self._bucket_of.get(index)
            if bucket is not None:
                self._copy_into_bucket(bucket, index)
                self._start_full_buckets()

    def finish(self) -> None:
        """Start all remaining buckets, wait for them, and store the reduced gradients."""
        if self._buckets is None:
            self._agree_on_buckets()
        assert self._buckets is not None
        for bucket in self._buckets:
            for index in list(bucket.pending):
                self._copy_into_bucket(bucket, index)
        self._start_full_buckets()
        sparse = [(index, self._start_sparse(index)) for index in self._sparse]
        for bucket in self._buckets:
            assert bucket.handle is not None
            wait_result(bucket.handle)
            self._copy_from_bucket(bucket)
        for index, wait_sparse in sparse:
            self._named[index][1].grad = wait_sparse()
        self.reset()

    def _start_full_buckets(self) -> None:
        """Start full buckets in the agreed order."""
        buckets = self._buckets or []
        while self._next < len(buckets) and not buckets[self._next].pending:
            bucket = buckets[self._next]
            among = NamedGroup(bucket.name, member_group(self._settings.process_set))
            bucket.handle = collectives.all_reduce(current_world(), [bucket.flat], among, self._settings.reduce)
            self._next += 1

    @torch.no_grad()
    def _copy_into_bucket(self, bucket: GradientBucket, index: int) -> None:
        """Copy the gradient, or zeros, into its slot."""
        param, slot = self._named[index][1], bucket.slots[index]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dense_grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if dense_grad.data_ptr() != slot.data_ptr():
            compressed, bucket.contexts[index] = self._settings.compression.compress(dense_grad)
            slot.copy_(compressed)
        bucket.pending.discard(index)

    @torch.no_grad()
    def _copy_from_bucket(self, bucket: GradientBucket) -> None:
        """Set each parameter's gradient to the reduced one, as a view of the bucket unless compressed."""
        for index, slot in bucket.slots.items():
            param = self._named[index][1]
            was_sparse = param.grad is not None and param.grad.is_sparse
            reduced = self._settings.compression.decompress(slot, bucket.contexts.get(index))
            grad = reduced.view(param.shape)
            param.grad = grad.to_sparse(1) if was_sparse and self._settings.sparse_as_dense else grad

    def _start_sparse(self, index: int) -> Callable[[], Tensor]:
        name, param = self._named[index]
        grad = param.grad
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64),
                param.new_empty(0, *param.shape[1:]),
                param.shape,
                check_invariants=True,
            )
        sparse_grad = grad if grad.is_sparse else grad.to_sparse(1)
        return sparse_allreduce_async(sparse_grad, name, self._settings.reduce.op, self._settings.process_set)

    def _agree_on_buckets(self) -> None:
        """Agree with all members on the same buckets in the same order."""
        world, group = current_world(), member_group(self._settings.process_set)
        local_facts = torch.zeros(2, len(self._named) + 1, dtype=torch.int64)
        checksum = self._grad_checksum()
        local_facts[0, -1], local_facts[1, -1] = (
            checksum,
            -checksum,
        )  # MAX of x and of -x are opposite if all ranks have the same x
        for position, index in enumerate(self._ready):
            local_facts[0, index] = position + 1
        if not self._settings.sparse_as_dense:
            for index, (_, param) in enumerate(self._named):
                local_facts[1, index] = int(param.grad is not None and param.grad.is_sparse)
        agreed = world.joined_results.pop(self._label, None)  # this rank had joined when the others agreed on the order
        if agreed is None:
            agreed = wait_tensor(
                collectives.all_reduce(
                    world, [local_facts], NamedGroup(self._label, group), ScaledReduction(ReductionOp.MAX)
                )
            )
        (*positions, max_checksum), (*sparse_flags, max_negated_checksum) = agreed.tolist()
        if checksum and max_checksum == -max_negated_checksum and len(group) > 1 and world.fabric.rank == group[0]:
            warn_identical_gradients(group)
        count = len(self._named)
        order = sorted(range(count), key=lambda index: (positions[index] or count + 1, -index))
        self._sparse = [index for index in order if sparse_flags[index]]
        dense = [index for index in order if not sparse_flags[index]]
        self._buckets = [self._make_bucket(indices) for indices in self._assign_buckets(dense, world.fusion_bytes)]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}

    def _grad_checksum(self) -> int:
        """Return a checksum of the gradients; 0 for zeros."""
        checksum = 0
        for _, param in self._named:
            if param.grad is not None:
                grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
                for part in (grad.indices(), grad.values()) if grad.is_sparse else (grad,):
                    checksum = (31 * checksum + int(sum_bits(part.contiguous()))) % (1 << 48)
        return checksum

    def _assign_buckets(self, order: Sequence[int], fusion_bytes: int) -> list[list[int]]:
        """Return the members of each bucket (one dtype, up to ``fusion_bytes``) in the order in which buckets fill."""
        groups = self._settings.groups
        group_of = {index: group_index for group_index, group in enumerate(groups or ()) for index in group}
        open_: dict[object, list[int]] = {}
        sizes: dict[object, int] = {}
        buckets: list[list[int]] = []
        for index in order:
            example = self._wire_example(index)
            size = example.numel() * example.element_size()
            key = (example.dtype, group_of.get(index, -1 - index) if groups is not None else None)
            if groups is None and key in open_ and sizes[key] + size > fusion_bytes:
                buckets.append(open_.pop(key))
            sizes[key] = size + (sizes[key] if key in open_ else 0)
            open_.setdefault(key, []).append(index)
        position_of = {index: position for position, index in enumerate(order)}
        return sorted([*buckets, *open_.values()], key=lambda members: position_of[members[-1]])

    def _wire_example(self, index: int) -> Tensor:
        """Return a tensor with the dtype and shape of the compressed gradient."""
        return self._settings.compression.compress(torch.zeros_like(self._named[index][1]).detach())[0]

    def _make_bucket(self, indices: list[int]) -> GradientBucket:
        examples = {index: self._wire_example(index) for index in indices}
        dtype = examples[indices[0]].dtype
        flat = current_world().fabric.empty(sum(example.numel() for example in examples.values()), dtype)
        parts = torch.split(flat, [example.numel() for example in examples.values()])
        slots = {index: part.view(examples[index].shape) for index, part in zip(indices, parts, strict=True)}
        names = [self._named[index][0] for index in indices]
        name = names[0] if len(names) == 1 else f"gradients of {len(names)} parameters, {names[0]} to {names[-1]}"
        return GradientBucket(indices, flat, slots, name, pending=set(indices))


def warn_identical_gradients(group: Sequence[int]) -> None:
    """Warn that ranks have bit-identical gradients, so they probably train on the same samples."""
    warn(
        f"{format_ranks(group)} have bit-identical gradients in their first step, so they trained on the same "
        f"samples: {len(group)} ranks do the work of one, and an epoch is read {len(group)} times; give each rank "
        "its own samples, with a DataLoader of DistributedSampler(dataset, hvd.size(), hvd.rank())",
        RuntimeWarning,
        stacklevel=5,
    )


def _make_hook(owner: weakref.ref[GradientReducer], index: int) -> Callable[[Tensor], None]:
    """Return a gradient hook that does nothing after the optimizer has been freed."""

    def accumulated(_: Tensor) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.on_grad_accumulated(index)

    return accumulated


O = TypeVar("O", bound=Optimizer)  # noqa: E741 - an optimizer

Closure = Callable[[], Any]


class _DistributedMixin:
    """Methods that ``DistributedOptimizer`` adds to an optimizer class: it reduces gradients before a step."""

    _reducer: GradientReducer | None
    _is_synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def load_state_dict(self, state_dict: Any) -> None:  # noqa: ANN401 - torch's own
        """Load the state, and reset to the state before a step."""
        if self._reducer is not None:
            self._reducer.reset()
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Reduce all gradients now; ``step`` need not do it again.

        Raises:
            HorovodInternalError: another rank has other parameters, has exited or is late.
        """
        if self._reducer is not None:
            self._reducer.check_known(param for group in self.param_groups for param in group["params"])
            self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step`` use the gradients as they are: they were synchronized, and may have been clipped."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - what the closure returns
        """Reduce the gradients over all members and update the parameters.

        Args:
            closure: computes the loss and its gradients; they are reduced after each call.
        """
        if closure is not None:
            return super().step(self._with_synchronize(closure))  # type: ignore[misc]
        if self._should_synchronize:
            if self._is_synchronized:
                warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients a second time; put the step "
                    "into `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step()  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        """Clear the gradients.

        Raises:
            CallOrderError: a backward pass has accumulated gradients, and they may be in flight.
        """
        if self._reducer is not None and self._reducer.has_accumulated:
            raise CallOrderError(
                "zero_grad() was called after backward() and before step() or synchronize(); the gradients are "
                "being reduced: call it before backward(), or after step(); if the backward was that of another "
                "model's loss, as of a generator through its discriminator, freeze this model for it: "
                "requires_grad_(False) before its forward, requires_grad_(True) after its backward"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _with_synchronize(self, closure: Closure) -> Closure:
        def loss_of_all() -> Any:  # noqa: ANN401 - what the closure returns
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._is_synchronized = False
            return loss

        return loss_of_all


class _DistributedAdasumMixin:
    """Methods that ``DistributedOptimizer(op=Adasum)`` adds: each rank steps locally, and the deltas are combined."""

    _named: NamedParameters
    _compression: type[Compressor]
    _process_set: ProcessSet
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: the deltas are combined, not the gradients."""
        return

    def skip_synchronize(self) -> None:
        """Reject the call.

        Raises:
            CallOrderError: always.
        """
        raise CallOrderError(
            "skip_synchronize() with op=Adasum: the ranks' steps are combined, so no gradients are "
            "synchronized; use op=Average to clip reduced gradients"
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - what the closure returns
        """Move the parameters by the Adasum of all members' steps."""
        params = [param for _, param in self._named if param.requires_grad]
        before = [param.detach().clone() for param in params]
        loss = super().step(closure)  # type: ignore[misc]
        pairs = [self._compression.compress(param - start) for param, start in zip(params, before, strict=True)]
        among = NamedGroup("steps of the optimizer", member_group(self._process_set))
        deltas = [delta for delta, _ in pairs]
        handle = collectives.all_reduce(current_world(), deltas, among, ScaledReduction(ReductionOp.ADASUM))
        for param, start, delta, (_, ctx) in zip(params, before, wait_tensors(handle), pairs, strict=True):
            param.copy_(start + self._compression.decompress(delta, ctx))
        return loss


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: O,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReductionOp = ReductionOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> O:
    """Return an optimizer of the same class, parameters, options and state that reduces gradients over all ranks.

    Args:
        optimizer: any of torch's; use the returned optimizer instead of it.
        named_parameters: ``model.named_parameters()``, for errors and the timeline.
        compression: of gradients in messages.
        backward_passes_per_step: passes that are accumulated before the gradients are reduced.
        op: Average or Sum of gradients, or Adasum of the ranks' steps.
        gradient_predivide_factor: with Average, divides gradients before the sum; the rest of the division follows it.
        num_groups: Horovod's older name for ``groups``.
        groups: number of groups of parameters, or the groups; each is reduced as one. By default buckets are filled up
            to HOROVOD_FUSION_THRESHOLD.
        sparse_as_dense: send sparse gradients as dense, and convert them back.
        process_set: members; on other ranks the optimizer steps locally.

    Raises:
        PlanError: the parameters or options contradict each other.

    Cost:
        bytes sent per rank and step: those of a ring all-reduce of the compressed gradients. Gradients are copied once,
        into memory shared by the ranks of a host.
    """
    named = _name_parameters(optimizer, named_parameters)
    _check_options(op, gradient_predivide_factor, backward_passes_per_step)
    is_adasum = op == ReductionOp.ADASUM and current_world().fabric.num_ranks > 1
    mixin = _DistributedAdasumMixin if is_adasum else _DistributedMixin
    optimizer_class = type(type(optimizer).__name__, (mixin, type(optimizer)), {})
    new: Any = object.__new__(optimizer_class)
    state = dict(optimizer.__dict__)
    state.pop("step", None)  # a scheduler's wrapper of the old optimizer's step
    new.__dict__.update(state)
    new.backward_passes_per_step = backward_passes_per_step
    if is_adasum:
        new._named, new._compression, new._process_set = named, compression, process_set  # noqa: SLF001
        return cast("O", new)
    new._is_synchronized, new._should_synchronize, new._reducer = False, True, None  # noqa: SLF001
    if process_set.included() and current_world().fabric.num_ranks > 1:
        reduce = ScaledReduction(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
        resolved_groups = _resolve_groups(groups if groups is not None else num_groups or None, named)
        settings = ReductionSettings(compression, reduce, process_set, resolved_groups, sparse_as_dense)
        new._reducer = GradientReducer(named, settings)  # noqa: SLF001
        new._reducer.set_passes(backward_passes_per_step)  # noqa: SLF001
    return cast("O", new)


def _check_options(op: ReductionOp, predivide_factor: float, passes: int) -> None:
    if op not in {ReductionOp.AVERAGE, ReductionOp.SUM, ReductionOp.ADASUM}:
        raise PlanError(f"DistributedOptimizer with op={op!r}: give Average, Sum or Adasum")
    if predivide_factor != 1.0 and op != ReductionOp.AVERAGE:
        raise PlanError(
            f"gradient_predivide_factor={predivide_factor} with op={ReductionOp(op).name}: it splits the division of a "
            "mean; "
            "omit it, or use op=Average"
        )
    if not predivide_factor > 0:
        raise PlanError(f"gradient_predivide_factor={predivide_factor} divides gradients; give a number above 0")
    if passes <= 0:
        raise PlanError(f"backward_passes_per_step={passes} is not a positive count; give 1 or more")


def _name_parameters(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None) -> NamedParameters:
    """Return every parameter of the optimizer once, with its name.

    Raises:
        PlanError: a name or a parameter is missing or duplicated.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [(f"parameter {index}", param) for index, param in enumerate(params)]
    named: list[Any] = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise PlanError(
            "named_parameters has an item that is not a pair of name and parameter; give model.named_parameters()"
        )
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise PlanError(f"named_parameters has {', '.join(duplicates)} more than once; names must be unique")
    name_of = {id(param): name for name, param in named}
    unnamed = [index for index, param in enumerate(params) if id(param) not in name_of]
    if unnamed:
        raise PlanError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(params)} parameters, the first with "
            f"shape {tuple(params[unnamed[0]].shape)}; name all of them, or omit named_parameters"
        )
    return [(name_of[id(param)], cast("nn.Parameter", param)) for param in params]


def _resolve_groups(
    groups: int | Sequence[Sequence[Tensor]] | None, named: NamedParameters
) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups as indices of the trained parameters.

    Raises:
        PlanError: the number of groups is invalid, or a parameter is in two groups.
    """
    if groups is None:
        return None
    trained = [param for _, param in named if param.requires_grad]
    if isinstance(groups, int):
        if groups <= 0:
            raise PlanError(f"groups={groups}; give at least 1 group, or lists of parameters")
        bounds = [len(trained) * index // groups for index in range(groups + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(bounds))
    index_of = {id(param): position for position, param in enumerate(trained)}
    resolved = [tuple(index_of[id(param)] for param in group if id(param) in index_of) for group in groups]
    flat = [position for group in resolved for position in group]
    if len(set(flat)) != len(flat):
        raise PlanError("groups has a parameter in two groups; give each parameter once")
    return tuple(resolved)
