"""Reading: a checkpoint is verified before a tensor is returned; damaged ones are reported and skipped."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from counterpoint.checkpoint.file_ops import is_folder
from counterpoint.checkpoint.folders import list_folder, step_folders
from counterpoint.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    ShardRecord,
    SliceRecord,
    State,
    parse_manifest,
)
from counterpoint.checkpoint.shard import find_shard_flaws, find_size_flaw, read_slice
from counterpoint.checkpoint.tensor_slice import dtype_name, torch_dtype
from counterpoint.errors import CheckpointError
from counterpoint.file_reader import Links, open_regular_file

PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"})
MAX_SHOWN = 10

CheckLevel = Literal["bytes", "sizes"]
StateCheck: TypeAlias = "Callable[[Checkpoint], object]"
"""Raises a CheckpointError for a checkpoint whose state cannot be used, which then counts as damaged."""


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that was skipped because it is damaged, and the reason."""

    folder: Path
    reason: str


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of verifying every byte of a checkpoint; it is intact if there are no problems."""

    folder: Path
    step: int | None
    num_bytes: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An intact checkpoint, opened for reading with ``Checkpoint.open``.

    Args:
        folder: its folder.
        manifest: its verified manifest.
        slices: the slices of every tensor by name, each with its shard.
        skipped: newer checkpoints that are damaged; report them to the user.
    """

    folder: Path
    manifest: CheckpointManifest
    slices: Mapping[str, tuple[tuple[ShardRecord, SliceRecord], ...]]
    skipped: tuple[SkippedCheckpoint, ...] = ()

    @staticmethod
    def open(path: Path, *, check: CheckLevel = "bytes", check_state: StateCheck | None = None) -> Checkpoint:
        """Open the checkpoint at ``path``, or the newest intact one if ``path`` has several.

        Args:
            path: folder of a checkpoint, or of all checkpoints.
            check: ``bytes`` verifies the checksum of every file; ``sizes`` checks only sizes, for ranks that open what
                another rank has verified. Reading a tensor verifies its crc32 in both cases.
            check_state: a check of the state, by which a checkpoint may count as damaged.

        Raises:
            CheckpointError: there is no intact checkpoint.
        """
        path = Path(path)
        _check_is_folder(path)
        if is_checkpoint(path):
            checkpoint, problems = _open_folder(path, check, check_state)
            if checkpoint is None or problems:
                raise CheckpointError(_format_damage(path, problems))
            return checkpoint
        found = latest(path, check=check, check_state=check_state)
        if found is None:
            raise CheckpointError(
                f"no checkpoint in {path}: {_format_listing(path)}; give a folder with checkpoints: step-…/{MANIFEST}"
            )
        return found

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    @property
    def state(self) -> State:
        """The non-tensor state."""
        return self.manifest.state

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, in the order in which they were saved."""
        return tuple(self.slices)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor, assembled from its slices, on the CPU and owned by the caller.

        Raises a CheckpointError if there is no such tensor, or its bytes have changed since opening.
        """
        shape = self._slices_of(name)[0][1].global_shape
        return self._read_rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def read_slice(self, name: str, flat_start: int, flat_stop: int) -> Tensor:
        """Return elements ``flat_start`` to ``flat_stop`` of the flattened tensor; only the slices needed are read.

        Raises:
            CheckpointError: there is no such tensor or range, or the bytes changed since opening.
        """
        slice_record = self._slices_of(name)[0][1]
        total = math.prod(slice_record.global_shape)
        if not 0 <= flat_start <= flat_stop <= total:
            raise CheckpointError(
                f"there is no range {flat_start} to {flat_stop} in {name!r} {list(slice_record.global_shape)}; "
                f"it has {total} elements"
            )
        if flat_start == flat_stop:
            return torch.empty(0, dtype=torch_dtype(slice_record.dtype))
        row = math.prod(slice_record.global_shape[1:])
        first_row = flat_start // row
        rows = self._read_rows(name, first_row, -(-flat_stop // row)).reshape(-1)
        return rows[flat_start - first_row * row : flat_stop - first_row * row].clone()

    def check_model(self, model: Mapping[str, str]) -> None:
        """Check that the checkpoint is of a model with this fingerprint.

        Raises:
            CheckpointError: it is of another model; the first differences are listed.
        """
        lines = _format_differences(self.manifest.model, model)
        if lines:
            more = [f"… and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
            listed = "\n  ".join([*lines[:MAX_SHOWN], *more])
            raise CheckpointError(
                f"{self.folder} is a checkpoint of another model: {len(lines)} differences\n  {listed}\n"
                f"create the model that was saved, or load single tensors with read(name)"
            )

    def _slices_of(self, name: str) -> tuple[tuple[ShardRecord, SliceRecord], ...]:
        if name not in self.slices:
            near = difflib.get_close_matches(name, self.slices, n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"it has {', '.join(list(self.slices)[:MAX_SHOWN])}"
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; {hint}")
        return self.slices[name]

    def _read_rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return rows ``first`` to ``stop`` along dim 0; only the slices needed are read."""
        slices = self._slices_of(name)
        shard, slice_record = slices[0]
        shape = slice_record.global_shape or (1,)
        if len(slices) == 1 and (first, stop) == (0, shape[0]):
            return read_slice(self.folder, shard, slice_record).reshape(shape)
        rows = torch.empty((stop - first, *shape[1:]), dtype=torch_dtype(slice_record.dtype))
        for shard, slice_record in slices:
            _copy_slice(rows, first, self.folder, (shard, slice_record))
        return rows


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is that of one checkpoint."""
    return os.path.lexists(path / MANIFEST) or path.name.startswith("step-")


def latest(root: Path, *, check: CheckLevel = "bytes", check_state: StateCheck | None = None) -> Checkpoint | None:
    """Return the newest intact checkpoint in ``root``, or None if there are no checkpoints.

    Its ``skipped`` has newer ones that are damaged.

    Args:
        root: folder of all checkpoints.
        check: see ``Checkpoint.open``.
        check_state: see ``Checkpoint.open``.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """
    root = Path(root)
    _check_is_folder(root, missing="allowed")
    skipped: list[SkippedCheckpoint] = []
    for folder in reversed(step_folders(root)):
        checkpoint, problems = _open_folder(folder, check, check_state, links="refused")
        if checkpoint is not None and not problems:
            return replace(checkpoint, skipped=tuple(skipped))
        skipped.append(SkippedCheckpoint(folder, problems[0]))
    if skipped:
        listed = "\n  ".join(skip.reason for skip in skipped)
        raise CheckpointError(
            f"all {len(skipped)} checkpoints in {root} are damaged:\n  {listed}\nrestore one from a backup"
        )
    return None


def verify(path: Path, *, check_state: StateCheck | None = None, links: Links = "followed") -> VerificationReport:
    """Verify every byte of the checkpoint in ``path``; return its problems.

    Args:
        path: its folder.
        check_state: see ``Checkpoint.open``.
        links: whether the folder may be a link.
    """
    path = Path(path)
    checkpoint, problems = _open_folder(path, "bytes", check_state, links=links)
    if checkpoint is None:
        return VerificationReport(path, None, 0, problems)
    num_bytes = sum(record.num_bytes for record in checkpoint.manifest.files)
    return VerificationReport(path, checkpoint.step, num_bytes, problems)


def _open_folder(
    folder: Path, check: CheckLevel, check_state: StateCheck | None, *, links: Links = "followed"
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Return the checkpoint in a folder and its problems; None if its manifest is damaged."""
    try:
        if links == "refused" and folder.is_symlink():
            return None, (f"{folder.name} is a link, and links in a folder of checkpoints are not followed",)
        manifest = parse_manifest(folder / MANIFEST)
        names = {entry.name for entry in folder.iterdir()}
    except CheckpointError as error:
        return None, (str(error),)
    except OSError as error:
        return None, (f"{folder.name} cannot be read: {error.strerror}",)
    slices: dict[str, list[tuple[ShardRecord, SliceRecord]]] = {}
    for record in manifest.files:
        for slice_record in record.slices:
            slices.setdefault(slice_record.name, []).append((record, slice_record))
    checkpoint = Checkpoint(folder, manifest, {name: tuple(parts) for name, parts in slices.items()})
    problems = list(_find_file_problems(folder, manifest, check))
    if check == "bytes":
        extra = sorted(names - {MANIFEST, *(record.file for record in manifest.files)})
        problems += [f"{folder.name}/{name} is not part of it" for name in extra]
        if folder.name.startswith("step-") and folder.name != f"step-{manifest.step:08d}":
            problems.append(f"{folder.name} is the checkpoint of step {manifest.step}; was the folder renamed?")
    if check_state is not None and not problems:
        try:
            check_state(checkpoint)
        except CheckpointError as error:
            problems = [str(error)]
    return checkpoint, tuple(problems)


def _find_file_problems(folder: Path, manifest: CheckpointManifest, check: CheckLevel) -> Iterator[str]:
    """Yield the flaws of a checkpoint's shards."""
    for record in manifest.files:
        if check == "bytes":
            yield from find_shard_flaws(folder, record, manifest.step, manifest.files)
        elif flaw := find_size_flaw(folder, record):
            yield flaw


def state_error(checkpoint: Checkpoint, flaw: str) -> CheckpointError:
    """Return the error for a wrong value in the state of a checkpoint."""
    return CheckpointError(
        f"{checkpoint.folder.name}/{MANIFEST}: {flaw}; it was changed, or written by another program: take another "
        "checkpoint, or restore this one from a backup"
    )


def load(path: Path, *, model: Mapping[str, str] | None = None) -> tuple[dict[str, Tensor], State]:
    """Load all tensors and the state of the checkpoint at ``path``, or of the newest intact one in it.

    Its errors are those of ``Checkpoint.open`` and ``Checkpoint.check_model``.
    """
    checkpoint = Checkpoint.open(path)
    if model is not None:
        checkpoint.check_model(model)
    return {name: checkpoint.read(name) for name in checkpoint.names()}, checkpoint.state


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return dtype and shape of each tensor, which identify a model: ``{"fc.weight": "float32[10, 64]"}``."""
    return {name: f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for name, tensor in tensors.items()}


def _copy_slice(rows: Tensor, first: int, folder: Path, source: tuple[ShardRecord, SliceRecord]) -> None:
    """Copy the intersection of a slice with ``rows`` (global rows from ``first`` on)."""
    shard, slice_record = source
    row = rows.shape[1:].numel()
    if isinstance(slice_record.offset, int):
        start = max(slice_record.offset, first * row)
        stop = min(slice_record.offset + math.prod(slice_record.shape), first * row + rows.numel())
        if start < stop:
            values = read_slice(folder, shard, slice_record).reshape(-1)
            rows.view(-1)[start - first * row : stop - first * row] = values[
                start - slice_record.offset : stop - slice_record.offset
            ]
        return
    top = slice_record.offset[0]
    start, stop = max(top, first), min(top + slice_record.shape[0], first + rows.shape[0])
    if start < stop and all(slice_record.shape):
        values = read_slice(folder, shard, slice_record)
        box = tuple(
            slice(at, at + length) for at, length in zip(slice_record.offset[1:], slice_record.shape[1:], strict=True)
        )
        rows[(slice(start - first, stop - first), *box)] = values[start - top : stop - top]


def _format_differences(saved: Mapping[str, str], model: Mapping[str, str]) -> list[str]:
    """Return one line per parameter that is missing, changed or unexpected in the checkpoint."""
    missing, extra = (
        [name for name in model if name not in saved],
        [name for name in saved if name not in model],
    )
    lines = []
    for name in missing:
        near = difflib.get_close_matches(name, extra or list(saved), n=1)
        lines.append(
            f"missing: {name} {model[name]}" + (f" (the nearest is {near[0]} {saved[near[0]]})" if near else "")
        )
    lines += [
        f"changed: {name} is {saved[name]} in the checkpoint, {kind} in the model"
        for name, kind in model.items()
        if saved.get(name, kind) != kind
    ]
    return lines + [f"unexpected: {name} {saved[name]}" for name in extra]


def _check_is_folder(path: Path, *, missing: Literal["refused", "allowed"] = "refused") -> None:
    if is_folder(path):
        return
    if not os.path.lexists(path):
        if missing == "refused":
            raise CheckpointError(f"{path} does not exist; give a folder with checkpoints")
        return
    if path.suffix in PICKLE_SUFFIXES or _looks_pickled(path):
        raise CheckpointError(
            f"{path} is a pickle file, which can run arbitrary code when it is loaded, and is rejected; "
            f"convert its tensors to safetensors in a sandbox and load those"
        )
    if path.name == MANIFEST or path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a checkpoint; give its folder")
    raise CheckpointError(f"{path} is a file, but a checkpoint is a folder; give the folder")


def _looks_pickled(path: Path) -> bool:
    try:
        with open_regular_file(path) as file:
            start = file.read(2)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; give a folder with checkpoints") from error
    return start in {b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"}


def _format_listing(folder: Path) -> str:
    """Return the contents of a folder, pickles marked, for an error."""
    names = sorted(
        f"{path.name} (a pickle, rejected)" if path.suffix in PICKLE_SUFFIXES else path.name
        for path in list_folder(folder)
    )
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"it has {', '.join(names[:MAX_SHOWN])}{more}"


def _format_damage(path: Path, problems: tuple[str, ...]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return (
        f"{problems[0]}{more}; nothing was loaded from {path}; "
        f"open the folder above it for the newest intact checkpoint"
    )
