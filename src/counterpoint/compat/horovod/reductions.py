"""Horovod's reductions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PlanError
from counterpoint.fabric.c10d import ReduceOp
from counterpoint.fabric.collectives.adasum import adasum
from counterpoint.fabric.torch_backend.collectives import TorchReduction, plan_reduction


class ReductionOp(IntEnum):
    """Horovod's reductions, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


TORCH_OPS: Final = {
    ReductionOp.AVERAGE: ReduceOp.AVG,
    ReductionOp.SUM: ReduceOp.SUM,
    ReductionOp.MIN: ReduceOp.MIN,
    ReductionOp.MAX: ReduceOp.MAX,
    ReductionOp.PRODUCT: ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class ScaledReduction:
    """A reduction with its factors.

    Args:
        op: of the reduction.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
    """

    op: ReductionOp = ReductionOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0

    def fabric_reduction(self, dtype: torch.dtype) -> TorchReduction | None:
        """Return the reduction of the fabric; None for Adasum, which needs every rank's tensor.

        Raises:
            PlanError: Adasum of integers.
        """
        if self.op == ReductionOp.ADASUM:
            if not dtype.is_floating_point:
                raise PlanError(
                    f"Adasum of {dtype}: it scales by fractions, so it needs a floating-point dtype; convert the "
                    "tensor, "
                    "or use op=Sum"
                )
            return None
        return plan_reduction(TORCH_OPS[self.op], dtype)


def resolve_op(op: ReductionOp | None, average: bool | None) -> ReductionOp:
    """Return the reduction requested by a call; Average by default.

    Raises:
        PlanError: both arguments are given, or the reduction is unknown.
    """
    if op is not None and average is not None:
        raise PlanError(f"op={op!r} and average={average} are both given; they have the same meaning: give op only")
    if op is None:
        return ReductionOp.SUM if average is False else ReductionOp.AVERAGE
    if op not in set(ReductionOp):
        raise PlanError(f"op={op!r} is not a reduction; give Average, Sum, Adasum, Min, Max or Product")
    return ReductionOp(op)


def scale_in_place(tensor: Tensor, factor: float) -> None:
    """Multiply the tensor in place; integers are rounded towards zero, as in Horovod."""
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def reduce_rows(rows: Tensor, reduction: TorchReduction | None, sizes: list[int]) -> Tensor:
    """Return the reduction of one flat row per rank.

    Args:
        rows: one per rank.
        reduction: that the fabric cannot do by itself; None for Adasum.
        sizes: of the tensors concatenated in a row: each has a separate Adasum.
    """
    if reduction is not None:
        return reduction.combine_rows(rows)
    parts = [torch.split(row, sizes) for row in rows.unbind()]
    return torch.cat([adasum(tensors) for tensors in zip(*parts, strict=True)])
