"""Collectives as the library is asked for them: what does not change from one step to the next is made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref, c_uint64
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import Operation, check_group, fingerprint
from counterpoint.fabric.lanes import reading
from counterpoint.fabric.shm.native import BYTES, DTYPES, READING_BYTES, VERBS, Kind, Request

Key: TypeAlias = tuple[Any, ...]


@dataclass(slots=True)
class Recipe:
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

    operation: Operation
    request: Request
    group: int
    num_bytes: int
    kept: tuple[Any, ...]
    reference: Any
    address: int = 0

    def place(self, address: int, segment: int, offset: int) -> None:
        """The next start is for the tensor at this address, in this segment of the rank or, with -1, in none."""
        self.request.data, self.request.segment, self.request.offset = address, segment, offset
        self.address = address

    def exchange(self, bounds: Sequence[int], received: Tensor, longest: int) -> None:
        """Ask for an exchange: what comes, and how long the longest range between any two members is, in numbers."""
        size = received.element_size()
        edges = (c_uint64 * len(bounds))(*(bound * size for bound in bounds))
        self.request.out, self.request.out_bounds = received.data_ptr(), edges
        self.request.longest = longest * size
        self.kept = (*self.kept, edges, received)


class Recipes:
    """The collectives of one rank.

    Args:
        rank: the own rank.
        num_ranks: how many there are.
        formed: returns the group of an operation, formed where it is new.
    """

    def __init__(self, rank: int, num_ranks: int, formed: Callable[[Operation], int]) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._formed = formed
        self._known: dict[Key, Recipe] = {}

    def get(self, key: Key) -> Recipe | None:
        """Return a recipe that was made before."""
        return self._known.get(key)

    def make(self, key: Key, kind: Kind, operation: Operation, tensor: Tensor, bounds: Sequence[int] = ()) -> Recipe:
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
        print_, words = fingerprint(operation), reading(operation).encode()[:READING_BYTES]
        handle = self._formed(operation) if len(operation.group) > 1 else 0
        request = Request(
            group=handle,
            kind=kind,
            dtype=DTYPES[tensor.dtype] if operation.reduces else BYTES,
            verb=VERBS[verb],
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
        recipe = Recipe(operation, request, handle, num_bytes, (print_, words, edges), byref(request))
        if key:
            self._known[key] = recipe
        return recipe

    def forget_places(self) -> None:
        """Where private memory was there may be shared memory now."""
        for recipe in list(self._known.values()):  # another thread may add one
            recipe.address = 0

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


def key_of(what: str, label: str, tensor: Tensor, group: Group, *more: object) -> Key:
    """Return what makes a collective the same as one before."""
    return (what, label, tensor.shape, tensor.dtype, group, *more)
