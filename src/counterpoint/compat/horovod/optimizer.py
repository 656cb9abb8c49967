"""Gradients of many ranks become one while the backward pass still runs: in buckets, in an order all agree on.

``DistributedOptimizer``: an optimizer of torch whose gradients are those of all ranks.
"""

from __future__ import annotations

import warnings
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
from counterpoint.runtime.replica_check import sum_bits

NamedParameters = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class ReductionSettings:
    """How gradients are reduced.

    Args:
        compression: what is done to each before and after.
        reduce: the reduction of a bucket.
        process_set: among whom.
        groups: parameters that are reduced together, as numbers in their list; None: as many as fit.
        sparse_as_dense: whether sparse gradients travel with their zeros.
    """

    compression: type[Compressor]
    reduce: ScaledReduction
    process_set: ProcessSet
    groups: tuple[tuple[int, ...], ...] | None = None
    sparse_as_dense: bool = False


@dataclass(slots=True)
class GradientBucket:
    """Gradients that travel as one; each has its place in one flat tensor.

    Args:
        members: numbers of the parameters, in the order in which their gradients are ready.
        flat: their compressed gradients, back to back.
        slots: the place of each, in its compressed shape.
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
    """The gradients of one optimizer, reduced among the members of its process set.

    The first time, they are reduced after the backward pass; by then it is known in which order they become ready and
    which are sparse, and the ranks agree on buckets. From then on a bucket is started as soon as it is full and those
    before it have been started. A gradient that a rank does not have counts as zeros.

    Args:
        named: the parameters, with different names.
        settings: how.
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
        facts = [(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in self._named]
        ends = f"{facts[0][0]} to {facts[-1][0]}, " if facts else ""
        self._label = f"{BUCKET_ORDER_LABEL} of {len(facts)} parameters, {ends}{digest(*facts).hex()[:8]}"
        own = weakref.ref(self)
        for number, (_, param) in enumerate(self._named):
            param.register_post_accumulate_grad_hook(_make_hook(own, number))  # type: ignore[no-untyped-call]

    def check_known(self, params: Iterable[Tensor]) -> None:
        """All trained parameters are known here.

        Raises:
            CallOrderError: some came later, and their gradients would be those of this rank alone.
        """
        unknown = [param for param in params if param.requires_grad and id(param) not in self._known_ids]
        if unknown:
            raise CallOrderError(
                f"{len(unknown)} parameters, the first with shape {tuple(unknown[0].shape)}, were added to the "
                "optimizer or unfrozen after DistributedOptimizer was called; their gradients would stay those of this "
                "rank: call hvd.DistributedOptimizer again, on a new optimizer with all parameters"
            )

    def set_passes(self, passes: int) -> None:
        """A step has so many backward passes from now on; what was counted is forgotten."""
        self.passes = passes
        self._passes_left = [passes] * len(self._named)

    def reset(self) -> None:
        """Nothing is ready, as before a step."""
        self._passes_left = [self.passes] * len(self._named)
        self._ready.clear()
        self._next = 0
        self.has_accumulated = False
        for bucket in self._buckets or []:
            bucket.pending = set(bucket.members)
            bucket.handle = None

    def on_grad_accumulated(self, number: int) -> None:
        """A backward pass has added to this gradient.

        Raises:
            CallOrderError: that was one too many.
        """
        if self._passes_left[number] <= 0:
            raise CallOrderError(
                f"the gradient of {self._named[number][0]} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(); it is being reduced already, so this pass would be lost: call "
                "step() or synchronize() first, or raise backward_passes_per_step to accumulate gradients locally"
            )
        self.has_accumulated = True
        self._passes_left[number] -= 1
        if self._passes_left[number] == 0:
            self._ready.append(number)
            bucket = self._bucket_of.get(number)
            if bucket is not None:
                self._copy_into_bucket(bucket, number)
                self._start_full_buckets()

    def finish(self) -> None:
        """Every parameter has the gradient of all members together."""
        if self._buckets is None:
            self._agree_on_buckets()
        assert self._buckets is not None
        for bucket in self._buckets:
            for number in list(bucket.pending):
                self._copy_into_bucket(bucket, number)
        self._start_full_buckets()
        sparse = [(number, self._start_sparse(number)) for number in self._sparse]
        for bucket in self._buckets:
            assert bucket.handle is not None
            wait_result(bucket.handle)
            self._copy_from_bucket(bucket)
        for number, gathered in sparse:
            self._named[number][1].grad = gathered()
        self.reset()

    def _start_full_buckets(self) -> None:
        """Buckets that are full are on their way, in the order that all members agree on."""
        buckets = self._buckets or []
        while self._next < len(buckets) and not buckets[self._next].pending:
            bucket = buckets[self._next]
            among = NamedGroup(bucket.name, member_group(self._settings.process_set))
            bucket.handle = collectives.all_reduce(current_world(), [bucket.flat], among, self._settings.reduce)
            self._next += 1

    @torch.no_grad()
    def _copy_into_bucket(self, bucket: GradientBucket, number: int) -> None:
        """The gradient, or zeros, stands in its place."""
        param, slot = self._named[number][1], bucket.slots[number]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        given = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if given.data_ptr() != slot.data_ptr():
            compressed, bucket.contexts[number] = self._settings.compression.compress(given)
            slot.copy_(compressed)
        bucket.pending.discard(number)

    @torch.no_grad()
    def _copy_from_bucket(self, bucket: GradientBucket) -> None:
        """Each parameter's gradient is the reduced one, where it lies if it was not compressed."""
        for number, slot in bucket.slots.items():
            param = self._named[number][1]
            was_sparse = param.grad is not None and param.grad.is_sparse
            reduced = self._settings.compression.decompress(slot, bucket.contexts.get(number))
            whole = reduced.view(param.shape)
            param.grad = whole.to_sparse(1) if was_sparse and self._settings.sparse_as_dense else whole

    def _start_sparse(self, number: int) -> Callable[[], Tensor]:
        name, param = self._named[number]
        grad = param.grad
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), param.new_empty(0, *param.shape[1:]), param.shape
            )
        given = grad if grad.is_sparse else grad.to_sparse(1)
        return sparse_allreduce_async(given, name, self._settings.reduce.op, self._settings.process_set)

    def _agree_on_buckets(self) -> None:
        """All members have the same buckets, in the same order."""
        world, group = current_world(), member_group(self._settings.process_set)
        facts = torch.zeros(2, len(self._named) + 1, dtype=torch.int64)
        own = self._grad_checksum()
        facts[0, -1], facts[1, -1] = own, -own  # so that the largest of both tell whether all are the same
        for place, number in enumerate(self._ready):
            facts[0, number] = place + 1
        if not self._settings.sparse_as_dense:
            for number, (_, param) in enumerate(self._named):
                facts[1, number] = int(param.grad is not None and param.grad.is_sparse)
        agreed = world.joined_results.pop(self._label, None)  # this rank had joined when the others agreed
        if agreed is None:
            agreed = wait_tensor(
                collectives.all_reduce(world, [facts], NamedGroup(self._label, group), ScaledReduction(ReductionOp.MAX))
            )
        (*places, most), (*flags, least) = agreed.tolist()
        if own and most == -least and len(group) > 1 and world.fabric.rank == group[0]:
            warn_identical_gradients(group)
        count = len(self._named)
        order = sorted(range(count), key=lambda number: (places[number] or count + 1, -number))
        self._sparse = [number for number in order if flags[number]]
        dense = [number for number in order if not flags[number]]
        self._buckets = [self._make_bucket(numbers) for numbers in self._assign_buckets(dense, world.fusion_bytes)]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.members}

    def _grad_checksum(self) -> int:
        """Return a number that is the same for the same gradients; 0 for those of zeros."""
        found = 0
        for _, param in self._named:
            if param.grad is not None:
                grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
                for part in (grad.indices(), grad.values()) if grad.is_sparse else (grad,):
                    found = (31 * found + sum_bits(part.contiguous())) % (1 << 48)
        return found

    def _assign_buckets(self, order: Sequence[int], fusion_bytes: int) -> list[list[int]]:
        """Return the members of each bucket: of one dtype, as many as fit; in the order in which buckets are full."""
        groups = self._settings.groups
        lots = {number: at for at, group in enumerate(groups or ()) for number in group}
        open_: dict[object, list[int]] = {}
        sizes: dict[object, int] = {}
        cut: list[list[int]] = []
        for number in order:
            example = self._wire_example(number)
            size = example.numel() * example.element_size()
            key = (example.dtype, lots.get(number, -1 - number) if groups is not None else None)
            if groups is None and key in open_ and sizes[key] + size > fusion_bytes:
                cut.append(open_.pop(key))
            sizes[key] = size + (sizes[key] if key in open_ else 0)
            open_.setdefault(key, []).append(number)
        rank_of = {number: place for place, number in enumerate(order)}
        return sorted([*cut, *open_.values()], key=lambda members: rank_of[members[-1]])

    def _wire_example(self, number: int) -> Tensor:
        """Return what a gradient looks like when it travels."""
        return self._settings.compression.compress(torch.zeros_like(self._named[number][1]).detach())[0]

    def _make_bucket(self, numbers: list[int]) -> GradientBucket:
        examples = {number: self._wire_example(number) for number in numbers}
        dtype = examples[numbers[0]].dtype
        flat = current_world().fabric.empty(sum(example.numel() for example in examples.values()), dtype)
        parts = torch.split(flat, [example.numel() for example in examples.values()])
        slots = {number: part.view(examples[number].shape) for number, part in zip(numbers, parts, strict=True)}
        names = [self._named[number][0] for number in numbers]
        name = names[0] if len(names) == 1 else f"gradients of {len(names)} parameters, {names[0]} to {names[-1]}"
        return GradientBucket(numbers, flat, slots, name, pending=set(numbers))


