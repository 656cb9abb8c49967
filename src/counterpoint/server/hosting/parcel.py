"""Messages as letters of the wire, and back; small ones that leave together are one letter.

A shard's state, which may be larger than a letter, is as many of them as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.fabric.frames import payload_bytes
from counterpoint.server.form import Message, Plain, from_plain, malformed, to_plain
from counterpoint.server.log import pieces, read_whole
from counterpoint.server.messages import Done, Pull, Pulled, Push, Pushed
from counterpoint.server.states import Install
from counterpoint.server.wire.letter import Letter, numbers

BUNDLE: Final = "bundle"
BUNDLE_BYTES: Final = 1 << 19
MAX_BUNDLED: Final = 64
BUNDLED: Final = (Push, Pull, Pushed, Pulled, Done)
PIECE: Final = "piece"
PIECE_BYTES: Final = 1 << 26
MAX_WHOLE_BYTES: Final = 1 << 42
KINDS: Final = {"install": Install}


def letters(message: Message, piece_bytes: int = PIECE_BYTES) -> Iterator[Letter]:
    """Yield a message as it travels: one letter, or for a state as many as it takes.

    Args:
        message: what is said; its tensors are not copied.
        piece_bytes: the most that a letter of a state holds.
    """
    if not isinstance(message, Install):
        yield Letter(*to_plain(message))
        return
    flat = pieces(message)
    whole, at = sum(map(len, flat)), 0
    for piece in flat:
        for part in torch.split(piece, piece_bytes):
            yield Letter(PIECE, {"whole": whole, "at": at}, (part,))
            at += len(part)


class Bundle:
    """Messages that are going to leave over one connection, in their order."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, dict[str, Plain], list[Tensor]]] = []
        self._num_bytes = 0

    def add(self, message: Message) -> bool:
        """The message is the last of the bundle; tell whether there may be more."""
        part = to_plain(message)
        self._parts.append(part)
        self._num_bytes += payload_bytes(part[2])
        return self._num_bytes < BUNDLE_BYTES and len(self._parts) < MAX_BUNDLED

    def taken(self) -> Iterator[Letter]:
        """Yield what is in the bundle, which has nothing then: one letter, but large messages travel alone."""
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if parts and payload_bytes(parts[-1][2]) >= BUNDLE_BYTES:
            yield from _tied(parts[:-1])
            parts = parts[-1:]
        yield from _tied(parts)


def _tied(parts: list[tuple[str, dict[str, Plain], list[Tensor]]]) -> Iterator[Letter]:
    if len(parts) == 1:
        yield Letter(*parts[0])
    elif parts:
        said = [[kind, fields, len(tensors)] for kind, fields, tensors in parts]
        yield Letter(BUNDLE, {"messages": said}, [tensor for _, _, tensors in parts for tensor in tensors])


def untied(letter: Letter) -> list[Message]:
    """Return the messages of a bundle.

    Raises:
        ProtocolError: it is none.
    """
    found: list[Message] = []
    said, at = letter.fields.get("messages"), 0
    if len(letter.fields) != 1 or not isinstance(said, list) or not said:
        raise malformed("a bundle of nothing")
    for part in said:
        match part:
            case [str(kind), dict(fields), int(count)] if type(count) is int and 0 <= count <= len(letter.tensors) - at:
                found.append(from_plain(kind, fields, letter.tensors[at : at + count]))
                at += count
            case _:
                raise malformed("a bundle of what is no message")
    if at != len(letter.tensors):
        raise malformed(f"a bundle with {len(letter.tensors)} tensors, of which its messages have {at}")
    return found


class Gathering:
    """The letters of one connection as messages."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._filled = 0

    def take(self, letter: Letter) -> list[Message]:
        """Return the messages that a letter is, or completes.

        Raises:
            ProtocolError: it is none, or not the next piece.
        """
        if letter.kind == BUNDLE:
            return untied(letter)
        if letter.kind != PIECE:
            return [from_plain(letter.kind, dict(letter.fields), letter.tensors)]
        (part,) = letter.tensors if len(letter.tensors) == 1 else (None,)
        whole, at = numbers(Letter(PIECE, letter.fields), "whole", "at")
        if at == 0 and 0 < whole <= MAX_WHOLE_BYTES:
            self._room, self._filled = _room_of(whole), 0
        room, end = self._room, at + (0 if part is None else len(part))
        fits = room is not None and at == self._filled and whole == len(room) and end <= whole
        if part is None or room is None or not fits or part.dtype != torch.uint8 or part.dim() != 1:
            raise ProtocolError(
                f"a piece of a state at {at} of {whole} bytes, where {self._filled} had come; look at what the other "
                "side runs"
            )
        room[at:end].copy_(part)
        self._filled = end
        if end < whole:
            return []
        self._room, self._filled = None, 0
        message: Message = read_whole(KINDS, room)
        return [message]


def _room_of(num_bytes: int) -> Tensor:
    """Return memory for a state; a ProtocolError where there is none."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ProtocolError(f"a state of {num_bytes} bytes came, for which there is no memory here") from error
