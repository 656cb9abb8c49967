"""The gradients that the last step has applied, which ranks keep until the next one."""

from __future__ import annotations

import math

from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.runtime.full_state import gather_grad_norms, gather_grads
from counterpoint.training.built_ranks import BuiltRanks


class StepGradients:
    """The gradients of the last step, read from the ranks.

    Args:
        built: the ranks; None before they are built.
    """

    def __init__(self, built: BuiltRanks | None = None) -> None:
        self.built = built
        self._result: StepResult | LateResult | None = None  # of the last step
        self._are_kept = False  # if that was not skipped

    @property
    def norm(self) -> float:
        """The norm; nan if there was no step, or it was not computed."""
        return math.nan if self._result is None else float(self._result.norm)

    @property
    def exist(self) -> bool:
        """Whether ranks have the gradients of the last step."""
        return self._are_kept and self._result is not None and not self._result.skip_reason

    def record_step(self, result: StepResult | LateResult) -> None:
        """Take note of a step."""
        self._result = result
        self._are_kept = self.built is not None and self.built.keeps_grads and not self.are_shared(self.built)

    def drop(self) -> None:
        """Take note that the ranks have none any more."""
        self._are_kept = False

    def keep_exported(self) -> None:
        """Keep the gradients when ranks leave shared memory; drop them if other processes have a part of it."""
        stores = [] if self.built is None else [rank.interpreter.store for rank in self.built.ranks]
        if self.built is not None and self.exist and self.built.is_single_process:
            for store in stores:
                store.copy_shared_grads()
        elif any(store.is_shared_on_host for store in stores):
            self.drop()

    def read(self) -> dict[str, Tensor]:
        """Return the gradients that the last step has applied, by parameter; a collective call."""
        return self._require().gather(gather_grads)

    def read_norms(self) -> dict[str, float]:
        """Return the norm of each gradient that the last step has applied, by parameter; a collective call."""
        return self._require().gather(gather_grad_norms)

    @staticmethod
    def are_shared(built: BuiltRanks) -> bool:
        """Return whether replicas share rows of embedding tables, whose gradients are not kept after the update."""
        return any(unit.has_shared_rows() for rank in built.ranks for unit in rank.interpreter.store.units.values())

    def _require(self) -> BuiltRanks:
        """Return the ranks, which have the gradients of the last step.

        Raises:
            DataError: they have not.
        """
        built = self.built
        if built is not None and self.exist:
            return built
        if built is not None and not built.keeps_grads:
            raise DataError(
                f"there is no gradient of the last step: under {built.plan} ranks or servers apply several, or those "
                "of earlier batches; compute one from the model, by a backward inside `with step.full_weights() as "
                "model:`"
            )
        if built is not None and self.are_shared(built):
            raise DataError(
                "there is no gradient of the last step: replicas share the rows of embedding tables in memory, where "
                "the next step overwrites them; pass share_params_on_host=False to keep them"
            )
        raise DataError(
            "there is no gradient of a step: none was taken, it was skipped, or the weights were exported or imported "
            "since; read gradients right after the step"
        )
