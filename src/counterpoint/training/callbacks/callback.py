"""The callback interface of a fit, its events, and a history of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.program.trace import Trace

if TYPE_CHECKING:
    from counterpoint.planner.choose import PlanChoice


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run is about to take its first step.

    Args:
        compiled: the plan, its program and its verification result.
        first_step: the number of the first step; above 0 for a resumed run.
        num_steps: steps of the whole run; None for a stream of batches whose length is not known.
        batch_size: samples of one global batch, of the first one if they differ.
        choice: the candidates of ``strategy="auto"``.
        resume_path: where the run looked for a checkpoint to continue from; None if it was not asked to.
        checkpoint: the checkpoint that it continues from; None if it starts.
    """

    compiled: CompiledPlan
    first_step: int
    num_steps: int | None
    batch_size: int
    choice: PlanChoice | None = None
    resume_path: Path | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class StepEnd:
    """One step is done.

    Args:
        step: its number, from 0.
        epoch: the epoch of its batch.
        loss: mean over the samples of the batch (of this worker's part under an asynchronous server).
        num_samples: samples of the batch (of this worker's part).
        seconds: its duration, including reading the batch.
        grad_norm: global norm; nan if it was not needed.
        skip_reason: why the update was skipped; empty if it was applied.
        options: learning rate and so on, of the first parameter group.
        busy_s: by rank, the seconds in which it did not wait for other ranks, if it commits together with this one.
        loss_parts: of a loss that is a dict, the mean of each entry.
        loss_scale: the factor of its losses in backward.
    """

    step: int
    epoch: int
    loss: float
    num_samples: int
    seconds: float
    grad_norm: float
    skip_reason: str
    options: Mapping[str, float]
    busy_s: Mapping[int, float] = field(default_factory=dict)
    loss_parts: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank takes longer for its part of a step than the others, much longer than was said before, or no longer.

    Args:
        rank: which.
        since_step: the first step in which it took so long.
        until_step: the first one in which it did not; None while it does.
        busy_s: its seconds per step without waiting for others, the median of the last steps.
        others_busy_s: the same of the other ranks.
    """

    rank: int
    since_step: int
    until_step: int | None
    busy_s: float
    others_busy_s: float

    @property
    def excess_s(self) -> float:
        """How much longer it takes than the others."""
        return self.busy_s - self.others_busy_s

    def __str__(self) -> str:
        """Return it as a sentence, with steps counted from 1 as in a progress line."""
        if self.until_step is not None:
            return f"rank {self.rank} was slow from step {self.since_step + 1} to {self.until_step}"
        return (
            f"rank {self.rank} is slow since step {self.since_step + 1}: busy {self.busy_s * 1000:.3g} ms of a step, "
            f"the others {self.others_busy_s * 1000:.3g} ms"
        )


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """The model was evaluated on held-out data after this many steps."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TraceRecorded:
    """One step was traced on every rank, instruction by instruction."""

    step: int
    trace: Trace


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint was written."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be written; the run continues, and earlier checkpoints are intact.

    Args:
        step: whose checkpoint it would have been.
        num_failed: the checkpoints of this fit that failed, with this one.
        reason: what failed.
    """

    step: int
    num_failed: int
    reason: str


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run has ended; ``error`` is the reason if it ended early."""

    num_steps: int
    error: BaseException | None = None


class Callback:
    """Receives the events of a run; override any method. Called on rank 0 only, unless ``on_every_rank`` is set."""

    on_every_rank = False

    def on_start(self, event: RunStart) -> None:
        """A run starts."""
        return

    def on_step(self, event: StepEnd) -> None:
        """A step is done."""
        return

    def on_evaluation(self, event: EvaluationEnd) -> None:
        """Held-out data was evaluated."""
        return

    def on_trace(self, event: TraceRecorded) -> None:
        """A step was traced."""
        return

    def on_slow_rank(self, event: SlowRank) -> None:
        """A rank has become slower than the others, or is no longer."""
        return

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """A checkpoint was written."""
        return

    def on_checkpoint_failed(self, event: CheckpointFailed) -> None:
        """A checkpoint could not be written."""
        return

    def on_end(self, event: RunEnd) -> None:
        """The run has ended."""
        return


def callbacks_on_every_rank(callbacks: Iterable[Callback]) -> list[Callback]:
    """Return the callbacks that are called on every rank."""
    return [callback for callback in callbacks if callback.on_every_rank]


@dataclass(slots=True)
class History(Callback):
    """Records every step and evaluation of a run.

    Args:
        steps: all steps, in order.
        evaluations: all evaluations, in order.
    """

    steps: list[StepEnd] = field(default_factory=list)
    evaluations: list[EvaluationEnd] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step.loss for step in self.steps]

    def on_step(self, event: StepEnd) -> None:
        """Record a step."""
        self.steps.append(event)

    def on_evaluation(self, event: EvaluationEnd) -> None:
        """Record an evaluation."""
        self.evaluations.append(event)
