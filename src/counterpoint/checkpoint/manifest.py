"""The manifest of a checkpoint: one JSON file, written last, by which everything else is verified."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, FailFast, Field, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from counterpoint.checkpoint.tensor_slice import DTYPES, MAX_DIMS, check_cover, check_extent, torch_dtype
from counterpoint.errors import CheckpointError
from counterpoint.file_reader import read_regular_file
from counterpoint.json_reader import check_json_density
from counterpoint.optim.validation import shorten

MANIFEST = "manifest.json"
FORMAT_VERSION: Final = 2
READABLE_VERSIONS = (1, 2)
"""In version 1 the tensors of a file are ``tensor-00000`` and so on, in version 2 they have their names."""
MANIFEST_MAX_BYTES = 256 * 2**20
MAX_FIELDS = 9
"""The largest number of names of an object of the format."""
HEADER_MAX_BYTES = 100_000_000
"""The largest header of a safetensors file, as its readers have it."""

State = Mapping[str, JsonValue]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Lengths = Annotated[tuple[Count, ...], Field(max_length=MAX_DIMS)]
Name = Annotated[str, Field(max_length=65_536)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """The position of a tensor slice in its global tensor and in its file (bytes ``start`` to ``stop``)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: Name
    key: Name
    dtype: str
    global_shape: Lengths
    offset: Count | Lengths
    shape: Lengths
    start: Count
    stop: Count
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]

    @property
    def dtype_and_shape(self) -> str:
        """Dtype and shape of its global tensor, as in fingerprints: ``float32[10, 64]``."""
        return f"{self.dtype}{list(self.global_shape)}"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One rank's file: its size, its checksum and its slices in file order. Ranks send it as JSON."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    file: Annotated[str, Field(pattern=r"^shard-\d{5,9}\.safetensors$")]
    rank: Count
    num_bytes: Count
    sha256: Sha256
    slices: Annotated[tuple[SliceRecord, ...], FailFast()]

    def to_json(self) -> str:
        """Return the record as JSON text; the inverse of ``ShardRecord.from_json``."""
        return _SHARD.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> ShardRecord:
        """Return the record that ``result_to_dict`` wrote.

        Raises:
            CheckpointError: the text is something else.
        """
        try:
            return _SHARD.validate_json(text)
        except ValidationError as error:
            raise CheckpointError(f"this is not a shard record: {_first_error(error)}") from error


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Everything in a checkpoint except the tensors' bytes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    format: Literal["counterpoint-checkpoint"]
    version: Literal[1, 2]
    step: Count
    libraries: dict[str, str]
    model: dict[str, str]
    state: dict[str, JsonValue]
    files: Annotated[tuple[ShardRecord, ...], FailFast()]
    sha256: Sha256 = "0" * 64


_SHARD = TypeAdapter(ShardRecord)
_MANIFEST = TypeAdapter(CheckpointManifest)


def format_manifest(manifest: CheckpointManifest) -> bytes:
    """Format the manifest as JSON, with its own checksum in the last key."""
    content = _MANIFEST.dump_python(manifest, mode="json")
    del content["sha256"]
    return json.dumps({**content, "sha256": _own_sha256(content)}, indent=1, allow_nan=False).encode()


def parse_manifest(path: Path) -> CheckpointManifest:
    """Parse the manifest at ``path``; verify its checksum, its schema, and that the slices cover the tensors.

    What this takes in memory depends on the size of the file alone, not on the sizes that it declares.

    Raises:
        CheckpointError: it is missing, not a regular file, damaged, inconsistent, or of another format version.
    """
    name = _short_path(path)
    text = _read_bytes(path)
    try:
        check_json_density(text)
        content = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise CheckpointError(f"{name} is damaged: not JSON ({shorten(str(error))})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is damaged: it has a {type(content).__name__}, not an object")
    _check_version(path, content)
    expected, found = content.pop("sha256", None), _own_sha256(content)
    if expected != found:
        raise CheckpointError(
            f"{name} is damaged: sha256 expected {str(expected)[:16]}…, found {found[:16]}…; nothing was loaded"
        )
    flaw = _find_repeated_flaw(content)
    del content  # the schema is checked on the text
    try:
        if flaw:
            raise CheckpointError(flaw)
        manifest = _MANIFEST.validate_json(text)
        check_records(manifest.files)
        check_model_saved(manifest.model, manifest.files)
    except ValidationError as error:
        raise CheckpointError(f"{name} breaks the schema: {_first_error(error)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{name} is inconsistent: {error}") from error
    return manifest


def _find_repeated_flaw(content: Mapping[str, Any]) -> str:
    """Return a flaw of the kinds that the schema would report once for each of a million names, or an empty text."""
    for name in ("libraries", "model"):
        texts = content.get(name)
        for key, text in texts.items() if type(texts) is dict else ():
            if type(text) is not str:
                return f"{name}[{shorten(key)!r}] is a {type(text).__name__}, but must be a text"
    most = max(map(len, _list_objects(content)))
    return f"an object has {most} names, but the format has at most {MAX_FIELDS}" if most > MAX_FIELDS else ""


