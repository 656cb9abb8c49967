"""``counterpoint plan --measure``: the best plans, tried on ranks of this host with a job's own model and data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from counterpoint.jobs.table import find
from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import launch
from counterpoint.model.timing_file import read_timing, write_timing
from counterpoint.plan import Plan
from counterpoint.planner.choose import Choice, Trial, decide, worth_measuring
from counterpoint.planner.rank import Refusal
from counterpoint.program.trace import Trace
from counterpoint.training.checks import make_face
from counterpoint.training.options import Options
from counterpoint.training.trainer import first_samples
from counterpoint.training.trials import Subject, try_plans
from counterpoint.training.world import open_world


def measured_here(job: str, choice: Choice, count: int) -> Choice:
    """Return the choice by what so many of the best plans and plain data parallelism take on this host.

    Raises:
        LaunchError: a rank failed; the first line names it.
    """
    plans = worth_measuring(choice, count)
    texts = [plan.to_yaml() for plan in plans]
    timing = choice.question.timing
    took = "" if timing is None else write_timing(timing)
    first, *_ = launch(measure_job, ranks=plans[0].num_ranks, args=[job, choice.question.batch_size, texts, took])
    trials = [
        Trial(plans[at], step_s, Trace.from_json(trace), tuple(turns)) for at, step_s, trace, turns in first["trials"]
    ]
    return decide(choice, trials, [Refusal(plans[at], reason) for at, reason in first["untried"]])


def measure_job(job: str, batch_size: int, texts: Sequence[str], took: str = "") -> dict[str, Any]:
    """Try plans on this rank, with the others, and return what they took; every rank returns the same.

    Args:
        job: whose model and data.
        batch_size: samples of one global batch.
        texts: of the plans.
        took: the text of a timing by whose seconds pipelines are cut; empty for none.
    """
    plans = [Plan.from_yaml(text) for text in texts]
    found = find(job)
    model, (data, _) = found.build_model(0), found.build_data()
    options = Options(batch_norm="deferred", timing=read_timing(took) if took else None)
    ranks = partial(open_world, detect(), plans[0].num_ranks, options.deadline_s)
    batch = partial(first_samples, data, min(batch_size, len(data)))
    subject = Subject(model, found.loss, make_face(found.optimizer, model), options, ranks, batch)
    trials, untried = try_plans(plans, subject, traced=True)
    return {
        "trials": [
            (plans.index(one.plan), one.step_s, one.trace.to_json() if one.trace is not None else "", one.turns)
            for one in trials
        ],
        "untried": [(plans.index(one.plan), one.reason) for one in untried],
    }
