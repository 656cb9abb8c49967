"""Checkpoints of an asynchronous pipeline: each rank writes its part when it reaches the step, without waiting.

The loop body of an asynchronous pipeline finishes one batch on every stage (decision 25). So the newest weights and
optimizer state of each stage after body k have seen the same batches, although the stages reach body k at different
times. The parts of one step are one checkpoint, and a run that resumes from it starts as after a flush at this step.
Batches in flight are not saved: they are trained on again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
from counterpoint.checkpoint.file_ops import is_folder
from counterpoint.errors import CheckpointError, CheckpointWriteError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.optim.validation import renamed_hint
from counterpoint.runtime.rank_builder import RankRuntime
from counterpoint.runtime.state_dict import collect_state_slices
from counterpoint.training.checkpointing.checkpoint_dir import CheckpointDir
from counterpoint.training.checkpointing.save_restore import (
    TrainProgress,
    collect_frozen_params,
    collect_state,
    require_finite_weights,
    saved_buffers,
)
from counterpoint.training.options import RENAMED_VALUES
from counterpoint.training.ranks.local_ranks import LocalRanks

CheckpointMode: TypeAlias = Literal["synchronous", "per_stage"]
"""Who writes a checkpoint: all ranks together, after a flush, or each stage independently."""


class StageCheckpointer:
    """Writes the parts of this process's ranks; holds locks on the drafts that still wait for other parts.

    Args:
        local_ranks: the ranks.
        target: the folder of all checkpoints.
        keep_last: how many checkpoints are kept; None keeps all.
    """

    def __init__(self, local_ranks: LocalRanks, target: CheckpointDir, keep_last: int | None) -> None:
        self.local_ranks = local_ranks
        self.target = target
        self.keep_last = keep_last
        self.drafts: dict[int, list[CheckpointDraft]] = {}  # by step, those of this process's ranks

    def save(self, progress: TrainProgress, metadata: Mapping[str, Any]) -> None:
        """Write the parts of this process's ranks, and commit if they were the last ones.

        If one cannot be written, the parts of this step that other ranks have written are removed.

        Raises:
            CheckpointWriteError: the disk did not take a part; earlier checkpoints are untouched.
        """
        drafts, files = self.drafts.setdefault(progress.step, []), self.target.files

        def work(fabric: Fabric) -> CheckpointWriteError | None:
            slices, state = self.collect_part(self.local_ranks.ranks[fabric.rank], fabric, progress, metadata)
            require_finite_weights(slices)
            try:
                self.target.require_held()
                require_folder(self.target.path)
                draft = join_draft(self.target.path, progress.step, self.target.draft_id, files=files)
                drafts.append(draft)
                add_part(draft, (fabric.rank, fabric.num_ranks), slices, state, files=files)
                commit_if_complete(draft, keep=self.keep_last, files=files)
            except CheckpointWriteError as error:
                return error
            return None

        with self.local_ranks.stale_weights.unmarked():
            failures = [error for error in self.local_ranks.world.run(work) if error is not None]
        for error in failures[:1]:
            for draft in self.drafts.pop(progress.step):
                draft.discard()
            raise error

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
        state = collect_state(self.local_ranks, progress, metadata, self.target.run_id) | {"scalars": scalars}
        return slices + collect_frozen_params(self.local_ranks), state

    def pop_completed(self) -> list[tuple[int, Path]]:
        """Return the steps that were completed since the last call, and their folders, except those pruned already.

        Raises:
            CheckpointWriteError: the folder cannot be read; what was completed is returned later.
        """
        completed = [step for step, drafts in self.drafts.items() if not any(map(is_pending, drafts))]
        try:
            folders = {int(folder.name.removeprefix("step-")): folder for folder in step_folders(self.target.path)}
        except CheckpointError as error:
            raise CheckpointWriteError(str(error)) from error
        for step in completed:
            self.release(step)
        return [(step, folders[step]) for step in completed if step in folders]

    def finish(self) -> None:
        """Wait until all ranks have written their parts; a collective call after the last flush."""
        self.local_ranks.world.run(lambda fabric: fabric.barrier(tuple(range(fabric.num_ranks))))

    def agree_on_newest(self, step: int) -> int:
        """Return the step of the newest complete checkpoint as the first rank knows it; a collective call."""
        everyone = tuple(range(self.local_ranks.world.fabrics[0].num_ranks))
        steps = self.local_ranks.world.run(lambda fabric: fabric.gather_values("newest checkpoint", step, everyone))
        return cast("list[int]", steps[0])[0]

    def release(self, step: int) -> None:
        """Release this process's locks on a step's drafts."""
        for draft in self.drafts.pop(step):
            draft.release()

    def close(self) -> None:
        """Release all locks; incomplete drafts are left for the next run to recover or remove."""
        for step in list(self.drafts):
            self.release(step)


def require_folder(path: Path) -> None:
    """Check that the folder of all checkpoints is still there, on a rank that does not hold its lock.

    Raises:
        CheckpointWriteError: it is not.
    """
    if not is_folder(path):
        raise CheckpointWriteError(
            f"{path} was removed or renamed while this run used it; nothing was saved: rename it back, with what was "
            "in it"
        )


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
