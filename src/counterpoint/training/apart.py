"""Checkpoints of a stream without a flush: each rank writes its part when it comes there, and waits for nobody.

A body of a stream finishes one batch on every stage (decision 25), so that behind it the newest weights and the
optimizer's state of a stage have seen as many batches as those of the others have behind theirs. The parts of one step
are one checkpoint, and a run that goes on from it begins as behind a flush at this step. What is in flight is in no
part: these batches are trained on again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeAlias, cast

from counterpoint.checkpoint import Draft, Piece, add_part, commit_whole, is_pending, join, rescue, step_folders
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.runtime.build import Rank
from counterpoint.runtime.state import pieces_of
from counterpoint.training.saving import Progress, buffers_of, frozen_pieces, state_of
from counterpoint.training.team import Team

SaveBy: TypeAlias = Literal["run", "stage"]
"""Who writes a checkpoint: all ranks of a run together, behind a flush, or each stage for itself."""


class Apart:
    """The checkpoints of one run that its ranks write apart. It has locks on those that still wait for parts.

    Args:
        team: the ranks.
        root: the folder of all checkpoints.
        keep: how many checkpoints stay; None keeps all.
    """

    def __init__(self, team: Team, root: Path, keep: int | None) -> None:
        self.team = team
        self.root = root
        self.keep = keep
        own, everyone = token_hex(4), tuple(range(team.world.fabrics[0].num_ranks))
        told = team.world.run(lambda fabric: fabric.gather_values("checkpoints of this run", own, everyone))
        self.run = cast("str", told[0][0])
        self.drafts: dict[int, list[Draft]] = {}  # by step, those of this process's ranks

    def save(self, progress: Progress, extra: Mapping[str, Any]) -> None:
        """Write the parts of this process's ranks, and commit if they were the last ones.

        Raises:
            CheckpointError: a part could not be written; earlier checkpoints are untouched.
        """
        mine = self.drafts.setdefault(progress.step, [])

        def work(fabric: Fabric) -> None:
            pieces, state = self.part_of(self.team.ranks[fabric.rank], fabric, progress, extra)
            draft = join(self.root, progress.step, self.run)
            mine.append(draft)
            add_part(draft, (fabric.rank, fabric.num_ranks), pieces, state)
            commit_whole(draft, keep=self.keep)

        self.team.world.run(work)

    def part_of(
        self, rank: Rank, fabric: Fabric, progress: Progress, extra: Mapping[str, Any]
    ) -> tuple[list[Piece], dict[str, Any]]:
        """Return what a rank writes: what it answers for, and the buffers that its forwards change."""
        pieces, scalars = pieces_of(self.team.book(), rank)
        changed, is_first = rank.interpreter.changed_buffers(), fabric.rank == 0
        for name, tensor in buffers_of(self.team, rank):
            if name in changed or is_first:
                own = f"~{fabric.rank}/{fabric.num_ranks}" if name in changed else ""
                pieces.append(Piece(f"buffer:{name}{own}", tensor, tuple(tensor.shape)))
        if not is_first:
            return pieces, {"scalars": scalars}
        return pieces + frozen_pieces(self.team), state_of(self.team, progress, extra) | {"scalars": scalars}

    def completed(self) -> list[tuple[int, Path]]:
        """Return the steps that are complete since the last call, and their folders, but for those pruned by now."""
        done = [step for step, drafts in self.drafts.items() if not any(map(is_pending, drafts))]
        for step in done:
            self.release(step)
        folders = {int(folder.name.removeprefix("step-")): folder for folder in step_folders(self.root)}
        return [(step, folders[step]) for step in done if step in folders]

    def finish(self) -> None:
        """All ranks have written what they had to; they call it together, behind the last flush."""
        self.team.world.run(lambda fabric: fabric.barrier(tuple(range(fabric.num_ranks))))

    def release(self, step: int) -> None:
        """This process has no lock on a step's draft any more."""
        for draft in self.drafts.pop(step):
            draft.release()

    def close(self) -> None:
        """The run is over; drafts that wait for parts are left to whoever sweeps them, or goes on."""
        for step in list(self.drafts):
            self.release(step)


def require_apart(team: Team, save_by: SaveBy, save_every: int | None) -> None:
    """Check that stages can save each for itself, if they are to.

    Raises:
        PlanError: they need not, because the plan flushes after every step; or it is not said when they do.
    """
    if save_by not in {"run", "stage"}:
        raise PlanError(f"there is no save_by={save_by!r}; give run or stage")
    if save_by == "run":
        return
    if save_every is None:
        raise PlanError(
            "save_by='stage' says who saves, but not when; give save_every=STEPS and save_to=FOLDER as well"
        )
    if not team.flight.ahead:
        raise PlanError(
            f"save_by='stage' has stages save without waiting for each other, but {team.plan} flushes after every "
            "step, so that all ranks are at the same one; leave it out, or take order=pipedream"
        )


def rescue_for_all(team: Team, root: Path) -> None:
    """Checkpoints that a dead run wrote, but did not commit, are there for every rank; all ranks call it together."""

    def work(fabric: Fabric) -> None:
        if fabric.rank == 0:
            rescue(root)
        fabric.barrier(tuple(range(fabric.num_ranks)))

    team.world.run(work)
