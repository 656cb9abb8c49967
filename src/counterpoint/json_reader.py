"""JSON of files that may come from elsewhere: what its values take in memory is bounded before any of them is built."""

from __future__ import annotations

from typing import Final

from counterpoint.value_codec import JsonValue, parse_json

MAX_RATIO: Final = 4
"""How many times its own size a text may take as values."""

FREE_BYTES: Final = 16 * 2**20
"""What the values of any text may take in addition, so that small texts can be dense."""

MAPPING_BYTES, LIST_BYTES, VALUE_BYTES = 184, 72, 64
"""What a mapping, a list and any other value take at most, without the characters of a string."""


def check_json_density(data: bytes) -> None:
    """Check that the values of a JSON text do not take many times its own size; ``[[],[],...]`` takes 20 times.

    Raises:
        ValueError: they could.

    Example:
        >>> check_json_density(b"[" + b"{}," * 1_000_000 + b"0]")
        Traceback (most recent call last):
        ValueError: its 3000003 characters could take 248000072 bytes as values; such a file has at most 28777228
    """
    mappings, lists, others = data.count(b"{"), data.count(b"["), data.count(b",")
    estimate = mappings * MAPPING_BYTES + lists * LIST_BYTES + others * VALUE_BYTES
    limit = MAX_RATIO * len(data) + FREE_BYTES
    if estimate > limit:
        raise ValueError(
            f"its {len(data)} characters could take {estimate} bytes as values; such a file has at most {limit}"
        )


def parse_json_file(data: bytes) -> JsonValue:
    """Return the value of the content of a JSON file.

    Raises:
        ValueError: its values could take many times its own size, or :func:`parse_json` rejects it.
    """
    check_json_density(data)
    return parse_json(data)