def _list_objects(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a manifest whose names the format has."""
    yield content
    files = content.get("files")
    for record in files if type(files) is list else ():
        if type(record) is dict:
            yield record
            slices = record.get("slices")
            yield from (part for part in (slices if type(slices) is list else ()) if type(part) is dict)


def check_records(records: tuple[ShardRecord, ...]) -> None:
    """Check that there is one file per rank, with ranges in order, and that every tensor is covered exactly once.

    Raises:
        CheckpointError: they do not.
    """
    by_name: dict[str, list[SliceRecord]] = {}
    ranks: set[int] = set()
    for record in records:
        if record.rank in ranks or record.file != shard_name(record.rank):
            raise CheckpointError(
                f"rank {record.rank} gave more than one record, or the wrong file name {record.file!r}"
            )
        ranks.add(record.rank)
        position = record.slices[0].start if record.slices else record.num_bytes
        if not 8 <= position <= HEADER_MAX_BYTES:
            raise CheckpointError(
                f"the header of {record.file} has {position:,} bytes; one has 8 to {HEADER_MAX_BYTES:,}"
            )
        if len({slice_record.key for slice_record in record.slices}) < len(record.slices):
            raise CheckpointError(f"two tensors have the same key in {record.file}")
        for slice_record in record.slices:
            _check_slice_record(record, slice_record, position)
            position = slice_record.stop
            by_name.setdefault(slice_record.name, []).append(slice_record)
        if position != record.num_bytes:
            raise CheckpointError(f"{record.file} ends at byte {record.num_bytes}, its last tensor at {position}")
    for name, slices in by_name.items():
        dtypes = sorted({slice_record.dtype for slice_record in slices})
        if len(dtypes) > 1:
            raise CheckpointError(f"the slices of {name!r} have different dtypes: {', '.join(dtypes)}")
        check_cover(name, slices)


def check_model_saved(model: Mapping[str, str], records: Sequence[ShardRecord]) -> None:
    """Check that every tensor of a model, by its fingerprint, is in the files.

    Raises:
        CheckpointError: one is missing, or has another dtype or shape.
    """
    saved = {slice_record.name: slice_record for record in records for slice_record in record.slices} if model else {}
    for name, kind in model.items():
        found = saved[name].dtype_and_shape if name in saved else "nothing"
        if found != kind:
            raise CheckpointError(
                f"the model has {shorten(name)!r} as {shorten(kind)}, but the ranks wrote {found}; a checkpoint must "
                "have the whole model"
            )


def _check_slice_record(record: ShardRecord, slice_record: SliceRecord, position: int) -> None:
    if slice_record.dtype not in DTYPES:
        raise CheckpointError(
            f"tensor {slice_record.name!r} has the unknown dtype {shorten(slice_record.dtype)!r}; known are "
            f"{', '.join(DTYPES)}"
        )
    check_extent(slice_record.name, slice_record.shape, slice_record.global_shape, slice_record.offset)
    num_bytes = math.prod(slice_record.shape) * torch_dtype(slice_record.dtype).itemsize
    if slice_record.start != position or slice_record.stop - slice_record.start != num_bytes:
        raise CheckpointError(
            f"tensor {slice_record.name!r} should take {num_bytes} bytes from byte {position} of {record.file}, "
            f"but is recorded at {slice_record.start} to {slice_record.stop}"
        )


def shard_name(rank: int) -> str:
    """Return the file name of a rank's shard; names of tensors are never file names."""
    return f"shard-{rank:05d}.safetensors"


def find_json_flaw(value: object, path: str = "state") -> str | None:
    """Return where and why ``value`` would be changed by JSON, or None."""
    match value:
        case None | bool() | int() | str():
            return None
        case float():
            return None if math.isfinite(value) else f"{path} is {value}, which JSON cannot represent"
        case dict():
            wrong = next((key for key in value if not isinstance(key, str)), None)
            if wrong is not None:
                return f"{path} has the key {wrong!r}, a {type(wrong).__name__}; keys are text"
            return _first(find_json_flaw(item, f"{path}.{key}") for key, item in value.items())
        case list():
            return _first(find_json_flaw(item, f"{path}[{index}]") for index, item in enumerate(value))
        case _:
            return f"{path} is a {type(value).__name__}, which JSON cannot represent"


def _first(flaws: Iterator[str | None]) -> str | None:
    return next((flaw for flaw in flaws if flaw is not None), None)


def _own_sha256(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular_file(path, max_bytes=MANIFEST_MAX_BYTES, links="refused")
    except OSError as error:
        raise CheckpointError(f"{_short_path(path)} cannot be read: {error.strerror}; a checkpoint needs it") from error


def _check_version(path: Path, content: Mapping[str, object]) -> None:
    if content.get("format") != "counterpoint-checkpoint":
        raise CheckpointError(
            f"{_short_path(path)} has an unknown format (format {shorten(repr(content.get('format')))})"
        )
    if content.get("version") not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{_short_path(path)} has format version {shorten(repr(content.get('version')))}, "
            f"this Counterpoint reads {' and '.join(map(str, READABLE_VERSIONS))}; "
            f"install the release that wrote it ({shorten(str(content.get('libraries')))})"
        )


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in first["loc"]))
    return f"{where or 'text'}: {first['msg'].lower()}"


def _short_path(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"
