"""Encode values as a JSON header and the raw bytes of their tensors, decode and validate them; nothing is pickled.

::

    offset 0        8              multiple of 64
    | header bytes  | JSON, spaces | buffer 0, 0s | buffer 1, 0s | ...

None, booleans, finite numbers, strings, and mappings with string keys are themselves in JSON. Everything else is a list
that begins with its kind, such as ``["tuple", 1, 2]`` or ``["tensor", "float32", [2, 3]]``. Tensors, arrays and bytes
own the buffers in the order in which they occur, so that sizes follow from dtypes and shapes. Each buffer starts at a
multiple of ``ALIGNMENT``. torch and numpy are imported only for values that need them.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from counterpoint.errors import CounterpointError, DataError, ProtocolError
from counterpoint.json_reader import MAX_BYTES, JsonValue, parse_json

if TYPE_CHECKING:
    import numpy as np
    import torch

UnsupportedValue: TypeAlias = Callable[[str, object], CounterpointError]
"""Makes the error for a part of a value that cannot be encoded, from the part's name and the part."""

ALIGNMENT: Final = 64
HEADER_SIZE = struct.Struct("<Q")
MAX_DIMS: Final = 32
SEQUENCES: Final[Mapping[str, type]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MAPPINGS: Final[Mapping[str, type]] = {"dict": dict, "ordered": OrderedDict}
DTYPES: Final = frozenset({
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip
ARRAY_DTYPE = re.compile(r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16)")


def unsupported_value(name: str, part: object) -> DataError:
    """Return the error for a part of a value that cannot be encoded."""
    return DataError(
        f"{name} is a {type(part).__name__}, which cannot be encoded; convert it to numbers, text, bytes, lists, "
        "tuples, sets, dicts, dense tensors or numpy arrays"
    )


def encode_value(value: object, name: str, unsupported: UnsupportedValue = unsupported_value) -> bytes:
    """Return a value as bytes.

    Args:
        value: None, booleans, numbers, strings, bytes, lists, tuples, sets, mappings, and dtypes, dense tensors,
            numbers and arrays of torch and numpy. An instance of a subclass is decoded as the type itself.
        name: of the value in errors.
        unsupported: makes the error.

    Raises:
        CounterpointError: a part of it has another type; a DataError by default.

    Example:
        >>> decode_value(encode_value({"epoch": 3, 7: (1.5, None)}, "the state"))
        {'epoch': 3, 7: (1.5, None)}
    """
    return b"".join(encode_parts(value, name, unsupported))


def encode_parts(value: object, name: str, unsupported: UnsupportedValue = unsupported_value) -> list[memoryview]:
    """Return a value as buffers to be concatenated; tensors and arrays are not copied. See :func:`encode_value`."""
    encoder = ValueEncoder(unsupported)
    return encoder.parts(encoder.encode(value, name))


def decode_value(data: bytes | bytearray | memoryview, kinds: Mapping[str, Callable[..., Any]] | None = None) -> Any:  # noqa: ANN401 - whatever was encoded
    """Return the value; its tensors and arrays are views of the data, or of a copy if the data is read-only.

    Args:
        data: as from :func:`encode_value`, with nothing before and nothing after it.
        kinds: see :class:`ValueDecoder`.

    Raises:
        ProtocolError: it is not a value, or has a buffer too much or too little.
    """
    tree, payload = parse_parts(data)
    decoder = ValueDecoder(payload, kinds or {})
    try:
        value = decoder.decode(tree)
    except RecursionError as error:
        raise malformed_value("it is nested too deeply") from error
    decoder.check_complete()
    return value


class ValueEncoder:
    """Encode one value.

    Args:
        unsupported: makes the error for a part that cannot be encoded.
        encode_other: called first for each part; returns its JSON, or None for a part that is encoded as usual.
    """

    def __init__(
        self, unsupported: UnsupportedValue, encode_other: Callable[[object, str], JsonValue] | None = None
    ) -> None:
        self._unsupported = unsupported
        self._encode_other = encode_other
        self._buffers: list[memoryview] = []

    def encode(self, value: Any, name: str) -> JsonValue:  # noqa: ANN401 - of any type
        """Return the JSON of a value, and append its buffers.

        Raises:
            CounterpointError: from ``unsupported``.
        """
        other = None if self._encode_other is None else self._encode_other(value, name)
        if other is not None:
            return other
        match value:
            case None | bool() | int() | str():
                return value
            case list() | tuple() | set() | frozenset():
                kind = next(kind for kind, sequence in SEQUENCES.items() if isinstance(value, sequence))
                ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
                return [kind, *(self.encode(item, f"{name}[{index}]") for index, item in enumerate(ordered))]
            case dict() if type(value) is dict and all(type(key) is str for key in value):
                return {key: self.encode(item, f"{name}[{key!r}]") for key, item in value.items()}
            case dict():
                kind = "ordered" if isinstance(value, OrderedDict) else "dict"
                return [
                    kind, *([self.encode(key, f"a key of {name}"), self.encode(item, f"{name}[{key!r}]")]
                            for key, item in value.items())
                ]  # fmt: skip
            case _:
                return self._encode_leaf(value, name)

    def encode_tensor(self, tensor: torch.Tensor, name: str) -> JsonValue:
        """Return the JSON of a tensor, and append its buffer; see :meth:`encode`."""
        import torch

        from counterpoint.tensor_bytes import as_bytes

        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or dtype not in DTYPES or tensor.dim() > MAX_DIMS:
            raise self._unsupported(name, tensor)
        self._buffers.append(memoryview(as_bytes(tensor.cpu()).numpy()))  # type: ignore[arg-type]  # a buffer
        return ["tensor", dtype, list(tensor.shape)]

    def parts(self, tree: JsonValue) -> list[memoryview]:
        """Return the header and the buffers that were appended."""
        text = format_json(tree).encode()
        text += b" " * (-(HEADER_SIZE.size + len(text)) % ALIGNMENT)
        parts = [memoryview(HEADER_SIZE.pack(len(text)) + text)]
        for buffer in self._buffers:
            parts += [buffer, memoryview(bytes(-len(buffer) % ALIGNMENT))]
        return [part for part in parts if len(part)]

    def _encode_leaf(self, value: Any, name: str) -> JsonValue:  # noqa: ANN401 - of any type
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")  # else there is no value of theirs
        if torch is not None and isinstance(value, torch.Tensor):
            return self.encode_tensor(value, name)
        if torch is not None and isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):  # float64 is a float, too
            return self._encode_array(value, name)
        match value:
            case float():
                return value if isfinite(value) else ["float", repr(float(value))]
            case bytes():
                self._buffers.append(memoryview(value))
                return ["bytes", len(value)]
            case _:
                raise self._unsupported(name, value)

    def _encode_array(self, value: np.ndarray | np.generic, name: str) -> JsonValue:
        import numpy as np

        array = np.asarray(value)
        if not ARRAY_DTYPE.fullmatch(array.dtype.str) or array.ndim > MAX_DIMS:
            raise self._unsupported(name, value)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._buffers.append(memoryview(raw))  # type: ignore[arg-type]  # a buffer
        return ["array" if isinstance(value, np.ndarray) else "number", array.dtype.str, list(array.shape)]


class ValueDecoder:
    """Decode one value.

    Args:
        payload: its buffers, in writable memory.
        kinds: what decodes the lists of further kinds, from this decoder and their other items, which are JSON.
    """

    def __init__(self, payload: memoryview, kinds: Mapping[str, Callable[..., Any]]) -> None:
        self._payload = payload
        self._kinds = kinds
        self._offset = 0

    def decode(self, tree: JsonValue) -> Any:  # noqa: ANN401 - whatever was encoded
        """Return the value of its JSON.

        Raises:
            ProtocolError: it is malformed.
        """
        match tree:
            case dict():
                return {key: self.decode(item) for key, item in tree.items()}
            case [str(kind), *items] if kind in SEQUENCES:
                return self._build(SEQUENCES[kind], list(map(self.decode, items)))
            case [str(kind), *pairs] if kind in MAPPINGS and all(type(p) is list and len(p) == 2 for p in pairs):
                return self._build(MAPPINGS[kind], [(self.decode(key), self.decode(item)) for key, item in pairs])
            case [str(kind), *items] if kind in self._kinds:
                return self._kinds[kind](self, *items)
            case list():
                return self._decode_leaf(tree)
            case _:
                return tree

    def check_complete(self) -> None:
        """Check that nothing is left of the payload.

        Raises:
            ProtocolError: something is.
        """
        if self._offset != len(self._payload):
            raise malformed_value(f"its buffers take {self._offset} of {len(self._payload)} bytes")

    def _build(self, kind: type, items: list[Any]) -> Any:  # noqa: ANN401 - of the kind
        try:
            return kind(items)
        except TypeError as error:
            raise malformed_value(f"a {kind.__name__} has a part that cannot be hashed") from error

    def _decode_leaf(self, tree: list[JsonValue]) -> Any:  # noqa: ANN401 - whatever was encoded
        match tree:
            case ["tensor", str(dtype), list(shape)] if dtype in DTYPES:
                return self._decode_tensor(dtype, shape)
            case ["array", str(dtype), list(shape)] if ARRAY_DTYPE.fullmatch(dtype):
                return self._decode_array(dtype, shape)
            case ["number", str(dtype), []] if ARRAY_DTYPE.fullmatch(dtype):
                return self._decode_array(dtype, [])[()]
            case ["bytes", int(size)] if type(size) is int and size >= 0:
                start = self._take([size], 1)
                return self._payload[start : start + size].tobytes()
            case ["dtype", str(dtype)] if dtype in DTYPES:
                return _torch_dtype(dtype)
            case ["float", "nan" | "inf" | "-inf" as text]:
                return float(text)
            case _:
                raise malformed_value(f"nothing is encoded as {ascii(tree)[:60]}")

    def _decode_tensor(self, dtype: str, shape: list[JsonValue]) -> torch.Tensor:
        import torch

        torch_dtype = _torch_dtype(dtype)
        start, count = self._take(shape, torch_dtype.itemsize), prod(shape)
        self._check_booleans(dtype == "bool", start, count)
        if not count:
            return torch.empty(shape, dtype=torch_dtype)
        return torch.frombuffer(self._payload, dtype=torch_dtype, count=count, offset=start).view(shape)

    def _decode_array(self, dtype: str, shape: list[JsonValue]) -> Any:  # noqa: ANN401 - an array
        import numpy as np

        start, count = self._take(shape, np.dtype(dtype).itemsize), prod(shape)
        self._check_booleans(dtype == "|b1", start, count)
        return np.frombuffer(self._payload, dtype, count, start).reshape(shape) if count else np.empty(shape, dtype)

    def _take(self, shape: list[JsonValue], itemsize: int) -> int:
        """Return the start of the next buffer, whose size follows from a shape."""
        fits = len(shape) <= MAX_DIMS and all(type(length) is int and length >= 0 for length in shape)
        if not fits or prod(filter(None, shape)) * itemsize > MAX_BYTES:  # a length of 0 must not hide the others
            raise malformed_value(f"a buffer has the shape {ascii(shape)[:80]}")
        start, size = self._offset, prod(shape) * itemsize
        self._offset += size + -size % ALIGNMENT
        if self._offset > len(self._payload):
            raise malformed_value(
                f"a buffer of {size} bytes at {start} extends beyond the {len(self._payload)} bytes of the payload"
            )
        return start

    def _check_booleans(self, is_bool: bool, start: int, count: int) -> None:  # noqa: FBT001 - of the two callers
        if is_bool and self._payload[start : start + count].tobytes().strip(b"\0\1"):
            raise malformed_value("a boolean is neither true nor false")


def parse_parts(data: bytes | bytearray | memoryview) -> tuple[JsonValue, memoryview]:
    """Return the JSON of a value and its buffers, in writable memory.

    Raises:
        ProtocolError: the data is not a value.
    """
    memory = memoryview(data)
    if len(memory) < HEADER_SIZE.size:
        raise malformed_value(f"{len(memory)} bytes are too few")
    (size,) = HEADER_SIZE.unpack_from(memory)
    start = HEADER_SIZE.size + size
    if start > len(memory) or start % ALIGNMENT:
        raise malformed_value(f"it announces a header of {size} bytes and has {len(memory)}")
    try:
        tree = parse_json(memory[HEADER_SIZE.size : start].tobytes())
    except ValueError as error:
        raise malformed_value(f"its header is not JSON ({ascii(str(error))[:80]})") from error
    payload = memory[start:]
    return tree, memoryview(bytearray(payload)) if payload.readonly else payload


def format_json(value: JsonValue) -> str:
    """Return compact JSON.

    Raises:
        ValueError: it has a number that is not finite, or is nested too deeply.
        TypeError: a part is not JSON.
    """
    try:
        return _JSON_ENCODER.encode(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


_JSON_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def malformed_value(problem: str) -> ProtocolError:
    """Return the error for bytes that are not an encoded value."""
    return ProtocolError(f"a malformed value: {problem}; check that it was written by the same version of counterpoint")
