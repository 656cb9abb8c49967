"""Gradients of many ranks become one while the backward pass still runs: in buckets, in an order all agree on."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from counterpoint.compat.horovod import collectives
from counterpoint.compat.horovod.collectives import Among
from counterpoint.compat.horovod.compression import Compressor
from counterpoint.compat.horovod.errors import CallOrderError
from counterpoint.compat.horovod.exchanging import sparse_allreduce_async
from counterpoint.compat.horovod.handles import Pending
from counterpoint.compat.horovod.rank_sets import RankSet, member_of
from counterpoint.compat.horovod.reductions import Op, Reduce
from counterpoint.compat.horovod.waiting import finish, finish_one
from counterpoint.compat.horovod.world import AGREEMENT, the_world
from counterpoint.fabric.fingerprint import digest, dtype_name, ranks
from counterpoint.runtime.twins import bits_of

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are reduced.

    Args:
        compression: what is done to each before and after.
        reduce: the reduction of a bucket.
        process_set: among whom.
        groups: parameters that are reduced together, as numbers in their list; None: as many as fit.
        sparse_as_dense: whether sparse gradients travel with their zeros.
    """

    compression: type[Compressor]
    reduce: Reduce
    process_set: RankSet
    groups: tuple[tuple[int, ...], ...] | None = None
    sparse_as_dense: bool = False


@dataclass(slots=True)
class Bucket:
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
    missing: set[int] = field(default_factory=set)
    context: dict[int, object] = field(default_factory=dict)
    handle: Pending | None = None


