"""The groups of one rank in shared memory: opened by name among ranks of one host, each with memory of its own.

Collectives as the library is asked for them: what does not change from one step to the next is made once.

A collective in shared memory that has been started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_uint64
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from counterpoint.fabric.fabric import Group, Work
from counterpoint.fabric.fingerprint import CollectiveSignature, check_group, digest, fingerprint
from counterpoint.fabric.gloo.collective_queue import signature_text
from counterpoint.fabric.shm.memory import CHUNK_BYTES, int_array
from counterpoint.fabric.shm.native import BYTES, DTYPES, REDUCTIONS, SIGNATURE_BYTES, CollectiveKind, CollectiveRequest
from counterpoint.fabric.shm.segments import SegmentMapping, create_segment

PollUntil = Callable[[Callable[[], int]], int]


class ShmGroups:
    """What a rank has joined.

    Args:
        library: the native part.
        world: its handle.
        rank: the own rank.
        here: the ranks of this host; the library counts them from 0.
    """

    def __init__(self, library: CDLL, world: int, rank: int, local_ranks: Group) -> None:
        self._library = library
        self._world = world
        self._rank = rank
        self._local_ranks = local_ranks
        self._groups: dict[tuple[Group, str], tuple[int, SegmentMapping | None]] = {}

    def open(self, operation: CollectiveSignature, poll_until: PollUntil) -> int:
        """Return the handle of the operation's group on its channel; all members have come where it is new.

        Raises:
            RuntimeError: a member has ended, or its memory cannot be opened.
            TimeoutError: a member has not come.
        """
        key = (operation.group, operation.channel)
        if key not in self._groups:
            library, world, places = (
                self._library,
                self._world,
                [self._local_ranks.index(rank) for rank in operation.group],
            )
            first, count = places[0], len(places)
            tag = int.from_bytes(digest("group", *key)[:8], "little") | 1
            mapping: SegmentMapping | None = None
            if self._rank == operation.group[0]:
                size = library.cp_group_bytes(count, CHUNK_BYTES)
                mapping = create_segment("counterpoint group", size, allocate=True)
                library.cp_format_group(mapping.address, count, CHUNK_BYTES)
                library.cp_register_segment(world, mapping.fd, size, tag)
                address = mapping.address
            else:
                number = poll_until(lambda: int(library.cp_await_segment(world, first, tag)))
                address = library.cp_map_segment(world, first, number) or 0
            handle = library.cp_open_group(world, address, int_array(tuple(places)), count) if address else None
            if not handle:
                raise RuntimeError(f"that of rank {operation.group[0]} cannot be opened")
            self._groups[key] = (handle, mapping)
            poll_until(lambda: int(library.cp_await_members(handle, address)))
            if mapping is not None:
                mapping.close_file()
        return self._groups[key][0]

    def close(self) -> None:
        """Their memory is gone from this process."""
        for handle, memory in self._groups.values():
            self._library.cp_close_group(handle)
            if memory is not None:
                memory.close()
        self._groups.clear()


CacheKey: TypeAlias = tuple[Any, ...]


@dataclass(slots=True)
class PreparedCollective:
    """A collective that can be started again and again.

    Args:
        operation: as errors name it.
        request: for the library; only the places of its tensors change.
        group: the group's handle; 0 for a rank alone.
        num_bytes: of the tensor.
        kept: what the request points to.
        reference: to the request.
        address: of the tensor that the request is for now; 0 where it must be looked for.
    """

    operation: CollectiveSignature
    request: CollectiveRequest
    group: int
    num_bytes: int
    keep_alive: tuple[Any, ...]
    reference: Any
    address: int = 0

    def set_tensor(self, address: int, segment: int, offset: int) -> None:
        """The next start is for the tensor at this address, in this segment of the rank or, with -1, in none."""
        self.request.data, self.request.segment, self.request.offset = address, segment, offset
        self.address = address

    def set_exchange(self, bounds: Sequence[int], received: Tensor, max_elements: int) -> None:
        """Ask for an exchange: what comes, and how long the longest range between any two members is, in numbers."""
        size = received.element_size()
        edges = (c_uint64 * len(bounds))(*(bound * size for bound in bounds))
        self.request.out, self.request.out_bounds = received.data_ptr(), edges
        self.request.longest = max_elements * size
        self.keep_alive = (*self.keep_alive, edges, received)


class RequestCache:
    """The collectives of one rank.

    Args:
        rank: the own rank.
        num_ranks: how many there are.
        formed: returns the group of an operation, formed where it is new.
    """

    def __init__(self, rank: int, num_ranks: int, open_group: Callable[[CollectiveSignature], int]) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._open_group = open_group
        self._prepared: dict[CacheKey, PreparedCollective] = {}

    def get(self, key: CacheKey) -> PreparedCollective | None:
        """Return a recipe that was made before."""
        return self._prepared.get(key)

    def make(
        self,
        key: CacheKey,
        kind: CollectiveKind,
        operation: CollectiveSignature,
        tensor: Tensor,
        bounds: Sequence[int] = (),
    ) -> PreparedCollective:
        """Return a new recipe and remember it; bounds, where there are any, are those of all members' ranges.

        Args:
            key: what it is remembered by; None where it is not.
            kind: for the library.
            operation: as errors name it.
            tensor: one like those it will be started with.
            bounds: of the members' ranges, in numbers.

        Raises:
            ProgramError: the group is none, or the dtype cannot be added up.
        """
        check_group(operation, self._rank, self._num_ranks)
        unit = 1 if operation.reduces else tensor.element_size()
        verb = operation.kind.partition(" ")[2] or "sum"
        edges = (c_uint64 * len(bounds))(*(bound * unit for bound in bounds)) if bounds else None
        print_, words = fingerprint(operation), signature_text(operation).encode()[:SIGNATURE_BYTES]
        handle = self._open_group(operation) if len(operation.group) > 1 else 0
        request = CollectiveRequest(
            group=handle,
            kind=kind,
            dtype=DTYPES[tensor.dtype] if operation.reduces else BYTES,
            verb=REDUCTIONS[verb],
            root=operation.group.index(operation.root) if operation.root >= 0 else 0,
            scale=1 / len(operation.group) if verb == "mean" else 1.0,
            count=tensor.numel() * unit,
            bounds=edges,
            segment=-1,
            fingerprint=print_,
            reading=words,
            reading_bytes=len(words),
        )
        num_bytes = tensor.numel() * tensor.element_size()
        recipe = PreparedCollective(operation, request, handle, num_bytes, (print_, words, edges), byref(request))
        if key:
            self._prepared[key] = recipe
        return recipe

    def invalidate_addresses(self) -> None:
        """Where private memory was there may be shared memory now."""
        for recipe in list(self._prepared.values()):  # another thread may add one
            recipe.address = 0

    def clear(self) -> None:
        """Forget all."""
        self._prepared.clear()


def cache_key(kind: str, label: str, tensor: Tensor, group: Group, *more: object) -> CacheKey:
    """Return what makes a collective the same as one before."""
    return (kind, label, tensor.shape, tensor.dtype, group, *more)


class ShmWorkOwner(Protocol):
    """The fabric, as its works see it."""

    def finish(self, prepared: PreparedCollective, index: int) -> None:
        """The collective is complete on this rank."""

    def poll(self, prepared: PreparedCollective, index: int) -> bool:
        """Whether it is, without waiting."""

    def wait_for(self, prepared: PreparedCollective, index: int, seconds: float) -> bool:
        """Return whether it may still be complete: it is over, or so much time has passed."""

    def retain(self, prepared: PreparedCollective, whole: Tensor) -> None:
        """What a collective needs that nobody will wait for lives as long as the fabric is open."""


class ShmWork(Work):
    """A collective in shared memory."""

    __slots__ = ("_fabric", "_recipe", "_target", "_turn", "_whole")

    def __init__(
        self, fabric: ShmWorkOwner, prepared: PreparedCollective, index: int, whole: Tensor, target: Tensor | None
    ) -> None:
        self._fabric: ShmWorkOwner | None = fabric
        self._recipe = prepared
        self._turn = index
        self._whole = whole
        self._target = target

    def is_done(self) -> bool:
        """Whether it is complete; a PeerError where it cannot be."""
        if self._fabric is not None and self._fabric.poll(self._recipe, self._turn):
            self._complete()
        return self._fabric is None

    def wait_for(self, seconds: float) -> None:
        """Take part until it is over, or for so long."""
        if self._fabric is not None:
            self._fabric.wait_for(self._recipe, self._turn, seconds)

    def completes_within(self, seconds: float) -> bool:
        """Take part for that long, and look."""
        if self.is_done():
            return True
        if self._fabric is not None and not self._fabric.wait_for(self._recipe, self._turn, seconds):
            self.wait()  # says why it will not be
        return self.is_done()

    def wait(self) -> None:
        """Take part until it is complete; signals are served."""
        if self._fabric is not None:
            self._fabric.finish(self._recipe, self._turn)
            self._complete()

    def __del__(self) -> None:
        """The library may still read and write the tensors of a collective that nobody has waited for."""
        if self._fabric is not None:
            self._fabric.retain(self._recipe, self._whole)

    def _complete(self) -> None:
        self._fabric = None
        if self._target is not None:
            self._target.detach().copy_(self._whole)
