"""Reads samples of map-style datasets into one tensor per field; errors name the sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from numbers import Number
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from counterpoint.errors import DataError

Fields: TypeAlias = tuple[Tensor, ...]


class MapDataset(Protocol):
    """A map-style dataset: a length, and a sample ``(inputs..., target)`` for every index below it.

    It may also have ``fetch(indices) -> tuple of tensors``, which returns many samples at once, each tensor with the
    samples along its first dim, in the order of the indices.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """Return one sample."""
        ...


@dataclass(frozen=True, slots=True)
class DatasetFingerprint:
    """Identifies a dataset, to detect that a run is resumed with another one.

    Args:
        num_samples: its length.
        type_name: module and name of its class.
        ends: hash of the first and the last sample, or ``"random"`` if they differ between two reads.
    """

    num_samples: int
    type_name: str
    ends: str

    def to_dict(self) -> dict[str, int | str]:
        """Return the fingerprint as a JSON-compatible mapping."""
        return asdict(self)


def fetch(dataset: MapDataset, indices: Iterable[int], *, before_read: Callable[[int], None] | None = None) -> Fields:
    """Return the samples at ``indices``, stacked field by field.

    Tensors, numpy arrays and numbers are fields. Without any index the tensors are empty, with the shape and dtype
    that they would have with samples.

    Args:
        dataset: see `MapDataset`.
        indices: of the samples, in the order of the result.
        before_read: called with the index before each sample is read, or with the first if many are read at once.

    Returns:
        ``(inputs..., target)``, each ``(sample, ...)``.
    """
    if isinstance(dataset, TensorDataset):
        numbers = indices if isinstance(indices, np.ndarray) else [int(index) for index in indices]
        rows = torch.from_numpy(np.asarray(numbers, dtype=np.int64))
        return _with_target(tuple(tensor[rows] for tensor in dataset.tensors), "the TensorDataset")
    wanted = indices.tolist() if isinstance(indices, np.ndarray) else [int(index) for index in indices]
    if before_read is not None and wanted and supports_batch_fetch(dataset):
        before_read(wanted[0])
    if hasattr(dataset, "fetch"):
        return _fetch_at_once(dataset, wanted)
    if not wanted:
        return tuple(field[:0] for field in _stack(dataset, [0], before_read))
    return _stack(dataset, wanted, before_read)


def supports_batch_fetch(dataset: object) -> bool:
    """Tell whether a dataset reads many samples at once with its own method; a subset does what its dataset does."""
    if type(dataset) is Subset:
        whole = dataset.dataset
        return supports_batch_fetch(whole) if type(whole) is Subset else hasattr(whole, "__getitems__")
    return hasattr(dataset, "fetch") or hasattr(dataset, "__getitems__")


def fingerprint(dataset: MapDataset) -> DatasetFingerprint:
    """Return the fingerprint of a dataset; torch's random generator is restored.

    Raises:
        DataError: the dataset is empty, or its first or last sample cannot be used.
    """
    num_samples = len(dataset)
    if num_samples < 1:
        raise DataError(
            f"the {type(dataset).__name__} has {num_samples} samples; a dataset needs at least one; "
            "check the path or the filter that it was created with"
        )
    with torch.random.fork_rng(devices=[]):
        first, second = (_hash(fetch(dataset, [0, num_samples - 1])) for _ in range(2))
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    return DatasetFingerprint(num_samples, name, first if first == second else "random")


def _hash(fields: Fields) -> str:
    digest = hashlib.sha256()
    for field in fields:
        digest.update(f"{field.dtype} {tuple(field.shape)};".encode())
        digest.update(field.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _fetch_at_once(dataset: object, indices: list[int]) -> Fields:
    fields = dataset.fetch(indices)  # type: ignore[attr-defined]
    name = f"{type(dataset).__name__}.fetch"
    if not isinstance(fields, tuple) or not all(isinstance(field, Tensor) for field in fields):
        raise DataError(
            f"{name} returned {_describe(fields)}; it must return a tuple of tensors (inputs..., target); "
            "stack each field along a new first dim, or remove fetch, so that samples are stacked automatically"
        )
    for number, field in enumerate(fields):
        if field.dim() == 0 or len(field) != len(indices):
            raise DataError(
                f"{name} returned field {number} of shape {tuple(field.shape)} for {len(indices)} indices; "
                "the first dim must be the samples; stack the samples along it"
            )
    return _with_target(fields, name)


def _with_target(fields: Fields, source: str) -> Fields:
    if len(fields) < 2:
        raise DataError(
            f"{source} gives {len(fields)} field; a sample is (inputs..., target); add the target as the last one"
        )
    return fields


def _stack(dataset: MapDataset, indices: list[int], before_read: Callable[[int], None] | None) -> Fields:
    items = _items(dataset, indices, before_read)
    samples = [_sample(item, index) for item, index in zip(items, indices, strict=True)]
    for sample, index in zip(samples[1:], indices[1:], strict=True):
        _check_same_shapes(samples[0], indices[0], sample, index)
    return tuple(torch.stack(field) for field in zip(*samples, strict=True))


def _items(dataset: MapDataset, indices: list[int], before_read: Callable[[int], None] | None) -> Sequence[object]:
    if hasattr(dataset, "__getitems__") and supports_batch_fetch(dataset):
        return cast(Sequence[object], dataset.__getitems__(indices))
    items = []
    for index in indices:
        if before_read is not None:
            before_read(index)
        try:
            items.append(dataset[index])
        except Exception as error:
            error.add_note(f"while reading sample {index} of the {type(dataset).__name__}")
            raise
    return items


def _sample(item: object, index: int) -> Fields:
    """Return the fields of one sample as tensors."""
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(
            f"sample {index} is {_describe(item)}; a sample is a tuple (inputs..., target); return the "
            "target as its last field"
        )
    return tuple(_field(value, index, number) for number, value in enumerate(item))


def _field(value: object, index: int, number: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.as_tensor(value)
    if isinstance(value, Number):
        return torch.tensor(value)
    raise DataError(
        f"field {number} of sample {index} is {_describe(value)}; a field is a tensor, a numpy array or a "
        "number; convert it in the dataset"
    )


def _check_same_shapes(first: Fields, first_index: int, sample: Fields, index: int) -> None:
    ours, theirs = ([(tuple(field.shape), field.dtype) for field in fields] for fields in (sample, first))
    if ours != theirs:
        raise DataError(
            f"sample {index} has fields {_describe_fields(sample)}, but sample {first_index} of the same "
            f"batch has {_describe_fields(first)}; they must agree to be stacked; crop, pad or convert them "
            "in the dataset"
        )


def _describe_fields(fields: Fields) -> str:
    return ", ".join(f"{tuple(field.shape)} {str(field.dtype).removeprefix('torch.')}" for field in fields)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} fields"
    return f"a {type(value).__name__}"
