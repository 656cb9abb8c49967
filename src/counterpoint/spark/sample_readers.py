"""Columns of Arrow batches as arrays, and rows of an RDD as tensors, laid down in a file for a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from counterpoint.errors import DataError

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

SAMPLES = "samples.safetensors"
NUMPY_DTYPES = {
    "tinyint": "int8",
    "smallint": "int16",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
}
"""Spark's numbers, as numpy calls them."""


@dataclass(frozen=True, slots=True)
class SampleColumn:
    """A column of samples.

    Args:
        name: in the DataFrame.
        dtype: of its numbers, as numpy calls it.
        depth: how many lists are inside each other: 0 for numbers, 1 for lists of numbers.
    """

    name: str
    dtype: str
    depth: int = 0

    @staticmethod
    def parse(name: str, spark_type: str, dtype: str) -> SampleColumn:
        """Return the column that Spark calls ``kind``.

        Args:
            name: of the column.
            kind: its type, as Spark writes it.
            dtype: what floating-point numbers are brought to.

        Example:
            >>> SampleColumn.parse("features", "array<double>", "float32")
            SampleColumn(name='features', dtype='float32', depth=1)
        """
        depth = spark_type.count("array<")
        found = NUMPY_DTYPES[spark_type.replace("array<", "").replace(">", "")]
        return SampleColumn(name, dtype if found.startswith("float") else found, depth)


@dataclass(frozen=True, slots=True)
class ArrowReader:
    """Lay down the columns of a partition's batches.

    Args:
        columns: those of the inputs, and that of the target last.
    """

    columns: tuple[SampleColumn, ...]

    def __call__(self, batches: Iterable[RecordBatch], folder: Path) -> None:
        """The samples are in a file in the folder.

        Raises:
            DataError: a row has nothing in a column, or rows have different shapes.
        """
        parts: list[list[Any]] = [[] for _ in self.columns]
        start = 0
        for batch in batches:
            for at, column in enumerate(self.columns):
                parts[at].append(column_values(batch.column(at), column, start))
            start += batch.num_rows
        fields = {
            f"{at:03}": concat_column([part for part in parts[at] if len(part)], column)
            for at, column in enumerate(self.columns)
        }
        save_file(fields, folder / SAMPLES)


@dataclass(frozen=True, slots=True)
class RowReader:
    """Lay down the rows of a partition of an RDD.

    Args:
        dtype: what floating-point fields are brought to.
    """

    dtype: str

    def __call__(self, rows: Iterable[Any], folder: Path) -> None:
        """The samples are in a file in the folder.

        Raises:
            DataError: a row is no sample, or rows have different shapes.
        """
        import torch

        from counterpoint.spark.samples import encode_samples

        (folder / SAMPLES).write_bytes(encode_samples(list(rows), getattr(torch, self.dtype)))


def concat_column(parts: Sequence[Any], column: SampleColumn) -> Any:  # noqa: ANN401 - an array of numpy
    """Return the values of all batches.

    Raises:
        DataError: lists differ in length from batch to batch.
    """
    if not parts:
        return np.zeros((0,) * (column.depth + 1), column.dtype)
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise DataError(
            f"column {column.name} has values of shapes {sorted(shapes)}; all samples have the same shape: pad them, "
            "or cut them"
        )
    return np.ascontiguousarray(np.concatenate(parts))


def column_values(array: Array, column: SampleColumn, start: int) -> Any:  # noqa: ANN401 - an array of numpy
    """Return a column of one batch as an array with the samples along its first dim.

    Args:
        array: of Arrow.
        column: what is to be in it.
        start: the number of its first row in the partition.

    Raises:
        DataError: a row has nothing in it, or lists differ in length.
    """
    count, shape, level = len(array), [len(array)], array
    for _ in range(column.depth):
        check_no_nulls(level, column, start, count)
        lengths = np.diff(level.offsets.to_numpy())
        if len(lengths) and lengths.min() != lengths.max():
            row = start + int(np.argmax(lengths != lengths[0])) * count // len(lengths)
            raise DataError(
                f"column {column.name} has lists of {lengths.min()} and of {lengths.max()} numbers, the first that "
                f"differs in row {row}; all samples have the same shape: pad them, or cut them"
            )
        shape.append(int(lengths[0]) if len(lengths) else 0)
        level = level.flatten()
    check_no_nulls(level, column, start, count)
    return level.to_numpy(zero_copy_only=False).astype(column.dtype, copy=False).reshape(shape)


def check_no_nulls(level: Array, column: SampleColumn, start: int, count: int) -> None:
    """Check that nothing is missing.

    Raises:
        DataError: something is.
    """
    if level.null_count:
        at = int(np.argmax(level.is_null().to_numpy(zero_copy_only=False))) * count // len(level)
        raise DataError(
            f"row {start + at} has nothing (null) in column {column.name}; drop such rows with df.dropna(), or fill "
            "them in"
        )
