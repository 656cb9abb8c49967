"""Rows of an RDD or a DataFrame as tensors: one message per partition, cached by Spark."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from isal import isal_zlib

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
from counterpoint.value_codec import decode_value, encode_value

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

PackedSamples: TypeAlias = "RDD[tuple[int, bytes]]"


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """Contents of a partition, as reported to the driver before training.

    Args:
        count: number of samples.
        digest: checksum of the samples.
        fields: dtype and shape of each field of a sample.
        python: Python version of the worker.
        torch: torch version of the worker.
        failure: why the rows cannot be used; empty if they can.
    """

    count: int
    digest: str
    fields: tuple[str, ...] = ()
    python: str = ""
    torch: str = ""
    failure: str = ""


def pack_partitions(rows: RDD[Any], dtype: torch.dtype) -> PackedSamples:
    """Return a cached RDD of the samples' messages by partition, with an extra partition after the last.

    Args:
        rows: samples ``(inputs..., target)`` of tensors, numpy arrays, numbers, lists of numbers or Spark vectors.
        dtype: dtype that floating-point fields are converted to, that of the weights.
    """
    from pyspark import StorageLevel

    count = rows.getNumPartitions()
    packed = rows.mapPartitionsWithIndex(PartitionPacker(str(dtype).removeprefix("torch.")))
    return packed.partitionBy(count + 1, identity_partitioner).persist(StorageLevel.MEMORY_AND_DISK)


def inspect_partitions(samples: PackedSamples, num_partitions: int) -> list[PartitionInfo]:
    """Return the contents of each partition; this runs one job, after which Spark has cached the samples.

    Raises:
        DataError: rows cannot be used, partitions have different fields, or there is no sample.
        LaunchError: the workers have other versions of Python or torch.
    """
    with translate_spark_errors("to read the samples"):
        lines = samples.mapPartitionsWithIndex(inspect_partition).collect()
    infos = parse_partition_infos(lines)
    check_partitions_match(infos, num_partitions)
    return infos


def check_partitions_match(infos: Sequence[PartitionInfo], num_partitions: int) -> None:
    """Check that the partitions match each other and this process.

    Raises:
        DataError: their fields differ.
        LaunchError: their versions differ.
    """
    for partition, info in enumerate(infos):
        if info.failure:
            raise DataError(f"partition {partition}: {info.failure}")
    driver_versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    mismatches = {
        f"partition {partition}: Python {info.python}, torch {info.torch}"
        for partition, info in enumerate(infos)
        if {"python": info.python, "torch": info.torch} != driver_versions
    }
    if mismatches:
        raise LaunchError(
            f"the executors run versions other than the driver's:\n  driver: Python {driver_versions['python']}, torch "
            f"{driver_versions['torch']}\n  "
            + "\n  ".join(sorted(mismatches))
            + "\nresults would depend on where a task runs; install "
            "the same versions everywhere, or set spark.pyspark.python"
        )
    first_partition_with: dict[tuple[str, ...], int] = {}
    for partition, info in enumerate(infos):
        if info.count:
            first_partition_with.setdefault(info.fields, partition)
    if not first_partition_with:
        raise DataError(
            f"there is no sample in {num_partitions} partitions; check the path and the filters of the data"
        )
    if len(first_partition_with) > 1:
        (first_fields, first), (second_fields, second), *_ = first_partition_with.items()
        raise DataError(
            f"samples have {', '.join(first_fields)} in partition {first}, but {', '.join(second_fields)} in partition "
            f"{second}; all samples must have the same fields, shapes and dtypes"
        )


@dataclass(frozen=True, slots=True)
class PartitionPacker:
    """Function that packs the rows of a partition into one message.

    Args:
        dtype: dtype that floating-point fields are converted to.
    """

    dtype: str

    def __call__(self, partition: int, rows: Iterable[Any]) -> Iterator[tuple[int, bytes]]:
        """Yield the message, or a report of why the rows cannot be used."""
        try:
            payload, message_kind = encode_samples(list(rows), getattr(torch, self.dtype)), ShuffleMessageKind.SAMPLES
        except DataError as error:
            payload, message_kind = str(error).encode(), ShuffleMessageKind.REPORT
        yield partition, format_message(ShuffleMessage(message_kind, partition, 0, payload))


def inspect_partition(partition: int, messages: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    """Yield the contents of a partition as JSON."""
    for _, text in messages:
        message = parse_message(text)
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        if message.kind is ShuffleMessageKind.REPORT:
            info = PartitionInfo(0, "", (), failure=message.payload.decode(), **versions)
        else:
            fields = decode_samples(message.payload)
            field_types = tuple(f"{str(field.dtype).removeprefix('torch.')}{list(field.shape[1:])}" for field in fields)
            info = PartitionInfo(
                len(fields[0]) if fields else 0, sample_digest(message.payload), field_types, **versions
            )
        yield partition, json.dumps(asdict(info))


def encode_samples(rows: Sequence[Any], dtype: torch.dtype) -> bytes:
    """Return samples as bytes.

    Raises:
        DataError: a row is not a sample, has a null field, or differs in shape from the first.

    Example:
        >>> [
        ...     field.tolist()
        ...     for field in decode_samples(encode_samples([([1.0, 2.0], 0), ([3.0, 4.0], 1)], torch.float32))
        ... ]
        [[[1.0, 2.0], [3.0, 4.0]], [0, 1]]
    """
    if not rows:
        return encode_value((), "samples")
    samples = [
        tuple(_to_numeric(value, index, position) for index, value in enumerate(_check_row(row, position)))
        for position, row in enumerate(rows)
    ]
    fields = fetch(samples, range(len(samples)))
    return encode_value(tuple(field.to(dtype) if field.is_floating_point() else field for field in fields), "samples")


def decode_samples(text: bytes) -> Fields:
    """Return the fields written by ``encode_samples``; none if there was no row."""
    fields: Fields = decode_value(text)
    return fields


def sample_digest(text: bytes) -> str:
    """Return a checksum of encoded samples."""
    return f"{isal_zlib.crc32(text):08x}"


def find_samples(messages: Sequence[ShuffleMessage], digest: str, partition: int) -> Fields:
    """Return the samples of a partition from its messages.

    Raises:
        DataError: they differ from those at the start of the training.
    """
    samples = next((message for message in messages if message.kind is ShuffleMessageKind.SAMPLES), None)
    if samples is None or sample_digest(samples.payload) != digest:
        raise DataError(
            f"partition {partition} changed since training began: Spark recomputed it with another result; use data "
            "that is deterministic: read it from files, sort it, or checkpoint it"
        )
    return decode_samples(samples.payload)


def _check_row(row: Any, index: int) -> Sequence[Any]:  # noqa: ANN401 - whatever is in an RDD
    if not isinstance(row, tuple | list) or len(row) < 2:
        raise DataError(
            f"row {index} is a {type(row).__name__}; a sample is a tuple (inputs..., target): map the "
            "rows to tuples, or give columns=('features', 'label') of a DataFrame"
        )
    return row


def _to_numeric(value: Any, field: int, row: int) -> Any:  # noqa: ANN401 - likewise
    """Return a value as a tensor, an array or a number."""
    if value is None:
        raise DataError(
            f"row {row} is null in field {field}; drop such rows with df.dropna(), or fill them with df.fillna()"
        )
    if isinstance(value, float):
        return np.float64(value)  # torch would convert a Python float to float32
    if hasattr(value, "toArray"):
        return value.toArray()
    if isinstance(value, list | tuple):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"field {field} of row {row} is a list of {array.dtype}; use numbers, in lists of equal length"
            )
        return array
    return value


NUMBERS = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double", "boolean"})
LISTS = frozenset(f"array<{number}>" for number in NUMBERS) | {"vector"}
LISTS_OF_LISTS = frozenset(f"array<array<{number}>>" for number in NUMBERS)


def to_sample_rdd(frame: DataFrame, columns: Sequence[str]) -> RDD[Any]:
    """Return the rows of a DataFrame as samples.

    Args:
        frame: of Spark.
        columns: input columns, then the target column.

    Raises:
        DataError: a column is missing or not numeric.
    """
    check_columns({field.name: field.dataType.simpleString() for field in frame.schema.fields}, columns)
    return frame.select(*columns).rdd.map(tuple)


def check_columns(types: Mapping[str, str], columns: Sequence[str]) -> None:
    """Check that the columns exist and are numeric.

    Args:
        types: Spark types of all columns.
        columns: names to use.

    Raises:
        DataError: one is missing or not numeric.

    Example:
        >>> check_columns({"features": "array<double>", "label": "string"}, ("features", "label"))
        Traceback (most recent call last):
        counterpoint.errors.DataError: column label is string, but samples consist of numbers, arrays of numbers and \
    vectors; convert it, for instance with pyspark.ml.feature.StringIndexer
    """
    if len(columns) < 2:
        raise DataError(f"columns={tuple(columns)!r} needs an input and a target; give columns=('features', 'label')")
    missing = [name for name in columns if name not in types]
    if missing:
        raise DataError(f"there is no column {', '.join(missing)}; the DataFrame has {', '.join(types)}")
    for name in columns:
        if types[name] not in NUMBERS | LISTS | LISTS_OF_LISTS:
            raise DataError(
                f"column {name} is {types[name]}, but samples consist of numbers, arrays of numbers and vectors; "
                "convert it, for instance with pyspark.ml.feature.StringIndexer"
            )


def pack_local(partitions: Sequence[Sequence[Any]], dtype: torch.dtype) -> list[ShuffleMessage]:
    """Return the samples' messages of partitions in this process."""
    pack = PartitionPacker(str(dtype).removeprefix("torch."))
    return [parse_message(text) for partition, rows in enumerate(partitions) for _, text in pack(partition, rows)]


def inspect_local(messages: Sequence[ShuffleMessage]) -> list[PartitionInfo]:
    """Return the contents of partitions in this process; raises as ``inspect_partitions``."""
    lines = [
        line
        for partition, message in enumerate(messages)
        for line in inspect_partition(partition, [(partition, format_message(message))])
    ]
    infos = parse_partition_infos(lines)
    check_partitions_match(infos, len(messages))
    return infos


def parse_partition_infos(lines: Iterable[tuple[int, str]]) -> list[PartitionInfo]:
    """Return the reported contents, in partition order."""
    infos = [json.loads(text) for _, text in sorted(lines)]
    return [PartitionInfo(**{**plain, "fields": tuple(plain["fields"])}) for plain in infos]
