"""``counterpoint plan --measure``: the best plans, tried on ranks of this host with a job's own model and data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from counterpoint.jobs.registry import find_job
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.model.model_profile import format_profile, parse_profile
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import PlanChoice, PlanTrial, candidates_to_measure, decide_by_trials
from counterpoint.planner.ranking import RejectedPlan
from counterpoint.program.trace import Trace
from counterpoint.training.distributed_world import open_world
from counterpoint.training.options import TrainingOptions
from counterpoint.training.plan_trials import TrialTarget, run_trials
from counterpoint.training.trainer import take_first_samples
from counterpoint.training.validation import wrap_optimizer


def measure_on_this_host(job: str, choice: PlanChoice, count: int) -> PlanChoice:
    """Return the choice by what so many of the best plans and plain data parallelism take on this host.

    Raises:
        LaunchError: a rank failed; the first line names it.
    """
    plans = candidates_to_measure(choice, count)
    texts = [plan.to_yaml() for plan in plans]
    timing = choice.problem.profile
    took = "" if timing is None else format_profile(timing)
    first, *_ = launch(measure_job, ranks=plans[0].num_ranks, args=[job, choice.problem.batch_size, texts, took])
    trials = [
        PlanTrial(plans[at], step_s, Trace.from_json(trace), tuple(turns))
        for at, step_s, trace, turns in first["trials"]
    ]
    return decide_by_trials(choice, trials, [RejectedPlan(plans[at], reason) for at, reason in first["untried"]])


def measure_job(job: str, batch_size: int, texts: Sequence[str], profile_text: str = "") -> dict[str, Any]:
    """Try plans on this rank, with the others, and return what they took; every rank returns the same.

    Args:
        job: whose model and data.
        batch_size: samples of one global batch.
        texts: of the plans.
        took: the text of a timing by whose seconds pipelines are cut; empty for none.
    """
    plans = [Plan.from_yaml(text) for text in texts]
    found = find_job(job)
    model, (data, _) = found.build_model(0), found.build_data()
    options = TrainingOptions(batch_norm="deferred", profile=parse_profile(profile_text) if profile_text else None)
    ranks = partial(open_world, detect(), plans[0].num_ranks, options.timeout_s)
    batch = partial(take_first_samples, data, min(batch_size, len(data)))
    subject = TrialTarget(model, found.loss, wrap_optimizer(found.optimizer, model), options, ranks, batch)
    trials, untried = run_trials(plans, subject, with_traces=True)
    return {
        "trials": [
            (plans.index(one.plan), one.step_s, one.trace.to_json() if one.trace is not None else "", one.round_times_s)
            for one in trials
        ],
        "untried": [(plans.index(one.plan), one.reason) for one in untried],
    }
