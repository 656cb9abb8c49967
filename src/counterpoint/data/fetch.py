"""Reads samples of map-style datasets and stacks them; errors name the sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from numbers import Number
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten
from torch.utils.data import Subset, TensorDataset

from counterpoint.data.batch_form import describe_form
from counterpoint.data.sampler import Indices
from counterpoint.errors import DataError
from counterpoint.partitioning.pytree import register_dataclasses
from counterpoint.tensor_bytes import as_bytes

Fields: TypeAlias = tuple[Tensor, ...]
CollateFn: TypeAlias = Callable[[list[Any]], Any]
"""From a list of samples to a batch, as for torch's DataLoader."""


class MapDataset(Protocol):
    """A map-style dataset: a length, and a sample such as ``(inputs..., target)`` for every index below it.

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
        return tuple(field[:0] for field in _stack(_items(dataset, [0], before_read), [0]))
    return _stack(_items(dataset, wanted, before_read), wanted)


def fetch_batch(
    dataset: MapDataset,
    indices: Indices,
    collate_fn: CollateFn | None = None,
    *,
    before_read: Callable[[int], None] | None = None,
) -> Any:  # noqa: ANN401 - any nest of tensors
    """Return the samples at ``indices`` as one batch, whatever form samples have.

    Args:
        dataset: see `MapDataset`; its samples may be dicts, dataclasses, or any nest of fields.
        indices: of the samples, at least one.
        collate_fn: makes the batch of a list of samples; by default each field is stacked.
        before_read: as for `fetch`.

    Example:
        >>> fetch_batch([{"x": 1.0, "labels": 2}, {"x": 3.0, "labels": 4}], np.array([1, 0]))
        {'x': tensor([3., 1.]), 'labels': tensor([4, 2])}
    """
    if collate_fn is None and (isinstance(dataset, TensorDataset) or hasattr(dataset, "fetch")):
        return fetch(dataset, indices, before_read=before_read)
    wanted: list[int] = indices.tolist()
    if collate_fn is not None:
        if before_read is not None and supports_batch_fetch(dataset):
            before_read(wanted[0])
        return collate_fn(list(_items(dataset, wanted, before_read)))
    if before_read is not None and supports_batch_fetch(dataset):
        before_read(wanted[0])
    return stack_samples(_items(dataset, wanted, before_read), wanted)


def require_fields(batch: Any, dataset: MapDataset) -> Fields:  # noqa: ANN401 - any nest of tensors
    """Return a batch of samples that are tuples, where no other form is possible.

    Raises:
        DataError: samples have another form.
    """
    if not isinstance(batch, tuple) or not all(isinstance(field, Tensor) for field in batch):
        raise DataError(
            f"a batch of the {type(dataset).__name__} is {describe_form(batch)}, but here a sample is a tuple "
            "(inputs..., target) of tensors; return the target as its last field"
        )
    return batch


def stack_samples(items: Sequence[object], indices: Sequence[int]) -> Any:  # noqa: ANN401 - a nest like the samples
    """Return samples stacked field by field, in a nest like theirs.

    Args:
        items: the samples.
        indices: of the samples, for errors.

    Raises:
        DataError: a sample has no fields, a field is not a tensor, array or number, or two samples differ in form.
    """
    if all(map(_is_flat_tuple, items)):
        return _stack(items, indices)
    leaves, specs = [], []
    for item, index in zip(items, indices, strict=True):
        register_dataclasses(item)
        if not isinstance(item, Mapping) and not is_dataclass(item):
            _require_tuple(item, index)
        first = items[0]
        ordered = {key: item[key] for key in first} if _have_same_keys(first, item) else item  # type: ignore[index, attr-defined]
        paths, spec = tree_flatten_with_path(ordered)
        leaves.append(tuple(_field(value, index, keystr(path)) for path, value in paths))
        specs.append(spec)
        if spec != specs[0]:
            raise DataError(
                f"sample {index} is {describe_form(item)} and has other fields than sample {indices[0]} of the same "
                f"batch, {describe_form(first)}; return the same fields in every sample, or pass a collate_fn"
            )
    return tree_unflatten(_stack_fields(leaves, indices), specs[0])


def supports_batch_fetch(dataset: object) -> bool:
    """Tell whether a dataset reads many samples at once with its own method; a subset does what its dataset does."""
    if type(dataset) is Subset:
        whole = dataset.dataset
        return supports_batch_fetch(whole) if type(whole) is Subset else hasattr(whole, "__getitems__")
    return hasattr(dataset, "fetch") or hasattr(dataset, "__getitems__")


def fingerprint(
    dataset: MapDataset, collate_fn: CollateFn | None = None, read: Callable[[Indices], object] | None = None
) -> DatasetFingerprint:
    """Return the fingerprint of a dataset; torch's random generator is restored.

    Args:
        dataset: see `MapDataset`.
        collate_fn: makes batches of its samples, which are not stacked here.
        read: returns samples, with the same random numbers for the same indices; by default those that come next.

    Raises:
        DataError: the dataset is empty, or its first or last sample cannot be used.
    """
    num_samples = _require_samples(dataset)
    with torch.random.fork_rng(devices=[]):
        ends = np.array([0, num_samples - 1])
        read = read or partial(fetch_batch, dataset, collate_fn=list if collate_fn else None)
        first, second = (_hash(read(ends)) for _ in range(2))
    return DatasetFingerprint(num_samples, _name_class(dataset), first if first == second else "random")


def describe_dataset(dataset: MapDataset) -> str:
    """Return the length and the class of a dataset, and a digest of the indices of a ``Subset``, to compare ranks by.

    Raises:
        DataError: the dataset is empty.

    Example:
        >>> describe_dataset([(1.0, 2), (3.0, 4)])
        '2 samples of builtins.list'
    """
    text = f"{_require_samples(dataset)} samples of {_name_class(dataset)}"
    positions, inner = hashlib.sha256(), cast("object", dataset)
    while type(inner) is Subset:
        positions.update(np.asarray(inner.indices).tobytes())
        inner = inner.dataset
    return text if inner is dataset else f"{text}, indices with the digest {positions.hexdigest()[:16]}"


def describe_samples(read: Callable[[Indices], object], indices: Indices) -> str:
    """Return a digest of some samples, to compare ranks by.

    A sample that cannot be read is reported where it is needed; here it only counts as such.

    Args:
        read: returns samples, with the same random numbers for the same indices.
        indices: of samples that are going to be read, of which some are taken.

    Example:
        >>> describe_samples(lambda indices: [float(index) for index in indices], np.arange(2))
        'digest 015e422c0c2d789a of 2 of them'
    """
    chosen = np.unique(indices[np.linspace(0, len(indices) - 1, NUM_COMPARED_SAMPLES).astype(int)])
    first, second = (_hash([_read_if_possible(read, index) for index in chosen]) for _ in range(2))
    return f"digest {first} of {len(chosen)} of them" if first == second else "random"


NUM_COMPARED_SAMPLES = 8
"""At most, of a dataset, which ranks read before the first step."""


def _read_if_possible(read: Callable[[Indices], object], index: int) -> object:
    try:
        return read(np.array([index]))  # one by one: samples of different shapes cannot be stacked
    except Exception as error:  # noqa: BLE001 - whatever a dataset raises
        return type(error).__name__


def _require_samples(dataset: MapDataset) -> int:
    num_samples = len(dataset)
    if num_samples < 1:
        raise DataError(
            f"the {type(dataset).__name__} has {num_samples} samples; a dataset needs at least one; "
            "check the path or the filter that it was created with"
        )
    return num_samples


def _name_class(dataset: object) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


def is_same_dataset(saved: Mapping[str, object], current: Mapping[str, object]) -> bool:
    """Return whether two fingerprints, as JSON, are of the same samples, whatever module defines the class.

    The name of the class counts only where one of them has no hash: because samples are random, or come from a stream.

    Example:
        >>> saved = {"num_samples": 9, "type_name": "__main__.Images", "ends": "ab"}
        >>> is_same_dataset(saved, {**saved, "type_name": "cnn.Images"})
        True
    """
    both = saved, current
    has_hashes = all(one.get("ends", "random") != "random" for one in both)
    facts = [
        (one.get("num_samples"), one["ends"] if has_hashes else str(one["type_name"]).rpartition(".")[2])
        for one in both
    ]
    return facts[0] == facts[1]


def _hash(values: object) -> str:
    digest = hashlib.sha256()
    for value in tree_leaves(values):
        if not isinstance(value, Tensor) and not (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
            digest.update(f"{value!r};".encode() if isinstance(value, Number | str | bytes) else b";")
            continue
        field = torch.as_tensor(value)
        digest.update(f"{field.dtype} {tuple(field.shape)};".encode())
        digest.update(as_bytes(field.cpu()).numpy().tobytes())
    return digest.hexdigest()[:16]


def _fetch_at_once(dataset: object, indices: list[int]) -> Fields:
    fields = dataset.fetch(indices)  # type: ignore[attr-defined]
    name = f"{type(dataset).__name__}.fetch"
    if not isinstance(fields, tuple) or not all(isinstance(field, Tensor) for field in fields):
        raise DataError(
            f"{name} returned {describe_form(fields)}; it must return a tuple of tensors (inputs..., target); "
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


def _stack(items: Sequence[object], indices: Sequence[int]) -> Fields:
    return _stack_fields([_sample(item, index) for item, index in zip(items, indices, strict=True)], indices)


def _stack_fields(samples: Sequence[Fields], indices: Sequence[int]) -> Fields:
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
    return tuple(_field(value, index, number) for number, value in enumerate(_require_tuple(item, index)))


def _require_tuple(item: object, index: int) -> Sequence[object]:
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(
            f"sample {index} is {describe_form(item)}; a sample is a tuple (inputs..., target); return the "
            "target as its last field"
        )
    return item


def _have_same_keys(first: object, item: object) -> bool:
    return isinstance(first, Mapping) and isinstance(item, Mapping) and first.keys() == item.keys()


def _is_flat_tuple(item: object) -> bool:
    return type(item) in {tuple, list} and not any(
        isinstance(value, tuple | list | Mapping) or is_dataclass(value)
        for value in item  # type: ignore[attr-defined]
    )


def _field(value: object, index: int, number: int | str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.as_tensor(value)
    if isinstance(value, Number):
        return torch.tensor(value)
    raise DataError(
        f"field {number} of sample {index} is {describe_form(value)}; a field is a tensor, a numpy array or a "
        "number; convert it in the dataset, or pass a collate_fn that makes a batch of such samples"
    )


def _check_same_shapes(first: Fields, first_index: int, sample: Fields, index: int) -> None:
    ours, theirs = ([(tuple(field.shape), field.dtype) for field in fields] for fields in (sample, first))
    if ours != theirs:
        raise DataError(
            f"sample {index} has fields {_describe_fields(sample)}, but sample {first_index} of the same "
            f"batch has {_describe_fields(first)}; they must agree to be stacked; crop, pad or convert them "
            "in the dataset, or pass a collate_fn that pads"
        )


def _describe_fields(fields: Fields) -> str:
    return ", ".join(f"{tuple(field.shape)} {str(field.dtype).removeprefix('torch.')}" for field in fields)
