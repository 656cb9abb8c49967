"""What the command asks its ranks to do, as a value that travels to their processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from counterpoint.cli.config import RunConfig
from counterpoint.model.model_profile import ModelProfile, format_profile, parse_profile
from counterpoint.plan.plan import Plan
from counterpoint.plan.source import PlanSource
from counterpoint.training.callbacks.progress import ProgressMode


@dataclass(frozen=True, slots=True)
class RankJob:
    """What the command asks its ranks to do.

    Args:
        config: all values, the job's own filled in.
        strategy: the plan with its ranks written out.
        folder: of the run.
        resume: a checkpoint, or a folder of them, to go on from.
        progress: how the first rank shows it.
        written: the file that the plan was read from, if it was; with its own microbatches and passes.
        timing: that the plan came with, if it did.
    """

    config: RunConfig
    strategy: str
    folder: Path
    resume: Path | None
    progress: ProgressMode
    plan_source: PlanSource | None = None
    profile: ModelProfile | None = None

    def to_json(self) -> str:
        """Write the order for another process."""
        resume = None if self.resume is None else str(self.resume)
        return json.dumps(
            {
                "config": self.config.model_dump(mode="json"),
                "strategy": self.strategy,
                "folder": str(self.folder),
                "resume": resume,
                "progress": self.progress,
                "written": None if self.plan_source is None else [self.plan_source.file, self.plan_source.lines],
                "timing": None if self.profile is None else format_profile(self.profile),
            }
        )

    @staticmethod
    def from_json(text: str) -> RankJob:
        """Read what :meth:`result_to_dict` wrote."""
        found = json.loads(text)
        resume = None if found["resume"] is None else Path(found["resume"])
        config = RunConfig.model_validate(found["config"])
        file, lines = found["written"] or ("", ())
        written = PlanSource(file, tuple((field, line) for field, line in lines)) if file else None
        timing = None if found["timing"] is None else parse_profile(found["timing"])
        return RankJob(config, found["strategy"], Path(found["folder"]), resume, found["progress"], written, timing)

    @property
    def plan(self) -> str | Plan:
        """What the trainer is given: a plan that was read from a file as a value, any other as its text."""
        if self.plan_source is None:
            return self.strategy
        plan = Plan.parse(self.strategy)
        micros, passes = self.config.plan.num_microbatches, self.config.plan.passes
        plan = replace(plan, num_microbatches=micros or 1, passes=tuple(passes or ()))
        return replace(plan, source=self.plan_source, profile=self.profile)
