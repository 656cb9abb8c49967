"""Compression of tensors for communication."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Compressor(Protocol):
    """A pair of functions; any class that has both can be used, including a script's own."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor to send, and the context to undo the compression."""
        ...

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor, up to the loss of the compression."""
        ...


class NoneCompressor:
    """No compression."""

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
    """Floating-point tensors are sent and summed as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor as float16, and its dtype."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(ctx) if isinstance(ctx, torch.dtype) else tensor


class Compression:
    """The compressors that Horovod names."""

    none = NoneCompressor
    fp16 = FP16Compressor
