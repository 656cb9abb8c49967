"""Columns of Arrow batches as arrays; skipped where there is no PyArrow."""

import numpy as np
import pytest

from counterpoint import DataError
from counterpoint.spark.sample_readers import SAMPLES, ArrowReader, SampleColumn
from counterpoint.value_codec import decode_value

pa = pytest.importorskip("pyarrow", reason="there is no PyArrow; pip install 'counterpoint[spark]'")
COLUMNS = (SampleColumn("x", "float32", 1), SampleColumn("y", "int64"))


def batch(x, y):
    return pa.RecordBatch.from_arrays([pa.array(x, pa.list_(pa.float64())), pa.array(y, pa.int64())], ["x", "y"])


def read_columns(tmp_path, *batches):
    ArrowReader(COLUMNS)(batches, tmp_path)
    return decode_value((tmp_path / SAMPLES).read_bytes())


def test_batches_become_one_array_for_each_column(tmp_path):
    result = read_columns(tmp_path, batch([[1, 2]], [7]), batch([], []), batch([[3, 4], [5, 6]], [8, 9]).slice(1))
    assert result[0].tolist() == [[1, 2], [5, 6]]
    assert result[1].tolist() == [7, 9]
    assert [field.dtype for field in result] == [np.float32, np.int64]


def test_a_partition_without_rows_has_no_samples(tmp_path):
    assert len(read_columns(tmp_path)[1]) == 0


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1], None], [1, 2], r"row 4 is null in column x"),
        ([[1], [None]], [1, 2], r"row 4 is null in column x"),
        ([[1], [2]], [None, 2], r"row 3 is null in column y"),
        ([[1], [2, 3]], [1, 2], "column x has lists of 1 and of 2 numbers, the first that differs in row 4"),
    ],
)
def test_a_row_that_is_no_sample_is_named(tmp_path, x, y, message):
    with pytest.raises(DataError, match=message):
        read_columns(tmp_path, batch([[1], [1], [1]], [0, 0, 0]), batch(x, y))


def test_lists_that_differ_from_batch_to_batch_are_refused(tmp_path):
    with pytest.raises(DataError, match="column x has values of shapes"):
        read_columns(tmp_path, batch([[1]], [1]), batch([[1, 2]], [1]))


def test_lists_of_lists_are_matrices(tmp_path):
    array = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float32())))
    columns = (SampleColumn.parse("x", "array<array<float>>", "float64"),)
    ArrowReader(columns)([pa.RecordBatch.from_arrays([array], ["x"])], tmp_path)
    assert decode_value((tmp_path / SAMPLES).read_bytes())[0].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
