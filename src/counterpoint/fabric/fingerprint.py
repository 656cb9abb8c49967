"""Signatures of collectives, which members compare before any data moves."""

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
    """One collective, as every member must describe it; of its tensor, only the metadata.

    Attributes:
        kind: the collective and its reduction, such as ``all_reduce sum``.
        root: the rank whose tensor is broadcast; -1 if there is none.
        channel: separates independent sequences of collectives of one group.
        device: of the tensor, if it is not in host memory; not compared.
        position: number of collectives that the group has started before; -1 if all of them are compared in order.
    """

    kind: str
    label: str
    group: Group
    dtype: str = ""
    shape: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    root: int = -1
    channel: str = ""
    device: str = ""
    position: int = -1

    @property
    def reduces(self) -> bool:
        """Whether the collective reduces values."""
        return " " in self.kind

    def __str__(self) -> str:
        """Format for an error: ``all_reduce sum of grad0, float32 (4, 8), among ranks 0, 1``."""
        tensor_meta = f", {self.dtype} {self.shape}" if self.dtype else ""
        ranges = f", bounds {self.bounds}" if self.bounds else ""
        root = f", root {self.root}" if self.root >= 0 else ""
        return f"{self.kind} of {self.label}{tensor_meta}{ranges}{root}, among {format_ranks(self.group)}"


