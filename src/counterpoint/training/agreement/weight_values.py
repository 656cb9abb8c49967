"""Compare the weights that ranks have in their models, by checksums."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from torch import Tensor, nn

from counterpoint.fabric.fabric import Fabric
from counterpoint.tensor_bytes import as_bytes


def find_differing_weights(fabric: Fabric, module: nn.Module) -> tuple[int, str] | None:
    """Return the first rank whose parameters differ from those of rank 0; a collective call.

    Args:
        fabric: this rank's connection to the others.
        module: this rank's model.

    Returns:
        The rank, and the names of the first parameters that differ; None if all are equal.
    """
    own: Any = {name: checksum_of(param) for name, param in module.named_parameters() if not param.is_meta}
    given: Any = fabric.gather_values("the weights of the model", own, tuple(range(fabric.num_ranks)))
    for rank, other in enumerate(given):
        differing = [name for name in given[0] if other.get(name) != given[0][name]]
        if differing:
            return rank, ", ".join(differing[:3]) + (" and others" if differing[3:] else "")
    return None


def checksum_of(tensor: Tensor, start: int = 0) -> int:
    """Return a checksum of the bytes of a tensor on any device.

    Args:
        tensor: its shape does not count.
        start: the checksum of what comes before it.

    Example:
        >>> import torch
        >>> checksum_of(torch.zeros(2)) == checksum_of(torch.zeros(1, 2))
        True
    """
    return crc32(as_bytes(tensor.cpu()).numpy().data, start)
