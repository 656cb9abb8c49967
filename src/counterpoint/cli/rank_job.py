"""The work that the command gives to its ranks, as a value that can be sent to other processes."""

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
    """The work of the ranks.

    Args:
        config: all values, with the job's defaults.
        strategy: the plan with its number of ranks.
        folder: folder of the run.
        resume: a checkpoint, or a folder of checkpoints, to continue from; ``auto`` for those of the run's folder.
        progress: how the first rank shows progress.
        plan_source: the file that the plan was read from, if any, with its own microbatches and passes.
        profile: the profile that the plan came with, if any.
    """

    config: RunConfig
    strategy: str
    folder: Path
    resume: Path | None
    progress: ProgressMode
    plan_source: PlanSource | None = None
    profile: ModelProfile | None = None

    def to_json(self) -> str:
        """Format the job for another process."""
        resume = None if self.resume is None else str(self.resume)
        return json.dumps(
            {
                "config": self.config.model_dump(mode="json"),
                "strategy": self.strategy,
                "folder": str(self.folder),
                "resume": resume,
                "progress": self.progress,
                "plan_source": None if self.plan_source is None else [self.plan_source.file, self.plan_source.lines],
                "profile": None if self.profile is None else format_profile(self.profile),
            }
        )

    @staticmethod
    def from_json(text: str) -> RankJob:
        """Parse what :meth:`to_json` wrote."""
        fields = json.loads(text)
        resume = None if fields["resume"] is None else Path(fields["resume"])
        config = RunConfig.model_validate(fields["config"])
        file, lines = fields["plan_source"] or ("", ())
        source = PlanSource(file, tuple((field, line) for field, line in lines)) if file else None
        profile = None if fields["profile"] is None else parse_profile(fields["profile"])
        return RankJob(config, fields["strategy"], Path(fields["folder"]), resume, fields["progress"], source, profile)

    @property
    def plan(self) -> str | Plan:
        """The plan for the trainer: a value if it was read from a file, else its text."""
        if self.plan_source is None:
            return self.strategy
        plan = Plan.parse(self.strategy)
        micros, passes = self.config.plan.num_microbatches, self.config.plan.passes
        plan = replace(plan, num_microbatches=micros or 1, passes=tuple(passes or ()))
        return replace(plan, source=self.plan_source, profile=self.profile)
