"""The batches in flight: one in a synchronous step, several in an asynchronous pipeline, none after a flush."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from counterpoint.compiler.compile import CompiledPlan
from counterpoint.errors import PlanError
from counterpoint.program.step_variants import StepVariant
from counterpoint.rpc.segments import available_bytes
from counterpoint.runtime.loss.loss_scale import DynamicLossScale, parse_loss_scale
from counterpoint.runtime.microbatches import AsyncPipelineBatches, MicrobatchSource
from counterpoint.training.options import TrainingOptions


@dataclass(slots=True)
class InFlightBatches:
    """The batches that steps read, by step number.

    A step of an asynchronous pipeline finishes the batch of its own number and starts later ones. A missing batch is
    empty. So the pipeline is filled by steps with negative numbers, which only start later batches, and flushed by
    steps that start none::

        step      -2      -1       0       1       2        lookahead = 2, batches 0 to 2
        starts   0       0 1     0 1 2   1 2     2          (on the first stage only batch step + 2)
        finishes -       -       0       1       2

    Args:
        lookahead: how many batches after its own a step starts.
        microbatches_per_batch: the number of microbatches of a batch.
        batches: the batches in flight, by the number of the step that finishes them.
    """

    lookahead: int = 0
    microbatches_per_batch: int = 0
    batches: dict[int, MicrobatchSource] = field(default_factory=dict)

    @staticmethod
    def for_variant(variant: StepVariant) -> InFlightBatches:
        """Return an empty set of batches for the steps of a plan."""
        return InFlightBatches(variant.lookahead, variant.microbatches_per_batch)

    def batch_source(self, number: int) -> MicrobatchSource:
        """Return the microbatches that the step of this number reads."""
        return (
            AsyncPipelineBatches(self.batches, number, self.lookahead, self.microbatches_per_batch)
            if self.lookahead
            else self.batches[number]
        )

    def warmup_steps(self, number: int) -> range:
        """Return the steps that must run before this one to start its batch; none in mid-stream."""
        return range(number - self.lookahead, number) if number not in self.batches else range(0)

    def require_flushed(self, operation: str) -> None:
        """Check that no batch is in flight.

        Raises:
            PlanError: one is.
        """
        if self.lookahead and self.batches:
            batches = f"{len(self.batches)} batch{'es' if len(self.batches) > 1 else ''}"
            raise PlanError(
                f"{operation} was called with {batches} in flight in a pipeline that does not flush after every step; "
                "let fit(...) do it, which flushes first: evaluate_every=, save_every=, or at the end of an epoch; in "
                "your own loop call step.flush() before"
            )


def require_known_to_stages(compiled: CompiledPlan, options: TrainingOptions) -> None:
    """Check that stages know the norm that gradients are clipped by, and the loss scale.

    Raises:
        PlanError: an asynchronous pipeline clips by the norm of the model, or has a dynamic loss scale; or another
            plan clips by the norm of each stage.
    """
    clip_norm, clip_by = options.clip_norm, options.clip_by
    is_async = compiled.step_variants[-1].lookahead > 0
    if is_async and isinstance(parse_loss_scale(options.loss_scale), DynamicLossScale):
        raise PlanError(
            f"a dynamic loss scale changes when gradients of any stage are not finite, but the stages of "
            f"{compiled.plan} update independently, without waiting for the others; give a number, as "
            "loss_scale=1024, or use schedule=one_f_one_b"
        )
    if clip_by == "stage" and clip_norm is None:
        raise PlanError("clip_by='stage' needs clip_norm, the largest norm of a stage's gradients; give clip_norm=1.0")
    if clip_by == "stage" and not is_async:
        raise PlanError(
            f"clip_by='stage' clips each stage by its own norm, which differs from one-device training, but under "
            f"{compiled.plan} the norm of the whole model is known; omit clip_by"
        )
    if clip_by == "model" and clip_norm is not None and is_async:
        raise PlanError(
            f"clip_norm={clip_norm} is a norm over all stages, but those of {compiled.plan} update independently, "
            "without waiting for the others; give clip_by='stage' to clip each stage by its own norm, or use "
            "schedule=one_f_one_b"
        )


def require_version_memory(compiled: CompiledPlan, hosts: Sequence[int], rank: int) -> None:
    """Check that there is memory for the older versions of weights (weight stashing).

    Args:
        compiled: the plan and its program.
        hosts: the host of every rank.
        rank: a rank on this host.

    Raises:
        PlanError: the versions on this host need more than is free.
    """
    if not compiled.step_variants[-1].lookahead:
        return
    local_ranks = [cost for cost, host in zip(compiled.cost.ranks, hosts, strict=True) if host == hosts[rank]]
    needed = sum(int((cost.weight_versions - 1) * sum(cost.updates.values())) for cost in local_ranks)
    free = available_bytes()
    if needed > free:
        max_versions = max(cost.weight_versions for cost in local_ranks)
        raise PlanError(
            f"the older versions of the weights that {compiled.plan} keeps, up to {max_versions - 1} on a rank, take "
            f"{needed} bytes on this host, of which {free} are free; use schedule=pipedream_2bw, which keeps one, or "
            "schedule=one_f_one_b, which keeps none, or fewer ranks on this host"
        )
