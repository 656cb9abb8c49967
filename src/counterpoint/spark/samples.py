"""The rows of an RDD or a DataFrame as tensors, one parcel for each partition, kept by Spark."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from isal import isal_zlib
from safetensors.torch import load as read_tensors, save as write_tensors

from counterpoint.data.fetch import Fields, fetch
from counterpoint.errors import DataError, LaunchError
from counterpoint.spark.failures import translate_spark_errors
from counterpoint.spark.shuffle import (
    ShuffleMessage,
    ShuffleMessageKind,
    format_message,
    identity_partitioner,
    parse_message,
)

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

PackedSamples: TypeAlias = "RDD[tuple[int, bytes]]"


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """What the driver learns of a partition before training begins.

    Args:
        count: how many samples it has.
        digest: a checksum of them.
        fields: dtype and shape of each field of a sample.
        python: the version that its worker runs.
        torch: likewise.
        failure: why the rows cannot be used; empty if they can.
    """

    count: int
    digest: str
    fields: tuple[str, ...] = ()
    python: str = ""
    torch: str = ""
    failure: str = ""


def pack_partitions(rows: RDD[Any], dtype: torch.dtype) -> PackedSamples:
    """Return an RDD of the samples' parcels, by place, with a partition behind the last; Spark keeps it.

    Args:
        rows: samples ``(inputs..., target)`` of tensors, numpy arrays, numbers, lists of numbers or Spark's vectors.
        dtype: what floating-point fields are brought to: that of the weights.
    """
    from pyspark import StorageLevel

    count = rows.getNumPartitions()
    found = rows.mapPartitionsWithIndex(PartitionPacker(str(dtype).removeprefix("torch.")))
    return found.partitionBy(count + 1, identity_partitioner).persist(StorageLevel.MEMORY_AND_DISK)


def inspect_partitions(samples: PackedSamples, num_partitions: int) -> list[PartitionInfo]:
    """Return what is in each partition; this is one job, after which Spark has them all.

    Raises:
        DataError: rows cannot be used, or partitions have different fields, or there is no sample at all.
        LaunchError: the workers have other versions of Python or torch.
    """
    with translate_spark_errors("to read the samples"):
        texts = samples.mapPartitionsWithIndex(inspect_partition).collect()
    found = parse_partition_infos(texts)
    check_partitions_match(found, num_partitions)
    return found


def check_partitions_match(infos: Sequence[PartitionInfo], num_partitions: int) -> None:
    """Check that the partitions go together, and with this process.

    Raises:
        DataError: their rows do not.
        LaunchError: their versions do not.
    """
    for place, one in enumerate(infos):
        if one.failure:
            raise DataError(f"partition {place}: {one.failure}")
    mine = {"python": platform.python_version(), "torch": str(torch.__version__)}
    others = {
        f"partition {place}: Python {one.python}, torch {one.torch}"
        for place, one in enumerate(infos)
        if {"python": one.python, "torch": one.torch} != mine
    }
    if others:
        raise LaunchError(
            f"the executors run other versions than the driver:\n  driver: Python {mine['python']}, torch "
            f"{mine['torch']}\n  "
            + "\n  ".join(sorted(others))
            + "\nnumbers would depend on where a task runs; install "
            "the same versions everywhere, or set spark.pyspark.python"
        )
    kinds: dict[tuple[str, ...], int] = {}
    for place, one in enumerate(infos):
        if one.count:
            kinds.setdefault(one.fields, place)
    if not kinds:
        raise DataError(f"there is no sample in {num_partitions} partitions; check the path or the filter of the data")
    if len(kinds) > 1:
        (first, at), (second, other), *_ = kinds.items()
        raise DataError(
            f"samples have {', '.join(first)} in partition {at}, but {', '.join(second)} in partition {other}; all "
            "samples have the same fields, shapes and dtypes"
        )


@dataclass(frozen=True, slots=True)
class PartitionPacker:
    """Make one parcel of the rows of a partition.

    Args:
        dtype: what floating-point fields are brought to.
    """

    dtype: str

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield the parcel, or a note that says what is wrong with the rows."""
        try:
            payload, kind = encode_samples(list(rows), getattr(torch, self.dtype)), ShuffleMessageKind.SAMPLES
        except DataError as error:
            payload, kind = str(error).encode(), ShuffleMessageKind.REPORT
        yield partition, format_message(ShuffleMessage(kind, partition, 0, payload))


