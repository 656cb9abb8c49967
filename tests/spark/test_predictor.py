"""Batches of columns through a model, as a task of Spark's does it."""

import numpy as np
import pytest
import torch
from torch import nn

from counterpoint import DataError
from counterpoint.spark.barrier_fit import named_tensors
from counterpoint.spark.predictor import Predictor
from counterpoint.spark.training_spec import LocalBytes, meta_copy
from counterpoint.value_codec import encode_value
from tests.spark.models import Sum

pd = pytest.importorskip("pandas", reason="there is no pandas; pip install 'counterpoint[spark]'")


class ReturnsPair(nn.Module):
    """No tensor."""

    def forward(self, x):
        return x, x


def predict(model, *columns, run):
    values = LocalBytes(encode_value(named_tensors(model), "values"))
    names = tuple(f"column_{at}" for at in range(len(columns)))
    predictor = Predictor(run, meta_copy(model), values, names, torch.float64, batch_rows=2)
    return list(predictor(iter([tuple(map(pd.Series, columns))])))


def test_the_class_of_the_greatest_output_and_all_outputs_come_out():
    model = nn.Linear(2, 3).double()
    rows = [np.array([1.0, 2.0]), np.array([0.5, 0.25]), np.array([-1.0, 4.0])]
    (result,) = predict(model, rows, run="linear")
    expected = model(torch.tensor(np.stack(rows))).detach()
    assert np.allclose(np.stack(result["raw"]), expected.numpy(), rtol=1e-12)
    assert result["prediction"].tolist() == expected.argmax(1).tolist()


def test_one_output_is_the_prediction_and_inputs_may_be_several():
    (result,) = predict(Sum(), [np.array([1.0, 2.0]), np.array([3.0, 4.0])], [10, 20], run="sum")
    assert result["prediction"].tolist() == [13.0, 27.0]
    assert [list(raw) for raw in result["raw"]] == [[13.0], [27.0]]


def test_a_batch_without_rows_has_no_predictions():
    (result,) = predict(nn.Linear(2, 3), [], run="empty")
    assert len(result) == 0


@pytest.mark.parametrize(
    ("model", "column", "message"),
    [
        (nn.Linear(2, 3), [np.array([1.0, 2.0]), None], r"a row is null in column column_0"),
        (nn.Linear(2, 3), [np.array([1.0, 2.0]), np.array([1.0])], "column column_0 has values of shapes"),
        (ReturnsPair(), [np.array([1.0, 2.0])], "the model returns tuple for 1 samples"),
        (nn.Unflatten(1, (1, 2)), [np.array([1.0, 2.0])], r"the model returns \[1, 1, 2\] for 1 samples"),
    ],
)
def test_what_is_no_sample_or_no_prediction_is_named(model, column, message, request):
    with pytest.raises(DataError, match=message):
        predict(model, column, run=request.node.name)