def format_ranks(group: Sequence[int]) -> str:
    """Return ``rank 1`` or ``ranks 0, 1``."""
    return f"rank{'s' if len(group) != 1 else ''} {', '.join(map(str, group))}"


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=4096)
def fingerprint(operation: CollectiveSignature) -> bytes:
    """Return a 16-byte hash of the signature, without its channel."""
    return digest(
        operation.kind, operation.label, operation.group, operation.dtype, operation.shape, operation.bounds,
        operation.root, operation.position,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def signature_text(signature: CollectiveSignature) -> str:
    """Return the signature's text in at most 240 bytes, shortened in its middle."""
    text = str(signature)
    full = text.encode()
    return text if len(full) <= 240 else f"{full[:160].decode(errors='ignore')} … {full[-70:].decode(errors='ignore')}"


def digest(*facts: object) -> bytes:
    """Return a 16-byte hash of strings, numbers and tuples of them."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def message_fingerprint(label: str, tensors: Sequence[Tensor]) -> bytes:
    """Return a 16-byte hash of a message's label and of its tensors' dtypes and shapes."""
    return _message_fingerprint(label, tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors))


@lru_cache(maxsize=4096)
def _message_fingerprint(label: str, tensor_meta: tuple[tuple[torch.dtype, tuple[int, ...]], ...]) -> bytes:
    return digest("send", label, tuple((dtype_name(dtype), shape) for dtype, shape in tensor_meta))


def describe_mismatch(
    seen: Mapping[int, tuple[bytes, str]], index: int, consequence: str = "no tensor was changed"
) -> str | None:
    """Return an error text that names two members with different signatures; None if all agree.

    Args:
        seen: fingerprint and text of the signature, by rank.
        index: number of collectives that the group has started before.
        consequence: what has become of the tensors.
    """
    first, *others = sorted(seen)
    for other in others:
        if seen[other][0] != seen[first][0]:
            return (
                f"ranks {first} and {other} disagree on collective {index} of their group: "
                f"rank {first} starts {seen[first][1]}; rank {other} starts {seen[other][1]}; "
                f"all members must start the same collectives in the same order; {consequence}: "
                f"compare what ranks {first} and {other} ran before it, and look for a branch that depends on the rank"
            )
    return None


def tensor_signature(kind: str, label: str, tensor: Tensor, group: Group, *, root: int = -1) -> CollectiveSignature:
    """Return the signature of a collective over a whole tensor."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    return CollectiveSignature(kind, label, group, dtype, shape, (), root, device=device_name(tensor))


def ranges_signature(kind: str, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> CollectiveSignature:
    """Return the signature of a collective over one range of a flat tensor per member.

    Raises:
        ProgramError: the tensor is not flat, or the ranges do not cover it.
    """
    edges = tuple(bounds)
    covers = len(edges) == len(group) + 1 and (edges[0], edges[-1]) == (0, whole.numel())
    if whole.dim() != 1 or not whole.is_contiguous() or not covers or sorted(edges) != list(edges):
        raise ProgramError(
            f"{kind} of {label}: bounds {edges} do not split a tensor of shape {tuple(whole.shape)} among "
            f"{format_ranks(group)}; a flat contiguous tensor needs one range per member, ascending, from 0 to the end"
        )
    shape, dtype = tuple(whole.shape), dtype_name(whole.dtype)
    return CollectiveSignature(kind, label, group, dtype, shape, edges, device=device_name(whole))


def device_name(tensor: Tensor) -> str:
    """Return the tensor's device; empty for host memory."""
    return "" if tensor.is_cpu else str(tensor.device)


def check_host_group(operation: CollectiveSignature, rank: int, num_ranks: int) -> None:
    """Check that this rank may start the collective on a transport that moves tensors in host memory only.

    Raises:
        ProgramError: :func:`check_group` refuses it, or its tensor is on a device.
    """
    check_group(operation, rank, num_ranks)
    if operation.device:
        raise ProgramError(
            f"rank {rank} starts {operation}: the tensor is on {operation.device}, and this transport moves tensors in "
            "host memory only; move it with .cpu(), or use transport='process_group'"
        )


@lru_cache(maxsize=4096)
def check_group(operation: CollectiveSignature, rank: int, num_ranks: int) -> None:
    """Check that this rank may start the collective.

    Raises:
        ProgramError: the group is not a sorted tuple of distinct ranks with this one among them, the root is not a
        member, or the dtype cannot be reduced.
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
            f"rank {rank} starts {operation}: {operation.dtype} cannot be reduced; keep a complex parameter as a real "
            "one of its real and imaginary parts (torch.view_as_real), and call torch.view_as_complex on it in forward"
        )
    if operation.kind.endswith(" mean") and operation.dtype.startswith("int"):
        raise ProgramError(
            f"rank {rank} starts {operation}: a mean of integers is not an integer; take the sum, or convert them first"
        )


def exchange_signature(
    label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group, rank: int
) -> CollectiveSignature:
    """Return the signature of an all-to-all.

    Raises:
        ProgramError: the tensor is not flat, or does not fit this rank's counts.
    """
    member = group.index(rank) if rank in group else 0
    fits = len(counts) == len(group) and all(len(row) == len(group) and min(row) >= 0 for row in counts)
    if not fits or whole.dim() != 1 or not whole.is_contiguous() or sum(counts[member]) != whole.numel():
        raise ProgramError(
            f"all_to_all of {label}: counts {counts} do not split a tensor of shape {tuple(whole.shape)} of rank "
            f"{rank} among {format_ranks(group)}; a flat contiguous tensor needs a square table of counts whose row "
            "for this "
            "rank sums to its length"
        )
    flat = tuple(count for row in counts for count in row)
    return CollectiveSignature("all_to_all", label, group, dtype_name(whole.dtype), (), flat, device=device_name(whole))


def check_peer(peer: int, rank: int, num_ranks: int, label: str) -> None:
    """Check that the peer is another rank of this world.

    Raises:
        ProgramError: it is not.
    """
    if not 0 <= peer < num_ranks or peer == rank:
        raise ProgramError(
            f"rank {rank} cannot exchange {label} with rank {peer}: a peer is another rank below {num_ranks}"
        )


def describe_unexpected_message(rank: int, label: str, peer: int, received_label: str) -> str:
    """Return the error text for a message with another label than expected."""
    return (
        f"rank {rank} expects {label} from rank {peer}, but its next message is {received_label}; messages arrive in "
        f"the order in which they were sent: compare what rank {peer} sends with what rank {rank} receives"
    )
