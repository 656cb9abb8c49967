"""Checkpoints of an asynchronous pipeline: each rank writes its part when it reaches the step, without waiting.

The loop body of an asynchronous pipeline finishes one batch on every stage (decision 25). So the newest weights and
optimizer state of each stage after body k have seen the same batches, although the stages reach body k at different
times. The parts of one step are one checkpoint, and a run that resumes from it starts as after a flush at this step.
Batches in flight are not saved: they are trained on again.
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
    step_folders,
)
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.optim.validation import renamed_hint
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.runtime.state_dict import collect_state_slices
from counterpoint.training.checkpointing.save_restore import (
    TrainProgress,
    collect_frozen_params,
    collect_state,
    require_finite_weights,
    saved_buffers,
)
from counterpoint.training.local_ranks import LocalRanks
from counterpoint.training.options import RENAMED_VALUES

CheckpointMode: TypeAlias = Literal["synchronous", "per_stage"]
"""Who writes a checkpoint: all ranks together, after a flush, or each stage independently."""


class StageCheckpointer:
    """Writes the parts of this process's ranks; holds locks on the drafts that still wait for other parts.

    Args:
        local_ranks: the ranks.
        checkpoint_dir: the folder of all checkpoints.
        keep_last: how many checkpoints are kept; None keeps all.
    """

    def __init__(self, local_ranks: LocalRanks, checkpoint_dir: Path, keep_last: int | None) -> None:
        self.local_ranks = local_ranks
        self.checkpoint_dir = checkpoint_dir
        self.keep_last = keep_last
        local_id, all_ranks = token_hex(4), tuple(range(local_ranks.world.fabrics[0].num_ranks))
        ids = local_ranks.world.run(lambda fabric: fabric.gather_values("checkpoints of this run", local_id, all_ranks))
        self.run_id = cast("str", ids[0][0])
        self.drafts: dict[int, list[CheckpointDraft]] = {}  # by step, those of this process's ranks

    def save(self, progress: TrainProgress, metadata: Mapping[str, Any]) -> None:
        """Write the parts of this process's ranks, and commit if they were the last ones.

        Raises:
            CheckpointError: a part could not be written; earlier checkpoints are untouched.
        """
        drafts = self.drafts.setdefault(progress.step, [])

        def work(fabric: Fabric) -> None:
            slices, state = self.collect_part(self.local_ranks.ranks[fabric.rank], fabric, progress, metadata)
            require_finite_weights(slices)
            draft = join_draft(self.checkpoint_dir, progress.step, self.run_id)
            drafts.append(draft)
            add_part(draft, (fabric.rank, fabric.num_ranks), slices, state)
            commit_if_complete(draft, keep=self.keep_last)

        with self.local_ranks.stale_weights.unmarked():
            self.local_ranks.world.run(work)

    def collect_part(
        self, rank: RankRuntime, fabric: Fabric, progress: TrainProgress, metadata: Mapping[str, Any]
    ) -> tuple[list[TensorSlice], dict[str, Any]]:
        """Return what a rank writes: the shards it owns, and the buffers that its forwards change."""
        slices, scalars = collect_state_slices(self.local_ranks.shard_map(), rank)
        changed_buffers, is_first = rank.interpreter.count_buffer_changes(), fabric.rank == 0
        for name, tensor in saved_buffers(self.local_ranks, rank):
            if name in changed_buffers or is_first:
                suffix = f"~{fabric.rank}/{fabric.num_ranks}" if name in changed_buffers else ""
                slices.append(TensorSlice(f"buffer:{name}{suffix}", tensor, tuple(tensor.shape)))
        if not is_first:
            return slices, {"scalars": scalars}
        return slices + collect_frozen_params(self.local_ranks), collect_state(self.local_ranks, progress, metadata) | {
            "scalars": scalars
        }

    def pop_completed(self) -> list[tuple[int, Path]]:
        """Return the steps that were completed since the last call, and their folders, except those pruned already."""
        completed = [step for step, drafts in self.drafts.items() if not any(map(is_pending, drafts))]
        for step in completed:
            self.release(step)
        folders = {int(folder.name.removeprefix("step-")): folder for folder in step_folders(self.checkpoint_dir)}
        return [(step, folders[step]) for step in completed if step in folders]

    def finish(self) -> None:
        """Wait until all ranks have written their parts; a collective call after the last flush."""
        self.local_ranks.world.run(lambda fabric: fabric.barrier(tuple(range(fabric.num_ranks))))

    def release(self, step: int) -> None:
        """Release this process's locks on a step's drafts."""
        for draft in self.drafts.pop(step):
            draft.release()

    def close(self) -> None:
        """Release all locks; incomplete drafts are left for the next run to recover or remove."""
        for step in list(self.drafts):
            self.release(step)


def require_checkpoint_mode(local_ranks: LocalRanks, checkpoint_mode: CheckpointMode, save_every: int | None) -> None:
    """Check that stages can save independently, if they are to.

    Raises:
        PlanError: the plan flushes after every step, or no period is given.
    """
    if checkpoint_mode not in {"synchronous", "per_stage"}:
        hint = renamed_hint(f"checkpoint_mode={checkpoint_mode}", RENAMED_VALUES)
        raise PlanError(f"there is no checkpoint_mode={checkpoint_mode!r}; give synchronous or per_stage{hint}")
    if checkpoint_mode == "synchronous":
        return
    if save_every is None:
        raise PlanError(
            "checkpoint_mode='per_stage' needs a period; give save_every=STEPS and checkpoint_dir=FOLDER as well"
        )
    if not local_ranks.in_flight.lookahead:
        raise PlanError(
            f"checkpoint_mode='per_stage' lets stages save without waiting for each other, but {local_ranks.plan} "
            "flushes after every step, so all ranks save the same step anyway; omit it, or use schedule=pipedream"
        )
