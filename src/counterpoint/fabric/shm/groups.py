"""The groups of one rank in shared memory: opened by name among ranks of one host, each with memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import CDLL

from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import Operation, digest
from counterpoint.fabric.shm.memory import PIECE_BYTES, int_array
from counterpoint.fabric.shm.segments import Mapping, create

Pump = Callable[[Callable[[], int]], int]


class Groups:
    """What a rank has joined.

    Args:
        library: the native part.
        world: its handle.
        rank: the own rank.
        here: the ranks of this host; the library counts them from 0.
    """

    def __init__(self, library: CDLL, world: int, rank: int, here: Group) -> None:
        self._library = library
        self._world = world
        self._rank = rank
        self._here = here
        self._known: dict[tuple[Group, str], tuple[int, Mapping | None]] = {}

    def opened(self, operation: Operation, pump: Pump) -> int:
        """Return the handle of the operation's group on its channel; all members have come where it is new.

        Raises:
            RuntimeError: a member has ended, or its memory cannot be opened.
            TimeoutError: a member has not come.
        """
        key = (operation.group, operation.channel)
        if key not in self._known:
            library, world, places = self._library, self._world, [self._here.index(rank) for rank in operation.group]
            first, count = places[0], len(places)
            tag = int.from_bytes(digest("group", *key)[:8], "little") | 1
            mapping: Mapping | None = None
            if self._rank == operation.group[0]:
                size = library.cp_group_bytes(count, PIECE_BYTES)
                mapping = create("counterpoint group", size, fill=True)
                library.cp_format_group(mapping.address, count, PIECE_BYTES)
                library.cp_register_segment(world, mapping.fd, size, tag)
                address = mapping.address
            else:
                number = pump(lambda: int(library.cp_await_segment(world, first, tag)))
                address = library.cp_map_segment(world, first, number) or 0
            handle = library.cp_open_group(world, address, int_array(tuple(places)), count) if address else None
            if not handle:
                raise RuntimeError(f"that of rank {operation.group[0]} cannot be opened")
            self._known[key] = (handle, mapping)
            pump(lambda: int(library.cp_await_members(handle, address)))
            if mapping is not None:
                mapping.forget_file()
        return self._known[key][0]

    def close(self) -> None:
        """Their memory is gone from this process."""
        for handle, memory in self._known.values():
            self._library.cp_close_group(handle)
            if memory is not None:
                memory.close()
        self._known.clear()
