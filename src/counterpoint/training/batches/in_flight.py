"""The batches that are under way: one in a synchronous step, several in a stream, none behind a flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError
from counterpoint.fabric.shm.segments import available_bytes
from counterpoint.program.step_variants import StepVariant
from counterpoint.runtime.microbatches import AsyncPipelineBatches, MicrobatchSource
from counterpoint.training.options import TrainingOptions


@dataclass(slots=True)
class InFlightBatches:
    """What the next steps are fed. The step of a stream finishes the batch of its number and begins later ones.

    A batch that is not there is empty: nothing is done for it. So a stream begins with steps of the numbers before its
    first batch, of which only the beginnings of later ones are left, and is flushed by steps without later ones.

    Args:
        ahead: how many batches behind its own one a step begins.
        stride: how many microbatches a batch has.
        feeds: the batches under way, by the number of their step.
    """

    lookahead: int = 0
    microbatches_per_batch: int = 0
    batches: dict[int, MicrobatchSource] = field(default_factory=dict)

    @staticmethod
    def for_variant(variant: StepVariant) -> InFlightBatches:
        """Return the flight of a plan's steps."""
        return InFlightBatches(variant.lookahead, variant.microbatches_per_batch)

    def batch_source(self, number: int) -> MicrobatchSource:
        """Return what the step of this number is fed."""
        return (
            AsyncPipelineBatches(self.batches, number, self.lookahead, self.microbatches_per_batch)
            if self.lookahead
            else self.batches[number]
        )

    def warmup_steps(self, number: int) -> range:
        """Return the steps that come before one of this number so that its batch has begun; none in mid-stream."""
        return range(number - self.lookahead, number) if number not in self.batches else range(0)

    def require_flushed(self, what: str) -> None:
        """Check that no batch is under way.

        Raises:
            PlanError: one is.
        """
        if self.lookahead and self.batches:
            batches = f"{len(self.batches)} batch{'es' if len(self.batches) > 1 else ''}"
            raise PlanError(
                f"{what} comes while {batches} are under way in a pipeline that does not flush after every step; let "
                "fit(...) do it, which flushes first: evaluate_every=, save_every=, or at the end of an epoch; in a "
                "loop of your own call step.flush() before"
            )


def require_known_grad_norm(compiled: CompiledPlan, options: TrainingOptions) -> None:
    """Check that stages know the norm that gradients are clipped by.

    Raises:
        PlanError: it is that of all stages, which do not wait for each other; or that of one, and they do.
    """
    clip, by = options.clip_norm, options.clip_by
    is_stream = compiled.step_variants[-1].lookahead > 0
    if by == "stage" and clip is None:
        raise PlanError("clip_by='stage' says by whose norm gradients are clipped, but not how far; give clip_norm=1.0")
    if by == "stage" and not is_stream:
        raise PlanError(
            f"clip_by='stage' clips each stage by its own norm, and so trains otherwise than solo, but under "
            f"{compiled.plan} the norm of the whole model is known; leave clip_by out"
        )
    if by == "model" and clip is not None and is_stream:
        raise PlanError(
            f"clip_norm={clip} is a norm over all stages, but those of {compiled.plan} update each for itself, without "
            "waiting for the others; give clip_by='stage' to clip each stage by its own norm, or take schedule=one_f_one_b"
        )


def require_version_memory(compiled: CompiledPlan, hosts: Sequence[int], rank: int) -> None:
    """Check that there is memory for the older versions of weights.

    Args:
        compiled: the plan and its program.
        hosts: the host of every rank.
        rank: one on this host.

    Raises:
        PlanError: the versions on this host need more than is free.
    """
    if not compiled.step_variants[-1].lookahead:
        return
    here = [made for made, host in zip(compiled.cost.ranks, hosts, strict=True) if host == hosts[rank]]
    needed = sum(int((made.weight_versions - 1) * sum(made.updates.values())) for made in here)
    free = available_bytes()
    if needed > free:
        most = max(made.weight_versions for made in here)
        raise PlanError(
            f"the older versions of the weights that {compiled.plan} keeps, up to {most - 1} on a rank, take {needed} "
            f"bytes on this host, of which {free} are free; take schedule=pipedream_2bw, which keeps one, or "
            "schedule=one_f_one_b, which keeps none, or fewer ranks on this host"
        )
