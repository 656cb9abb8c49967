"""Notice weights that a script has set between steps: all ranks are to have set the same.

torch counts the operations in place on each parameter. What the counts show on one rank is sent to all with the norm of
the gradients, so that a step in which nothing was set costs no message and no pass over the weights; else all ranks
compare checksums.
"""

from __future__ import annotations

from torch import nn

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric
from counterpoint.training.agreement.weight_values import find_differing_weights


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

    def has_changes(self) -> bool:
        """Return whether this rank has set weights since the last step."""
        return self.were_moved or self._read_versions() != self.seen

    def require_equal(self) -> None:
        """Check that all ranks have the same weights; a collective call.

        Raises:
            DataError: one differs.
        """
        differing = find_differing_weights(self.fabric, self.module)
        if differing is not None:
            raise DataError(
                "rank {} has other numbers in {} than rank 0: the script has set weights on some ranks only; set the "
                "same on all ranks, or inside zero.GatheredParameters(params, modifier_rank=0), which sends those of "
                "one rank".format(*differing)
            )
        self.remember()

    def _read_versions(self) -> list[tuple[int, int]]:
        return [(param.data_ptr(), param._version) for param in self.module.parameters()]  # noqa: SLF001 - torch's count
