"""Memory of tensors: whether it has the elements as they are, and its bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def is_resolved(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are in memory as they are, one after another.

    Torch negates lazily: ``z.conj().imag`` of a complex ``z`` is a view with a flag, of which memory has the opposite.

    Example:
        >>> one = torch.complex(torch.zeros(1), torch.ones(1))
        >>> is_resolved(one.imag), is_resolved(one.conj().imag), is_resolved(torch.ones(2, 2).T)
        (True, False, False)
    """
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, on its device: a view of its memory if that is resolved, else of a copy.

    Returns:
        ``(num_bytes,)``, of uint8.

    Example:
        >>> as_bytes(torch.tensor([[1, 256]], dtype=torch.int32)).tolist()
        [1, 0, 0, 0, 0, 1, 0, 0]
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor whose memory is resolved, as a view: what is written to it is written to the tensor.

    Returns:
        ``(num_bytes,)``, of uint8.

    Raises:
        ValueError: the memory is not resolved; bytes of a copy would be lost.
    """
    if not is_resolved(tensor):
        raise ValueError(
            f"the bytes of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be written in "
            f"place: call .resolve_conj().resolve_neg().contiguous() on it first"
        )
    return as_bytes(tensor)
