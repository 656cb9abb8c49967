"""Read JSON that may come from anybody: its size, its depth and what its values take in memory are bounded."""

from __future__ import annotations

import json
from itertools import chain
from math import isfinite
from typing import Any, Final, NoReturn, TypeAlias

JsonValue: TypeAlias = Any
"""None, a bool, an int, a float, a string, or a list or a mapping of these."""

MAX_BYTES: Final = 1 << 40
MAX_JSON_DEPTH: Final = 200
"""How deeply lists and mappings of JSON may be nested."""

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


def parse_json(text: bytes | str, max_bytes: int = MAX_BYTES) -> JsonValue:
    """Return the value of JSON that may come from anybody.

    Args:
        text: one value, in UTF-8 if it is bytes.
        max_bytes: the largest size.

    Raises:
        ValueError: it is too long, not JSON in UTF-8, a name occurs twice, a number is not finite or has more than
            4300 digits, or it is nested more than ``MAX_JSON_DEPTH`` levels deep. The message is short.

    Example:
        >>> parse_json(b'{"loss": NaN}')
        Traceback (most recent call last):
        ...
        ValueError: NaN is not a JSON number
    """
    if len(text) > max_bytes:
        raise ValueError(f"it has {len(text)} bytes, but at most {max_bytes} are read")
    try:
        text = text if isinstance(text, str) else text.decode()
        value: JsonValue = _JSON_DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for half of a surrogate pair
        _check_depth(text, value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _check_depth(text: str, value: JsonValue) -> None:
    """Raise ValueError if a value is nested too deeply; texts with few brackets need no look at the value."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    level, depth = [value] if type(value) in {dict, list} else [], 0
    while level:
        items = chain.from_iterable(item.values() if type(item) is dict else item for item in level)
        level, depth = [item for item in items if type(item) in {dict, list}], depth + 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_float(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text[:40]} is beyond the range of a float")
    return number


def _reject_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


_JSON_DECODER = json.JSONDecoder(
    parse_float=_parse_float, parse_constant=_refuse_constant, object_pairs_hook=_reject_duplicates
)
