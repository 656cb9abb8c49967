"""How numbers of several ranks become one, by Horovod's names."""

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
    """Horovod's reductions; the numbers are Horovod's, too."""

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
        op: which.
        prescale: what every rank's numbers are multiplied by before.
        postscale: what the result is multiplied by.
    """

    op: ReductionOp = ReductionOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0

    def fabric_reduction(self, dtype: torch.dtype) -> TorchReduction | None:
        """Return how the fabric does it; None for Adasum, which needs every rank's tensor at once.

        Raises:
            PlanError: Adasum of whole numbers.
        """
        if self.op == ReductionOp.ADASUM:
            if not dtype.is_floating_point:
                raise PlanError(
                    f"Adasum of {dtype}: it scales by fractions, which whole numbers cannot hold; convert the tensor "
                    "to a floating point type, or use op=Sum"
                )
            return None
        return plan_reduction(TORCH_OPS[self.op], dtype)


def resolve_op(op: ReductionOp | None, average: bool | None) -> ReductionOp:
    """Return the reduction that a call asks for; the mean where it does not say.

    Raises:
        PlanError: both arguments are given, or the reduction is none.
    """
    if op is not None and average is not None:
        raise PlanError(f"op={op!r} and average={average} are both given; they say the same thing: give op alone")
    if op is None:
        return ReductionOp.SUM if average is False else ReductionOp.AVERAGE
    if op not in set(ReductionOp):
        raise PlanError(
            f"op={op!r} is no reduction; there are Average, Sum, Adasum, Min, Max and Product: give one of them"
        )
    return ReductionOp(op)


def scale_in_place(tensor: Tensor, factor: float) -> None:
    """The tensor is multiplied, in place; whole numbers are rounded towards zero, as Horovod does."""
    if factor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def reduce_rows(rows: Tensor, reduction: TorchReduction | None, sizes: list[int]) -> Tensor:
    """Return what becomes of one flat row per rank.

    Args:
        rows: one per rank.
        reduction: of the fabric, one that it does not do by itself; None for Adasum.
        sizes: of the tensors that lie in a row back to back: each has an Adasum of its own.
    """
    if reduction is not None:
        return reduction.combine_rows(rows)
    parts = [torch.split(row, sizes) for row in rows.unbind()]
    return torch.cat([adasum(tensors) for tensors in zip(*parts, strict=True)])
