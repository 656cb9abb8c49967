"""Messages as letters of the wire, and back; a shard's state, which may be larger than a letter, as many of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.server.form import Message, from_plain, to_plain
from counterpoint.server.log import pieces, read_whole
from counterpoint.server.states import Install
from counterpoint.server.wire.letter import Letter, numbers

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


class Gathering:
    """The letters of one connection as messages."""

    def __init__(self) -> None:
        self._room: Tensor | None = None
        self._filled = 0

    def take(self, letter: Letter) -> Message | None:
        """Return the message that a letter is, or completes.

        Raises:
            ProtocolError: it is none, or not the next piece.
        """
        if letter.kind != PIECE:
            return from_plain(letter.kind, dict(letter.fields), letter.tensors)
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
            return None
        self._room, self._filled = None, 0
        message: Message = read_whole(KINDS, room)
        return message


def _room_of(num_bytes: int) -> Tensor:
    """Return memory for a state; a ProtocolError where there is none."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ProtocolError(f"a state of {num_bytes} bytes came, for which there is no memory here") from error
