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

from counterpoint.checkpoint import (
    CheckpointDraft,
    TensorSlice,
    add_part,
    commit_if_complete,
    is_pending,
    join_draft,
    recover_drafts,
    step_folders,
)
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.runtime.state_dict import collect_state_slices
from counterpoint.training.checkpointing.save_restore import (
    TrainProgress,
    collect_frozen_params,
    collect_state,
    saved_buffers,
)
from counterpoint.training.local_ranks import LocalRanks

CheckpointMode: TypeAlias = Literal["synchronous", "per_stage"]
"""Who writes a checkpoint: all ranks of a run together, behind a flush, or each stage for itself."""


class StageCheckpointer:
    """The checkpoints of one run that its ranks write apart. It has locks on those that still wait for parts.

    Args:
        team: the ranks.
        root: the folder of all checkpoints.
        keep: how many checkpoints stay; None keeps all.
    """

    def __init__(self, local_ranks: LocalRanks, checkpoint_dir: Path, keep_last: int | None) -> None:
        self.local_ranks = local_ranks
        self.checkpoint_dir = checkpoint_dir
        self.keep_last = keep_last
        own, everyone = token_hex(4), tuple(range(local_ranks.world.fabrics[0].num_ranks))
        told = local_ranks.world.run(lambda fabric: fabric.gather_values("checkpoints of this run", own, everyone))
        self.run_id = cast("str", told[0][0])
        self.drafts: dict[int, list[CheckpointDraft]] = {}  # by step, those of this process's ranks

    def save(self, progress: TrainProgress, metadata: Mapping[str, Any]) -> None:
        """Write the parts of this process's ranks, and commit if they were the last ones.

        Raises:
            CheckpointError: a part could not be written; earlier checkpoints are untouched.
        """
        mine = self.drafts.setdefault(progress.step, [])

        def work(fabric: Fabric) -> None:
            pieces, state = self.collect_part(self.local_ranks.ranks[fabric.rank], fabric, progress, metadata)
            draft = join_draft(self.checkpoint_dir, progress.step, self.run_id)
            mine.append(draft)
            add_part(draft, (fabric.rank, fabric.num_ranks), pieces, state)
            commit_if_complete(draft, keep=self.keep_last)

        self.local_ranks.world.run(work)

    def collect_part(
        self, rank: RankRuntime, fabric: Fabric, progress: TrainProgress, metadata: Mapping[str, Any]
    ) -> tuple[list[TensorSlice], dict[str, Any]]:
        """Return what a rank writes: what it answers for, and the buffers that its forwards change."""
        pieces, scalars = collect_state_slices(self.local_ranks.shard_map(), rank)
        changed, is_first = rank.interpreter.count_buffer_changes(), fabric.rank == 0
        for name, tensor in saved_buffers(self.local_ranks, rank):
            if name in changed or is_first:
                own = f"~{fabric.rank}/{fabric.num_ranks}" if name in changed else ""
                pieces.append(TensorSlice(f"buffer:{name}{own}", tensor, tuple(tensor.shape)))
        if not is_first:
            return pieces, {"scalars": scalars}
        return pieces + collect_frozen_params(self.local_ranks), collect_state(self.local_ranks, progress, metadata) | {
            "scalars": scalars
        }

    def pop_completed(self) -> list[tuple[int, Path]]:
        """Return the steps that are complete since the last call, and their folders, but for those pruned by now."""
        done = [step for step, drafts in self.drafts.items() if not any(map(is_pending, drafts))]
        for step in done:
            self.release(step)
        folders = {int(folder.name.removeprefix("step-")): folder for folder in step_folders(self.checkpoint_dir)}
        return [(step, folders[step]) for step in done if step in folders]

    def finish(self) -> None:
        """All ranks have written what they had to; they call it together, behind the last flush."""
        self.local_ranks.world.run(lambda fabric: fabric.barrier(tuple(range(fabric.num_ranks))))

    def release(self, step: int) -> None:
        """This process has no lock on a step's draft any more."""
        for draft in self.drafts.pop(step):
            draft.release()

    def close(self) -> None:
        """The run is over; drafts that wait for parts are left to whoever sweeps them, or goes on."""
        for step in list(self.drafts):
            self.release(step)


def require_checkpoint_mode(local_ranks: LocalRanks, checkpoint_mode: CheckpointMode, save_every: int | None) -> None:
    """Check that stages can save each for itself, if they are to.

    Raises:
        PlanError: they need not, because the plan flushes after every step; or it is not said when they do.
    """
    if checkpoint_mode not in {"synchronous", "per_stage"}:
        raise PlanError(f"there is no checkpoint_mode={checkpoint_mode!r}; give synchronous or per_stage")
    if checkpoint_mode == "synchronous":
        return
    if save_every is None:
        raise PlanError(
            "checkpoint_mode='per_stage' says who saves, but not when; give save_every=STEPS and checkpoint_dir=FOLDER as well"
        )
    if not local_ranks.in_flight.lookahead:
        raise PlanError(
            f"checkpoint_mode='per_stage' has stages save without waiting for each other, but {local_ranks.plan} flushes after every "
            "step, so that all ranks are at the same one; leave it out, or take schedule=pipedream"
        )


def recover_drafts(local_ranks: LocalRanks, checkpoint_dir: Path) -> None:
    """Checkpoints that a dead run wrote, but did not commit, are there for every rank; all ranks call it together."""

    def work(fabric: Fabric) -> None:
        if fabric.rank == 0:
            recover_drafts(checkpoint_dir)
        fabric.barrier(tuple(range(fabric.num_ranks)))

    local_ranks.world.run(work)
