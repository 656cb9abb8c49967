"""A log as bytes: one frame for each line, so that what a crash has torn off is seen, and nothing else is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from counterpoint.errors import CheckpointError, PeerError
from counterpoint.fabric.frames import MAGIC, PREFIX_BYTES, Kind, Stamp, decode, pieces_of, raw_bytes, read_prefix
from counterpoint.server.form import read_as, to_plain
from counterpoint.server.lines import Decision, Line, Noted
from counterpoint.server.states import Entry

STAMP = Stamp(Kind.VALUE, 0, 0, 0, 0, bytes(16))
LINES: Mapping[str, type] = {kind.__name__.lower(): kind for kind in (*get_args(Decision), *get_args(Entry), Noted)}


def record(line: Line) -> bytes:
    """Return a line as it is appended to a log."""
    return b"".join(map(raw_bytes, pieces(line)))


def pieces(value: object) -> list[Tensor]:
    """Return a line, or a value like it, as flat bytes one behind the other; large tensors of it are not copied."""
    kind, plain, tensors = to_plain(value)
    text = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    return pieces_of(STAMP, kind, [text, *tensors])


def read_whole(kinds: Mapping[str, type], room: Tensor) -> Any:  # noqa: ANN401 - one of the kinds
    """Return the one value that these bytes are.

    Args:
        kinds: what it may be.
        room: flat bytes; the value's tensors are views of them.

    Raises:
        PeerError: they are not what :func:`pieces` wrote of such a value.
    """
    frame = decode(room)
    text, *tensors = frame.tensors
    return read_as(kinds, frame.label, json.loads(text.numpy().tobytes()), tensors)


def read_log(raw: bytes) -> tuple[list[Any], int]:
    """Return the lines of a log, and how many of its bytes they are; what follows was torn by a crash and is to go.

    Raises:
        CheckpointError: whole lines follow upon what cannot be read, so that something else than a crash was at work.
    """
    lines, at = [], 0
    while at < len(raw):
        try:
            line, size = _read(raw, at)
        except PeerError as error:
            _require_end(raw, at, error)
            break
        lines.append(line)
        at += size
    return lines, at


def _read(raw: bytes, at: int) -> tuple[Any, int]:
    start = torch.frombuffer(bytearray(raw[at : at + PREFIX_BYTES]), dtype=torch.uint8)
    size = read_prefix(start).frame_bytes
    return read_whole(LINES, torch.frombuffer(bytearray(raw[at : at + size]), dtype=torch.uint8)), size


def _require_end(raw: bytes, at: int, error: PeerError) -> None:
    """No line follows upon a damaged one."""
    later = raw.find(MAGIC, at + 1)
    while later >= 0:
        try:
            _read(raw, later)
        except PeerError:
            later = raw.find(MAGIC, later + 1)
            continue
        raise CheckpointError(
            f"a log is damaged at byte {at} of {len(raw)}, before whole lines from byte {later} on: {error}; go on "
            "from the last checkpoint, and look at the disk"
        ) from error