def warn_identical_gradients(group: Sequence[int]) -> None:
    """Warn that ranks have come to the same gradient, bit for bit, from what each was fed."""
    warnings.warn(
        f"{format_ranks(group)} came to the same gradient in their first step, bit for bit, so they were fed the same "
        f"samples: {len(group)} ranks do the work of one, and an epoch is read {len(group)} times; give each rank "
        "samples of its own, for a DataLoader with DistributedSampler(dataset, hvd.size(), hvd.rank())",
        RuntimeWarning,
        stacklevel=5,
    )


def _make_hook(owner: weakref.ref[GradientReducer], number: int) -> Callable[[Tensor], None]:
    """Return a hook that does nothing when the optimizer is gone."""

    def accumulated(_: Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients.on_grad_accumulated(number)

    return accumulated


O = TypeVar("O", bound=Optimizer)  # noqa: E741 - an optimizer

Closure = Callable[[], Any]


class _DistributedMixin:
    """What ``DistributedOptimizer`` adds to the class of an optimizer: gradients are reduced before a step."""

    _reducer: GradientReducer | None
    _is_synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """A step has so many backward passes from now on."""
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def load_state_dict(self, state_dict: Any) -> None:  # noqa: ANN401 - torch's own
        """The optimizer is as it was saved, before a step."""
        if self._reducer is not None:
            self._reducer.reset()
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Every parameter's gradient is that of all members; ``step`` need not do it again.

        Raises:
            HorovodInternalError: another rank has other parameters, is gone or late.
        """
        if self._reducer is not None:
            self._reducer.check_known(param for group in self.param_groups for param in group["params"])
            self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step`` takes the gradients as they are: they have been synchronized, and perhaps clipped since then."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - what the closure returns
        """The parameters have been updated with the gradients of all members.

        Args:
            closure: computes the loss and its gradients; they are synchronized each time it is called.
        """
        if closure is not None:
            return super().step(self._with_synchronize(closure))  # type: ignore[misc]
        if self._should_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() after optimizer.synchronize() reduces the gradients a second time; put the step "
                    "into `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step()  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        """The gradients are gone, or zeros.

        Raises:
            CallOrderError: a backward pass has fed them, and they may be on their way to the other ranks.
        """
        if self._reducer is not None and self._reducer.has_accumulated:
            raise CallOrderError(
                "zero_grad() was called after backward() and before step() or synchronize(); the gradients are on "
                "their way to the other ranks: call it before backward(), or after step()"
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
    """What ``DistributedOptimizer(op=Adasum)`` adds: each rank steps alone, and the steps are combined by Adasum."""

    _named: NamedParameters
    _compression: type[Compressor]
    _process_set: ProcessSet
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """A step has so many backward passes from now on."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing is done: what is combined are the steps, not the gradients."""
        return

    def skip_synchronize(self) -> None:
        """Refuse.

        Raises:
            CallOrderError: always.
        """
        raise CallOrderError(
            "skip_synchronize() with op=Adasum: each rank's step is combined after it was taken, so no gradients are "
            "synchronized that could be skipped; use op=Average to clip gradients of all ranks"
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:  # noqa: ANN401 - what the closure returns
        """The parameters have moved by the Adasum of all members' steps."""
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
    """Return an optimizer of the same class, with the same parameters, options and state, that all ranks step together.

    Args:
        optimizer: any of torch's; use what is returned instead of it.
        named_parameters: ``model.named_parameters()``, for errors and the timeline.
        compression: what is done to gradients on the wire.
        backward_passes_per_step: gradients are accumulated over so many passes before they are reduced.
        op: Average or Sum of gradients, or Adasum of the ranks' steps.
        gradient_predivide_factor: with Average, gradients are divided by it before they are added up, and by what is
            left of the number of ranks afterwards.
        num_groups: Horovod's older name for ``groups``.
        groups: into how many groups the parameters are split, or the groups themselves; each is reduced as one. Left
            out, as many gradients as fit into HOROVOD_FUSION_THRESHOLD are.
        sparse_as_dense: sparse gradients travel with their zeros, and are sparse again afterwards.
        process_set: who takes part; on the other ranks the optimizer steps alone.

    Raises:
        PlanError: the parameters or options contradict each other; it says which.

    Cost:
        bytes on the wire per rank and step: those of a ring all-reduce of the compressed gradients. Gradients are
        copied once, into memory that the ranks of a host share.
    """
    named = _name_parameters(optimizer, named_parameters)
    _check_options(op, gradient_predivide_factor, backward_passes_per_step)
    is_adasum = op == ReductionOp.ADASUM and current_world().fabric.num_ranks > 1
    face = _DistributedAdasumMixin if is_adasum else _DistributedMixin
    kind = type(type(optimizer).__name__, (face, type(optimizer)), {})
    new: Any = object.__new__(kind)
    state = dict(optimizer.__dict__)
    state.pop("step", None)  # a scheduler's wrapper of the step of the old one
    new.__dict__.update(state)
    new.backward_passes_per_step = backward_passes_per_step
    if is_adasum:
        new._named, new._compression, new._process_set = named, compression, process_set  # noqa: SLF001
        return cast("O", new)
    new._is_synchronized, new._should_synchronize, new._reducer = False, True, None  # noqa: SLF001
    if process_set.included() and current_world().fabric.num_ranks > 1:
        reduce = ScaledReduction(op, 1.0 / gradient_predivide_factor, gradient_predivide_factor)
        grouped = _resolve_groups(groups if groups is not None else num_groups or None, named)
        new._reducer = GradientReducer(
            named, ReductionSettings(compression, reduce, process_set, grouped, sparse_as_dense)
        )  # noqa: SLF001
        new._reducer.set_passes(backward_passes_per_step)  # noqa: SLF001
    return cast("O", new)


def _check_options(op: ReductionOp, predivide_factor: float, passes: int) -> None:
    if op not in {ReductionOp.AVERAGE, ReductionOp.SUM, ReductionOp.ADASUM}:
        raise PlanError(
            f"DistributedOptimizer with op={op!r}: gradients are averaged or added; give Average, Sum, Adasum"
        )
    if predivide_factor != 1.0 and op != ReductionOp.AVERAGE:
        raise PlanError(
            f"gradient_predivide_factor={predivide_factor} with op={ReductionOp(op).name}: it splits the division of a mean; "
            "leave it out, or use op=Average"
        )
    if not predivide_factor > 0:
        raise PlanError(f"gradient_predivide_factor={predivide_factor} divides gradients; give a number above 0")
    if passes <= 0:
        raise PlanError(f"backward_passes_per_step={passes} leaves nothing to step with; give a number from 1")


def _name_parameters(optimizer: Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> NamedParameters:
    """Return every parameter of the optimizer once, with its name.

    Raises:
        PlanError: names or parameters are missing or there twice.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if given is None:
        return [(f"parameter {number}", param) for number, param in enumerate(params)]
    named: list[Any] = list(given)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise PlanError(
            "named_parameters holds something that is no pair of name and parameter; give model.named_parameters()"
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanError(f"named_parameters has {', '.join(twice)} more than once; every name must be given once")
    of = {id(param): name for name, param in named}
    unnamed = [number for number, param in enumerate(params) if id(param) not in of]
    if unnamed:
        raise PlanError(
            f"named_parameters leaves out {len(unnamed)} of the optimizer's {len(params)} parameters, the first with "
            f"shape {tuple(params[unnamed[0]].shape)}; name all of them, or leave named_parameters out"
        )
    return [(of[id(param)], cast("nn.Parameter", param)) for param in params]


def _resolve_groups(
    groups: int | Sequence[Sequence[Tensor]] | None, named: NamedParameters
) -> tuple[tuple[int, ...], ...] | None:
    """Return the groups as numbers of the parameters that are trained.

    Raises:
        PlanError: there is no such number of groups, or a parameter is in two.
    """
    if groups is None:
        return None
    trained = [param for _, param in named if param.requires_grad]
    if isinstance(groups, int):
        if groups <= 0:
            raise PlanError(f"groups={groups}; give a number of groups from 1, or lists of parameters")
        edges = [len(trained) * at // groups for at in range(groups + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(edges))
    numbers = {id(param): number for number, param in enumerate(trained)}
    found = [tuple(numbers[id(param)] for param in group if id(param) in numbers) for group in groups]
    flat = [number for group in found for number in group]
    if len(set(flat)) != len(flat):
        raise PlanError("groups has a parameter in two groups; a gradient is reduced once: give each parameter once")
    return tuple(found)
