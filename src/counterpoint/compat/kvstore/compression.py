"""Gradient compression: what is too small to be sent now stays on the worker, and is added to the next gradient."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

from torch import Tensor

from counterpoint.errors import PlanError


@dataclass(frozen=True, slots=True)
class TwoBit:
    """Each number travels as minus the threshold, nothing, or the threshold.

    Source:
        MXNet's gradient compression, type ``2bit``, src/kvstore/gradient_compression-inl.h.
    """

    threshold: float = 0.5

    def quantize(self, values: Tensor) -> Tensor:
        """Return what arrives.

        Example:
            >>> import torch
            >>> TwoBit(0.5).quantize(torch.tensor([0.7, 0.5, 0.4, -0.4, -0.5]))
            tensor([ 0.5000,  0.5000,  0.0000,  0.0000, -0.5000])
        """
        above, below = values >= self.threshold, values <= -self.threshold
        return (above.to(values.dtype) - below.to(values.dtype)) * self.threshold

    @property
    def codec(self) -> str:
        """The code in which a push to servers says the same."""
        return f"twobit:{Decimal(repr(self.threshold)):f}"


@dataclass(frozen=True, slots=True)
class OneBit:
    """Each number travels as 1 where it is above the threshold, and as -1 elsewhere.

    Source:
        MXNet's gradient compression, type ``1bit``, src/kvstore/gradient_compression-inl.h; Seide et al., 2014.
    """

    threshold: float = 0.5

    def quantize(self, values: Tensor) -> Tensor:
        """Return what arrives.

        Example:
            >>> import torch
            >>> OneBit(0.0).quantize(torch.tensor([0.7, 0.0, -0.4]))
            tensor([ 1., -1., -1.])
        """
        return (values > self.threshold).to(values.dtype) * 2 - 1

    codec = ""


KVCodec: TypeAlias = TwoBit | OneBit
CODECS: dict[str, type[KVCodec]] = {"2bit": TwoBit, "1bit": OneBit}


def parse_compression(params: object) -> KVCodec:
    """Return the code that parameters describe.

    Args:
        params: ``{"type": "2bit", "threshold": 0.5}``; the threshold may be missing.

    Raises:
        PlanError: they describe none.
    """
    found = params if isinstance(params, Mapping) else {}
    unknown = [name for name in found if name not in {"type", "threshold"}]
    kind = CODECS.get(str(found.get("type")))
    if kind is None or unknown:
        raise PlanError(
            f"set_gradient_compression({params!r}): there are the types 2bit and 1bit, each with a threshold; write "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    try:
        threshold = float(found.get("threshold", kind().threshold))
    except (TypeError, ValueError):
        threshold = math.nan
    if not math.isfinite(threshold) or (kind is TwoBit and threshold <= 0):
        raise PlanError(
            f"set_gradient_compression({params!r}): the threshold is a number, above 0 for 2bit; write "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    return kind(threshold)


@dataclass(slots=True)
class GradientCompressor:
    """A code, and what it has not sent.

    Args:
        code: which.
        unsent: by key, and by place where a key has several.
    """

    codec: KVCodec
    residuals: dict[Hashable, Tensor] = field(default_factory=dict)

    def compress(self, slot: Hashable, gradient: Tensor) -> Tensor:
        """Return what arrives of a gradient; what does not is added to the next one of this place.

        Example:
            >>> import torch
            >>> half = GradientCompressor(TwoBit(0.5))
            >>> [half.compress("w", torch.tensor([number])).item() for number in (0.4, 0.2, 0.0)]
            [0.0, 0.5, 0.0]
        """
        total = self.add_residual(slot, gradient)
        sent = self.codec.quantize(total)
        total.sub_(sent)
        return sent

    def add_residual(self, slot: Hashable, gradient: Tensor) -> Tensor:
        """Return a gradient with what was not sent before, for a sender that takes off what it sends."""
        total = self.residuals.get(slot)
        total = gradient.detach().clone() if total is None else total.add_(gradient.detach())
        self.residuals[slot] = total
        return total
