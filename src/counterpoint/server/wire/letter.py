"""A letter as bytes and back: a kind, fields that JSON can hold, and tensors; nothing in it can become code."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.frames import ALIGNMENT, described, padded, raw_bytes, read_looks
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.rooms import Room

MAGIC: Final = b"CPWL"
VERSION: Final = 1
HEAD = struct.Struct("<4sBBHIIQ")  # magic, version, sort, tensors, bytes of text, of text and looks, of the payload
LETTER: Final = 1
GOODBYE: Final = 2
MAX_KIND: Final = 64
MAX_TENSORS: Final = (1 << 16) - 1

Plain: TypeAlias = Any
"""None, a bool, an int, a float, a string, or a list or a mapping of these."""


@dataclass(frozen=True, slots=True, eq=False)
class Letter:
    """What one process tells another.

    Args:
        kind: what it is about, in a word.
        fields: what JSON can hold.
        tensors: a sent one must stay as it is until it has left; a received one is the receiver's to keep.
    """

    kind: str
    fields: Mapping[str, Plain] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """How long the parts of a frame are, within the limits."""

    sort: int
    num_tensors: int
    text_bytes: int
    front_bytes: int
    payload_bytes: int

    @property
    def body_bytes(self) -> int:
        """Length of what follows the head."""
        return self.front_bytes + self.payload_bytes


def frame_of(letter: Letter, limits: Limits) -> list[memoryview]:
    """Return the frame in pieces: its head, and then what stands behind it; tensors are not copied.

    Raises:
        PeerError: the letter cannot travel.
    """
    text, looks = written(letter), b"".join(map(described, letter.tensors))
    front = text + looks + bytes(-(len(text) + len(looks)) % ALIGNMENT)
    pieces = [memoryview(front)]
    for tensor in letter.tensors:
        raw = raw_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        pieces += [raw, memoryview(bytes(padded(len(raw)) - len(raw)))]
    num_bytes = sum(map(len, pieces)) - len(front)
    if len(front) > limits.text_bytes or num_bytes > limits.payload_bytes or len(letter.tensors) > MAX_TENSORS:
        raise PeerError(
            f"{letter.kind[:MAX_KIND]!r} with {len(letter.tensors)} tensors has {len(front)} + {num_bytes} bytes; "
            f"a letter has at most {MAX_TENSORS} tensors and {limits.text_bytes} + {limits.payload_bytes} bytes: send "
            "it in parts"
        )
    head = HEAD.pack(MAGIC, VERSION, LETTER, len(letter.tensors), len(text), len(front), num_bytes)
    return [memoryview(head), *(piece for piece in pieces if len(piece))]


def goodbye() -> list[memoryview]:
    """Return the frame after which none follows."""
    return [memoryview(HEAD.pack(MAGIC, VERSION, GOODBYE, 0, 0, 0, 0))]


def written(letter: Letter) -> bytes:
    """Return kind and fields as text.

    Raises:
        PeerError: they are not what JSON can hold.
    """
    try:
        text = json.dumps([letter.kind, letter.fields], allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise PeerError(
            f"the fields of {letter.kind[:MAX_KIND]!r} cannot travel: {error}; "
            "numbers (no nan), texts, lists and mappings can"
        ) from error
    return text.encode()


def read_head(raw: memoryview, limits: Limits) -> Head:
    """Return the lengths of a frame.

    Raises:
        ProtocolError: it is none, or it is beyond the limits.
    """
    magic, version, sort, num_tensors, text_bytes, front_bytes, payload_bytes = HEAD.unpack(raw)
    if magic != MAGIC or version != VERSION or sort not in {LETTER, GOODBYE}:
        raise malformed(f"it begins with {magic!r}, version {version}, sort {sort}")
    fits = text_bytes <= front_bytes <= limits.text_bytes and payload_bytes <= limits.payload_bytes
    if not fits or front_bytes % ALIGNMENT or payload_bytes % ALIGNMENT:
        raise malformed(
            f"it announces {text_bytes} of {front_bytes} and {payload_bytes} bytes, where {limits.text_bytes} and "
            f"{limits.payload_bytes} are allowed"
        )
    if sort == GOODBYE and any((num_tensors, text_bytes, front_bytes, payload_bytes)):
        raise malformed("it says goodbye and goes on")
    return Head(sort, num_tensors, text_bytes, front_bytes, payload_bytes)


def read_letter(head: Head, room: Room) -> Letter:
    """Return what a frame says, its tensors in the room.

    Raises:
        ProtocolError: it contradicts itself.
    """
    front = bytes(room.memory[: head.front_bytes])
    kind, fields = read_text(front[: head.text_bytes])
    tensors: list[Tensor] = []
    start, end = head.front_bytes, head.body_bytes
    for dtype, shape in read_looks(front[head.text_bytes :], head.num_tensors):
        size = prod(shape) * dtype.itemsize
        if start + padded(size) > end:
            raise malformed(f"tensor {len(tensors)}, {dtype} {shape}, ends behind its payload")
        tensors.append(room.tensor(dtype, shape, start, size))
        if dtype == torch.bool and size and int(tensors[-1].view(torch.uint8).max()) > 1:
            raise malformed(f"tensor {len(tensors) - 1}, {dtype} {shape}, is neither true nor false")
        start += padded(size)
    if start != end:
        raise malformed(f"its tensors take {end - start} bytes less than its payload")
    return Letter(kind, fields, tuple(tensors))


def read_text(text: bytes) -> tuple[str, dict[str, Plain]]:
    """Return kind and fields.

    Raises:
        ProtocolError: the text is not as :func:`written` writes it.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:  # of UTF-8 and of numbers, too
        raise malformed(f"its text is no JSON ({ascii(str(error))[:80]})") from error
    if not isinstance(found, list) or len(found) != 2:
        raise malformed("its text is not a kind and fields")
    kind, fields = found
    if not isinstance(kind, str) or not isinstance(fields, dict) or not 0 < len(kind) <= MAX_KIND:
        raise malformed("its text is not a kind and fields")
    return kind, fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _each_once(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def malformed(found: str) -> ProtocolError:
    """Return the error for what is no frame of ours, though it came from a peer of ours."""
    return ProtocolError(
        f"a malformed frame: {found}; it was not looked at further and changed nothing: look for another version of "
        "counterpoint at the other end"
    )
