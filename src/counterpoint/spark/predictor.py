"""A trained model in the Python workers of Spark: columns in, and a number and the outputs of each sample out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load as read_tensors
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.spark.training_spec import BroadcastBytes, load_values

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Predictor:
    """What a task does with batches of samples.

    Args:
        run: a name that no other model has.
        model: without the numbers of its parameters and buffers.
        still: those.
        columns: the names of the inputs.
        dtype: what floating-point inputs are brought to.
        rows: samples that are computed at a time.
    """

    run_id: str
    model: nn.Module
    constants: BroadcastBytes
    columns: tuple[str, ...]
    dtype: torch.dtype
    batch_rows: int = 1024

    def __call__(self, batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        """Yield a prediction and the outputs of each sample, batch by batch."""
        import pandas as pd

        model = _load_model(self)
        for batch in batches:
            fields = [self._tensor(column, name) for column, name in zip(batch, self.columns, strict=True)]
            parts = [self._outputs(model, fields, start) for start in range(0, len(batch[0]), self.batch_rows)]
            outputs = torch.cat(parts) if parts else torch.zeros(0, 1)
            numbers = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(1)
            yield pd.DataFrame({"prediction": numbers.double().numpy(), "raw": list(outputs.double().numpy())})

    def _outputs(self, model: nn.Module, fields: Sequence[Tensor], start: int) -> Tensor:
        """Return the outputs of some samples, a row each.

        Raises:
            DataError: the model gives something else.
        """
        count = len(fields[0][start : start + self.batch_rows])
        with torch.inference_mode():
            found = model(*(one[start : start + self.batch_rows] for one in fields))
        if not isinstance(found, Tensor) or found.dim() == 0 or len(found) != count or found.dim() > 2:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise DataError(
                f"the model gives {shape} for {count} samples; a transformer needs a number or a row of numbers for "
                "each sample: put what picks them out into the model"
            )
        return found.reshape(count, -1)

    def _tensor(self, column: pd.Series, name: str) -> Tensor:
        """Return a column of a batch as a tensor, the samples along its first dim.

        Raises:
            DataError: a row has nothing in it, or lists differ in length.
        """
        if column.isna().any():
            raise DataError(
                f"a row has nothing (null) in column {name}; drop such rows with df.dropna(), or fill them in"
            )
        if not len(column):
            return torch.zeros(0)
        rows = [np.stack(value) if np.asarray(value).dtype.kind == "O" else value for value in column]
        shapes = {np.shape(row) for row in rows}
        if len(shapes) > 1:
            raise DataError(
                f"column {name} has values of shapes {sorted(shapes)}; all samples have the same shape: pad them, or "
                "cut them"
            )
        array = np.stack(rows) if shapes != {()} else column.to_numpy()
        found = torch.tensor(array)
        return found.to(self.dtype) if found.is_floating_point() else found


def _load_model(predictor: Predictor) -> nn.Module:
    """Return this process's model with its numbers, made when it is first asked for."""
    kept = _model_slot(predictor.run_id)
    if not kept:
        model = predictor.model
        load_values(model, read_tensors(predictor.constants.value))
        kept.append(model.eval())
    return kept[0]


@lru_cache(maxsize=4)
def _model_slot(run_id: str) -> list[nn.Module]:
    """Return the place of a model in this process; those of the last few stay."""
    del run_id
    return []
