"""Notice weights that a script has set between steps: all ranks are to have set the same.

torch counts the operations in place on each parameter. What the counts show on one rank is told to all with the norm of
the gradients, so that a step in which nothing was set costs no message and no pass over the weights; else all ranks
compare checksums.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric


class WeightChanges:
    """The parameters of a model as the last step has left them.

    Args:
        fabric: this rank's connection to the others.
        module: the model.
    """

    def __init__(self, fabric: Fabric, module: nn.Module) -> None:
        self.fabric, self.module = fabric, module
        self.remember()

    def remember(self) -> None:
        """Take the present weights for those that all ranks have."""
        self.seen, self.were_moved = self._read_versions(), False

    def note_move(self) -> None:
        """Note that a weight was set which has its own memory again."""
        self.were_moved = True

    def are_there(self) -> bool:
        """Return whether this rank has set weights since the last step."""
        return self.were_moved or self._read_versions() != self.seen

    def require_equal(self) -> None:
        """Check that all ranks have the same weights; a collective call.

        Raises:
            DataError: one differs.
        """
        own: Any = {name: checksum_of(param) for name, param in self.module.named_parameters()}
        given: Any = self.fabric.gather_values("the weights of the model", own, tuple(range(self.fabric.num_ranks)))
        for rank, other in enumerate(given):
            differing = [name for name in given[0] if other.get(name) != given[0][name]]
            if differing:
                names = ", ".join(differing[:3]) + (" and others" if differing[3:] else "")
                raise DataError(
                    f"rank {rank} has other numbers in {names} than rank 0: the script has set weights on some ranks "
                    "only; set the same on all ranks, or inside zero.GatheredParameters(params, "
                    "modifier_rank=0), which sends those of one rank"
                )
        self.remember()

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(param.data_ptr(), param._version) for param in self.module.parameters()]  # noqa: SLF001 - torch's count


def checksum_of(tensor: Tensor) -> int:
    """Return a checksum of the bytes of a tensor.

    Example:
        >>> checksum_of(torch.zeros(2)) == checksum_of(torch.zeros(1, 2))
        True
    """
    return crc32(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
