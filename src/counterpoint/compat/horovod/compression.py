"""What is done with a tensor before it travels and after."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Compressor(Protocol):
    """A pair of functions; any class that has both will do, a script's own, too."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return what travels, and what is needed to undo it."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor as it was, but for what the compression has lost."""
        ...


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor itself."""
        del ctx
        return tensor


class FP16Compressor:
    """Numbers with a fraction travel as float16, and are added up in it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor in float16, and its dtype."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor in its dtype."""
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) else tensor


class Compression:
    """The compressions that Horovod names."""

    none = NoneCompressor
    fp16 = FP16Compressor
