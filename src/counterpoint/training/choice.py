"""From what a user writes to a plan and options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from counterpoint.cutting.eager import Inputs
from counterpoint.cutting.seeds import is_plain_sequential
from counterpoint.errors import PlanError
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import PASSES as PASSES, Plan
from counterpoint.planner.choose import PERHAPS_AS_FAST, Choice, weigh
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.remedies import Question
from counterpoint.planner.staged import EXACT_ORDERS, staged_plans
from counterpoint.runtime.build import call_form
from counterpoint.runtime.optimizers import Face
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.terms import chunks_in
from counterpoint.training.cutting import finest_cut
from counterpoint.training.options import Options
from counterpoint.training.trained import trainable, with_unused
from counterpoint.world.cluster import Cluster
from counterpoint.world.cluster_file import cluster_of

FEW_SAMPLES = 8
"""A model is traced on so many samples at most, to see what it costs."""

_AUTO = re.compile(r"^\s*auto\s*(\(\s*\d+\s*\))?\s*$")


def make_options(options: dict[str, Any]) -> Options:
    """Return the options.

    Raises:
        PlanError: a name is none, and the message suggests the nearest one; or the file of a cluster is wrong.
    """
    known = list(Options.__dataclass_fields__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PlanError(f"there is no option {name!r}; {hint}the options are {', '.join(known)}")
    given = options.get("cluster")
    return Options(**(options if given is None else {**options, "cluster": cluster_of(given)}))


def make_plan(
    strategy: str | Plan,
    environment: RankEnvironment | None,
    num_microbatches: int | None,
    passes: Sequence[str] | None,
) -> Plan:
    """Return the plan for the ranks that were started, or for this process alone; data where a choice is left open.

    Args:
        strategy: a plan, or its text; a plan has its passes, a text gets :data:`counterpoint.plan.PASSES`.
        environment: what a launcher told this process, if any did.
        num_microbatches: of the innermost program; None for those of the plan.
        passes: what is done to the program instead; None where nothing is asked for.
    """
    num_ranks = environment.world_size if environment is not None else 1
    if isinstance(strategy, Plan):
        plan = strategy
    else:
        text = _AUTO.sub(r"data\1", strategy)
        hosts = hosts_of(environment)
        found = Plan.parse(text, num_ranks=num_ranks, num_microbatches=num_microbatches, hosts=hosts)
        plan = replace(found, passes=PASSES)
    if num_microbatches is not None:
        plan = replace(plan, num_microbatches=num_microbatches)
    if num_ranks > 1:
        plan.require_ranks(num_ranks)
    return plan if passes is None else replace(plan, passes=tuple(passes))


def says_microbatches(strategy: str | Plan, num_microbatches: int | None) -> bool:
    """Return whether the number of microbatches is given, by itself or in the plan, and not for us to choose."""
    return num_microbatches is not None or isinstance(strategy, Plan) or chunks_in(strategy) is not None


def hosts_of(environment: RankEnvironment | None) -> list[int]:
    """Return the host of every rank, as its launcher has laid them out: each host full before the next; none alone."""
    if environment is None:
        return []
    return [rank // environment.local_world_size for rank in range(environment.world_size)]


@dataclass(frozen=True, slots=True)
class Auto:
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
    def alone(self) -> Plan:
        """What is taken where there is one rank."""
        return Plan((), self.num_microbatches or 1, self.passes)

    def choose(self, model: nn.Module, face: Face, inputs: Inputs, options: Options, batch_size: int) -> Plan:
        """Return the plan that the planner would take, the same on every rank; see :meth:`weigh`.

        Raises:
            PlanError: the model does not take the inputs, or there is no plan for this batch.
        """
        return self.alone if self.num_ranks == 1 else self.weigh(model, face, inputs, options, batch_size).plan

    def weigh(self, model: nn.Module, face: Face, inputs: Inputs, options: Options, batch_size: int) -> Choice:
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
        spec = trace_spec(model, face, inputs, options.dims)
        cluster = options.cluster or Cluster()
        cluster.require_ranks(self.num_ranks)
        staged = staged_plans(self.num_ranks, spec.unsliced, cluster, batch_size, EXACT_ORDERS, timing=options.timing)
        plans = (
            replace(plan, num_microbatches=self.num_microbatches or plan.num_microbatches, passes=self.passes)
            for plan in (*enumerate_plans(self.num_ranks, spec), *staged)
            if face.is_elementwise or not any(isinstance(strategy, Tensor) for strategy in plan.strategies)
        )
        within = None if options.measure else PERHAPS_AS_FAST  # what is measured may be predicted to be slower
        return weigh(plans, Question(spec, cluster, batch_size, options.timing), within)


def make_auto(strategy: str | Plan, plan: Plan, num_microbatches: int | None, options: Options) -> Auto | None:
    """Return the choice that is left open for the ranks of a plan; None when there is none.

    Raises:
        PlanError: there is none, and plans are to be measured.
    """
    if isinstance(strategy, Plan) or _AUTO.fullmatch(strategy) is None:
        if options.measure:
            raise PlanError(
                f"measure={options.measure} says how many plans are measured to choose one, but the plan is given, "
                f"{strategy}; give strategy='auto', or leave measure out"
            )
        return None
    return Auto(plan.num_ranks, num_microbatches, plan.passes)


def trace_spec(model: nn.Module, face: Face, inputs: Inputs, dims: Mapping[str, tuple[str, str]] | None) -> ModelSpec:
    """Return a model as the planner sees it: cut as finely as it can be, without its frozen parameters.

    A Sequential, which is cut in another way where nobody slices its layers, is described in both.

    Raises:
        PlanError: it cannot even be called with these inputs.
    """
    spec = with_unused(trainable(finest_cut(model, call_form(inputs), ("regions", "chain"), dims).spec, face))
    if not is_plain_sequential(model):
        return spec
    chained = with_unused(trainable(finest_cut(model, call_form(inputs), ("chain",), dims).spec, face))
    return spec if spec == chained else replace(spec, chained=chained)
