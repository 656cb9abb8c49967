"""Sum-pooling of rows on the wire: an embedding bag is pulled as its sum, and its gradient is pushed once per bag."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from counterpoint.ps.update_rules import invalid_request


class RowPooling(Struct, frozen=True, forbid_unknown_fields=True, eq=False):
    """Which rows each output sums, in the format of ``torch.nn.functional.embedding_bag``.

    Output ``i`` sums rows ``indices[offsets[i]:offsets[i + 1]]``; the last output runs to the end.

    Args:
        indices: row positions, int32.
        offsets: where the indices of each output begin, int32, ascending from 0.

    Example:
        >>> pooling = RowPooling(torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
        >>> pooling.pool(torch.tensor([[1.0], [10.0], [100.0]]))
        tensor([[101.],
                [ 10.]])
    """

    indices: Tensor
    offsets: Tensor

    def pool(self, values: Tensor) -> Tensor:
        """Return the sums, ``(len(offsets), width)``, each added in the order of its indices."""
        if not self.indices.numel() or not values.numel():
            return values.new_zeros((len(self.offsets), *values.shape[1:]))
        return F.embedding_bag(self.indices, values, self.offsets, mode="sum")


def validate_pooling(pooling: RowPooling, key: str, rows: Tensor | None, values: Tensor | None = None) -> None:
    """Check that indices and offsets are consistent with the rows or values they refer to.

    Args:
        pooling: to be checked.
        key: name of the table, for errors.
        rows: the rows that are pulled or pushed.
        values: the pushed gradients, of which each row's gradient is a sum; None for a pull, which sums rows.

    Raises:
        ProtocolError: they are not consistent.
    """
    if rows is None:
        raise invalid_request(f"pooling of {key} without rows")
    num_values, num_outputs = (len(rows), len(pooling.offsets)) if values is None else (len(values), len(rows))
    if any(tensor.dtype != torch.int32 or tensor.dim() != 1 for tensor in (pooling.indices, pooling.offsets)):
        raise invalid_request(f"pooling of {key} whose indices or offsets are not 1-d int32")
    indices, offsets = pooling.indices.numpy(), pooling.offsets.numpy()
    if offsets.size != num_outputs:
        raise invalid_request(f"{offsets.size} pooled outputs of {key}, expected {num_outputs}")
    if indices.size and not (offsets.size and indices.min() >= 0 and indices.max() < num_values):
        raise invalid_request(f"pooling of {key} with indices outside its {num_values} values")
    if offsets.size and not (offsets[0] == 0 and (offsets[1:] >= offsets[:-1]).all() and offsets[-1] <= indices.size):
        raise invalid_request(f"pooling of {key} whose offsets do not ascend from 0")
