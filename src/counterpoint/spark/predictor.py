"""Prediction in Spark's Python workers: input columns in, predictions and raw outputs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.spark.training_spec import BroadcastBytes, load_values
from counterpoint.value_codec import decode_value

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Predictor:
    """Prediction function for the batches of a Spark task.

    Args:
        run_id: unique name of the model.
        model: on the ``meta`` device.
        constants: the model's parameters and buffers.
        columns: names of the input columns.
        dtype: dtype that floating-point inputs are converted to.
        batch_rows: samples per forward pass.
    """

    run_id: str
    model: nn.Module
    constants: BroadcastBytes
    columns: tuple[str, ...]
    dtype: torch.dtype
    batch_rows: int = 1024

    def __call__(self, batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        """Yield the prediction and the raw outputs of each sample, batch by batch."""
        import pandas as pd

        model = _load_model(self)
        for batch in batches:
            fields = [self._tensor(column, name) for column, name in zip(batch, self.columns, strict=True)]
            parts = [self._outputs(model, fields, start) for start in range(0, len(batch[0]), self.batch_rows)]
            outputs = torch.cat(parts) if parts else torch.zeros(0, 1)
            predictions = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(1)
            yield pd.DataFrame({"prediction": predictions.double().numpy(), "raw": list(outputs.double().numpy())})

    def _outputs(self, model: nn.Module, fields: Sequence[Tensor], start: int) -> Tensor:
        """Return the outputs of some samples as ``(samples, outputs)``.

        Raises:
            DataError: the model returns something else.
        """
        count = len(fields[0][start : start + self.batch_rows])
        with torch.inference_mode():
            outputs = model(*(field[start : start + self.batch_rows] for field in fields))
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != count or outputs.dim() > 2:
            shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise DataError(
                f"the model returns {shape} for {count} samples; a Spark transformer needs one number or one row of "
                "numbers per sample: select them inside the model"
            )
        return outputs.reshape(count, -1)

    def _tensor(self, column: pd.Series, name: str) -> Tensor:
        """Return a column of a batch as a tensor, the samples along its first dim.

        Raises:
            DataError: a value is null, or lists differ in length.
        """
        if column.isna().any():
            raise DataError(
                f"a row is null in column {name}; drop such rows with df.dropna(), or fill them with df.fillna()"
            )
        if not len(column):
            return torch.zeros(0)
        rows = [np.stack(value) if np.asarray(value).dtype.kind == "O" else value for value in column]
        shapes = {np.shape(row) for row in rows}
        if len(shapes) > 1:
            raise DataError(
                f"column {name} has values of shapes {sorted(shapes)}; all samples must have the same shape: pad or "
                "truncate them"
            )
        array = np.stack(rows) if shapes != {()} else column.to_numpy()
        tensor = torch.tensor(array)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _load_model(predictor: Predictor) -> nn.Module:
    """Return this process's model with its values, built on first use."""
    slot = _model_slot(predictor.run_id)
    if not slot:
        model = predictor.model
        load_values(model, decode_value(predictor.constants.value))
        slot.append(model.eval())
    return slot[0]


@lru_cache(maxsize=4)
def _model_slot(run_id: str) -> list[nn.Module]:
    """Return the cache slot of a model in this process; the last few models stay cached."""
    del run_id
    return []
