"""What MXNet calls a row_sparse array is a sparse tensor here whose first dim is sparse and whose others are dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.errors import PlanError


def is_row_sparse(what: str, tensor: Tensor) -> bool:
    """Tell whether a tensor has its rows by number.

    Raises:
        PlanError: it is sparse in another way.
    """
    if tensor.layout is torch.strided:
        return False
    if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != 1 or tensor.dim() < 2:
        dims = f", of {tensor.dim()} dims" if tensor.layout is torch.sparse_coo else ""
        raise PlanError(
            f"{what} with a tensor of layout {tensor.layout}{dims}: rows by number are sparse in the first dim only; "
            "give tensor.to_dense().to_sparse(1)"
        )
    return True


def sum_tensors(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in their order, on the device of the first, as a tensor that is nobody else's.

    Example:
        >>> rows = torch.eye(2).to_sparse(1)
        >>> sum_tensors([rows, rows]).to_dense()
        tensor([[2., 0.],
                [0., 2.]])
    """
    total = values[0].detach()
    if total.layout is torch.sparse_coo:
        indices = torch.cat([value.detach()._indices().to(total.device) for value in values], dim=1)  # noqa: SLF001 - not coalesced
        parts = torch.cat([value.detach()._values().to(total.device) for value in values])  # noqa: SLF001 - likewise
        return torch.sparse_coo_tensor(indices, parts, total.shape, check_invariants=False).coalesce()
    total = total.clone(memory_format=torch.contiguous_format)
    for value in values[1:]:
        total += value.detach().to(total.device)
    return total


def normalize_row_ids(what: str, row_ids: Tensor, num_rows: int) -> Tensor:
    """Return numbers of rows ascending and each once, on the CPU.

    Raises:
        PlanError: they are no whole numbers, or not of these rows.

    Example:
        >>> normalize_row_ids("row_sparse_pull", torch.tensor([[2, 0], [2, 2]]), 3)
        tensor([0, 2])
    """
    if row_ids.is_floating_point() or row_ids.is_complex() or row_ids.dtype is torch.bool:
        raise PlanError(f"{what} with row_ids of {row_ids.dtype}: rows have whole numbers; give row_ids.long()")
    numbers: Tensor = row_ids.detach().cpu().long().reshape(-1).unique()  # type: ignore[no-untyped-call]
    if len(numbers) and not (int(numbers[0]) >= 0 and int(numbers[-1]) < num_rows):
        raise PlanError(
            f"{what} with row_ids from {int(numbers[0])} to {int(numbers[-1])}, of {num_rows} rows: they count from 0"
        )
    return numbers


def write_rows(out: Tensor, numbers: Tensor, values: Tensor) -> None:
    """A sparse tensor has these rows and no others; of a dense one these rows have changed, and no others."""
    with torch.no_grad():
        if out.layout is torch.sparse_coo:
            indices, parts = numbers[None].to(out.device), values.to(out.device, out.dtype)
            made = torch.sparse_coo_tensor(indices, parts, out.shape, check_invariants=False, is_coalesced=True)
            out.copy_(made)
        else:
            out[numbers.to(out.device)] = values.to(out.device, out.dtype)
