"""MXNet's gradient compression with error feedback: values that are not sent are added to the next gradient."""

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
    """Codec that sends each value as minus the threshold, zero, or the threshold.

    Source:
        MXNet's gradient compression, type ``2bit``, src/kvstore/gradient_compression-inl.h.
    """

    threshold: float = 0.5

    def quantize(self, values: Tensor) -> Tensor:
        """Return the values as received.

        Example:
            >>> import torch
            >>> TwoBit(0.5).quantize(torch.tensor([0.7, 0.5, 0.4, -0.4, -0.5]))
            tensor([ 0.5000,  0.5000,  0.0000,  0.0000, -0.5000])
        """
        above, below = values >= self.threshold, values <= -self.threshold
        return (above.to(values.dtype) - below.to(values.dtype)) * self.threshold

    @property
    def codec(self) -> str:
        """The codec's name in a push to servers; empty if it runs on the worker."""
        return f"twobit:{Decimal(repr(self.threshold)):f}"


@dataclass(frozen=True, slots=True)
class OneBit:
    """Codec that sends each value as 1 above the threshold, and as -1 otherwise.

    Source:
        MXNet's gradient compression, type ``1bit``, src/kvstore/gradient_compression-inl.h; Seide et al., 2014.
    """

    threshold: float = 0.5

    def quantize(self, values: Tensor) -> Tensor:
        """Return the values as received.

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
    """Return the codec that MXNet's compression parameters describe.

    Args:
        params: ``{"type": "2bit", "threshold": 0.5}``; the threshold is optional.

    Raises:
        PlanError: they are invalid.
    """
    given = params if isinstance(params, Mapping) else {}
    unknown = [name for name in given if name not in {"type", "threshold"}]
    kind = CODECS.get(str(given.get("type")))
    if kind is None or unknown:
        raise PlanError(
            f"set_gradient_compression({params!r}): the types are 2bit and 1bit, each with a threshold; give "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    try:
        threshold = float(given.get("threshold", kind().threshold))
    except (TypeError, ValueError):
        threshold = math.nan
    if not math.isfinite(threshold) or (kind is TwoBit and threshold <= 0):
        raise PlanError(
            f"set_gradient_compression({params!r}): the threshold must be a finite number, above 0 for 2bit; give "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    return kind(threshold)


@dataclass(slots=True)
class GradientCompressor:
    """A codec with error feedback.

    Args:
        codec: of the gradients.
        residuals: values not sent yet, by slot: the key, and the device index if a key has several.
    """

    codec: KVCodec
    residuals: dict[Hashable, Tensor] = field(default_factory=dict)

    def compress(self, slot: Hashable, gradient: Tensor) -> Tensor:
        """Return the gradient as received; what is lost is added to the next gradient of the slot.

        Example:
            >>> import torch
            >>> half = GradientCompressor(TwoBit(0.5))
            >>> [half.compress("w", torch.tensor([number])).item() for number in (0.4, 0.2, 0.0)]
            [0.0, 0.5, 0.0]
        """
        total = self.add_residual(slot, gradient)
        received = self.codec.quantize(total)
        total.sub_(received)
        return received

    def add_residual(self, slot: Hashable, gradient: Tensor) -> Tensor:
        """Return the gradient plus the slot's residual; the caller subtracts from it what it sends."""
        total = self.residuals.get(slot)
        total = gradient.detach().clone() if total is None else total.add_(gradient.detach())
        self.residuals[slot] = total
        return total
