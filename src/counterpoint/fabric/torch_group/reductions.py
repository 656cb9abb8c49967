"""How torch lets numbers of several ranks become one: in the fabric's verbs or, where it has none, one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import ProgramError
from counterpoint.fabric.fabric import Verb
from counterpoint.fabric.gloo import ReduceOp

Fold = Callable[[Tensor, Tensor], Tensor]

SUM: Final = ReduceOp.SUM
VERBS: Final[tuple[tuple[ReduceOp.RedOpType, Verb], ...]] = (
    (ReduceOp.SUM, "sum"), (ReduceOp.AVG, "mean"), (ReduceOp.MAX, "max"), (ReduceOp.MIN, "min"),
)  # fmt: skip
FOLDS: Final[tuple[tuple[ReduceOp.RedOpType, Fold], ...]] = (
    (ReduceOp.PRODUCT, torch.mul), (ReduceOp.BAND, torch.bitwise_and),
    (ReduceOp.BOR, torch.bitwise_or), (ReduceOp.BXOR, torch.bitwise_xor),
)  # fmt: skip
WIDER: Final = {torch.bool: torch.int32, torch.uint8: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32}


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is to be done with tensors of one dtype.

    Attributes:
        verb: of the fabric, on tensors of the dtype ``through``.
        through: the dtype that the fabric is given; a sum of narrower ones wraps as it does in torch.
        fold: where the fabric has no verb: of two ranks' tensors; the verb then means nothing.
        divides: whether a sum is to be divided by the number of ranks, towards zero: the mean of whole numbers.
    """

    verb: Verb
    through: torch.dtype
    fold: Fold | None = None
    divides: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether the fabric's verb leaves nothing to do."""
        return self.fold is None and not self.divides

    def ended(self, reduced: Tensor, num_ranks: int, dtype: torch.dtype) -> Tensor:
        """Return what the fabric has reduced as the program wants it."""
        whole = torch.div(reduced, num_ranks, rounding_mode="trunc") if self.divides else reduced
        return whole if whole.dtype == dtype else whole.to(dtype)

    def folded(self, rows: Tensor) -> Tensor:
        """Return what becomes of one row per rank, in their order."""
        assert self.fold is not None
        return reduce(self.fold, rows.unbind())


def reduction_of(op: ReduceOp | ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Return how an operation of torch is done here.

    Raises:
        ProgramError: it is not known here.
    """
    for known, verb in VERBS:
        if op == known:
            through = WIDER.get(dtype, dtype)
            if dtype == torch.bool and verb == "sum":  # True and True is True, not 2
                return Reduction("max", through)
            if verb == "mean" and not through.is_floating_point:
                return Reduction("sum", through, divides=True)
            return Reduction(verb, through)
    for known, fold in FOLDS:
        if op == known:
            return Reduction("sum", dtype, fold)
    raise ProgramError(
        f"{op} of {dtype} is none of the reductions of backend counterpoint (sum, avg, max, min, product, band, bor, "
        "bxor); scale the tensor before you add it up, or use the gloo backend"
    )