def inspect_partition(partition: int, messages: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """Yield what the driver is told of a partition."""
    for _, text in messages:
        parcel = parse_message(text)
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        if parcel.kind is ShuffleMessageKind.REPORT:
            found = PartitionInfo(0, "", (), failure=parcel.payload.decode(), **versions)
        else:
            fields = decode_samples(parcel.payload)
            kinds = tuple(f"{str(field.dtype).removeprefix('torch.')}{list(field.shape[1:])}" for field in fields)
            found = PartitionInfo(len(fields[0]) if fields else 0, sample_digest(parcel.payload), kinds, **versions)
        yield partition, json.dumps(asdict(found))


def encode_samples(rows: Sequence[Any], dtype: torch.dtype) -> bytes:
    """Return samples as bytes.

    Raises:
        DataError: a row is no sample, has nothing in a field, or another shape than the first.

    Example:
        >>> [
        ...     field.tolist()
        ...     for field in decode_samples(encode_samples([([1.0, 2.0], 0), ([3.0, 4.0], 1)], torch.float32))
        ... ]
        [[[1.0, 2.0], [3.0, 4.0]], [0, 1]]
    """
    if not rows:
        return write_tensors({})
    samples = [tuple(_to_numeric(value, at, row) for at, value in enumerate(_check_row(found, row))) for row, found in
               enumerate(rows)]  # fmt: skip
    fields = fetch(samples, range(len(samples)))
    return write_tensors(
        {
            f"{at:03}": (field.to(dtype) if field.is_floating_point() else field).contiguous()
            for at, field in enumerate(fields)
        }
    )


def decode_samples(text: bytes) -> Fields:
    """Return the fields that ``encode_samples`` wrote; none where there was no row."""
    return tuple(value for _, value in sorted(read_tensors(text).items()))


def sample_digest(text: bytes) -> str:
    """Return a checksum of samples."""
    return f"{isal_zlib.crc32(text):08x}"


def find_samples(messages: Sequence[ShuffleMessage], digest: str, partition: int) -> Fields:
    """Return the samples of a place.

    Raises:
        DataError: they are not those that were there when training began.
    """
    parcel = next((one for one in messages if one.kind is ShuffleMessageKind.SAMPLES), None)
    if parcel is None or sample_digest(parcel.payload) != digest:
        raise DataError(
            f"partition {partition} has other samples than when training began: Spark computed it again, and it came out "
            "differently; give data that is the same each time: read it from files, order it, or checkpoint it"
        )
    return decode_samples(parcel.payload)


def _check_row(row: Any, at: int) -> Sequence[Any]:  # noqa: ANN401 - whatever is in an RDD
    if not isinstance(row, tuple | list) or len(row) < 2:
        raise DataError(
            f"row {at} is a {type(row).__name__}; a sample is a tuple (inputs..., target), the target last: map the "
            "rows to that, or give columns=('features', 'label') of a DataFrame"
        )
    return row


def _to_numeric(value: Any, at: int, row: int) -> Any:  # noqa: ANN401 - likewise
    """Return a value as a tensor, an array or a number."""
    if value is None:
        raise DataError(f"row {row} has nothing (null) in field {at}; drop such rows with df.dropna(), or fill them in")
    if isinstance(value, float):
        return np.float64(value)  # a number of torch alone would be a float32
    if hasattr(value, "toArray"):
        return value.toArray()
    if isinstance(value, list | tuple):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DataError(f"field {at} of row {row} is a list of {array.dtype}; numbers are needed, of one length")
        return array
    return value


NUMBERS = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double", "boolean"})
LISTS = frozenset(f"array<{number}>" for number in NUMBERS) | {"vector"}
LISTS_OF_LISTS = frozenset(f"array<array<{number}>>" for number in NUMBERS)


def to_sample_rdd(frame: DataFrame, columns: Sequence[str]) -> RDD[Any]:
    """Return the rows of a DataFrame as samples.

    Args:
        frame: of Spark.
        columns: those of the inputs, and that of the target last.

    Raises:
        DataError: there is no such column, or it has no numbers.
    """
    check_columns({field.name: field.dataType.simpleString() for field in frame.schema.fields}, columns)
    return frame.select(*columns).rdd.map(tuple)


def check_columns(types: Mapping[str, str], columns: Sequence[str]) -> None:
    """Check that samples can be made of columns.

    Args:
        types: of all columns, as Spark writes them.
        columns: those that are wanted.

    Raises:
        DataError: they cannot.

    Example:
        >>> check_columns({"features": "array<double>", "label": "string"}, ("features", "label"))
        Traceback (most recent call last):
        counterpoint.errors.DataError: column label is string, but samples are made of numbers, arrays of numbers and \
vectors; convert it, for instance with pyspark.ml.feature.StringIndexer
    """
    if len(columns) < 2:
        raise DataError(f"columns={tuple(columns)!r} names no input and target; give columns=('features', 'label')")
    missing = [name for name in columns if name not in types]
    if missing:
        raise DataError(f"there is no column {', '.join(missing)}; the DataFrame has {', '.join(types)}")
    for name in columns:
        if types[name] not in NUMBERS | LISTS | LISTS_OF_LISTS:
            raise DataError(
                f"column {name} is {types[name]}, but samples are made of numbers, arrays of numbers and vectors; "
                "convert it, for instance with pyspark.ml.feature.StringIndexer"
            )


def pack_local(partitions: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[ShuffleMessage]:
    """Return the samples' parcels of partitions in this process."""
    pack = PartitionPacker(str(dtype).removeprefix("torch."))
    return [parse_message(text) for place, rows in enumerate(partitions) for _, text in pack(place, rows)]


def inspect_local(messages: Sequence[ShuffleMessage]) -> list[PartitionInfo]:
    """Return what is in each partition in this process; errors as of ``looks``."""
    texts = [
        found
        for place, one in enumerate(messages)
        for found in inspect_partition(place, [(place, format_message(one))])
    ]
    found = parse_partition_infos(texts)
    check_partitions_match(found, len(messages))
    return found


def parse_partition_infos(texts: Iterable[tuple[int, str]]) -> list[PartitionInfo]:
    """Return what has been told, in the order of the places."""
    told = [json.loads(text) for _, text in sorted(texts)]
    return [PartitionInfo(**{**plain, "fields": tuple(plain["fields"])}) for plain in told]
