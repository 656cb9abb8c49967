"""Ranks of one host: gradients are added up in place, in memory that all of them see, by the native library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import Finished, Group, Json, Verb, Work
from counterpoint.fabric.fingerprint import (
    Operation,
    check_group,
    dtype_name,
    of_exchange,
    of_ranges,
    of_tensor,
)  # fmt: skip
from counterpoint.fabric.shm.groups import Groups
from counterpoint.fabric.shm.memory import SharedTensors, Site, opened
from counterpoint.fabric.shm.native import Kind, Status
from counterpoint.fabric.shm.rank import ShmRank
from counterpoint.fabric.shm.recipes import Recipe, Recipes, key_of
from counterpoint.fabric.shm.work import ShmWork

NOTHING: Final = Finished()
EMPTY: Final = torch.empty(0)


class ShmFabric(ShmRank):
    """One rank among processes of one host; :func:`~counterpoint.fabric.meeting.connect` makes it.

    Cost:
        tensors from :meth:`empty` are added up where they lie: every rank reads and writes its share of everybody's.
        Any other is copied to shared memory once, a piece at a time, while the piece before is added up.
        Up to 32 KB, a start looks for the others for a microsecond or two, and what is complete by then needs no wait.

    Args:
        site: where the ranks of this host meet; all numbers that a caller gives or gets are those of the world.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, site: Site, job: int, generation: int) -> None:
        super().__init__(site, job, generation)
        self._cp_start, self._cp_wait = self._library.cp_start, self._library.cp_wait
        self._sums: dict[str, tuple[Recipe, torch.dtype, Group, Verb, torch.Size]] = {}  # found faster than by a key
        self._forgotten: list[tuple[Recipe, Tensor]] = []
        self._recipes = Recipes(self.rank, self.num_ranks, self._formed)
        self._tensors = SharedTensors(self._library, self._world, self._recipes.forget_places)
        self._groups = Groups(self._library, self._world, self.rank, self.here)
        self.form([self.here])

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in shared memory; a PeerError where there is not enough."""
        if not self._world:
            return super().empty(num_elements, dtype)
        try:
            return self._tensors.empty(num_elements, dtype)
        except PeerError as error:
            raise self.fail(f"rank {self.rank} has {error}") from error

    def spare(self, num_elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return a flat tensor in shared memory, where there is enough."""
        try:
            return self._tensors.empty(num_elements, dtype) if self._world else None
        except PeerError:
            return None

    def all_reduce(self, label: str, tensor: Tensor, group: Group, verb: Verb = "sum") -> Work:
        """Start to add up; sums are made in the order of the group, and are the same bits on all members."""
        last = self._sums.get(label)
        if last is not None:
            recipe, dtype, members, kind, shape = last
            if dtype is tensor.dtype and members == group and kind == verb and shape == tensor.shape:
                return self._start(recipe, tensor)
        key = key_of(verb, label, tensor, group)
        known = self._recipes.get(key)
        if known is None:
            operation = of_tensor(f"all_reduce {verb}", label, tensor, group)
            known = self._recipes.make(key, Kind.ALL_REDUCE, operation, tensor)
        self._sums[label] = (known, tensor.dtype, group, verb, tensor.shape)
        return self._start(known, tensor)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, verb: Verb = "sum"
    ) -> Work:
        """Start to add up ranges; sums are made in the order of the group."""
        key = key_of(f"reduce_scatter {verb}", label, whole, group, *bounds)
        recipe = self._recipes.get(key)
        if recipe is None:
            operation = of_ranges(f"reduce_scatter {verb}", label, whole, bounds, group)
            recipe = self._recipes.make(key, Kind.REDUCE_SCATTER, operation, whole, bounds)
        return self._start(recipe, whole)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to collect the members' ranges."""
        key = key_of("all_gather", label, whole, group, *bounds)
        recipe = self._recipes.get(key)
        if recipe is None:
            operation = of_ranges("all_gather", label, whole, bounds, group)
            recipe = self._recipes.make(key, Kind.ALL_GATHER, operation, whole, bounds)
        return self._start(recipe, whole)

    def open_channel(self, group: Group, channel: str) -> None:
        """The group can start collectives on this channel; all members have come."""
        self._formed(Operation("form", "group", group, channel=channel))

    def begin(self, kind: Kind, operation: Operation, tensor: Tensor, bounds: Sequence[int] = ()) -> ShmWork | None:
        """Start one of the library's collectives on a channel of its own; None where there is nothing to do.

        Args:
            kind: the collective.
            operation: what it is for errors; its group and its channel say among whom, its dtype and shape what.
            tensor: flat and contiguous.
            bounds: of the members' ranges, in numbers, where the collective has any.
        """
        key = (kind, operation, *bounds)
        recipe = self._recipes.get(key) or self._recipes.make(key, kind, operation, tensor, bounds)
        work = self._start(recipe, tensor)
        return work if isinstance(work, ShmWork) else None

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start to exchange ranges, through shared memory."""
        operation = of_exchange(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), NOTHING
        place = group.index(self.rank)
        theirs = [row[place] for row in counts]
        received = whole.new_empty(sum(theirs))
        recipe = self._recipes.make((), Kind.ALL_TO_ALL, operation, whole, [0, *accumulate(counts[place])])
        recipe.exchange([0, *accumulate(theirs)], received, max(map(max, counts)))
        return received, self._start(recipe, whole)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start to copy the root's tensor."""
        key = key_of("broadcast", label, tensor, group, root)
        recipe = self._recipes.get(key)
        if recipe is None:
            operation = of_tensor("broadcast", label, tensor, group, root=root)
            recipe = self._recipes.make(key, Kind.BROADCAST, operation, tensor)
        return self._start(recipe, tensor)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange the lengths of what JSON makes of the values, then these."""
        operation = Operation("gather_values", label, group)
        check_group(operation, self.rank, self.num_ranks)
        written = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        place, count = group.index(self.rank), len(group)
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[place] = len(written)
        key = key_of("lengths", label, lengths, group)
        recipe = self._recipes.get(key)
        if recipe is None:
            recipe = self._recipes.make(key, Kind.ALL_GATHER, operation, lengths, range(count + 1))
        self._start(recipe, lengths).wait()
        bounds = [0, *torch.cumsum(lengths, 0).tolist()]
        values = torch.empty(bounds[-1], dtype=torch.uint8)
        values[bounds[place] : bounds[place + 1]] = written
        self._start(self._recipes.make((), Kind.ALL_GATHER, operation, values, bounds), values).wait()
        raw = values.numpy().tobytes()
        return [json.loads(raw[start:stop]) for start, stop in pairwise(bounds)]

    def shared(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Open what the first member shares."""
        operation = Operation("shared", label, group, dtype_name(dtype), (num_elements,))
        check_group(operation, self.rank, self.num_ranks)
        own = self._tensors.filled(num_elements, dtype) if self.rank == group[0] else None
        if len(group) == 1:
            return own
        address = None if own is None else list(self._tensors.address_of(own))
        found = self.gather_values(f"memory for {operation}", address, group)[0]
        if own is None:
            with self.waiting(f"memory for {label}", group[:1]):
                own = opened(found, num_elements, dtype)
        self.barrier(group)
        return own

    def meet(self, label: str, group: Group) -> Work:
        """Start to announce that this rank is here."""
        key = key_of("barrier", label, EMPTY, group)
        recipe = self._recipes.get(key)
        if recipe is None:
            recipe = self._recipes.make(key, Kind.BARRIER, Operation("barrier", label, group), EMPTY)
        return self._start(recipe, EMPTY)

    def form(self, groups: Sequence[Group]) -> None:
        """Open the memory of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = Operation("form", "group", group)
                check_group(operation, self.rank, self.num_ranks)
                self._formed(operation)

    def close(self) -> None:
        """Let go of everything; what was sent stays in the pipes until the others have let go, too."""
        if self._world:
            self.failure = self.failure or "the fabric has been closed"
            self._groups.close()
            self._recipes.clear()
            self._sums.clear()
            self._leave()
            self._tensors.close()
            self._forgotten.clear()

    def finish(self, recipe: Recipe, turn: int) -> None:
        """The collective is complete on this rank.

        Raises:
            PeerError: the members disagree, one is gone, or the deadline has passed.
        """
        if self.failure is None and self._cp_wait(recipe.group, turn) == 0:
            return
        operation = recipe.operation
        with self.waiting(f"{operation.kind} of {operation.label}", self.others(operation.group)):
            self._pump(lambda: int(self._cp_wait(recipe.group, turn)), recipe)

    def keep(self, recipe: Recipe, whole: Tensor) -> None:
        """What a collective needs that nobody will wait for lives as long as the fabric is open."""
        if self._world:
            self._forgotten.append((recipe, whole))

    def pause(self, recipe: Recipe, turn: int, seconds: float) -> bool:
        """Take part until the collective is over in whatever way, or for so long; return whether it may still be."""
        if self.failure is not None:
            return False
        return self._library.cp_pause(recipe.group, turn, int(seconds * 1e9)) in {Status.DONE, Status.NOT_YET}

    def look(self, recipe: Recipe, turn: int) -> bool:
        """Whether the collective is complete on this rank; whatever can go on without waiting has gone on.

        Raises:
            PeerError: as :meth:`finish`.
        """
        if self.failure is not None:
            raise PeerError(self.failure)
        library = self._library
        library.cp_advance(self._world)
        if library.cp_num_done(recipe.group) > turn:
            return True
        if library.cp_status(recipe.group) != 0:
            self.finish(recipe, turn)
        return False

    def _start(self, recipe: Recipe, tensor: Tensor) -> Work:
        if not recipe.group:
            return NOTHING
        if self.failure is not None:
            raise PeerError(self.failure)
        whole = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        address = whole.data_ptr()
        if address != recipe.address:
            recipe.place(address, *self._tensors.find(address, recipe.num_bytes))
        turn = self._cp_start(recipe.reference)
        if turn >= 0 or whole is not tensor:
            return ShmWork(self, recipe, turn, whole, None if whole is tensor else tensor)
        return NOTHING

    def _formed(self, operation: Operation) -> int:
        with self.waiting(f"the start of {operation.kind} of {operation.label}", self.others(operation.group)):
            return self._groups.opened(operation, self._pump)
