"""A compiled plan on the simulator's clock: what its words cost, how long its steps take, and what they look like.

What one simulation of a plan says, in a few figures: enough to tell plans apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.compiler.compile import CompiledPlan, message_size_fn
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.spec import ModelSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.prepare import compile_for, fit_profile, storage_sizes
from counterpoint.program.instruction import Backward
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Trace
from counterpoint.simulator.bucketed_backward import BackwardSlice, slice_backward, split_backward
from counterpoint.simulator.cost_model import CostModel, analytic_costs
from counterpoint.simulator.measured_costs import measured_costs
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.simulate import StepBreakdown, simulate_breakdown, simulate_variant
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.world.cluster import Cluster


def build_costs(
    clusters: Sequence[Cluster],
    model: ModelSpec,
    *,
    samples: int,
    global_num_microbatches: int,
    profile: ModelProfile | None = None,
) -> list[CostModel]:
    """Return what the words of a program cost on each cluster.

    Args:
        clusters: where it runs.
        model: with the blocks that the program names.
        samples: of one microbatch.
        num_micros: microbatches of a step, of all ranks.
        timing: of the model's own pieces; None where their work is only counted.
    """
    sizes = message_size_fn(model, samples)
    counted = [analytic_costs(model, one, sizes, samples_per_microbatch=samples) for one in clusters]
    if profile is None:
        return counted
    return [
        measured_costs(
            model, profile, one, sizes, samples_per_microbatch=samples, global_num_microbatches=global_num_microbatches
        )
        for one in counted
    ]


@dataclass(frozen=True, slots=True)
class PlanSimulation:
    """A compiled plan that is to be played.

    Args:
        compiled: the plan's program.
        samples: of one microbatch.
        timing: of the model's own pieces; None where their work is only counted.
    """

    compiled: CompiledPlan
    samples: int
    profile: ModelProfile | None = None

    def simulate_steps(self, clusters: Sequence[Cluster]) -> list[StepBreakdown]:
        """Return for each cluster what a step takes; where steps are not all alike, over all of them in the long run.

        Ranks are on hosts, and in each other's way, as on the first one.
        """
        costs = self._costs(clusters)
        played = []
        for turn in self.compiled.step_variants:
            if turn.frequency:
                shown, costing, _ = self._split_for_overlap(turn, costs, clusters[0])
                played.append((float(turn.frequency), simulate_breakdown(shown, costing, clusters[0])))
        return [_weighted_mean([(share, found[at]) for share, found in played]) for at in range(len(clusters))]

    def simulate_trace(self, cluster: Cluster) -> Trace:
        """Return a step word by word; of steps that are not all alike the last kind."""
        turn = self.compiled.step_variants[-1]
        shown, (costing,), origins = self._split_for_overlap(turn, self._costs((cluster,)), cluster)
        trace = simulate_variant(shown, costing, cluster)
        if not origins:
            return trace
        events = []
        for event in trace.events:
            index = origins[event.rank][event.index]
            text = format_instruction(turn.program.rank_programs[event.rank].body[index])
            events.append(replace(event, index=index, words=text))
        return replace(trace, events=tuple(events))

    def _costs(self, clusters: Sequence[Cluster]) -> list[CostModel]:
        model, micros = self.compiled.model, self.compiled.plan.global_num_microbatches
        return build_costs(clusters, model, samples=self.samples, global_num_microbatches=micros, profile=self.profile)

    def _split_for_overlap(
        self, variant: StepVariant, costs: Sequence[CostModel], cluster: Cluster
    ) -> tuple[StepVariant, list[CostModel], tuple[tuple[int, ...], ...]]:
        """Return a kind of step as it is played, its costs, and where its words come from if it was made finer."""
        model = self.compiled.model
        if not has_divisible_backward(model):
            return variant, list(costs), ()
        portions = backward_slices(model, costs[0], self.compiled.plan.buckets, self.samples, self.profile)
        finer = split_backward(variant, portions, cluster)
        if finer is None:
            return variant, list(costs), ()
        return finer.variant, [finer.cost_model(one) for one in costs], finer.source_indices


def has_divisible_backward(model: ModelSpec) -> bool:
    """Tell whether the backward of a model is one word for several pieces, so that sums may begin inside of it."""
    return model.num_blocks == 1 and len(model.layers) > 1


def backward_slices(
    model: ModelSpec, costs: CostModel, buckets: BucketConfig, samples: int, profile: ModelProfile | None
) -> tuple[BackwardSlice, ...]:
    """Return the portions of the backward of a model in one block, by what its pieces take or, untimed, cost.

    Args:
        model: in one block.
        costs: of its words.
        buckets: of its sums.
        samples: of one microbatch.
        timing: of the model's own pieces; None where their work is only counted.
    """
    whole_s = costs.compute_s(Backward(0, 0), Fraction(1))
    if profile is None:
        work = [piece.cost for piece in model.layers]
    else:
        work = [piece.backward_s for piece in profile.at_microbatch_size(samples).layers]
    total = sum(work)
    return slice_backward(model, [whole_s * one / total for one in work] if total else work, buckets)


def _weighted_mean(parts: Sequence[tuple[float, StepBreakdown]]) -> StepBreakdown:
    return StepBreakdown(
        sum(share * spent.step_s for share, spent in parts),
        sum(share * spent.compute_s for share, spent in parts),
        sum(share * spent.update_s for share, spent in parts),
    )


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What a plan whose steps are all alike takes.

    Args:
        step_s: seconds of one step.
        compute_s: seconds of forward and backward on a rank, on average.
        update_s: seconds that a rank updates weights, on average.
        sent_bytes: what the busiest rank sends.
        memory_bytes: what the fullest rank holds at most.
    """

    step_s: float
    compute_s: float
    update_s: float
    sent_bytes: int
    memory_bytes: int


def summarize_step(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> StepSummary:
    """Return the figures of a plan that has one kind of step, compiled and played from nothing.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the timing is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    (spent,) = PlanSimulation(compiled, samples, profile).simulate_steps((cluster,))
    return StepSummary(
        step_s=spent.step_s,
        compute_s=spent.compute_s,
        update_s=spent.update_s,
        sent_bytes=int(max(compiled.sent_bytes())),
        memory_bytes=max(
            peak_memory_bytes(compiled.step_variants[-1].full_program, storage_sizes(compiled.model, samples, profile))
        ),
    )
