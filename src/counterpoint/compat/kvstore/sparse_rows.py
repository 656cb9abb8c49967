"""MXNet's row_sparse arrays as torch tensors that are sparse in the first dim and dense in the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoint.errors import PlanError


def is_row_sparse(what: str, tensor: Tensor) -> bool:
    """Return whether a tensor is sparse in its first dim.

    Raises:
        PlanError: it has another sparse layout.
    """
    if tensor.layout is torch.strided:
        return False
    if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != 1 or tensor.dim() < 2:
        dims = f", of {tensor.dim()} dims" if tensor.layout is torch.sparse_coo else ""
        raise PlanError(
            f"{what} with a tensor of layout {tensor.layout}{dims}: a row-sparse tensor is sparse in the first dim "
            "only; "
            "give tensor.to_dense().to_sparse(1)"
        )
    return True


def sum_tensors(values: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in their order, on the device of the first, as a new tensor.

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
    """Return row indices sorted and unique, on the CPU.

    Raises:
        PlanError: they are not integers, or out of range.

    Example:
        >>> normalize_row_ids("row_sparse_pull", torch.tensor([[2, 0], [2, 2]]), 3)
        tensor([0, 2])
    """
    if row_ids.is_floating_point() or row_ids.is_complex() or row_ids.dtype is torch.bool:
        raise PlanError(f"{what} with row_ids of {row_ids.dtype}: row indices are integers; give row_ids.long()")
    indices: Tensor = row_ids.detach().cpu().long().reshape(-1).unique()  # type: ignore[no-untyped-call]
    if len(indices) and not (int(indices[0]) >= 0 and int(indices[-1]) < num_rows):
        raise PlanError(
            f"{what} with row_ids from {int(indices[0])} to {int(indices[-1])}, but the key has {num_rows} rows; give "
            f"indices from 0 to {num_rows - 1}"
        )
    return indices


def write_rows(out: Tensor, row_ids: Tensor, values: Tensor) -> None:
    """Replace a sparse tensor by these rows, or only these rows of a dense tensor."""
    with torch.no_grad():
        if out.layout is torch.sparse_coo:
            indices, parts = row_ids[None].to(out.device), values.to(out.device, out.dtype)
            sparse = torch.sparse_coo_tensor(indices, parts, out.shape, check_invariants=False, is_coalesced=True)
            out.copy_(sparse)
        else:
            out[row_ids.to(out.device)] = values.to(out.device, out.dtype)