class Gradients:
    """The gradients of one optimizer, reduced among the members of its process set.

    The first time, they are reduced after the backward pass; by then it is known in which order they become ready and
    which are sparse, and the ranks agree on buckets. From then on a bucket is started as soon as it is full and those
    before it have been started. A gradient that a rank does not have counts as zeros.

    Args:
        named: the parameters, with different names.
        settings: how.
    """

    def __init__(self, named: Named, settings: Settings) -> None:
        self.passes = 1
        self._named = [(name, param) for name, param in named if param.requires_grad]
        self._known = {id(param) for _, param in self._named}
        self._settings = settings
        self._left = [1] * len(self._named)
        self._ready: list[int] = []
        self._buckets: list[Bucket] | None = None
        self._bucket_of: dict[int, Bucket] = {}
        self._sparse: list[int] = []
        self._next = 0
        self.is_fed = False
        facts = [(name, tuple(param.shape), dtype_name(param.dtype)) for name, param in self._named]
        ends = f"{facts[0][0]} to {facts[-1][0]}, " if facts else ""
        self._label = f"{AGREEMENT} of {len(facts)} parameters, {ends}{digest(*facts).hex()[:8]}"
        own = weakref.ref(self)
        for number, (_, param) in enumerate(self._named):
            param.register_post_accumulate_grad_hook(_hook(own, number))  # type: ignore[no-untyped-call]

    def require_all(self, params: Iterable[Tensor]) -> None:
        """All trained parameters are known here.

        Raises:
            CallOrderError: some came later, and their gradients would be those of this rank alone.
        """
        unknown = [param for param in params if param.requires_grad and id(param) not in self._known]
        if unknown:
            raise CallOrderError(
                f"{len(unknown)} parameters, the first with shape {tuple(unknown[0].shape)}, were added to the "
                "optimizer or unfrozen after DistributedOptimizer was called; their gradients would stay those of this "
                "rank: call hvd.DistributedOptimizer again, on a new optimizer with all parameters"
            )

    def expect(self, passes: int) -> None:
        """A step has so many backward passes from now on; what was counted is forgotten."""
        self.passes = passes
        self._left = [passes] * len(self._named)

    def forget(self) -> None:
        """Nothing is ready, as before a step."""
        self._left = [self.passes] * len(self._named)
        self._ready.clear()
        self._next = 0
        self.is_fed = False
        for bucket in self._buckets or []:
            bucket.missing = set(bucket.members)
            bucket.handle = None

    def accumulated(self, number: int) -> None:
        """A backward pass has added to this gradient.

        Raises:
            CallOrderError: that was one too many.
        """
        if self._left[number] <= 0:
            raise CallOrderError(
                f"the gradient of {self._named[number][0]} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(); it is being reduced already, so this pass would be lost: call "
                "step() or synchronize() first, or raise backward_passes_per_step to accumulate gradients locally"
            )
        self.is_fed = True
        self._left[number] -= 1
        if self._left[number] == 0:
            self._ready.append(number)
            bucket = self._bucket_of.get(number)
            if bucket is not None:
                self._fill(bucket, number)
                self._start_full()

    def finish(self) -> None:
        """Every parameter has the gradient of all members together."""
        if self._buckets is None:
            self._agree()
        assert self._buckets is not None
        for bucket in self._buckets:
            for number in list(bucket.missing):
                self._fill(bucket, number)
        self._start_full()
        sparse = [(number, self._start_sparse(number)) for number in self._sparse]
        for bucket in self._buckets:
            assert bucket.handle is not None
            finish(bucket.handle)
            self._deliver(bucket)
        for number, gathered in sparse:
            self._named[number][1].grad = gathered()
        self.forget()

    def _start_full(self) -> None:
        """Buckets that are full are on their way, in the order that all members agree on."""
        buckets = self._buckets or []
        while self._next < len(buckets) and not buckets[self._next].missing:
            bucket = buckets[self._next]
            among = Among(bucket.name, member_of(self._settings.process_set))
            bucket.handle = collectives.all_reduce(the_world(), [bucket.flat], among, self._settings.reduce)
            self._next += 1

    @torch.no_grad()
    def _fill(self, bucket: Bucket, number: int) -> None:
        """The gradient, or zeros, stands in its place."""
        param, slot = self._named[number][1], bucket.slots[number]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        given = param.grad.to_dense() if param.grad.is_sparse else param.grad
        if given.data_ptr() != slot.data_ptr():
            compressed, bucket.context[number] = self._settings.compression.compress(given)
            slot.copy_(compressed)
        bucket.missing.discard(number)

    @torch.no_grad()
    def _deliver(self, bucket: Bucket) -> None:
        """Each parameter's gradient is the reduced one, where it lies if it was not compressed."""
        for number, slot in bucket.slots.items():
            param = self._named[number][1]
            was_sparse = param.grad is not None and param.grad.is_sparse
            reduced = self._settings.compression.decompress(slot, bucket.context.get(number))
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

    def _agree(self) -> None:
        """All members have the same buckets, in the same order."""
        world, group = the_world(), member_of(self._settings.process_set)
        facts = torch.zeros(2, len(self._named) + 1, dtype=torch.int64)
        own = self._mark()
        facts[0, -1], facts[1, -1] = own, -own  # so that the largest of both tell whether all are the same
        for place, number in enumerate(self._ready):
            facts[0, number] = place + 1
        if not self._settings.sparse_as_dense:
            for number, (_, param) in enumerate(self._named):
                facts[1, number] = int(param.grad is not None and param.grad.is_sparse)
        agreed = world.mirrored.pop(self._label, None)  # this rank had joined when the others agreed
        if agreed is None:
            agreed = finish_one(collectives.all_reduce(world, [facts], Among(self._label, group), Reduce(Op.MAX)))
        (*places, most), (*flags, least) = agreed.tolist()
        if own and most == -least and len(group) > 1 and world.fabric.rank == group[0]:
            warn_of_same_samples(group)
        count = len(self._named)
        order = sorted(range(count), key=lambda number: (places[number] or count + 1, -number))
        self._sparse = [number for number in order if flags[number]]
        dense = [number for number in order if not flags[number]]
        self._buckets = [self._bucket(numbers) for numbers in self._cut(dense, world.fusion_bytes)]
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.members}

    def _mark(self) -> int:
        """Return a number that is the same for the same gradients; 0 for those of zeros."""
        found = 0
        for _, param in self._named:
            if param.grad is not None:
                grad = param.grad.coalesce() if param.grad.is_sparse else param.grad
                for part in (grad.indices(), grad.values()) if grad.is_sparse else (grad,):
                    found = (31 * found + bits_of(part.contiguous())) % (1 << 48)
        return found

    def _cut(self, order: Sequence[int], fusion_bytes: int) -> list[list[int]]:
        """Return the members of each bucket: of one dtype, as many as fit; in the order in which buckets are full."""
        groups = self._settings.groups
        lots = {number: at for at, group in enumerate(groups or ()) for number in group}
        open_: dict[object, list[int]] = {}
        sizes: dict[object, int] = {}
        cut: list[list[int]] = []
        for number in order:
            example = self._example(number)
            size = example.numel() * example.element_size()
            key = (example.dtype, lots.get(number, -1 - number) if groups is not None else None)
            if groups is None and key in open_ and sizes[key] + size > fusion_bytes:
                cut.append(open_.pop(key))
            sizes[key] = size + (sizes[key] if key in open_ else 0)
            open_.setdefault(key, []).append(number)
        rank_of = {number: place for place, number in enumerate(order)}
        return sorted([*cut, *open_.values()], key=lambda members: rank_of[members[-1]])

    def _example(self, number: int) -> Tensor:
        """Return what a gradient looks like when it travels."""
        return self._settings.compression.compress(torch.zeros_like(self._named[number][1]).detach())[0]

    def _bucket(self, numbers: list[int]) -> Bucket:
        examples = {number: self._example(number) for number in numbers}
        dtype = examples[numbers[0]].dtype
        flat = the_world().fabric.empty(sum(example.numel() for example in examples.values()), dtype)
        parts = torch.split(flat, [example.numel() for example in examples.values()])
        slots = {number: part.view(examples[number].shape) for number, part in zip(numbers, parts, strict=True)}
        names = [self._named[number][0] for number in numbers]
        name = names[0] if len(names) == 1 else f"gradients of {len(names)} parameters, {names[0]} to {names[-1]}"
        return Bucket(numbers, flat, slots, name, missing=set(numbers))


def warn_of_same_samples(group: Sequence[int]) -> None:
    """Warn that ranks have come to the same gradient, bit for bit, from what each was fed."""
    warnings.warn(
        f"{ranks(group)} came to the same gradient in their first step, bit for bit, so they were fed the same "
        f"samples: {len(group)} ranks do the work of one, and an epoch is read {len(group)} times; give each rank "
        "samples of its own, for a DataLoader with DistributedSampler(dataset, hvd.size(), hvd.rank())",
        RuntimeWarning,
        stacklevel=5,
    )


def _hook(owner: weakref.ref[Gradients], number: int) -> Callable[[Tensor], None]:
    """Return a hook that does nothing when the optimizer is gone."""

    def accumulated(_: Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients.accumulated(number)

    return accumulated
