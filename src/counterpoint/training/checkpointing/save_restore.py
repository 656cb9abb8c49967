"""Full parameters out of a checkpoint: slices put together, of one replica or of the model.

Checkpoints of a run: every rank writes what it answers for, one rank commits, any layout reads them back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from counterpoint.checkpoint import (
    Checkpoint,
    CheckpointDraft,
    ShardRecord,
    TensorSlice,
    begin,
    cleanup_drafts,
    commit,
    fingerprint,
    whole_tensor,
    write_shard,
)
from counterpoint.data.sampler import Cursor
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.runtime.rank_builder import sliced_params
from counterpoint.runtime.state_dict import (
    collect_delayed_grads,
    collect_error_feedback,
    collect_state_slices,
    error_feedback_keys,
    find_delayed_grads,
    frozen_params,
    is_error_feedback,
    load_weights,
    mean_over_replicas,
    restore_delayed_grads,
    restore_error_feedback,
    restore_optimizers,
)
from counterpoint.training.local_ranks import LocalRanks


class CheckpointReader:
    """Reads full parameters, putting slices together; those of one replica, or the model's.

    Args:
        checkpoint: what is read.
        slices: for each sliced parameter its dim and the number of slices.
        num_replicas: how many replicas have saved their own.
        replica: whose is read; None for the model's.
        has_center: whether the last replica has what the model has, which is else the mean.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slices: Mapping[str, tuple[int, int]],
        num_replicas: int,
        replica: int | None = None,
        *,
        has_center: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.slices = slices
        self.num_replicas = num_replicas
        self.replica = replica
        self.has_center = has_center
        self.names = set(checkpoint.names())

    def for_replica(self, replica: int, num_replicas: int) -> CheckpointReader:
        """Return the reader for a replica: of its own, where as many have saved theirs, else of the mean."""
        own = replica if num_replicas == self.num_replicas else None
        return CheckpointReader(self.checkpoint, self.slices, self.num_replicas, own, has_center=self.has_center)

    def replica_suffixes(self, kind: str) -> list[str]:
        """Return what the names that are read end with, for weights or for what optimizers keep."""
        if self.num_replicas == 1:
            return [""]
        wanted = list(range(self.num_replicas)) if self.replica is None else [self.replica]
        if self.has_center and self.replica is None:
            wanted = wanted[-1:] if kind == "model" else wanted[:-1]
        return [f"~{replica}/{self.num_replicas}" for replica in wanted]

    def scalars(self, saved: Mapping[str, Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
        """Return the plain numbers by parameter; of replicas whose mean is read, those of the first."""
        ending = self.replica_suffixes("optimizer")[0]
        return {name.split("@")[0].split("~")[0]: found for name, found in saved.items() if name.endswith(ending)}

    def read_unsharded(self, kind: str, name: str, suffix: str) -> Tensor:
        """Return a parameter's tensor of one kind in full, as it was saved with this ending."""
        if name not in self.slices:
            return self.checkpoint.read(f"{kind}:{name}{suffix}")
        dim, count = self.slices[name]
        parts = [self.checkpoint.read(f"{kind}:{name}@{index}/{count}{suffix}") for index in range(count)]
        return torch.cat(parts, dim=dim)

    def read(self, kind: str, name: str) -> Tensor:
        """Return a parameter's tensor of one kind in full."""
        return mean_over_replicas([self.read_unsharded(kind, name, ending) for ending in self.replica_suffixes(kind)])

    def read_optional(self, kind: str, name: str) -> Tensor | None:
        """Return a parameter's tensor of one kind in full; None when it was not saved."""
        at = f"@0/{self.slices[name][1]}" if name in self.slices else ""
        there = all(f"{kind}:{name}{at}{ending}" in self.names for ending in self.replica_suffixes(kind))
        return self.read(kind, name) if there else None


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """How far a run has come.

    Args:
        step: steps that are done.
        cursor: the next batch.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)


def save_checkpoint(
    local_ranks: LocalRanks,
    checkpoint_dir: Path,
    progress: TrainProgress,
    metadata: Mapping[str, Any],
    *,
    keep_last: int | None,
) -> Path:
    """Write a checkpoint of the whole run; all ranks call it together.

    Args:
        team: the ranks.
        root: the folder of all checkpoints.
        progress: how far the run has come.
        extra: more JSON, kept with it (a schedule's state, the dataset's fingerprint).
        keep: how many checkpoints stay; None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it could not be written; earlier checkpoints are untouched.
    """
    local_ranks.sync_state()
    return local_ranks.world.run(
        lambda fabric: _save_rank(local_ranks, fabric, checkpoint_dir, (progress, metadata, keep_last))
    )[0]


def create_checkpoint_dir(local_ranks: LocalRanks, checkpoint_dir: Path | None) -> None:
    """The folder of all checkpoints is there, so that a run does not learn at its end that it cannot be.

    Nothing is left in it of runs that died while they saved.

    Raises:
        CheckpointError: it cannot be made.
    """
    if checkpoint_dir is None or local_ranks.world.fabrics[0].rank != 0:
        return
    try:
        checkpoint_dir.mkdir(parents=True, exist_ok=True)
        cleanup_drafts(checkpoint_dir)
    except OSError as error:
        raise CheckpointError(
            f"the folder {checkpoint_dir} for checkpoints cannot be made: {error.strerror}; choose another path"
        ) from None


def _save_rank(
    local_ranks: LocalRanks,
    fabric: Fabric,
    checkpoint_dir: Path,
    what: tuple[TrainProgress, Mapping[str, Any], int | None],
) -> Path:
    progress, extra, keep = what
    everyone = tuple(range(fabric.num_ranks))
    rank = local_ranks.ranks[fabric.rank]
    book = local_ranks.shard_map()
    pieces, scalars = collect_state_slices(book, rank)
    pieces += collect_error_feedback(rank)
    pieces += collect_delayed_grads(book, rank) if local_ranks.has_delayed_grads else []
    if fabric.rank == 0:
        pieces += [whole_tensor(f"buffer:{name}", tensor) for name, tensor in saved_buffers(local_ranks, rank)]
        pieces += collect_frozen_params(local_ranks)
    draft, failure = None, ""
    if fabric.rank == 0:
        try:
            draft = begin(checkpoint_dir, progress.step)
        except CheckpointError as error:
            failure = str(error)
    answers = fabric.gather_values("checkpoint folder", [str(draft.folder) if draft else "", failure], everyone)
    folder, failure = cast("list[list[str]]", answers)[0]
    if failure:
        raise CheckpointError(failure)
    record, failure = None, ""
    try:
        record = write_shard(Path(folder), fabric.rank, pieces)
    except CheckpointError as error:
        failure = str(error)
    sent = fabric.gather_values(
        "shards", [record.to_json() if record else "", cast("dict[str, Json]", scalars), failure], everyone
    )
    return _commit_checkpoint(local_ranks, fabric, draft, sent, (progress, extra, keep), Path(folder))


def _commit_checkpoint(
    local_ranks: LocalRanks,
    fabric: Fabric,
    draft: CheckpointDraft | None,
    sent: list[Any],
    what: tuple[TrainProgress, Mapping[str, Any], int | None],
    folder: Path,
) -> Path:
    progress, extra, keep = what
    failed = [f"rank {rank}: {failure}" for rank, (_, _, failure) in enumerate(sent) if failure]
    path, failure = folder.parent, "; ".join(failed)
    if draft is not None and not failure:
        merged: dict[str, Json] = {}
        for _, scalars, _ in sent:
            merged.update(scalars)
        state = collect_state(local_ranks, progress, extra) | {"scalars": merged}
        try:
            records = [ShardRecord.from_json(text) for text, _, _ in sent]
            path = commit(draft, records, state=state, keep=keep)
        except CheckpointError as error:
            failure = str(error)
    if draft is not None and failure:
        draft.discard()
    everyone = tuple(range(fabric.num_ranks))
    outcome: Any = fabric.gather_values("checkpoint", [str(path), failure], everyone)[0]
    if outcome[1]:
        raise CheckpointError(outcome[1])
    return Path(outcome[0])


def collect_frozen_params(local_ranks: LocalRanks) -> list[TensorSlice]:
    """Return the parameters that are not trained, as one rank writes them for all."""
    return [whole_tensor(f"frozen:{name}", value) for name, value in frozen_params(local_ranks.model).items()]


def collect_state(local_ranks: LocalRanks, progress: TrainProgress, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors and the plain numbers of optimizers."""
    return {
        "step": progress.step,
        "cursor": progress.cursor.to_dict(),
        "plan": str(local_ranks.plan),
        "replicas": local_ranks.shard_map().num_replicas,
        "has_center": local_ranks.shard_map().center_replica is not None,
        "late": describe_delayed_grads(local_ranks),
        "slices": {name: list(how) for name, how in sliced_params(local_ranks.run_spec.model_spec).items()}
        if local_ranks.run_spec
        else {},
        "model": local_model_fingerprint(local_ranks),
        "extra": dict(metadata),
    }


def describe_delayed_grads(local_ranks: LocalRanks) -> dict[str, Json]:
    """Return how many replicas have set gradients aside, and whether these will be left out."""
    first = next(iter(local_ranks.ranks.values())).interpreter
    asides = find_delayed_grads(local_ranks.shard_map(), first.fabric.rank) if local_ranks.has_delayed_grads else []
    return {
        "replicas": max((aside.num_replicas for aside in asides), default=0),
        "left_out": first.state.skip_delayed_update,
    }


def saved_buffers(local_ranks: LocalRanks, rank: Any) -> list[tuple[str, Tensor]]:  # noqa: ANN401 - a runtime Rank
    """Return the buffers that belong into a checkpoint."""
    kept = set(local_ranks.model.state_dict().keys())
    return [(name, tensor.detach()) for name, tensor in rank.interpreter.store.buffers.items() if name in kept]


def local_model_fingerprint(local_ranks: LocalRanks) -> dict[str, str]:
    """Return :func:`model_fingerprint` the model of a team."""
    return model_fingerprint(local_ranks.model)


def model_fingerprint(model: nn.Module) -> dict[str, str]:
    """Return one line per parameter and saved buffer, by which another model is recognised."""
    params = dict(model.named_parameters())
    kept = model.state_dict().keys()
    prints = fingerprint({**params, **{name: value for name, value in model.named_buffers() if name in kept}})
    return {
        name: kind if name not in params or params[name].requires_grad else f"{kind} frozen"
        for name, kind in prints.items()
    }


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at a path, or the newest intact one in a folder of checkpoints; warn of damaged newer ones.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if (path / "manifest.json").exists() or not path.is_dir():
        return Checkpoint.open(path)
    found = Checkpoint.open(path)
    for skipped in found.skipped:
        warnings.warn(f"{skipped.reason}; resumed from {found.folder.name} instead", RuntimeWarning, stacklevel=2)
    return found


def require_same_architecture(local_ranks: LocalRanks, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint is of this model, before anything is changed.

    Raises:
        CheckpointError: it is of another; the first differences are listed.
    """
    saved = cast("dict[str, str]", checkpoint.state["model"])  # by the names of the model, not of its slices
    replace(checkpoint, manifest=replace(checkpoint.manifest, model=saved)).check_model(
        local_model_fingerprint(local_ranks)
    )


def restore_checkpoint(local_ranks: LocalRanks, checkpoint: Checkpoint) -> tuple[TrainProgress, dict[str, Any]]:
    """Put a checkpoint's state into all ranks, whatever plan wrote it.

    Returns:
        How far the saved run had come, and what was kept with it.
    """
    state: Any = checkpoint.state
    reader = CheckpointReader(
        checkpoint, state["slices"], int(state.get("replicas", 1)), has_center=state.get("has_center", False)
    )
    late: Mapping[str, Any] = state.get("late", {"replicas": 0, "left_out": False})
    local_ranks.has_delayed_grads = late["replicas"] > 0 and local_ranks.plan.sync_schedule.staleness > 0
    if late["replicas"] > 0 and not local_ranks.has_delayed_grads:
        warnings.warn(
            f"the gradient of step {state['step'] - 1}, which {state['plan']} had set aside, is applied by no step, "
            f"because {local_ranks.plan} sets none aside",
            RuntimeWarning,
            stacklevel=2,
        )
    book = local_ranks.shard_map()
    keys = sorted(
        {name.split(":")[0].removeprefix("optimizer.") for name in checkpoint.names() if "optimizer." in name}
    )
    unsent = find_residuals(local_ranks, checkpoint)

    def work(fabric: Fabric) -> None:
        """A rank has what it had when this was saved: weights, state, gradients unsent or set aside, buffers."""
        rank = local_ranks.ranks[fabric.rank]
        mine = reader.for_replica(book.replica_of_rank(fabric.rank), book.num_replicas)
        load_weights(book, rank, lambda name: mine.read("model", name))
        scalars = mine.scalars(state["scalars"])
        restore_optimizers(book, rank, keys, lambda key, name: mine.read_optional(f"optimizer.{key}", name), scalars)
        restore_error_feedback(rank, unsent, checkpoint.read)
        if local_ranks.has_delayed_grads:
            rank.interpreter.state.skip_delayed_update = bool(late["left_out"])
            count = late["replicas"]
            restore_delayed_grads(
                book, rank, count, lambda name, at: reader.read_unsharded("late", name, f"~{at}/{count}")
            )
        with torch.no_grad():
            for name, buffer in saved_buffers(local_ranks, rank):
                buffer.copy_(read_buffer(checkpoint, name))

    with torch.no_grad():
        for name, value in frozen_params(local_ranks.model).items():
            value.copy_(checkpoint.read(f"frozen:{name}"))
    local_ranks.world.run(work)
    local_ranks.import_frozen_params()
    return TrainProgress(int(state["step"]), Cursor.from_dict(state["cursor"])), dict(state["extra"])


def read_buffer(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a buffer; the mean of what ranks have that saved their own."""
    entry = f"buffer:{name}"
    own = [found for found in checkpoint.names() if found.startswith(f"{entry}~")]
    return mean_over_replicas([checkpoint.read(found) for found in own or [entry]])


def find_residuals(local_ranks: LocalRanks, checkpoint: Checkpoint) -> list[str]:
    """Return the entries of a checkpoint with what codes had not sent, if the plan is the same; warn if it is not."""
    names = [name for name in checkpoint.names() if is_error_feedback(name)]
    places = {name.split("@", 1)[1] for name in names if name.startswith("residual@")}
    saved_by = str(checkpoint.state["plan"])
    if saved_by == str(local_ranks.plan) and places <= error_feedback_keys(local_ranks.shard_map()):
        return names
    if names:
        warnings.warn(
            f"{checkpoint.folder.name} was saved under {saved_by}, whose ranks kept what they had not sent of their "
            f"gradients; {local_ranks.plan} has other ranks or codes, so that this is left out; resume with the same plan to "
            "go on with it",
            RuntimeWarning,
            stacklevel=2,
        )
    return []
