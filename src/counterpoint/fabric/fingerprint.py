"""What a collective is, small enough to travel: ranks that are about to do different things find out before they do."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.fabric import Group

REDUCIBLE_DTYPES = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32}


@dataclass(frozen=True, slots=True)
class CollectiveSignature:
    """One collective as every member must see it; a tensor only by its looks.

    Attributes:
        kind: the collective, with how it reduces: ``all_reduce sum``.
        root: the rank whose value counts, -1 where all do.
        channel: tells apart what one group does for different purposes, each in an order of its own.
    """

    kind: str
    label: str
    group: Group
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    root: int = -1
    channel: str = ""

    @property
    def reduces(self) -> bool:
        """Whether numbers of several members become one."""
        return " " in self.kind

    def __str__(self) -> str:
        """Read as in an error: ``all_reduce sum of grad0, float32 (4, 8), among ranks 0, 1``."""
        looks = f", {self.dtype} {self.shape}" if self.dtype else ""
        ranges = f", bounds {self.bounds}" if self.bounds else ""
        root = f", root {self.root}" if self.root >= 0 else ""
        return f"{self.kind} of {self.label}{looks}{ranges}{root}, among {format_ranks(self.group)}"


def format_ranks(group: Sequence[int]) -> str:
    """Name them: ``rank 1`` or ``ranks 0, 1``."""
    return f"rank{'s' if len(group) != 1 else ''} {', '.join(map(str, group))}"


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=4096)
def fingerprint(operation: CollectiveSignature) -> bytes:
    """Return 16 bytes that are equal for equal operations, and for others only by a miracle."""
    return digest(
        operation.kind, operation.label, operation.group, operation.dtype, operation.shape, operation.bounds,
        operation.root,
    )  # fmt: skip


def digest(*facts: object) -> bytes:
    """Return 16 bytes for strings, numbers and tuples of them."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def message_fingerprint(label: str, tensors: Sequence[Tensor]) -> bytes:
    """Return the fingerprint of a message: its label and its tensors' looks."""
    return _message_fingerprint(label, tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))


@lru_cache(maxsize=4096)
def _message_fingerprint(label: str, tensor_meta: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> bytes:
    return digest("send", label, tuple((dtype_name(dtype), shape) for dtype, shape in tensor_meta))


def describe_mismatch(seen: Mapping[int, tuple[bytes, str]], index: int) -> str | None:
    """Say which two members are about to do different things; None where all that are seen agree.

    Args:
        seen: fingerprint and reading of the operation, by rank.
        turn: the collectives that this group has started before.
    """
    first, *others = sorted(seen)
    for other in others:
        if seen[other][0] != seen[first][0]:
            return (
                f"ranks {first} and {other} disagree on collective {index} of their group: "
                f"rank {first} starts {seen[first][1]}; rank {other} starts {seen[other][1]}; "
                "all members must start the same collectives in the same order; nothing was added up or overwritten: "
                f"compare what ranks {first} and {other} ran before it, and look for an if that goes by the rank"
            )
    return None


def tensor_signature(kind: str, label: str, tensor: Tensor, group: Group, *, root: int = -1) -> CollectiveSignature:
    """Return the collective over a whole tensor."""
    return CollectiveSignature(kind, label, group, dtype_name(tensor.dtype), tuple(tensor.shape), (), root)


def ranges_signature(kind: str, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> CollectiveSignature:
    """Return the collective over one range per member of a flat tensor.

    Raises:
        ProgramError: the tensor is not flat, or the ranges do not cover it.
    """
    edges = tuple(bounds)
    covers = len(edges) == len(group) + 1 and (edges[0], edges[-1]) == (0, whole.numel())
    if whole.dim() != 1 or not whole.is_contiguous() or not covers or sorted(edges) != list(edges):
        raise ProgramError(
            f"{kind} of {label}: bounds {edges} do not cut a tensor of shape {tuple(whole.shape)} for {format_ranks(group)}; "
            "a flat contiguous tensor needs one range per member, rising from 0 to its length"
        )
    return CollectiveSignature(kind, label, group, dtype_name(whole.dtype), tuple(whole.shape), edges)


@lru_cache(maxsize=4096)
def check_group(operation: CollectiveSignature, rank: int, num_ranks: int) -> None:
    """The operation's group is one that this rank may act in.

    Raises:
        ProgramError: the group is not a sorted tuple of ranks of the world with this one among them, or the root is not
            in it, or the dtype cannot be added up.
    """
    group = operation.group
    if rank not in group or list(group) != sorted(set(group)) or group[0] < 0 or group[-1] >= num_ranks:
        raise ProgramError(
            f"rank {rank} starts {operation}: a group is a sorted tuple of ranks below {num_ranks}, "
            f"rank {rank} included"
        )
    if operation.root != -1 and operation.root not in group:
        raise ProgramError(f"rank {rank} starts {operation}: the root must be a member")
    if operation.reduces and operation.dtype not in {dtype_name(dtype) for dtype in REDUCIBLE_DTYPES}:
        raise ProgramError(
            f"rank {rank} starts {operation}: {operation.dtype} cannot be added up over ranks; convert it first"
        )
    if operation.kind.endswith(" mean") and operation.dtype.startswith("int"):
        raise ProgramError(
            f"rank {rank} starts {operation}: the mean of whole numbers is none; add them up, or convert them first"
        )


def exchange_signature(
    label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group, rank: int
) -> CollectiveSignature:
    """Return the exchange of ranges between all members.

    Raises:
        ProgramError: the tensor is not flat, or the counts are not those of this rank.
    """
    place = group.index(rank) if rank in group else 0
    fits = len(counts) == len(group) and all(len(row) == len(group) and min(row) >= 0 for row in counts)
    if not fits or whole.dim() != 1 or not whole.is_contiguous() or sum(counts[place]) != whole.numel():
        raise ProgramError(
            f"all_to_all of {label}: counts {counts} do not cut a tensor of shape {tuple(whole.shape)} of rank {rank} "
            f"for {format_ranks(group)}; a flat contiguous tensor needs a square of counts whose own row adds up to its length"
        )
    flat = tuple(count for row in counts for count in row)
    return CollectiveSignature("all_to_all", label, group, dtype_name(whole.dtype), (), flat)


def check_peer(peer: int, rank: int, num_ranks: int, label: str) -> None:
    """The peer is another rank of this world.

    Raises:
        ProgramError: it is not.
    """
    if not 0 <= peer < num_ranks or peer == rank:
        raise ProgramError(
            f"rank {rank} cannot exchange {label} with rank {peer}: a peer is another rank below {num_ranks}"
        )


def describe_unexpected_message(rank: int, label: str, peer: int, found: str) -> str:
    """Say that another message came than the one that was to come."""
    return (
        f"rank {rank} expects {label} from rank {peer}, but its next message is {found}; messages "
        "arrive in the order in "
        f"which they were sent: compare what rank {peer} sends with what rank {rank} receives"
    )
