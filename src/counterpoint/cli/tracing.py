"""A job's model as the planner sees it: traced on a few of its own samples, cut as finely as each plan needs."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from counterpoint.cutting.choose import Need, cut_model
from counterpoint.data.fetch import fetch
from counterpoint.errors import PlanError
from counterpoint.jobs.job import Job
from counterpoint.model.spec import ModelSpec
from counterpoint.plan import Plan

FEW_SAMPLES = 8


class TracedJob:
    """A job's model in all the ways in which it can be cut; each is traced when it is first asked for.

    Args:
        model: the job's model.
        inputs: of a few samples.
    """

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.model = model
        self.inputs = inputs
        self.cut = cache(self._cut)

    def _cut(self, need: Need) -> ModelSpec | PlanError:
        try:
            return cut_model(self.model, self.inputs, need=need).spec
        except PlanError as reason:
            return reason

    def model_for(self, plan: Plan) -> ModelSpec:
        """Return the model as the runtime cuts it for a plan.

        Raises:
            PlanError: the plan needs a finer cut than there is.
        """
        need = plan.need
        found = self.cut("chain" if need == "wish" else need)
        if isinstance(found, PlanError) and need == "wish":
            found = self.cut("none")
        if isinstance(found, PlanError):
            raise found
        return found

    def finest(self) -> ModelSpec:
        """Return the model in its most blocks.

        Raises:
            PlanError: it cannot even be run.
        """
        found = self.cut("chain")
        if isinstance(found, PlanError):
            found = self.cut("none")
        if isinstance(found, PlanError):
            raise found
        return found


def trace_job(job: Job, batch_size: int) -> TracedJob:
    """Return a job's model with a few samples of its data, ready to be traced."""
    dataset, _ = job.build_data()
    fields = fetch(dataset, range(min(batch_size, FEW_SAMPLES, len(dataset))))  # type: ignore[arg-type]
    return TracedJob(job.build_model(0), tuple(fields[:-1]))
