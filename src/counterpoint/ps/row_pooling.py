"""Sums of rows, which travel instead of them: a bag is looked up as its sum, and its gradient is that of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoint.ps.update_rules import invalid_request


@dataclass(frozen=True, slots=True, eq=False)
class RowPooling:
    """Which rows of a tensor each sum takes, one list behind the other.

    Sum ``i`` is that of rows ``members[starts[i]:starts[i + 1]]``, and the last list goes to the end.

    Args:
        members: numbers of rows, int32.
        starts: where each sum's members begin, int32, ascending from 0.

    Example:
        >>> sums = Sums(torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
        >>> sums.of(torch.tensor([[1.0], [10.0], [100.0]]))
        tensor([[101.],
                [ 10.]])
    """

    indices: Tensor
    offsets: Tensor

    def pool(self, values: Tensor) -> Tensor:
        """Return the sums, ``(len(starts), width)``, each added up in the order of its members."""
        if not self.indices.numel() or not values.numel():
            return values.new_zeros((len(self.offsets), *values.shape[1:]))
        return F.embedding_bag(self.indices, values, self.offsets, mode="sum")


def validate_pooling(pooling: RowPooling, key: str, rows: Tensor | None, values: Tensor | None = None) -> None:
    """The lists can be added up.

    Args:
        sums: the lists.
        key: of which table.
        rows: that are pulled or pushed.
        values: what is pushed, of which the sums are the rows' gradients; None for a pull, which sums rows.

    Raises:
        ProtocolError: they cannot.
    """
    if rows is None:
        raise invalid_request(f"sums of {key} without rows")
    num_values, num_sums = (len(rows), len(pooling.offsets)) if values is None else (len(values), len(rows))
    if any(one.dtype != torch.int32 or one.dim() != 1 for one in (pooling.indices, pooling.offsets)):
        raise invalid_request(f"sums of {key} whose lists are not int32 with one dim")
    members, starts = pooling.indices.numpy(), pooling.offsets.numpy()
    if starts.size != num_sums:
        raise invalid_request(f"{starts.size} sums of {key} where {num_sums} belong")
    if members.size and not (starts.size and members.min() >= 0 and members.max() < num_values):
        raise invalid_request(f"sums of {key} of others than its {num_values} parts")
    if starts.size and not (starts[0] == 0 and (starts[1:] >= starts[:-1]).all() and starts[-1] <= members.size):
        raise invalid_request(f"sums of {key} whose lists do not follow one another")
