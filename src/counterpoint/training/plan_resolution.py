"""Which replicas are on one host, so that they may have one copy of the weights.

From what a user writes to a plan and options.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from counterpoint.errors import PlanError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.model.spec import ModelSpec
from counterpoint.partitioning.dry_run import Inputs
from counterpoint.partitioning.seed_hooks import is_plain_sequential
from counterpoint.plan.parser import explicit_microbatches
from counterpoint.plan.plan import DEFAULT_PASSES as DEFAULT_PASSES, Plan
from counterpoint.planner.choose import PREDICTED_TOLERANCE, PlanChoice, rank_and_choose
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.pipeline.candidates import SYNCHRONOUS_SCHEDULES, find_pipeline_plans
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import as_call_args
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.strategy import Strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.tree_reduce import TreeReduce
from counterpoint.strategies.zero import Zero
from counterpoint.training.model_partition import assign_unused_params, drop_frozen_params, finest_partition
from counterpoint.training.options import TrainingOptions
from counterpoint.world.cluster import Cluster
from counterpoint.world.cluster_file import resolve_cluster
from counterpoint.world.mesh import replicas_per_host


def share_params_per_host(plan: Plan, hosts: Sequence[int]) -> Plan:
    """Return the plan in which replicas of one host share their update, and so can have their weights in common.

    Results stay the same, and so do the bytes that the plan sends. Where replicas are spread over hosts, those of each
    host share, and hosts sum what they have shared out. Nothing changes where other strategies share out already, or
    leave the update to one replica, or where gradients are summed in a code, which is about whole ones, or where
    replicas have weights or gradients of their own: where steps are not all alike.

    Args:
        plan: as it was asked for.
        hosts: the host of every rank.

    Example:
        >>> print(share_params_per_host(Plan.parse("data(4)"), (0, 0, 0, 0)))
        data(4, update=sharded)
        >>> print(share_params_per_host(Plan.parse("data(4)"), (0, 0, 1, 1)))
        data(2, update=sharded) * data(2)
    """
    if (
        any(isinstance(strategy, Zero | Server | ElasticAveraging | TreeReduce) for strategy in plan.strategies)
        or len(plan.sync_schedule.step_fractions) > 1
    ):
        return plan
    if any(isinstance(strategy, Data) and strategy.codec for strategy in plan.strategies):
        return plan
    stride = 1
    for index, strategy in enumerate(plan.strategies):
        if isinstance(strategy, Data) and strategy.degree > 1:
            among = replicas_per_host(strategy.degree, stride, hosts)
            if among == 1 or strategy.update == "sharded":
                return plan
            shared: list[Strategy] = [replace(strategy, degree=among, update="sharded")]
            across = [replace(strategy, degree=strategy.degree // among)] if among < strategy.degree else []
            strategies = (*plan.strategies[:index], *shared, *across, *plan.strategies[index + 1 :])
            return drop_redundant_overlap(replace(plan, strategies=strategies))
        stride = strategy.num_ranks(stride)
    return plan


def drop_redundant_overlap(plan: Plan) -> Plan:
    """Return the plan without the overlap of communication, where all of it is an announcement."""
    if all(isinstance(strategy, Data) and strategy.update == "sharded" for strategy in plan.strategies):
        return replace(plan, passes=tuple(name for name in plan.passes if name != "overlap"))
    return plan


MAX_TRACE_SAMPLES = 8
"""A model is traced on so many samples at most, to see what it costs."""

_AUTO = re.compile(r"^\s*auto\s*(\(\s*\d+\s*\))?\s*$")


def parse_options(options: dict[str, Any]) -> TrainingOptions:
    """Return the options.

    Raises:
        PlanError: a name is none, and the message suggests the nearest one; or the file of a cluster is wrong.
    """
    known = list(TrainingOptions.__dataclass_fields__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PlanError(f"there is no option {name!r}; {hint}the options are {', '.join(known)}")
    given = options.get("cluster")
    return TrainingOptions(**(options if given is None else {**options, "cluster": resolve_cluster(given)}))


def resolve_initial_plan(
    strategy: str | Plan,
    environment: RankEnvironment | None,
    num_microbatches: int | None,
    passes: Sequence[str] | None,
) -> Plan:
    """Return the plan for the ranks that were started, or for this process alone; data where a choice is left open.

    Args:
        strategy: a plan, or its text; a plan has its passes, a text gets :data:`counterpoint.plan.plan.DEFAULT_PASSES`.
        environment: what a launcher told this process, if any did.
        num_microbatches: of the innermost program; None for those of the plan.
        passes: what is done to the program instead; None where nothing is asked for.
    """
    num_ranks = environment.world_size if environment is not None else 1
    if isinstance(strategy, Plan):
        plan = strategy
    else:
        text = _AUTO.sub(r"data\1", strategy)
        hosts = hosts_of_ranks(environment)
        found = Plan.parse(text, num_ranks=num_ranks, num_microbatches=num_microbatches, hosts=hosts)
        plan = replace(found, passes=DEFAULT_PASSES)
    if num_microbatches is not None:
        plan = replace(plan, num_microbatches=num_microbatches)
    if num_ranks > 1:
        plan.require_ranks(num_ranks)
    return plan if passes is None else replace(plan, passes=tuple(passes))


def has_explicit_microbatches(strategy: str | Plan, num_microbatches: int | None) -> bool:
    """Return whether the number of microbatches is given, by itself or in the plan, and not for us to choose."""
    return num_microbatches is not None or isinstance(strategy, Plan) or explicit_microbatches(strategy) is not None


def hosts_of_ranks(environment: RankEnvironment | None) -> list[int]:
    """Return the host of every rank, as its launcher has laid them out: each host full before the next; none alone."""
    if environment is None:
        return []
    return [rank // environment.local_world_size for rank in range(environment.world_size)]


@dataclass(frozen=True, slots=True)
class AutoStrategy:
    """The choice that ``auto`` leaves open until the first batch is known.

    Args:
        num_ranks: ranks there are.
        num_microbatches: of the innermost program; None when these are to be chosen, too.
        passes: what is done to the program afterwards.
    """

    num_ranks: int
    num_microbatches: int | None
    passes: tuple[str, ...]

    @property
    def single_rank_plan(self) -> Plan:
        """What is taken where there is one rank."""
        return Plan((), self.num_microbatches or 1, self.passes)

    def choose_plan(
        self, model: nn.Module, optimizer_spec: OptimizerSpec, inputs: Inputs, options: TrainingOptions, batch_size: int
    ) -> Plan:
        """Return the plan that the planner would take, the same on every rank; see :meth:`weigh`.

        Raises:
            PlanError: the model does not take the inputs, or there is no plan for this batch.
        """
        return (
            self.single_rank_plan
            if self.num_ranks == 1
            else self.rank_candidates(model, optimizer_spec, inputs, options, batch_size).plan
        )

    def rank_candidates(
        self, model: nn.Module, optimizer_spec: OptimizerSpec, inputs: Inputs, options: TrainingOptions, batch_size: int
    ) -> PlanChoice:
        """Return the plan that the planner would take, with those that it was weighed against.

        Args:
            model: it stays as it is.
            face: the user's optimizer; one that looks at whole tensors rules out slices.
            inputs: of a few samples.
            options: how the run trains.
            batch_size: samples of a global batch.

        Raises:
            PlanError: the model does not take the inputs, or there is no plan for this batch.
        """
        spec = trace_model_spec(model, optimizer_spec, inputs, options.dims)
        cluster = options.cluster or Cluster()
        cluster.require_ranks(self.num_ranks)
        staged = find_pipeline_plans(
            self.num_ranks, spec.without_tp, cluster, batch_size, SYNCHRONOUS_SCHEDULES, profile=options.profile
        )
        plans = (
            replace(plan, num_microbatches=self.num_microbatches or plan.num_microbatches, passes=self.passes)
            for plan in (*enumerate_plans(self.num_ranks, spec), *staged)
            if optimizer_spec.is_elementwise or not any(isinstance(strategy, Tensor) for strategy in plan.strategies)
        )
        within = (
            None if options.num_measured_plans else PREDICTED_TOLERANCE
        )  # what is measured may be predicted to be slower
        return rank_and_choose(plans, PlanningProblem(spec, cluster, batch_size, options.profile), within)


def make_auto_strategy(
    strategy: str | Plan, plan: Plan, num_microbatches: int | None, options: TrainingOptions
) -> AutoStrategy | None:
    """Return the choice that is left open for the ranks of a plan; None when there is none.

    Raises:
        PlanError: there is none, and plans are to be measured.
    """
    if isinstance(strategy, Plan) or _AUTO.fullmatch(strategy) is None:
        if options.num_measured_plans:
            raise PlanError(
                f"measure={options.num_measured_plans} says how many plans are measured to choose one, but the plan is given, "
                f"{strategy}; give strategy='auto', or leave measure out"
            )
        return None
    return AutoStrategy(plan.num_ranks, num_microbatches, plan.passes)


def trace_model_spec(
    model: nn.Module, optimizer_spec: OptimizerSpec, inputs: Inputs, dims: Mapping[str, tuple[str, str]] | None
) -> ModelSpec:
    """Return a model as the planner sees it: cut as finely as it can be, without its frozen parameters.

    A Sequential, which is cut in another way where nobody slices its layers, is described in both.

    Raises:
        PlanError: it cannot even be called with these inputs.
    """
    spec = assign_unused_params(
        drop_frozen_params(
            finest_partition(model, as_call_args(inputs), ("tensor_parallel", "blocks"), dims).spec, optimizer_spec
        )
    )
    if not is_plain_sequential(model):
        return spec
    chained = assign_unused_params(
        drop_frozen_params(finest_partition(model, as_call_args(inputs), ("blocks",), dims).spec, optimizer_spec)
    )
    return spec if spec == chained else replace(spec, chained=chained)
