"""Ranks of one host: gradients are added up in place, in memory that all of them see, by the native library."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.fabric import Finished, Group, Json, Verb, Work
from counterpoint.fabric.fingerprint import (
    Operation,
    check_group,
    check_peer,
    digest,
    disagreement,
    of_exchange,
    of_ranges,
    of_tensor,
    unexpected,
)  # fmt: skip
from counterpoint.fabric.joined import JoinedFabric
from counterpoint.fabric.shm.mail import ShmMail
from counterpoint.fabric.shm.memory import PIECE_BYTES, SharedTensors, Site, int_array
from counterpoint.fabric.shm.native import READING_BYTES, REASON_BYTES, SLICE_NS, Kind, Status, native
from counterpoint.fabric.shm.recipes import Recipe, Recipes, key_of
from counterpoint.fabric.shm.segments import Mapping, create

NOTHING: Final = Finished()
EMPTY: Final = torch.empty(0)
SPINS, FEW_SPINS = 4000, 50  # where every rank has a core, and where ranks take turns


class ShmFabric(JoinedFabric):
    """One rank among processes of one host; :func:`~counterpoint.fabric.meeting.connect` makes it.

    Cost:
        tensors from :meth:`empty` are added up where they lie: every rank reads and writes its share of everybody's.
        Any other is copied to shared memory once, a piece at a time, while the piece before is added up.

    Args:
        site: where the ranks of this host meet.
        job: the job's number.
        generation: of its ranks.
    """

    def __init__(self, site: Site, job: int, generation: int) -> None:
        super().__init__(site.rank, site.num_ranks, site.deadline_s)
        library = native().library
        assert library is not None, "whoever chose this transport has looked"
        self._library = library
        self._cp_start, self._cp_wait = library.cp_start, library.cp_wait
        self._groups: dict[Group, tuple[int, Mapping | None]] = {}
        self._sums: dict[str, tuple[Recipe, torch.Size, Group, Verb, torch.dtype]] = {}  # found faster than by a key
        self._recipes = Recipes(self.rank, self.num_ranks, self._formed)
        count = site.num_ranks
        self._memory = site.open_world(library)
        self._processes = site.open_processes()
        spins = SPINS if len(os.sched_getaffinity(0)) >= count else FEW_SPINS
        self._world: int = library.cp_open_world(
            self._memory.address, self.rank, count, os.getpid(), int_array(self._processes), spins
        )
        self._tensors = SharedTensors(library, self._world)
        self._mail = ShmMail(library, self._world, self.rank, job, generation)
        self.form([tuple(range(count))])

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor in shared memory; a PeerError where there is not enough."""
        return self._tensors.empty(num_elements, dtype) if self._world else super().empty(num_elements, dtype)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the pipe to the peer."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.waiting(f"room to send {label}", (peer,)):
            self._mail.send(peer, label, tensors, self._pump)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next message and verify it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.waiting(label, (peer,)):
            frame = self._mail.recv(peer, self._pump)
            if frame.label != label:
                raise PeerError(unexpected(self.rank, label, peer, frame.label))
        return frame.tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a message of any of the peers."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.waiting("any message", peers):
            sender, frame = self._mail.recv_any(peers, self._pump)
        return sender, frame.label, frame.tensors

    def all_reduce(self, label: str, tensor: Tensor, group: Group, verb: Verb = "sum") -> Work:
        """Start to add up; sums are made in the order of the group, and are the same bits on all members."""
        last = self._sums.get(label)
        if last is not None and (last[1:4] == (tensor.shape, group, verb)) and last[4] is tensor.dtype:
            return self._start(last[0], tensor)
        operation = of_tensor(f"all_reduce {verb}", label, tensor, group)
        recipe = self._recipes.make(key_of(verb, label, tensor, group), Kind.ALL_REDUCE, operation, tensor)
        self._sums[label] = (recipe, tensor.shape, group, verb, tensor.dtype)
        return self._start(recipe, tensor)

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

    def barrier(self, group: Group) -> None:
        """Announce that this rank is here, and wait for all announcements."""
        key = key_of("barrier", "arrival", EMPTY, group)
        recipe = self._recipes.get(key)
        if recipe is None:
            recipe = self._recipes.make(key, Kind.BARRIER, Operation("barrier", "arrival", group), EMPTY)
        self._start(recipe, EMPTY).wait()

    def form(self, groups: Sequence[Group]) -> None:
        """Open the memory of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                check_group(Operation("form", "group", group), self.rank, self.num_ranks)
                with self.waiting("form of group", group):
                    self._group(group)

    def stop(self, reason: str) -> None:
        """Write the reason where all see it, and wake them."""
        if self._world:
            self.fail(reason)

    def close(self) -> None:
        """Let go of everything; what was sent stays in the pipes until the others have let go, too."""
        if not self._world:
            return
        self.failure = self.failure or "the fabric has been closed"
        for handle, memory in self._groups.values():
            self._library.cp_close_group(handle)
            if memory is not None:
                memory.close()
        self._library.cp_close_world(self._world)
        self._memory.close()
        self._world = 0
        for process in self._processes:
            if process >= 0:
                os.close(process)
        self._tensors.close()
        self._recipes.clear()
        self._sums.clear()
        self._groups.clear()

    def finish(self, recipe: Recipe, turn: int, patience_s: float | None = None) -> bool:
        """Return whether the collective is complete on this rank; it is, where no patience is given.

        Raises:
            PeerError: the members disagree, one is gone, or the deadline has passed.
        """
        if self.failure is None:
            slice_ns = SLICE_NS if patience_s is None else int(patience_s * 1e9)
            status = self._cp_wait(self._world, recipe.group, turn, slice_ns)
            if status == 0 or (status == Status.NOT_YET and patience_s is not None):
                return bool(status == 0)
        operation = recipe.operation
        with self.waiting(f"{operation.kind} of {operation.label}", self.others(operation.group)):
            self._pump(lambda: int(self._library.cp_wait(self._world, recipe.group, turn, SLICE_NS)), recipe)
        return True

    def _start(self, recipe: Recipe, tensor: Tensor) -> Work:
        if len(recipe.operation.group) == 1:
            return NOTHING
        if self.failure is not None:
            raise PeerError(self.failure)
        whole = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        address = whole.data_ptr()
        segment, offset = self._tensors.find(address, recipe.num_bytes)
        turn = self._cp_start(recipe.group, recipe.address, address, segment, offset)
        return ShmWork(self, recipe, turn, whole, None if whole is tensor else tensor)

    def _formed(self, operation: Operation) -> int:
        with self.waiting(f"the start of {operation.kind} of {operation.label}", self.others(operation.group)):
            return self._group(operation.group)

    def _group(self, group: Group) -> int:
        """Return the group's handle; all members have come where it is new.

        Raises:
            RuntimeError: a member has ended, or its memory cannot be opened.
            TimeoutError: a member has not come.
        """
        if group not in self._groups:
            library, world, first, count = self._library, self._world, group[0], len(group)
            tag = int.from_bytes(digest("group", group)[:8], "little") | 1
            mapping: Mapping | None = None
            if self.rank == first:
                size = library.cp_group_bytes(count, PIECE_BYTES)
                mapping = create("counterpoint group", size, fill=False)
                library.cp_format_group(mapping.address, count, PIECE_BYTES)
                library.cp_register_segment(world, mapping.fd, size, tag)
                address = mapping.address
            else:
                number = self._pump(lambda: int(library.cp_await_segment(world, first, tag, SLICE_NS)))
                address = library.cp_map_segment(world, first, number) or 0
            handle = library.cp_open_group(world, address, int_array(group), count) if address else None
            if not handle:
                raise RuntimeError(f"that of rank {first} cannot be opened")
            self._groups[group] = (handle, mapping)
            self._pump(lambda: int(library.cp_await_members(world, handle, address, SLICE_NS)))
            if mapping is not None:
                mapping.forget_file()
        return self._groups[group][0]

    def _pump(self, call: Callable[[], int], recipe: Recipe | None = None) -> int:
        """Return what a call of the library returns when it is done; it is called again and again until then.

        Raises:
            PeerError: the members of the recipe's group disagree.
            RuntimeError: somebody has stopped, or is lost.
            TimeoutError: the deadline has passed.
        """
        end = time.monotonic() + self.deadline_s
        while True:
            status = call()
            if status >= 0:
                return status
            if status == Status.DISAGREE and recipe is not None:
                raise PeerError(self._disagreement(recipe))
            if status != Status.NOT_YET:
                raise RuntimeError(Status(status).name)
            if time.monotonic() > end:
                raise TimeoutError

    def stopped(self) -> str | None:
        """Read what a rank has written."""
        if not self._world:
            return None
        room = ctypes.create_string_buffer(REASON_BYTES)
        stopper = self._library.cp_stopped(self._world, room, REASON_BYTES)
        return None if stopper in {-1, self.rank} else f"rank {stopper}: {room.value.decode(errors='replace')}"

    def cause_of(self, error: Exception) -> str:
        """A process has ended, or its memory cannot be opened."""
        lost = self._library.cp_lost(self._world) if self._world else -1
        if lost >= 0:
            return f"rank {lost} has ended; look at the output of rank {lost}"
        return f"shared memory cannot be used ({error}); look at the output of the rank that ended first"

    def tell_others(self, reason: str) -> None:
        """Write the reason where all see it, unless another rank was first, and wake them."""
        if self._world:
            raw = reason.encode()
            self._library.cp_stop(self._world, raw, len(raw))

    def _disagreement(self, recipe: Recipe) -> str:
        turn = self._library.cp_num_done(recipe.group)
        seen = {}
        for place, member in enumerate(recipe.operation.group):
            print_, words = ctypes.create_string_buffer(16), ctypes.create_string_buffer(READING_BYTES)
            length = self._library.cp_notice(recipe.group, place, turn, print_, words)
            seen[member] = (print_.raw, words.raw[:length].decode(errors="replace"))
        return disagreement(seen, turn) or "the members of a group disagree"


class ShmWork(Work):
    """A collective in shared memory."""

    __slots__ = ("_fabric", "_recipe", "_target", "_turn", "_whole")

    def __init__(self, fabric: ShmFabric, recipe: Recipe, turn: int, whole: Tensor, target: Tensor | None) -> None:
        self._fabric: ShmFabric | None = fabric
        self._recipe = recipe
        self._turn = turn
        self._whole = whole
        self._target = target

    def wait(self) -> None:
        """Take part until it is complete; signals are served."""
        self.completes_within(None)

    def completes_within(self, seconds: float | None) -> bool:
        """Take part for that long; until it is complete where None."""
        if self._fabric is not None:
            if not self._fabric.finish(self._recipe, self._turn, seconds):
                return False
            self._fabric = None
            if self._target is not None:
                self._target.detach().copy_(self._whole)
        return True
