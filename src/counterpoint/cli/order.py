"""What the command asks its ranks to do, as a value that travels to their processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from counterpoint.cli.config import RunConfig
from counterpoint.model.timing import Timing
from counterpoint.model.timing_file import read_timing, write_timing
from counterpoint.plan import Plan
from counterpoint.strategies.written import Written
from counterpoint.training.progress import Mode


@dataclass(frozen=True, slots=True)
class Order:
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
    progress: Mode
    written: Written | None = None
    timing: Timing | None = None

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
                "written": None if self.written is None else [self.written.file, self.written.lines],
                "timing": None if self.timing is None else write_timing(self.timing),
            }
        )

    @staticmethod
    def from_json(text: str) -> Order:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(text)
        resume = None if found["resume"] is None else Path(found["resume"])
        config = RunConfig.model_validate(found["config"])
        file, lines = found["written"] or ("", ())
        written = Written(file, tuple((field, line) for field, line in lines)) if file else None
        timing = None if found["timing"] is None else read_timing(found["timing"])
        return Order(config, found["strategy"], Path(found["folder"]), resume, found["progress"], written, timing)

    @property
    def plan(self) -> str | Plan:
        """What the trainer is given: a plan that was read from a file as a value, any other as its text."""
        if self.written is None:
            return self.strategy
        plan = Plan.parse(self.strategy)
        micros, passes = self.config.plan.num_microbatches, self.config.plan.passes
        plan = replace(plan, num_microbatches=micros or 1, passes=tuple(passes or ()))
        return replace(plan, written=self.written, timing=self.timing)
