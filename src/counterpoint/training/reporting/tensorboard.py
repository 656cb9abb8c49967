"""Write TensorBoard event files without TensorBoard or protobuf installed.

An event file is a list of records: length, masked CRC32C of the length, an ``Event`` message in protobuf's wire
format, masked CRC32C of the message. Field numbers are those of TensorFlow's event.proto and summary.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from counterpoint.file_writer import append_whole, encode_text

POLYNOMIAL = 0x82F63B78  # Castagnoli, reversed
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION = 1, 2, 3, 5, 7  # of Event
VALUE, TAG, SIMPLE_VALUE, STATUS, START = 1, 1, 2, 1, 1  # of Summary, Summary.Value and SessionLog
VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types


def table_entry(byte: int) -> int:
    """Return the CRC32C of one byte without the inversions."""
    for _ in range(8):
        byte = (byte >> 1) ^ (POLYNOMIAL if byte & 1 else 0)
    return byte


TABLE = tuple(table_entry(byte) for byte in range(256))


def crc32c(data: bytes) -> int:
    """Return the CRC32C of the data.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    """Return the masked checksum of a record: rotated and shifted, so that checksums of checksums differ."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def frame_record(message: bytes) -> bytes:
    """Return a message with its length and checksums."""
    length = struct.pack("<Q", len(message))
    return length + masked_crc(length) + message + masked_crc(message)


def encode_varint(number: int) -> bytes:
    """Return a nonnegative number in groups of 7 bits, lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def field_key(field: int, wire: int) -> bytes:
    """Return the key of a protobuf field."""
    return encode_varint(field << 3 | wire)


def length_delimited_field(field: int, content: bytes) -> bytes:
    """Return a field with a message or a string."""
    return field_key(field, BYTES) + encode_varint(len(content)) + content


class TensorBoardWriter:
    """An event file that grows; every event can be read as soon as it is written.

    Args:
        folder: TensorBoard's log directory; a new file is created in it.
        clock: seconds since 1970.
        first_step: the number of steps done before this run; TensorBoard purges later ones of earlier files.
    """

    def __init__(self, folder: Path, clock: Callable[[], float], first_step: int = 0) -> None:
        self.clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{clock():.6f}.counterpoint"
        path.unlink(missing_ok=True)  # what is there is of an earlier start in the same microsecond, or a link
        self.file: BinaryIO = path.open("xb", buffering=0)
        self.write_event(length_delimited_field(FILE_VERSION, b"brain.Event:2"))
        if (
            first_step or len(list(folder.glob("events.out.tfevents.*"))) > 1
        ):  # discards the steps from this one on in earlier files
            self.write_event(
                step_field(first_step + 1)
                + length_delimited_field(SESSION, field_key(STATUS, VARINT) + encode_varint(START))
            )

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one value for each tag at a step."""
        summary = b"".join(length_delimited_field(VALUE, encode_scalar(tag, value)) for tag, value in values.items())
        self.write_event(step_field(step) + length_delimited_field(SUMMARY, summary))

    def write_event(self, content: bytes) -> None:
        """Write one event."""
        record = frame_record(field_key(WALL_TIME, DOUBLE) + struct.pack("<d", self.clock()) + content)
        append_whole(self.file.fileno(), record)  # readers stop at the first incomplete record

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def step_field(step: int) -> bytes:
    """Return the field with the step of an event."""
    return field_key(STEP, VARINT) + encode_varint(step)


def encode_scalar(tag: str, value: float) -> bytes:
    """Return a ``Summary.Value``."""
    return length_delimited_field(TAG, encode_text(tag)) + field_key(SIMPLE_VALUE, FLOAT) + struct.pack("<f", value)
