"""Readers that convert the rows of a Spark partition to arrays in a file for the rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from counterpoint.errors import DataError
from counterpoint.value_codec import encode_value

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

SAMPLES = "samples.value"
NUMPY_DTYPES = {
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
}
"""Numpy dtype of each numeric Spark type."""


@dataclass(frozen=True, slots=True)
class SampleColumn:
    """One column of the samples.

    Args:
        name: name in the DataFrame.
        dtype: numpy name of the element type.
        depth: levels of list nesting: 0 for scalars, 1 for lists of numbers.
    """

    name: str
    dtype: str
    depth: int = 0

    @staticmethod
    def parse(name: str, spark_type: str, dtype: str) -> SampleColumn:
        """Parse a Spark column type.

        Args:
            name: of the column.
            spark_type: type as Spark writes it.
            dtype: numpy dtype that floating-point values are converted to.

        Example:
            >>> SampleColumn.parse("features", "array<double>", "float32")
            SampleColumn(name='features', dtype='float32', depth=1)
        """
        depth = spark_type.count("array<")
        numpy_dtype = NUMPY_DTYPES[spark_type.replace("array<", "").replace(">", "")]
        return SampleColumn(name, dtype if numpy_dtype.startswith("float") else numpy_dtype, depth)


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """Writer of a partition's Arrow batches to the rank's samples file.

    Args:
        columns: input columns, then the target column.
    """

    columns: tuple[SampleColumn, ...]

    def __call__(self, batches: Iterable[RecordBatch], folder: Path) -> None:
        """Write the samples to a file in ``folder``.

        Raises:
            DataError: a value is null, or samples have different shapes.
        """
        parts: list[list[Any]] = [[] for _ in self.columns]
        start = 0
        for batch in batches:
            for index, column in enumerate(self.columns):
                parts[index].append(column_values(batch.column(index), column, start))
            start += batch.num_rows
        fields = tuple(
            concat_column([part for part in arrays if len(part)], column)
            for arrays, column in zip(parts, self.columns, strict=True)
        )
        (folder / SAMPLES).write_bytes(encode_value(fields, "samples"))


@dataclass(frozen=True, slots=True)
class RowReader:
    """Writer of a partition's RDD rows to the rank's samples file.

    Args:
        dtype: dtype that floating-point fields are converted to.
    """

    dtype: str

    def __call__(self, rows: Iterable[Any], folder: Path) -> None:
        """Write the samples to a file in ``folder``.

        Raises:
            DataError: a row is not a sample, or samples have different shapes.
        """
        import torch

        from counterpoint.spark.samples import encode_samples

        (folder / SAMPLES).write_bytes(encode_samples(list(rows), getattr(torch, self.dtype)))


def concat_column(parts: Sequence[Any], column: SampleColumn) -> Any:  # noqa: ANN401 - an array of numpy
    """Return the values of a column from all batches as one array.

    Raises:
        DataError: lists differ in length between batches.
    """
    if not parts:
        return np.zeros((0,) * (column.depth + 1), column.dtype)
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise DataError(
            f"column {column.name} has values of shapes {sorted(shapes)}; all samples must have the same shape: pad or "
            "truncate them"
        )
    return np.ascontiguousarray(np.concatenate(parts))


def column_values(array: Array, column: SampleColumn, start: int) -> Any:  # noqa: ANN401 - an array of numpy
    """Return a column of one batch as an array with the samples along its first dim.

    Args:
        array: Arrow array.
        column: expected type of the values.
        start: index of the batch's first row in the partition.

    Raises:
        DataError: a value is null, or lists differ in length.
    """
    count, shape, level = len(array), [len(array)], array
    for _ in range(column.depth):
        check_no_nulls(level, column, start, count)
        lengths = np.diff(level.offsets.to_numpy())
        if len(lengths) and lengths.min() != lengths.max():
            row = start + int(np.argmax(lengths != lengths[0])) * count // len(lengths)
            raise DataError(
                f"column {column.name} has lists of {lengths.min()} and of {lengths.max()} numbers, the first that "
                f"differs in row {row}; all samples must have the same shape: pad or truncate them"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        level = level.flatten()
    check_no_nulls(level, column, start, count)
    return level.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False).reshape(shape)


def check_no_nulls(level: Array, column: SampleColumn, start: int, count: int) -> None:
    """Check that a column has no null.

    Raises:
        DataError: it has one.
    """
    if level.null_count:
        index = int(np.argmax(level.is_null().to_numpy(zero_copy_only=False))) * count // len(level)
        raise DataError(
            f"row {start + index} is null in column {column.name}; drop such rows with df.dropna(), or fill them with "
            "df.fillna()"
        )
