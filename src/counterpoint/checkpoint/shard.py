"""Shards: one rank's file, written in one pass with its checksums, and read back."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from isal import isal_zlib
from torch import Tensor

from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps, check_space, write_failure
from counterpoint.checkpoint.manifest import HEADER_MAX_BYTES, ShardRecord, SliceRecord, shard_name
from counterpoint.checkpoint.tensor_slice import DTYPES, TensorSlice, check_slice, dtype_name, torch_dtype
from counterpoint.errors import CheckpointError, CheckpointWriteError
from counterpoint.file_reader import open_regular_file
from counterpoint.json_reader import parse_json_file
from counterpoint.tensor_bytes import as_bytes

HeaderEntry: TypeAlias = tuple[str, Sequence[int], tuple[int, int]]
"""Dtype, shape, first and last byte of a tensor, counted from the end of the header."""

CHUNK_BYTES = 4 * 2**20
_FOLDER = re.compile(r"step-([0-9]{8,})\.tmp-[0-9a-f]+")


def write_shard(folder: Path, rank: int, slices: Sequence[TensorSlice], *, files: FileOps = LOCAL_FILES) -> ShardRecord:
    """Write this rank's slices to ``folder``, sync and verify them; return a record of their positions.

    Args:
        folder: the draft's folder, the same on every rank; see ``begin``.
        rank: this rank, for the file name.
        slices: tensor slices of this rank; every element is in exactly one slice of one rank.
        files: file operations; tests pass failing ones.

    Returns:
        The record for ``commit``; send it with ``result_to_dict``.

    Raises:
        CheckpointError: a slice cannot be saved, or the disk is full or failed; committed checkpoints are unchanged.
    """
    folder = Path(folder)
    step = _parse_draft_step(folder)
    slices = sorted(slices, key=lambda tensor_slice: -tensor_slice.tensor.element_size())  # keeps every tensor aligned
    records, header = _plan_layout(slices, step, rank)
    num_bytes = records[-1].stop if records else len(header)
    path = folder / shard_name(rank)
    try:
        check_space(files, folder, num_bytes)
        sums = _write_slices(files, path, header, slices, records)
        files.sync_folder(folder)
        finished = tuple(replace(record, crc32=crc32) for record, crc32 in zip(records, sums.crc32s, strict=True))
        shard = ShardRecord(path.name, rank, num_bytes, sums.sha256, finished)
        flaws = list(find_shard_flaws(folder, shard, step))
    except OSError as error:
        raise write_failure(files, folder, num_bytes, error) from error
    for flaw in flaws:
        raise CheckpointWriteError(f"the shard could not be read back: {flaw}; check the disk, then save again")
    return shard


def find_shard_flaws(folder: Path, shard: ShardRecord, step: int, shards: Sequence[ShardRecord] = ()) -> Iterator[str]:
    """Yield the flaws of a shard after reading every byte of it, if it has the size of one of the shards.

    Args:
        folder: of the shard.
        shard: its record in the manifest.
        step: the checkpoint's step, which is also in the file's own header.
        shards: all of the same checkpoint, to detect swapped ones.
    """
    name = f"{folder.name}/{shard.file}"
    wrong_size = find_size_flaw(folder, shard)
    try:
        with open_regular_file(folder / shard.file, links="refused") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            header = _read_header(file, num_bytes)
            has_known_size = any(num_bytes == other.num_bytes for other in (shard, *shards))
            sums = _compute_checksums(file, shard) if has_known_size else None
    except OSError as error:
        yield wrong_size or f"{name} cannot be read: {error.strerror}"
        return
    if sums is not None and sums.sha256 == shard.sha256 and not wrong_size:
        if any(found != slice_record.crc32 for found, slice_record in zip(sums.crc32s, shard.slices, strict=True)):
            yield f"{name} is intact, but the manifest has other crc32 checksums for its tensors"
        yield from _find_header_flaws(name, header, shard, step)
        return
    duplicate = next((other.file for other in shards if sums is not None and other.sha256 == sums.sha256), None)
    origin = _parse_origin(header)
    if origin not in {None, (str(step), str(shard.rank))} and duplicate is None:
        yield f"{name} is the shard of step {origin[0]}, rank {origin[1]}, not that of step {step}, rank {shard.rank}"
    elif duplicate is not None:
        yield f"{name} has the bytes of {duplicate}: the files were swapped or overwritten"
    elif wrong_size or sums is None:
        yield wrong_size or f"{name} has changed its size while it was read"
    else:
        yield from _find_damage(name, shard, sums)


def find_size_flaw(folder: Path, shard: ShardRecord) -> str | None:
    """Return why a file cannot be the recorded one, without reading it, or None."""
    name = f"{folder.name}/{shard.file}"
    try:
        status = (folder / shard.file).lstat()
    except FileNotFoundError:
        return f"{name} is missing ({shard.num_bytes:,} bytes of rank {shard.rank})"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a regular file"
    found = status.st_size
    if found == shard.num_bytes:
        return None
    verb = "is truncated" if found < shard.num_bytes else "has grown"
    return f"{name} {verb}: {shard.num_bytes:,} bytes expected, {found:,} found"


def read_slice(folder: Path, shard: ShardRecord, slice_record: SliceRecord) -> Tensor:
    """Read a slice into new memory, and verify its crc32.

    Raises:
        CheckpointError: the file has changed or cannot be read.
    """
    name = f"{folder.name}/{shard.file}"
    try:
        with open_regular_file(folder / shard.file, links="refused") as file:
            if os.fstat(file.fileno()).st_size != shard.num_bytes:  # before memory of the declared size is allocated
                raise CheckpointError(f"{find_size_flaw(folder, shard) or name}, after it was opened")
            data = bytearray(slice_record.stop - slice_record.start)
            file.seek(slice_record.start)
            found_bytes = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    if found_bytes != len(data) or f"{isal_zlib.crc32(data):08x}" != slice_record.crc32:
        raise CheckpointError(
            f"{name} is damaged: tensor {slice_record.name!r}: crc32 expected {slice_record.crc32}, found "
            f"{isal_zlib.crc32(data):08x}"
        )
    dtype = torch_dtype(slice_record.dtype)
    if not data:
        return torch.empty(slice_record.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(slice_record.shape)


@dataclass(frozen=True, slots=True)
class _Checksums:
    sha256: str
    crc32s: tuple[str, ...]


def _plan_layout(slices: Sequence[TensorSlice], step: int, rank: int) -> tuple[list[SliceRecord], bytes]:
    """Return the record of each slice, without its crc32, and the file header."""
    for tensor_slice in slices:
        check_slice(tensor_slice)
    keys = name_in_file(slices)
    sizes = [tensor_slice.tensor.numel() * tensor_slice.tensor.element_size() for tensor_slice in slices]
    spans = list(pairwise(accumulate(sizes, initial=0)))
    entries = {
        key: (dtype_name(tensor_slice.tensor.dtype), tensor_slice.tensor.shape, span)
        for key, tensor_slice, span in zip(keys, slices, spans, strict=True)
    }
    front = _format_header(entries, step, rank)
    records = [
        SliceRecord(
            name=tensor_slice.name,
            key=key,
            dtype=dtype_name(tensor_slice.tensor.dtype),
            global_shape=tuple(tensor_slice.global_shape),
            offset=tensor_slice.offset,
            shape=tuple(tensor_slice.tensor.shape),
            start=len(front) + start,
            stop=len(front) + stop,
            crc32="00000000",
        )
        for key, tensor_slice, (start, stop) in zip(keys, slices, spans, strict=True)
    ]
    return records, front


def _write_slices(
    files: FileOps, path: Path, header: bytes, slices: Sequence[TensorSlice], records: Sequence[SliceRecord]
) -> _Checksums:
    digest, crc32s = hashlib.sha256(), []
    descriptor = files.create(path)
    try:
        files.write(descriptor, memoryview(header))
        digest.update(header)
        for tensor_slice, record in zip(slices, records, strict=True):
            crc32 = 0
            for chunk in _chunks(tensor_slice.tensor):
                digest.update(chunk)
                crc32 = isal_zlib.crc32(chunk, crc32)
                files.write(descriptor, chunk)
            crc32s.append(f"{crc32:08x}")
            assert record.stop - record.start == tensor_slice.tensor.numel() * tensor_slice.tensor.element_size()
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    return _Checksums(digest.hexdigest(), tuple(crc32s))


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes, a few megabytes at a time, without a copy if it is contiguous on the CPU."""
    if not tensor.numel():
        return
    flat = as_bytes(tensor.cpu())
    data = flat.numpy().data
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _format_header(entries: Mapping[str, HeaderEntry], step: int, rank: int) -> bytes:
    """Return the header of a file, with its size in front."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step), "rank": str(rank)}}
    for key, (dtype, shape, span) in entries.items():
        header[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": list(span)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _compute_checksums(file: BufferedReader, shard: ShardRecord) -> _Checksums:
    """Return the checksums of the file and of every recorded range in it, with one pass."""
    digest, crc32s = hashlib.sha256(), []
    file.seek(0)
    front = shard.slices[0].start if shard.slices else shard.num_bytes
    for length in (front, *(slice_record.stop - slice_record.start for slice_record in shard.slices)):
        crc32 = 0
        while length and (chunk := file.read(min(length, CHUNK_BYTES))):
            digest.update(chunk)
            crc32 = isal_zlib.crc32(chunk, crc32)
            length -= len(chunk)
        crc32s.append(f"{crc32:08x}")
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return _Checksums(digest.hexdigest(), tuple(crc32s[1:]))


def _find_damage(name: str, shard: ShardRecord, sums: _Checksums) -> Iterator[str]:
    """Yield the tensors that have changed; if none has, the header has."""
    whole_file = f"sha256 of the file: expected {shard.sha256[:16]}…, found {sums.sha256[:16]}…"
    damaged = [
        (slice_record, found)
        for slice_record, found in zip(shard.slices, sums.crc32s, strict=True)
        if slice_record.crc32 != found
    ]
    if not damaged:
        yield f"{name} is damaged in its header; {whole_file}"
    for slice_record, found in damaged:
        sums_text = f"crc32 expected {slice_record.crc32}, found {found}"
        yield f"{name} is damaged: tensor {slice_record.name!r}: {sums_text} ({whole_file})"


def _read_header(file: BufferedReader, num_bytes: int) -> bytes:
    """Return the header of a file, with its size in front; empty if it cannot be one."""
    front = file.read(8)
    length = int.from_bytes(front, "little")
    return front + file.read(length) if length <= min(num_bytes, HEADER_MAX_BYTES) - 8 else b""


def _find_header_flaws(name: str, header: bytes, shard: ShardRecord, step: int) -> Iterator[str]:
    """Yield differences between the file's own header and the record."""
    front = shard.slices[0].start if shard.slices else shard.num_bytes
    entries: dict[str, HeaderEntry] = {
        record.key: (record.dtype, record.shape, (record.start - front, record.stop - front)) for record in shard.slices
    }
    if header == _format_header(entries, step, shard.rank):  # as it is unless another program has written it
        return
    found = _parse_header(header)
    if found is None or len(header) != front:
        yield f"{name} is not a safetensors file: it has no header of {front:,} bytes"
        return
    if found.keys() - {"__metadata__"} != entries.keys():
        yield f"{name} has other tensors in its header than in the manifest"
        return
    for key, (dtype, shape, span) in entries.items():
        if found[key] != {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": list(span)}:
            yield f"{name} gives {key!r} another dtype, shape or place in its header than in the manifest"


def _parse_header(header: bytes) -> dict[str, Any] | None:
    """Return the header of a file, or None if that is not a JSON object."""
    try:
        found = parse_json_file(header[8:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _parse_origin(header: bytes) -> tuple[str, str] | None:
    """Return the step and rank in the file's header, or None if it has none."""
    metadata = (_parse_header(header) or {}).get("__metadata__")
    if not isinstance(metadata, dict):
        return None
    step, rank = metadata.get("step"), metadata.get("rank")
    return (step[:20], rank[:20]) if isinstance(step, str) and isinstance(rank, str) else None


def _parse_draft_step(folder: Path) -> int:
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(
            f"{folder} is not the folder of a save in progress; "
            f"rank 0 creates one with begin(root, step) and sends its name to the others"
        )
    return int(match[1])


def name_in_file(slices: Sequence[TensorSlice]) -> list[str]:
    """Return the key of each slice in its file: the tensor's name, and of a part also its range.

    ``fc.weight`` is a whole tensor, ``fc.weight[0:24]`` are elements of the flattened one, and ``fc.weight[0:3,2:4]``
    is a box.
    """
    keys: dict[str, None] = {"__metadata__": None}  # which safetensors reserves
    for tensor_slice in slices:
        shape, offset = tuple(tensor_slice.tensor.shape), tensor_slice.offset
        ranges = [(offset, tensor_slice.tensor.numel())] if isinstance(offset, int) else zip(offset, shape, strict=True)
        text = ",".join(f"{start}:{start + count}" for start, count in ranges)
        key = tensor_slice.name if shape == tuple(tensor_slice.global_shape) else f"{tensor_slice.name}[{text}]"
        while key in keys:
            key += "'"
        keys[key] = None
    return list(keys)[1:]
