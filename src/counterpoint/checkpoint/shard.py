"""One rank's file: written in one pass with its checksums, read back before it is believed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open
from torch import Tensor

from counterpoint.checkpoint.file_ops import LOCAL_FILES, FileOps, check_space, write_failure
from counterpoint.checkpoint.manifest import ShardRecord, SliceRecord, shard_name
from counterpoint.checkpoint.tensor_slice import DTYPES, TensorSlice, check_slice, dtype_name, torch_dtype
from counterpoint.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
_FOLDER = re.compile(r"step-(\d{8,})\.tmp-[0-9a-f]+")


def write_shard(folder: Path, rank: int, slices: Sequence[TensorSlice], *, files: FileOps = LOCAL_FILES) -> ShardRecord:
    """This rank's pieces are on disk in ``folder``, synced and read back; the record says where they lie.

    Args:
        folder: the draft's folder, the same on every rank; see ``begin``.
        rank: this rank; it names the file.
        pieces: what this rank holds; over all ranks every element exactly once.
        files: the file operations; tests pass some that fail.

    Returns:
        The record for ``commit``; send it with ``result_to_dict``.

    Raises:
        CheckpointError: a piece cannot be saved, or the disk is full or failed; nothing committed is touched.
    """
    folder = Path(folder)
    step = _parse_draft_step(folder)
    slices = sorted(slices, key=lambda piece: -piece.tensor.element_size())  # keeps every tensor aligned
    records, header = _plan_layout(slices, {"format": "pt", "step": str(step), "rank": str(rank)})
    num_bytes = records[-1].stop if records else len(header)
    path = folder / shard_name(rank)
    try:
        check_space(files, folder, num_bytes)
        sums = _write_slices(files, path, header, slices, records)
        files.sync_folder(folder)
    except OSError as error:
        raise write_failure(files, folder, num_bytes, error) from error
    finished = tuple(replace(record, crc32=crc32) for record, crc32 in zip(records, sums.crc32s, strict=True))
    shard = ShardRecord(path.name, rank, num_bytes, sums.sha256, finished)
    for flaw in find_shard_flaws(folder, shard, step, {}):
        raise CheckpointError(f"what was written could not be read back: {flaw}; look at the disk, then save again")
    return shard


def find_shard_flaws(folder: Path, shard: ShardRecord, step: int, names_by_sha256: dict[str, str]) -> Iterator[str]:
    """Yield what is wrong with a shard after reading every byte of it; nothing when it is intact.

    Args:
        folder: where the shard lies.
        shard: what the manifest says about it.
        step: the checkpoint's step, which the file repeats in its own header.
        names_by_sha256: the files of the same checkpoint by checksum, to recognise swapped ones.
    """
    path, name = folder / shard.file, f"{folder.name}/{shard.file}"
    wrong_size = find_size_flaw(folder, shard)
    if wrong_size and not _is_regular(path):
        yield wrong_size
        return
    sums = _compute_checksums(path, shard)
    if sums.sha256 == shard.sha256 and not wrong_size:
        if any(found != piece.crc32 for found, piece in zip(sums.crc32s, shard.slices, strict=True)):
            yield f"{name} holds what was written, but the manifest has other crc32 sums for its tensors"
        yield from _find_header_flaws(path, shard)
        return
    twin, origin = names_by_sha256.get(sums.sha256), _read_origin(path)
    if origin not in {None, (str(step), str(shard.rank))} and twin is None:
        found_text = f"step {origin[0]}, rank {origin[1]}"
        yield f"{name} is the shard of {found_text}; that of step {step}, rank {shard.rank} belongs here"
    elif twin is not None:
        yield f"{name} holds the bytes of {twin}: the files were swapped or copied over each other"
    elif wrong_size:
        yield wrong_size
    else:
        yield from _find_damage(name, shard, sums)


def find_size_flaw(folder: Path, shard: ShardRecord) -> str | None:
    """Return why the file cannot be the recorded one, judged without reading it, or None."""
    path, name = folder / shard.file, f"{folder.name}/{shard.file}"
    if not os.path.lexists(path):
        return f"{name} is missing ({shard.num_bytes:,} bytes of rank {shard.rank})"
    if not _is_regular(path):
        return f"{name} is not a regular file"
    found = path.lstat().st_size
    if found == shard.num_bytes:
        return None
    verb = "is truncated" if found < shard.num_bytes else "has grown"
    return f"{name} {verb}: {shard.num_bytes:,} bytes expected, {found:,} found"


def read_slice(folder: Path, shard: ShardRecord, piece: SliceRecord) -> Tensor:
    """Return the piece's values, their crc32 proved, in memory of their own.

    Raises:
        CheckpointError: the file changed or cannot be read.
    """
    name = f"{folder.name}/{shard.file}"
    data = bytearray(piece.stop - piece.start)
    try:
        with _open(folder / shard.file) as file:
            file.seek(piece.start)
            found_bytes = file.readinto(data)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
    if found_bytes != len(data) or f"{isal_zlib.crc32(data):08x}" != piece.crc32:
        raise CheckpointError(
            f"{name} is damaged: tensor {piece.name!r}: crc32 expected {piece.crc32}, found {isal_zlib.crc32(data):08x}"
        )
    dtype = torch_dtype(piece.dtype)
    if not data:
        return torch.empty(piece.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(piece.shape)


@dataclass(frozen=True, slots=True)
class _Checksums:
    sha256: str
    crc32s: tuple[str, ...]


def _plan_layout(slices: Sequence[TensorSlice], metadata: dict[str, str]) -> tuple[list[SliceRecord], bytes]:
    """Return where each piece goes (crc32 still unknown) and the bytes in front of the first."""
    for piece in slices:
        check_slice(piece)
    header: dict[str, object] = {"__metadata__": metadata}
    spans: list[tuple[int, int]] = []
    position = 0
    for index, piece in enumerate(slices):
        stop = position + piece.tensor.numel() * piece.tensor.element_size()
        code, shape = DTYPES[dtype_name(piece.tensor.dtype)], list(piece.tensor.shape)
        header[_tensor_key(index)] = {"dtype": code, "shape": shape, "data_offsets": [position, stop]}
        spans.append((position, stop))
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    records = [
        SliceRecord(
            name=piece.name,
            key=_tensor_key(index),
            dtype=dtype_name(piece.tensor.dtype),
            global_shape=tuple(piece.global_shape),
            offset=piece.offset,
            shape=tuple(piece.tensor.shape),
            start=len(front) + start,
            stop=len(front) + stop,
            crc32="00000000",
        )
        for index, (piece, (start, stop)) in enumerate(zip(slices, spans, strict=True))
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
        for piece, record in zip(slices, records, strict=True):
            crc32 = 0
            for chunk in _chunks(piece.tensor):
                digest.update(chunk)
                crc32 = isal_zlib.crc32(chunk, crc32)
                files.write(descriptor, chunk)
            crc32s.append(f"{crc32:08x}")
            assert record.stop - record.start == piece.tensor.numel() * piece.tensor.element_size()
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    return _Checksums(digest.hexdigest(), tuple(crc32s))


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the tensor's bytes, a few megabytes at a time, without a copy of what lies flat on the CPU."""
    if not tensor.numel():
        return
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = flat.numpy().data
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _compute_checksums(path: Path, shard: ShardRecord) -> _Checksums:
    """Return the checksums of the file and of every recorded range in it, in one pass."""
    digest, crc32s = hashlib.sha256(), []
    with _open(path) as file:
        front = shard.slices[0].start if shard.slices else shard.num_bytes
        for length in (front, *(piece.stop - piece.start for piece in shard.slices)):
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
    """Yield which tensors changed; where none did, the header in front of them has."""
    whole_file = f"sha256 of the file: expected {shard.sha256[:16]}…, found {sums.sha256[:16]}…"
    damaged = [(piece, found) for piece, found in zip(shard.slices, sums.crc32s, strict=True) if piece.crc32 != found]
    if not damaged:
        yield f"{name} is damaged in its header; {whole_file}"
    for piece, found in damaged:
        sums_text = f"crc32 expected {piece.crc32}, found {found}"
        yield f"{name} is damaged: tensor {piece.name!r}: {sums_text} ({whole_file})"


def _find_header_flaws(path: Path, shard: ShardRecord) -> Iterator[str]:
    """Yield where the file's own header, read by the safetensors library, contradicts the record."""
    name = f"{path.parent.name}/{path.name}"
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            if keys != {piece.key for piece in shard.slices}:
                yield f"{name} lists other tensors in its header than the manifest"
                return
            for piece in shard.slices:
                if tuple(file.get_slice(piece.key).get_shape()) != piece.shape:
                    yield f"{name} gives {piece.name!r} another shape in its header than the manifest"
    except (SafetensorError, OSError) as error:
        yield f"{name} is not a safetensors file: {error}"


def _read_origin(path: Path) -> tuple[str, str] | None:
    """Return the step and rank that the file's header names, or None where it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError):
        return None
    return (metadata["step"], metadata["rank"]) if {"step", "rank"} <= metadata.keys() else None


def _open(path: Path) -> BufferedReader:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _parse_draft_step(folder: Path) -> int:
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(
            f"{folder} is not the folder of a save in progress; "
            f"rank 0 makes one with begin(root, step) and tells the others"
        )
    return int(match[1])


def _tensor_key(index: int) -> str:
    return f"tensor-{index:05d}"
