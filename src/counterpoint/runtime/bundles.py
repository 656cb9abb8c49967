"""What is alive at a boundary between blocks, and the gradients of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Grads = list["Tensor | None"]


@dataclass(slots=True)
class Bundle:
    """The values at one boundary, detached, and which of them carry a gradient."""

    values: tuple[Tensor, ...]
    carries: tuple[bool, ...]

    @staticmethod
    def of(outputs: Sequence[Tensor]) -> Bundle:
        """Return the results of a segment as the bundle behind it."""
        return Bundle(tuple(output.detach() for output in outputs), tuple(output.requires_grad for output in outputs))

    def leaves(self) -> list[Tensor]:
        """Return the values as leaves of autograd."""
        pairs = zip(self.values, self.carries, strict=True)
        return [value.detach().requires_grad_() if carries else value for value, carries in pairs]


def no_gradients(count: int) -> Grads:
    """Return that many missing gradients."""
    return [None] * count
