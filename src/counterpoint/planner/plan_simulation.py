"""Simulate a compiled plan: costs of its instructions, the duration of its steps, and their traces."""

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
    """Return the cost model of a program on each cluster.

    Args:
        clusters: where it runs.
        model: with the blocks that the program names.
        samples: of one microbatch.
        global_num_microbatches: microbatches of a step, of all ranks.
        profile: measured times of the model's layers; None to use operation counts.
    """
    size_of = message_size_fn(model, samples)
    analytic = [analytic_costs(model, cluster, size_of, samples_per_microbatch=samples) for cluster in clusters]
    if profile is None:
        return analytic
    return [
        measured_costs(
            model,
            profile,
            link_costs,
            size_of,
            samples_per_microbatch=samples,
            global_num_microbatches=global_num_microbatches,
        )
        for link_costs in analytic
    ]


@dataclass(frozen=True, slots=True)
class PlanSimulation:
    """A compiled plan that can be simulated.

    Args:
        compiled: the plan's program.
        samples: of one microbatch.
        profile: measured times of the model's layers; None to use operation counts.
    """

    compiled: CompiledPlan
    samples: int
    profile: ModelProfile | None = None

    def simulate_steps(self, clusters: Sequence[Cluster]) -> list[StepBreakdown]:
        """Return the breakdown of a step on each cluster, averaged over step variants by frequency.

        Hosts and shared resources are those of the first cluster.
        """
        costs = self._costs(clusters)
        simulated = []
        for variant in self.compiled.step_variants:
            if variant.frequency:
                split_variant, split_costs, _ = self._split_for_overlap(variant, costs, clusters[0])
                simulated.append(
                    (float(variant.frequency), simulate_breakdown(split_variant, split_costs, clusters[0]))
                )
        return [
            _weighted_mean([(frequency, breakdowns[index]) for frequency, breakdowns in simulated])
            for index in range(len(clusters))
        ]

    def simulate_trace(self, cluster: Cluster) -> Trace:
        """Return the trace of one step, of the last of several step variants."""
        variant = self.compiled.step_variants[-1]
        split_variant, (cost_model,), source_indices = self._split_for_overlap(
            variant, self._costs((cluster,)), cluster
        )
        trace = simulate_variant(split_variant, cost_model, cluster)
        if not source_indices:
            return trace
        events = []
        for event in trace.events:
            index = source_indices[event.rank][event.index]
            text = format_instruction(variant.program.rank_programs[event.rank].body[index])
            events.append(replace(event, index=index, text=text))
        return replace(trace, events=tuple(events))

    def _costs(self, clusters: Sequence[Cluster]) -> list[CostModel]:
        model, num_microbatches = self.compiled.model, self.compiled.plan.global_num_microbatches
        return build_costs(
            clusters, model, samples=self.samples, global_num_microbatches=num_microbatches, profile=self.profile
        )

    def _split_for_overlap(
        self, variant: StepVariant, costs: Sequence[CostModel], cluster: Cluster
    ) -> tuple[StepVariant, list[CostModel], tuple[tuple[int, ...], ...]]:
        """Return the simulated step variant, its costs, and its source indices if its backward was split."""
        model = self.compiled.model
        if not has_divisible_backward(model):
            return variant, list(costs), ()
        slices = backward_slices(model, costs[0], self.compiled.plan.buckets, self.samples, self.profile)
        split = split_backward(variant, slices, cluster)
        if split is None:
            return variant, list(costs), ()
        return split.variant, [split.cost_model(cost_model) for cost_model in costs], split.source_indices


def has_divisible_backward(model: ModelSpec) -> bool:
    """Return whether one instruction is the backward of several layers, so that reductions may overlap it."""
    return model.num_blocks == 1 and len(model.layers) > 1


def backward_slices(
    model: ModelSpec, costs: CostModel, buckets: BucketConfig, samples: int, profile: ModelProfile | None
) -> tuple[BackwardSlice, ...]:
    """Return the slices of the backward of a model in one block, by the times or operation counts of its layers.

    Args:
        model: in one block.
        costs: of its instructions.
        buckets: of its reductions.
        samples: of one microbatch.
        profile: measured times of the model's layers; None to use operation counts.
    """
    whole_s = costs.compute_s(Backward(0, 0), Fraction(1))
    if profile is None:
        work = [layer.cost for layer in model.layers]
    else:
        work = [layer.backward_s for layer in profile.at_microbatch_size(samples).layers]
    total = sum(work)
    return slice_backward(model, [whole_s * layer_work / total for layer_work in work] if total else work, buckets)


def _weighted_mean(parts: Sequence[tuple[float, StepBreakdown]]) -> StepBreakdown:
    return StepBreakdown(
        sum(frequency * breakdown.step_s for frequency, breakdown in parts),
        sum(frequency * breakdown.compute_s for frequency, breakdown in parts),
        sum(frequency * breakdown.update_s for frequency, breakdown in parts),
    )


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Predictions for a plan with a single step variant.

    Args:
        step_s: seconds of one step.
        compute_s: seconds of forward and backward, averaged over ranks.
        update_s: seconds of updates, averaged over ranks.
        sent_bytes: sent by the rank that sends most.
        memory_bytes: peak memory of the rank that needs most.
    """

    step_s: float
    compute_s: float
    update_s: float
    sent_bytes: int
    memory_bytes: int


def summarize_step(
    plan: Plan, model: ModelSpec, cluster: Cluster, *, batch_size: int, profile: ModelProfile | None = None
) -> StepSummary:
    """Return the predictions for a plan with a single step variant, compiled and simulated from scratch.

    Raises:
        PlanError: it cannot be compiled for this model or this batch, or the profile is of another model.
    """
    profile = fit_profile(plan, model, profile)
    compiled, samples = compile_for(plan, model, cluster, batch_size, profile)
    (breakdown,) = PlanSimulation(compiled, samples, profile).simulate_steps((cluster,))
    return StepSummary(
        step_s=breakdown.step_s,
        compute_s=breakdown.compute_s,
        update_s=breakdown.update_s,
        sent_bytes=int(max(compiled.sent_bytes())),
        memory_bytes=max(
            peak_memory_bytes(compiled.step_variants[-1].full_program, storage_sizes(compiled.model, samples, profile))
        ),
    )
