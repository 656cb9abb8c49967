"""A letter as bytes and back: a kind, fields that JSON can hold, and tensors; nothing in it can become code."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import Tensor

from counterpoint.errors import PeerError, ProtocolError
from counterpoint.fabric.frames import ALIGNMENT, described, padded, payload_bytes, raw_bytes, read_looks
from counterpoint.server.wire.limits import Limits
from counterpoint.server.wire.rooms import Room
from counterpoint.server.wire.shelves import Borrowing

MAGIC: Final = b"CPWL"
VERSION: Final = 1
HEAD = struct.Struct("<4sBBHIIQ")  # magic, version, sort, tensors, bytes of text, of text and looks, of the payload
LETTER: Final = 1
GOODBYE: Final = 2
LAID: Final = 3  # a letter whose tensors are on a shelf, which its text names
OFFER: Final = 4  # of a shelf
BACK: Final = 5  # a shelf that the other side has found, or needs no more
SORTS: Final = {LETTER, GOODBYE, LAID, OFFER, BACK}
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
        return self.front_bytes if self.sort == LAID else self.front_bytes + self.payload_bytes


def frame_of(letter: Letter, limits: Limits, sort: int = LETTER, shelf: int | None = None) -> list[memoryview]:
    """Return the frame in pieces: its head, and then what stands behind it; tensors are not copied.

    Args:
        letter: to be sent.
        limits: of this side.
        sort: of the frame.
        shelf: where its tensors are; None where they travel with it.

    Raises:
        PeerError: the letter cannot travel.
    """
    text, looks = written(letter, shelf), b"".join(map(described, letter.tensors))
    front = text + looks + bytes(-(len(text) + len(looks)) % ALIGNMENT)
    num_bytes = payload_bytes(letter.tensors)
    if len(front) > limits.text_bytes or num_bytes > limits.payload_bytes or len(letter.tensors) > MAX_TENSORS:
        raise PeerError(
            f"{letter.kind[:MAX_KIND]!r} with {len(letter.tensors)} tensors has {len(front)} + {num_bytes} bytes; "
            f"a letter has at most {MAX_TENSORS} tensors and {limits.text_bytes} + {limits.payload_bytes} bytes: send "
            "it in parts"
        )
    head = HEAD.pack(MAGIC, VERSION, sort, len(letter.tensors), len(text), len(front), num_bytes)
    return [memoryview(head), memoryview(front), *(() if shelf is not None else payload(letter.tensors))]


def payload(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of the tensors, each padded."""
    for tensor in tensors:
        raw = raw_bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        if len(raw):
            yield raw
        if padding := padded(len(raw)) - len(raw):
            yield memoryview(bytes(padding))


def goodbye() -> list[memoryview]:
    """Return the frame after which none follows."""
    return [memoryview(HEAD.pack(MAGIC, VERSION, GOODBYE, 0, 0, 0, 0))]


def written(letter: Letter, shelf: int | None = None) -> bytes:
    """Return kind and fields, and the shelf if there is one, as text.

    Raises:
        PeerError: they are not what JSON can hold.
    """
    said = [letter.kind, letter.fields] if shelf is None else [letter.kind, letter.fields, shelf]
    if not 0 < len(letter.kind) <= MAX_KIND:
        raise PeerError(
            f"a letter of kind {letter.kind[:MAX_KIND]!r} cannot travel: a kind has 1 to {MAX_KIND} letters"
        )
    try:
        text = _WRITER.encode(said)
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
    magic, version, sort, num_tensors, text_bytes, front_bytes, num_bytes = HEAD.unpack(raw)
    if magic != MAGIC or version != VERSION or sort not in SORTS:
        raise malformed(f"it begins with {magic!r}, version {version}, sort {sort}")
    fits = text_bytes <= front_bytes <= limits.text_bytes and num_bytes <= limits.payload_bytes
    if not fits or front_bytes % ALIGNMENT or num_bytes % ALIGNMENT:
        raise malformed(
            f"it announces {text_bytes} of {front_bytes} and {num_bytes} bytes, where {limits.text_bytes} and "
            f"{limits.payload_bytes} are allowed"
        )
    if sort == GOODBYE and any((num_tensors, text_bytes, front_bytes, num_bytes)):
        raise malformed("it says goodbye and goes on")
    return Head(sort, num_tensors, text_bytes, front_bytes, num_bytes)


def read_letter(head: Head, room: Room, borrowing: Borrowing | None) -> Letter:
    """Return what a frame says, its tensors in the room or on a shelf.

    Args:
        head: of the frame.
        room: with its body.
        borrowing: the shelves of the other side; None where there are none.

    Raises:
        ProtocolError: it contradicts itself.
    """
    front = bytes(room.memory[: head.front_bytes])
    kind, fields, shelf = read_text(front[: head.text_bytes])
    if (head.sort == LAID) != (shelf is not None) or (shelf is not None and borrowing is None):
        raise malformed("its tensors are neither in it nor on a shelf")
    start = head.front_bytes
    if shelf is not None and borrowing is not None:
        room, start = Room(borrowing.store(shelf, head.payload_bytes), head.payload_bytes), 0
    end = start + head.payload_bytes
    tensors: list[Tensor] = []
    for dtype, shape in read_looks(front[head.text_bytes :], head.num_tensors):
        size = prod(shape) * dtype.itemsize
        if start + padded(size) > end:
            raise malformed(f"tensor {len(tensors)}, {dtype} {shape}, ends behind its payload")
        tensors.append(read_tensor(room, dtype, shape, start))
        start += padded(size)
    if start != end:
        raise malformed(f"its tensors take {end - start} bytes less than its payload")
    return Letter(kind, fields, tuple(tensors))


def read_tensor(room: Room, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """Return a tensor in the room.

    Raises:
        ProtocolError: it holds what its dtype does not.
    """
    tensor = room.tensor(dtype, shape, start)
    if dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise malformed(f"a tensor of {dtype} {shape} is neither true nor false")
    return tensor


def read_text(text: bytes) -> tuple[str, dict[str, Plain], int | None]:
    """Return kind, fields and the number of a shelf, if there is one.

    Raises:
        ProtocolError: the text is not as :func:`written` writes it.
    """
    try:
        found = _READER.decode(text.decode())
    except (ValueError, RecursionError) as error:  # of UTF-8 and of numbers, too
        raise malformed(f"its text is no JSON ({ascii(str(error))[:80]})") from error
    match found:
        case [str(kind), dict(fields)] if 0 < len(kind) <= MAX_KIND:
            return kind, fields, None
        case [str(kind), dict(fields), int(shelf)] if 0 < len(kind) <= MAX_KIND and shelf is not True:
            return kind, fields, int(shelf)
        case _:
            raise malformed("its text is not a kind and fields")


def numbers(letter: Letter, *names: str) -> list[int]:
    """Return these fields, and there are no others.

    Raises:
        ProtocolError: they are not numbers, or not these.
    """
    found = [value for name in names if type(value := letter.fields.get(name)) is int]
    if len(letter.fields) != len(names) or letter.tensors or len(found) != len(names):
        raise malformed(f"{letter.kind!r} is not about {', '.join(names)}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _each_once(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


_WRITER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_READER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_each_once)


def malformed(found: str) -> ProtocolError:
    """Return the error for what is no frame of ours, though it came from a peer of ours."""
    return ProtocolError(
        f"a malformed frame: {found}; it was not looked at further and changed nothing: look for another version of "
        "counterpoint at the other end"
    )
