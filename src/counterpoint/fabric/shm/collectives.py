"""Groups of one rank in shared memory, and collectives prepared as requests that can be started repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, byref, c_uint64
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import CollectiveSignature, check_host_group, digest, fingerprint, signature_text
from counterpoint.fabric.shm.memory import CHUNK_BYTES, int_array
from counterpoint.fabric.shm.native import BYTES, DTYPES, REDUCTIONS, SIGNATURE_BYTES, CollectiveKind, CollectiveRequest
from counterpoint.rpc.segments import SegmentMapping, create_segment

PollUntil = Callable[[Callable[[], int]], int]


class ShmGroups:
    """Groups that this rank has joined, each with a shared memory segment made by its first member.

    Args:
        library: the native library.
        host: handle of the host context.
        rank: the own rank.
        local_ranks: the ranks of this host; the library uses indices into it.
    """

    def __init__(self, library: CDLL, host: int, rank: int, local_ranks: Group) -> None:
        self._library = library
        self._host = host
        self._rank = rank
        self._local_ranks = local_ranks
        self._groups: dict[tuple[Group, str], tuple[int, SegmentMapping | None]] = {}

    def open(self, operation: CollectiveSignature, poll_until: PollUntil) -> int:
        """Return the handle of the operation's group on its channel; opening a new one waits for all members.

        Raises:
            RuntimeError: a member has ended, or its memory cannot be mapped.
            TimeoutError: members are missing at the timeout.
        """
        key = (operation.group, operation.channel)
        if key not in self._groups:
            library, host = self._library, self._host
            members = [self._local_ranks.index(rank) for rank in operation.group]
            first, count = members[0], len(members)
            tag = int.from_bytes(digest("group", *key)[:8], "little") | 1
            mapping: SegmentMapping | None = None
            if self._rank == operation.group[0]:
                size = library.cp_group_bytes(count, CHUNK_BYTES)
                mapping = create_segment("counterpoint group", size, allocate=True)
                library.cp_format_group(mapping.address, count, CHUNK_BYTES)
                library.cp_register_segment(host, mapping.fd, size, tag)
                address = mapping.address
            else:
                number = poll_until(lambda: int(library.cp_await_segment(host, first, tag)))
                address = library.cp_map_segment(host, first, number) or 0
            handle = library.cp_open_group(host, address, int_array(tuple(members)), count) if address else None
            if not handle:
                raise RuntimeError(f"the segment of rank {operation.group[0]} cannot be mapped")
            self._groups[key] = (handle, mapping)
            poll_until(lambda: int(library.cp_await_members(handle, address)))
            if mapping is not None:
                mapping.close_file()
        return self._groups[key][0]

    def close(self) -> None:
        """Unmap the groups' memory."""
        for handle, memory in self._groups.values():
            self._library.cp_close_group(handle)
            if memory is not None:
                memory.close()
        self._groups.clear()


CacheKey: TypeAlias = tuple[Any, ...]


@dataclass(slots=True)
class PreparedCollective:
    """A collective that can be started repeatedly; what does not change between steps is computed once.

    Args:
        operation: for errors.
        request: for the library; only the tensor's location changes.
        group: the group's handle; 0 for a group of one rank.
        num_bytes: of the tensor.
        keep_alive: objects that the request points to.
        reference: to the request.
        address: of the tensor that the request is set to; 0 if it must be looked up again.
    """

    operation: CollectiveSignature
    request: CollectiveRequest
    group: int
    num_bytes: int
    keep_alive: tuple[Any, ...]
    reference: Any
    address: int = 0

    def set_tensor(self, address: int, segment: int, offset: int) -> None:
        """Set the tensor of the next start; ``segment`` is -1 for private memory."""
        self.request.data, self.request.segment, self.request.offset = address, segment, offset
        self.address = address

    def set_exchange(self, bounds: Sequence[int], received: Tensor, max_elements: int) -> None:
        """Set the receive side of an all-to-all: bounds and buffer, and the largest range between any two members."""
        size = received.element_size()
        edges = (c_uint64 * len(bounds))(*(bound * size for bound in bounds))
        self.request.out, self.request.out_bounds = received.data_ptr(), edges
        self.request.max_range = max_elements * size
        self.keep_alive = (*self.keep_alive, edges, received)


class RequestCache:
    """Prepared collectives of one rank.

    Args:
        rank: the own rank.
        num_ranks: the world size.
        open_group: returns the handle of an operation's group; opens it if it is new.
    """

    def __init__(self, rank: int, num_ranks: int, open_group: Callable[[CollectiveSignature], int]) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._open_group = open_group
        self._prepared: dict[CacheKey, PreparedCollective] = {}

    def get(self, key: CacheKey) -> PreparedCollective | None:
        """Return the collective prepared under this key, if any."""
        return self._prepared.get(key)

    def make(
        self,
        key: CacheKey,
        kind: CollectiveKind,
        operation: CollectiveSignature,
        tensor: Tensor,
        bounds: Sequence[int] = (),
    ) -> PreparedCollective:
        """Prepare a collective, and cache it.

        Args:
            key: to find it again; an empty one is not cached.
            kind: for the library.
            operation: its signature.
            tensor: one like those that it will be started with.
            bounds: of all members' ranges, in elements, if it has any.

        Raises:
            ProgramError: the group is invalid, or the dtype cannot be reduced.
        """
        check_host_group(operation, self._rank, self._num_ranks)
        unit = 1 if operation.reduces else tensor.element_size()
        op = operation.kind.partition(" ")[2] or "sum"
        native_bounds = (c_uint64 * len(bounds))(*(bound * unit for bound in bounds)) if bounds else None
        hash_, text = fingerprint(operation), signature_text(operation).encode()[:SIGNATURE_BYTES]
        handle = self._open_group(operation) if len(operation.group) > 1 else 0
        request = CollectiveRequest(
            group=handle,
            kind=kind,
            dtype=DTYPES[tensor.dtype] if operation.reduces else BYTES,
            op=REDUCTIONS[op],
            root=operation.group.index(operation.root) if operation.root >= 0 else 0,
            scale=1 / len(operation.group) if op == "mean" else 1.0,
            count=tensor.numel() * unit,
            bounds=native_bounds,
            segment=-1,
            fingerprint=hash_,
            description=text,
            description_bytes=len(text),
        )
        num_bytes = tensor.numel() * tensor.element_size()
        prepared = PreparedCollective(
            operation, request, handle, num_bytes, (hash_, text, native_bounds), byref(request)
        )
        if key:
            self._prepared[key] = prepared
        return prepared

    def invalidate_addresses(self) -> None:
        """Look addresses up again: private memory may have been replaced by shared memory."""
        for prepared in list(self._prepared.values()):  # another thread may add one
            prepared.address = 0

    def clear(self) -> None:
        """Drop all."""
        self._prepared.clear()


def cache_key(kind: str, label: str, tensor: Tensor, group: Group, *more: object) -> CacheKey:
    """Return a key that is equal for equal collectives."""
    return (kind, label, tensor.shape, tensor.dtype, group, *more)
