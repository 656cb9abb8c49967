"""What a fit does beside its steps, checked when it is said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from counterpoint.data.fetch import MapDataset
from counterpoint.errors import PlanError
from counterpoint.optim.options import require_counts
from counterpoint.training.apart import SaveBy
from counterpoint.training.checks import require_folder
from counterpoint.training.evaluation import Measure


@dataclass(frozen=True, slots=True)
class Evaluating:
    """What is measured after every epoch and at the end.

    Args:
        dataset: held-out data; None where nothing is measured.
        measure: how.
        every: measure after so many steps, too.

    Raises:
        PlanError: a number makes no sense.
    """

    dataset: MapDataset | None
    measure: Measure
    every: int | None

    def __post_init__(self) -> None:
        require_counts(optional=True, evaluate_every=self.every)


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints are.

    Args:
        folder: of all of them; None where nothing is saved.
        every: save after so many steps, too.
        keep: how many stay; None keeps all.
        by: who saves; ``stage`` for each stage by itself, without a flush.

    Raises:
        PlanError: it is said when, but not where, or a number makes no sense.
        CheckpointError: there is a file where the folder is to be.
    """

    folder: Path | None
    every: int | None
    keep: int | None
    by: SaveBy

    def __post_init__(self) -> None:
        if self.every is not None and self.folder is None:
            raise PlanError(f"save_every={self.every} says when, but not where; give save_to=FOLDER as well")
        require_counts(optional=True, save_every=self.every, keep=self.keep)
        require_folder(self.folder)


@dataclass(frozen=True, slots=True)
class Reading:
    """How samples are read.

    Args:
        workers: processes of each rank that do; 0 for none but this.
        prefetch: microbatches that each reads ahead.

    Raises:
        PlanError: a number makes no sense.
    """

    workers: int
    prefetch: int

    def __post_init__(self) -> None:
        require_counts(prefetch=self.prefetch)
        require_counts(optional=True, workers=self.workers or None)


@dataclass(frozen=True, slots=True)
class Goals:
    """What a fit is to do.

    Args:
        num_epochs: passes over the dataset.
        max_steps: steps at most.
        evaluating: what is measured.
        saving: where checkpoints are.
        reading: how samples are read.

    Raises:
        PlanError: a number makes no sense.
    """

    num_epochs: int
    max_steps: int | None
    evaluating: Evaluating
    saving: Saving
    reading: Reading

    def __post_init__(self) -> None:
        require_counts(epochs=self.num_epochs)
        require_counts(optional=True, max_steps=self.max_steps)
