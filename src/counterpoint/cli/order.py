"""What the command asks its ranks to do, as a value that travels to their processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from counterpoint.cli.config import RunConfig
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
    """

    config: RunConfig
    strategy: str
    folder: Path
    resume: Path | None
    progress: Mode

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
            }
        )

    @staticmethod
    def from_json(text: str) -> Order:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(text)
        resume = None if found["resume"] is None else Path(found["resume"])
        config = RunConfig.model_validate(found["config"])
        return Order(config, found["strategy"], Path(found["folder"]), resume, found["progress"])
