"""Resolve what a user asks for to a plan and options: text, number of ranks, ``auto``, sharing on one host."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from counterpoint.compiler.given_program import GivenProgram
from counterpoint.errors import PlanError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.model.compilation import parse_compilation
from counterpoint.model.model_profile import ModelProfile
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.model.spec import ModelSpec
from counterpoint.optim.validation import renamed_hint
from counterpoint.partitioning.dry_run import Inputs
from counterpoint.partitioning.module_casts import cast_modules
from counterpoint.partitioning.partition import PartitionGranularity
from counterpoint.partitioning.partitioned_model import as_call_args
from counterpoint.partitioning.seed_hooks import is_plain_sequential
from counterpoint.plan.parser import explicit_microbatches
from counterpoint.plan.plan import DEFAULT_PASSES as DEFAULT_PASSES, Plan, require_pass_names
from counterpoint.program.program import Program
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.strategy import Strategy, require_strategy
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.tree_reduce import TreeReduce
from counterpoint.strategies.zero import Zero
from counterpoint.training.model_checks.validation import uses_sync_batch_norm
from counterpoint.training.model_partition import describe_trained, finest_partition, plan_fingerprint
from counterpoint.training.options import (
    HOST_DEVICES,
    OTHER_FIT_OPTIONS,
    OTHER_OPTIONS,
    RENAMED_OPTIONS,
    TrainingOptions,
)
from counterpoint.world.cluster import Cluster

if TYPE_CHECKING:
    from counterpoint.planner.choose import PlanChoice
from counterpoint.world.cluster_file import resolve_cluster
from counterpoint.world.mesh import replicas_per_host


def share_params_per_host(plan: Plan, hosts: Sequence[int]) -> Plan:
    """Return the plan in which replicas on one host shard their update, so that they can share their parameters.

    Results are unchanged, and so are the bytes that are sent. With replicas on several hosts, those of each host shard
    the update, and hosts all-reduce the shards. The plan is unchanged if other strategies already shard, or leave the
    update to one replica, if gradients are compressed (codecs need whole ones), or if steps are not all the same.

    Args:
        plan: the plan that was asked for.
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
            per_host = replicas_per_host(strategy.degree, stride, hosts)
            if per_host == 1 or strategy.update == "sharded":
                return plan
            sharded: list[Strategy] = [replace(strategy, degree=per_host, update="sharded")]
            over_hosts = [replace(strategy, degree=strategy.degree // per_host)] if per_host < strategy.degree else []
            strategies = (*plan.strategies[:index], *sharded, *over_hosts, *plan.strategies[index + 1 :])
            return drop_redundant_overlap(replace(plan, strategies=strategies))
        stride = strategy.num_ranks(stride)
    return plan


def drop_redundant_overlap(plan: Plan) -> Plan:
    """Drop the pass ``overlap`` if all communication is the sharded update, which needs no pass."""
    if all(isinstance(strategy, Data) and strategy.update == "sharded" for strategy in plan.strategies):
        return replace(plan, passes=tuple(name for name in plan.passes if name != "overlap"))
    return plan


MAX_TRACE_SAMPLES = 8
"""The largest number of samples on which a model is traced for the planner."""

_AUTO = re.compile(r"^\s*auto\s*(\(\s*\d+\s*\))?\s*$")


PASS_OPTIONS = {
    "overlap": 'passes=("overlap",)',
    "prefetch": 'passes=("overlap", "prefetch")',
    "recompute": 'passes=("overlap", "recompute")',
}
"""What is written as a pass, by the option that other libraries have for it."""


LOOP_OPTIONS = {
    "lr_scheduler": "a loop of your own steps its scheduler: call scheduler.step() after step(inputs, targets)",
    "callbacks": "a loop of your own calls what it needs after step(inputs, targets)",
    **dict.fromkeys(("batch_size", "epochs", "max_steps", "num_workers"), "a loop of your own has it, or its loader"),
    **dict.fromkeys(
        ("checkpoint_dir", "keep_last", "resume", "save_every"),
        "a loop of your own calls step.save(folder) and step.load(folder)",
    ),
    **dict.fromkeys(
        ("eval_dataset", "evaluate_every", "metrics"),
        "a loop of your own evaluates the model inside `with step.full_weights() as model:`",
    ),
}
"""What a loop of the user's does instead, by the option that ``Trainer`` or its ``fit`` has for it."""


def _hint_option(name: str, caller: Callable[..., Any], fit: Callable[..., Any] | None) -> str:
    """Return what to write instead of an option that does not exist, or all options."""
    if name in RENAMED_OPTIONS:
        return renamed_hint(name, RENAMED_OPTIONS)
    if name in PASS_OPTIONS:
        return f"; it is a pass of the program: write {PASS_OPTIONS[name]}"
    if fit is not None and name in inspect.signature(fit).parameters:
        return f"; it is an option of fit(...): trainer.fit(dataset, {name}=...)"
    if fit is not None and name in OTHER_FIT_OPTIONS:
        return f"; in fit(...): {OTHER_FIT_OPTIONS[name]}"
    if name in OTHER_OPTIONS or (fit is None and name in LOOP_OPTIONS):
        return f"; {OTHER_OPTIONS.get(name) or LOOP_OPTIONS[name]}"
    own = [key for key, value in inspect.signature(caller).parameters.items() if value.kind == value.KEYWORD_ONLY]
    known = [*TrainingOptions.__dataclass_fields__, *own]
    matches = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {matches[0]}? " if matches else ""
    return f"; {hint}the options are {', '.join(known)}"


def parse_options(
    options: dict[str, Any], caller: Callable[..., Any], *, fit: Callable[..., Any] | None = None
) -> TrainingOptions:
    """Build the training options from keyword arguments.

    Args:
        options: those that the caller has no parameters for.
        caller: a function with parameters of its own, one of which may be meant.
        fit: the function that is called later, whose parameter may be meant; None for a loop of the user's.

    Raises:
        PlanError: there is no option of a name (the message has the nearest or new one), or the cluster file is wrong.
    """
    for name in options:
        if name not in TrainingOptions.__dataclass_fields__:
            raise PlanError(f"there is no option {name!r}{_hint_option(name, caller, fit)}")
    cluster = options.get("cluster")
    return TrainingOptions(**(options if cluster is None else {**options, "cluster": resolve_cluster(cluster)}))


StrategyArgument: TypeAlias = str | Plan | Program | Strategy | Sequence[Strategy]
"""What a plan is given as: its text, a plan, a program, a strategy, or several that are applied from left to right."""


@dataclass(frozen=True, slots=True)
class RequestedPlan:
    """A plan as it is asked for.

    Args:
        strategy: a text or strategies get the default passes; a plan has its own, a program none.
        num_microbatches: of the innermost program; None for that of the plan.
        passes: replace the plan's passes; None keeps them.
    """

    strategy: StrategyArgument
    num_microbatches: int | None = None
    passes: Sequence[str] | None = None

    def resolve(self, num_ranks: int = 1, hosts: Sequence[int] = ()) -> Plan:
        """Return the plan; ``auto`` begins as ``data``.

        Args:
            num_ranks: for a text that omits it.
            hosts: the host of every rank.

        Raises:
            PlanError: there is no such plan, or a strategy lacks something.
        """
        if isinstance(self.strategy, Plan):
            plan = self.strategy
        elif isinstance(self.strategy, Program):
            plan = Plan((GivenProgram(self.strategy),), len(self.strategy.micros))
        elif isinstance(self.strategy, str):
            text = _AUTO.sub(r"data\1", self.strategy)
            parsed = Plan.parse(text, num_ranks=num_ranks, num_microbatches=self.num_microbatches, hosts=hosts)
            plan = replace(parsed, passes=DEFAULT_PASSES)
        else:
            strategies = self.strategy if isinstance(self.strategy, tuple | list) else (self.strategy,)
            plan = Plan(tuple(map(require_strategy, strategies)), passes=DEFAULT_PASSES)
        if self.num_microbatches is not None:
            plan = replace(plan, num_microbatches=self.num_microbatches)
        if self.passes is None:
            return plan
        require_pass_names(self.passes)
        return replace(plan, passes=tuple(self.passes))

    def describe(self, plan: Plan, profile: ModelProfile | None) -> list[list[str]]:
        """Return what was asked for by name, for the comparison of ranks.

        Args:
            plan: what :meth:`resolve` has returned.
            profile: by which stages are balanced.
        """
        is_auto = isinstance(self.strategy, str) and _AUTO.fullmatch(self.strategy) is not None
        is_given = self.has_explicit_microbatches and not is_auto
        return [
            ["the plan", "auto" if is_auto else plan_fingerprint(plan, profile)],
            ["the option num_microbatches", str(plan.num_microbatches if is_given else self.num_microbatches)],
            ["the option passes", str(plan.passes)],
            ["the precision of the plan", str(plan.precision)],
            ["the compile of the plan", str(plan.compile)],
        ]

    @property
    def has_explicit_microbatches(self) -> bool:
        """Whether the number of microbatches is given, as an argument or in the plan."""
        return (
            self.num_microbatches is not None
            or isinstance(self.strategy, Plan | Program)
            or (isinstance(self.strategy, str) and explicit_microbatches(self.strategy) is not None)
        )


def resolve_initial_plan(requested_plan: RequestedPlan, environment: RankEnvironment | None) -> Plan:
    """Return the plan for the ranks that were started, or for this process.

    Args:
        requested_plan: the plan that is asked for.
        environment: what a launcher set for this process, if any did.

    Raises:
        PlanError: it needs another number of ranks than were started.
    """
    num_ranks = environment.world_size if environment is not None else 1
    plan = requested_plan.resolve(num_ranks, hosts_of_ranks(environment))
    if num_ranks > 1:
        plan.require_ranks(num_ranks)
    return plan


def hosts_of_ranks(environment: RankEnvironment | None) -> list[int]:
    """Return the host of every rank, if ranks fill one host after another; empty without a launcher."""
    if environment is None:
        return []
    return [rank // environment.local_world_size for rank in range(environment.world_size)]


@dataclass(frozen=True, slots=True)
class AutoStrategy:
    """``strategy="auto"``: the plan is chosen when the first batch is known.

    Args:
        num_ranks: the number of ranks.
        num_microbatches: of the innermost program; None if it is chosen too.
        passes: applied to the program afterwards.
    """

    num_ranks: int
    num_microbatches: int | None
    passes: tuple[str, ...]

    @property
    def single_rank_plan(self) -> Plan:
        """The plan for a single rank."""
        return Plan((), self.num_microbatches or 1, self.passes)

    def choose_plan(
        self, model: nn.Module, optimizer_spec: OptimizerSpec, inputs: Inputs, options: TrainingOptions, batch_size: int
    ) -> Plan:
        """Return the plan that the planner chooses, the same on every rank; see :meth:`rank_candidates`.

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
        """Return the plan that the planner chooses, with the other candidates.

        Args:
            model: the model; it is not changed.
            optimizer_spec: the user's optimizer; one that needs whole tensors rules out tensor parallelism.
            inputs: of a few samples.
            options: the training options.
            batch_size: samples of a global batch.

        Raises:
            PlanError: the model does not take the inputs, or there is no plan for this batch.
        """
        from counterpoint.planner.choose import PREDICTED_TOLERANCE, rank_and_choose
        from counterpoint.planner.enumerate import enumerate_plans
        from counterpoint.planner.memory_suggestions import PlanningProblem
        from counterpoint.planner.pipeline.candidates import DEFAULT_SYNCHRONOUS_SCHEDULES, find_pipeline_plans

        spec = trace_model_spec(model, optimizer_spec, inputs, options.dims, parse_precision(options.precision))
        cluster = options.cluster or Cluster()
        cluster.require_ranks(self.num_ranks)
        profile = options.profile
        if profile is not None:
            profile = profile.for_compilation(parse_compilation(options.compile))
        pipeline_plans = find_pipeline_plans(
            self.num_ranks, spec.without_tp, cluster, batch_size, DEFAULT_SYNCHRONOUS_SCHEDULES, profile=profile
        )
        plans = (
            replace(plan, num_microbatches=self.num_microbatches or plan.num_microbatches, passes=self.passes)
            for plan in (*enumerate_plans(self.num_ranks, spec), *pipeline_plans)
            if optimizer_spec.is_elementwise or not any(isinstance(strategy, Tensor) for strategy in plan.strategies)
        )
        tolerance = (
            None if options.num_measured_plans else PREDICTED_TOLERANCE
        )  # slower predictions may be measured, too
        is_on_host = all(param.device.type in HOST_DEVICES for param in model.parameters())
        has_folder = options.offload_folder is not None and is_on_host and options.device in {None, "cpu"}
        problem = PlanningProblem(
            spec,
            cluster,
            batch_size,
            profile,
            has_offload_folder=has_folder,
            may_recompute=not uses_sync_batch_norm(model, options),
        )
        return rank_and_choose(plans, problem, tolerance)


def make_auto_strategy(requested_plan: RequestedPlan, plan: Plan, options: TrainingOptions) -> AutoStrategy | None:
    """Return the choice to make, for the ranks of a plan; None if the plan is given.

    Raises:
        PlanError: the plan is given, and plans are to be measured.
    """
    strategy = requested_plan.strategy
    if not isinstance(strategy, str) or _AUTO.fullmatch(strategy) is None:
        if options.num_measured_plans:
            raise PlanError(
                f"num_measured_plans={options.num_measured_plans} is the number of plans that are measured to choose "
                f"one, but the plan is given, {plan}; give strategy='auto', or omit num_measured_plans"
            )
        return None
    if options.loss_reduction == "batch" and plan.num_ranks > 1:
        raise PlanError(
            f"strategy='{strategy}' was given with loss_reduction='batch', but plans are predicted for losses of "
            "microbatches, and most pipelines cannot gather outputs; name the plan: data, zero3 or gpipe"
        )
    return AutoStrategy(plan.num_ranks, requested_plan.num_microbatches, plan.passes)


def trace_model_spec(
    model: nn.Module,
    optimizer_spec: OptimizerSpec,
    inputs: Inputs,
    dims: Mapping[str, tuple[str, str]] | None,
    precision: Precision | None = None,
) -> ModelSpec:
    """Describe a model for the planner: partitioned as finely as possible, without its frozen parameters.

    A Sequential, which is partitioned differently without tensor parallelism, is described both ways. With a precision
    that casts modules, values have the dtypes that they have in a run, and parameters the bytes.

    Raises:
        PlanError: the model cannot even be called with these inputs.
    """

    def describe(*granularities: PartitionGranularity) -> ModelSpec:
        with cast_modules(model, precision):
            partition = finest_partition(model, as_call_args(inputs), granularities, dims)
            return describe_trained(partition, model, optimizer_spec, precision)

    spec = describe("tensor_parallel", "blocks")
    if not is_plain_sequential(model):
        return spec
    without_tp = describe("blocks")
    return spec if spec == without_tp else replace(spec, variant_without_tp=without_tp)
