"""``counterpoint plan --measure``: measure the best plans on ranks of this host, on a job's or a script's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from counterpoint.cli.workload import load_workload
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.model.model_profile import format_profile, parse_profile
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import PlanChoice, PlanTrial, candidates_to_measure, decide_by_trials
from counterpoint.planner.ranking import RejectedPlan
from counterpoint.program.trace import Trace
from counterpoint.training.distributed_world import open_world
from counterpoint.training.ranks.plan_trials import TrialTarget, run_trials


def measure_on_this_host(name: tuple[str, list[str], int], choice: PlanChoice, count: int) -> PlanChoice:
    """Return the choice after measuring a number of the best plans and plain data parallelism on this host.

    Args:
        name: the arguments of :func:`~counterpoint.cli.workload.load_workload`, with which every rank loads it.
        choice: by predicted times.
        count: the number of plans in addition to data parallelism.

    Raises:
        LaunchError: a rank failed; the first line names it.
    """
    plans = candidates_to_measure(choice, count)
    texts = [plan.to_yaml() for plan in plans]
    profile = choice.problem.profile
    profile_text = "" if profile is None else format_profile(profile)
    result, *_ = launch(
        measure_workload, ranks=plans[0].num_ranks, args=[*name, choice.problem.batch_size, texts, profile_text]
    )
    trials = [
        PlanTrial(plans[at], step_s, Trace.from_json(trace), tuple(turns))
        for at, step_s, trace, turns in result["trials"]
    ]
    return decide_by_trials(choice, trials, [RejectedPlan(plans[at], reason) for at, reason in result["untried"]])


def measure_workload(
    name: str, arguments: Sequence[str], which: int, batch_size: int, texts: Sequence[str], profile_text: str = ""
) -> dict[str, Any]:
    """Measure plans on this rank, together with the others; every rank returns the same times.

    Args:
        name: the job or the script whose model and data are used.
        arguments: of the script.
        which: which of its calls.
        batch_size: samples of one global batch.
        texts: the plans, as YAML.
        profile_text: the profile by which pipelines are partitioned, as JSON; empty for none.
    """
    plans = [Plan.from_yaml(text) for text in texts]
    workload = load_workload(name, arguments, which)
    profile = parse_profile(profile_text) if profile_text else None
    options = replace(workload.options, num_measured_plans=0, profile=profile)
    ranks = partial(open_world, detect(), plans[0].num_ranks, options.timeout_s)
    batch = partial(workload.make_batch, batch_size)
    target = TrialTarget(workload.model, workload.loss, workload.optimizer_spec, options, ranks, batch)
    trials, untried = run_trials(plans, target, with_traces=True)
    return {
        "trials": [
            (
                plans.index(trial.plan),
                trial.step_s,
                trial.trace.to_json() if trial.trace is not None else "",
                trial.round_times_s,
            )
            for trial in trials
        ],
        "untried": [(plans.index(trial.plan), trial.reason) for trial in untried],
    }
