"""Save and restore a run: every rank writes the shards it owns, one rank commits, any plan reads them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from counterpoint.checkpoint import (
    Checkpoint,
    CheckpointDraft,
    ShardRecord,
    TensorSlice,
    begin,
    commit,
    fingerprint,
    is_checkpoint,
    recover_drafts,
    step_folders,
    whole_tensor,
    write_shard,
)
from counterpoint.checkpoint.file_ops import is_folder
from counterpoint.data.sampler import Cursor
from counterpoint.errors import CheckpointError, CheckpointWriteError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.fabric.shm.magnitudes import find_magnitudes
from counterpoint.partitioning.dry_run import assign_values
from counterpoint.runtime.loss.loss_scale import DynamicLossScale
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.rank_builder import sliced_params
from counterpoint.runtime.state_dict import (
    collect_delayed_grads,
    collect_error_feedback,
    collect_state_slices,
    decode_scalar,
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
from counterpoint.terminal_text import warn
from counterpoint.training.checkpointing.checkpoint_dir import CheckpointDir
from counterpoint.training.checkpointing.train_state import check_train_state
from counterpoint.training.optimizer_state import describe_param_groups
from counterpoint.training.ranks.local_ranks import LocalRanks


class CheckpointReader:
    """Reads full parameters from their shards, those of one replica or the model's.

    Args:
        checkpoint: what is read.
        slices: for each tensor-parallel parameter its sharded dim and the number of shards.
        num_replicas: how many replicas have saved weights of their own.
        replica: whose weights are read; None for the model's.
        has_center: whether the last replica is the center (EASGD), which is the model; otherwise that is the mean.
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

    @staticmethod
    def open(checkpoint: Checkpoint) -> CheckpointReader:
        """Return the reader of a checkpoint's model."""
        state: Any = checkpoint.state
        return CheckpointReader(
            checkpoint, state["slices"], int(state.get("replicas", 1)), has_center=state.get("has_center", False)
        )

    def for_replica(self, replica: int, num_replicas: int) -> CheckpointReader:
        """Return the reader for a replica: of its own weights, if as many replicas have saved theirs."""
        saved_replica = replica if num_replicas == self.num_replicas else None
        return CheckpointReader(
            self.checkpoint, self.slices, self.num_replicas, saved_replica, has_center=self.has_center
        )

    def replica_suffixes(self, kind: str) -> list[str]:
        """Return the name suffixes of the replicas to read, for weights or for optimizer state."""
        if self.num_replicas == 1:
            return [""]
        replicas = list(range(self.num_replicas)) if self.replica is None else [self.replica]
        if self.has_center and self.replica is None:
            replicas = replicas[-1:] if kind == "model" else replicas[:-1]
        return [f"~{replica}/{self.num_replicas}" for replica in replicas]

    def scalars(self, scalars: Mapping[str, Mapping[str, Json]]) -> dict[str, dict[str, Any]]:
        """Return the scalars by parameter; if the mean of replicas is read, those of the first."""
        ending = self.replica_suffixes("optimizer")[0]
        return {
            name.split("@")[0].split("~")[0]: {key: decode_scalar(value) for key, value in values.items()}
            for name, values in scalars.items()
            if name.endswith(ending)
        }

    def optimizer_keys(self) -> list[str]:
        """Return the names of the optimizer's tensors, ``exp_avg`` for instance."""
        return sorted({name.split(":")[0].removeprefix("optimizer.") for name in self.names if "optimizer." in name})

    def read_unsharded(self, kind: str, name: str, suffix: str) -> Tensor:
        """Return a full tensor of a parameter, as it was saved with this suffix."""
        if name not in self.slices:
            return self.checkpoint.read(f"{kind}:{name}{suffix}")
        dim, count = self.slices[name]
        shards = [self.checkpoint.read(f"{kind}:{name}@{index}/{count}{suffix}") for index in range(count)]
        return torch.cat(shards, dim=dim)

    def read(self, kind: str, name: str) -> Tensor:
        """Return a full tensor of a parameter."""
        return mean_over_replicas([self.read_unsharded(kind, name, ending) for ending in self.replica_suffixes(kind)])

    def read_optional(self, kind: str, name: str) -> Tensor | None:
        """Return a full tensor of a parameter; None if it was not saved."""
        shard = f"@0/{self.slices[name][1]}" if name in self.slices else ""
        is_saved = all(f"{kind}:{name}{shard}{ending}" in self.names for ending in self.replica_suffixes(kind))
        return self.read(kind, name) if is_saved else None


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """The progress of a run.

    Args:
        step: the number of steps that are done.
        cursor: the next batch.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)


def save_checkpoint(
    local_ranks: LocalRanks,
    target: CheckpointDir,
    progress: TrainProgress,
    metadata: Mapping[str, Any],
    *,
    keep_last: int | None,
) -> Path:
    """Write a checkpoint of the whole run; a collective call.

    Args:
        local_ranks: the ranks.
        target: the folder of all checkpoints.
        progress: the progress of the run.
        metadata: JSON to save with it (scheduler state, the dataset's fingerprint).
        keep_last: how many checkpoints of this run are kept; None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointWriteError: the disk of a rank did not take it; on all ranks.
        CheckpointError: it could not be saved for another reason. In either case earlier checkpoints are untouched.
    """
    local_ranks.sync_state()
    with local_ranks.stale_weights.unmarked():
        path, kind, text = local_ranks.world.run(
            lambda fabric: _save_rank(local_ranks, fabric, target, (progress, metadata, keep_last))
        )[0]
    if kind:
        raise FAILURES[kind](text)
    return Path(path)


FAILURES = {error.__name__: error for error in (CheckpointError, CheckpointWriteError)}


def _save_rank(
    local_ranks: LocalRanks,
    fabric: Fabric,
    target: CheckpointDir,
    contents: tuple[TrainProgress, Mapping[str, Any], int | None],
) -> list[str]:
    """Return the checkpoint's folder, and the kind and text of a failure, if any; the same on all ranks."""
    rank = local_ranks.ranks[fabric.rank]
    shard_map = local_ranks.shard_map()
    slices, scalars = collect_state_slices(shard_map, rank)
    slices += collect_error_feedback(rank)
    slices += collect_delayed_grads(shard_map, rank) if local_ranks.has_delayed_grads else []
    if fabric.rank == 0:
        slices += [whole_tensor(f"buffer:{name}", tensor) for name, tensor in saved_buffers(local_ranks, rank)]
        slices += collect_frozen_params(local_ranks)
    draft: list[CheckpointDraft] = []

    def begin_draft() -> list[str]:
        if fabric.rank == 0:
            try:
                target.require_held()
                draft.append(begin(target.path, contents[0].step, files=target.files))
            except CheckpointError as error:
                return ["", *describe_failure(error)]
        return [str(draft[0].folder) if draft else "", *NO_FAILURE]

    def write_own_shard() -> list[Any]:
        try:
            require_finite_weights(slices)
            record = write_shard(Path(folder), fabric.rank, slices, files=target.files)
        except CheckpointError as error:
            return ["", scalars, *describe_failure(error)]
        return [record.to_json(), scalars, *NO_FAILURE]

    folder, *failure = gather_when_done(fabric, "checkpoint folder", begin_draft)[0]
    if failure != NO_FAILURE:
        return ["", *failure]
    reports = gather_when_done(fabric, "shards", write_own_shard)
    outcomes = gather_when_done(
        fabric,
        "checkpoint",
        lambda: _commit_checkpoint(local_ranks, draft[0], reports, contents, target) if draft else ["", *NO_FAILURE],
    )
    return cast("list[str]", outcomes[0])


def gather_when_done(fabric: Fabric, label: str, work: Callable[[], list[Any]]) -> list[Any]:
    """Run a function on every rank and return its results by rank; it may take longer than ``timeout_s``.

    Ranks whose disks are slow report at every third of ``timeout_s`` that they have not finished, so that the others
    wait on. A rank that has ended is an error, as in every exchange.
    """
    everyone, start_s, has_warned = tuple(range(fabric.num_ranks)), time.monotonic(), False
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while True:
            is_done = bool(wait([future], fabric.timeout_s / 3).done)
            own: list[Json] = [is_done, future.result() if is_done else []]
            gathered = cast("list[Any]", fabric.gather_values(label, own, everyone))
            slow = [rank for rank, (has_ended, _) in enumerate(gathered) if not has_ended]
            if not slow:
                return [value for _, value in gathered]
            if fabric.rank == 0 and not has_warned:
                has_warned, seconds = True, time.monotonic() - start_s
                text = f"a checkpoint is still being written on {format_ranks(slow)} after {seconds:.0f} s"
                warn(f"{text}; training waits for it", RuntimeWarning)


NO_FAILURE = ["", ""]


def describe_failure(error: CheckpointError) -> list[str]:
    """Return the kind and the text of a failure, to be sent to the other ranks."""
    return [CheckpointWriteError.__name__ if isinstance(error, CheckpointWriteError) else "CheckpointError", str(error)]


def require_finite_weights(slices: Sequence[TensorSlice]) -> None:
    """Check that the trained weights that a rank would save are finite, because no run could continue with them.

    Raises:
        CheckpointError: a weight is nan or infinite.
    """
    weights = [weight for weight in slices if weight.name.startswith("model:") and weight.tensor.is_floating_point()]
    for weight in weights:
        if not isfinite(find_magnitudes([weight.tensor])[0]):
            raise CheckpointError(
                f"{weight.name.removeprefix('model:')} has values that are not finite, so nothing was saved; earlier "
                "checkpoints are untouched: resume from one of them, with a lower learning rate or clip_norm=1.0"
            )


def _commit_checkpoint(
    local_ranks: LocalRanks,
    draft: CheckpointDraft,
    reports: Sequence[Any],
    contents: tuple[TrainProgress, Mapping[str, Any], int | None],
    target: CheckpointDir,
) -> list[str]:
    """Commit the draft if all ranks have written their shards, else remove it; return what :func:`_save_rank` does."""
    progress, extra, keep = contents
    failures = {rank: failure for rank, (*_, kind, failure) in enumerate(reports) if kind}
    if failures:
        draft.discard()
        kinds = {kind for *_, kind, _ in reports if kind}
        kind = "CheckpointError" if "CheckpointError" in kinds else CheckpointWriteError.__name__
        return ["", kind, "; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items())]
    merged: dict[str, Json] = {}
    for _, scalars, *_ in reports:
        merged.update(scalars)
    state = collect_state(local_ranks, progress, extra, target.run_id) | {"scalars": merged}
    try:
        records = [ShardRecord.from_json(text) for text, *_ in reports]
        return [str(commit(draft, records, state=state, keep=keep, files=target.files)), *NO_FAILURE]
    except CheckpointError as error:
        draft.discard()
        return ["", *describe_failure(error)]


def collect_frozen_params(local_ranks: LocalRanks) -> list[TensorSlice]:
    """Return the frozen parameters, which one rank writes for all."""
    return [whole_tensor(f"frozen:{name}", value) for name, value in frozen_params(local_ranks.trained).items()]


def collect_state(
    local_ranks: LocalRanks, progress: TrainProgress, metadata: Mapping[str, Any], run_id: str
) -> dict[str, Any]:
    """Return the state of a checkpoint except tensors and the scalars of optimizers."""
    return {
        **({"run_id": run_id} if run_id else {}),
        "step": progress.step,
        "cursor": progress.cursor.to_dict(),
        "plan": str(local_ranks.plan),
        "replicas": local_ranks.shard_map().num_replicas,
        "has_center": local_ranks.shard_map().center_replica is not None,
        "delayed_grads": describe_delayed_grads(local_ranks),
        **describe_loss_scale(local_ranks),
        "slices": {name: list(sharding) for name, sharding in sliced_params(local_ranks.run_spec.model_spec).items()}
        if local_ranks.run_spec
        else {},
        "model": local_model_fingerprint(local_ranks),
        "optimizer": describe_optimizer(local_ranks.optimizer_spec, local_ranks.trained),
        "state_dict": name_state_dict(local_ranks.model),
        "extra": dict(metadata),
    }


def describe_optimizer(optimizer_spec: OptimizerSpec, model: nn.Module) -> dict[str, Any]:
    """Return the class of the optimizer and its parameter groups, as JSON."""
    groups = describe_param_groups(optimizer_spec.optimizer, dict(model.named_parameters()))
    return {"class_name": optimizer_spec.optimizer_class.__name__, "param_groups": groups}


def name_state_dict(model: nn.Module) -> dict[str, str]:
    """Return by the names of the model's ``state_dict()`` those in a checkpoint; tied parameters have one."""
    names = {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    tensors = model.state_dict(keep_vars=True)
    return {name: names[id(tensor)] for name, tensor in tensors.items() if id(tensor) in names}


def describe_delayed_grads(local_ranks: LocalRanks) -> dict[str, Json]:
    """Return how many replicas have delayed gradients, and whether these will be skipped."""
    interpreter = next(iter(local_ranks.ranks.values())).interpreter
    delayed = (
        find_delayed_grads(local_ranks.shard_map(), interpreter.fabric.rank) if local_ranks.has_delayed_grads else []
    )
    return {
        "replicas": max((delayed_grad.num_replicas for delayed_grad in delayed), default=0),
        "skipped": interpreter.state.skip_delayed_update,
        "mean_factor": interpreter.state.delayed_mean_factor,
    }


def describe_loss_scale(local_ranks: LocalRanks) -> dict[str, Json]:
    """Return the state of a dynamic loss scale, the smallest of this process's ranks; empty if it is not dynamic.

    Servers of asynchronous workers take no part in commits, so that their scale stays the first one.
    """
    states = [rank.interpreter.state for rank in local_ranks.ranks.values()]
    scalers = [state.loss_scaler for state in [one for one in states if one.num_commits] or states]
    if not isinstance(scalers[0].config, DynamicLossScale):
        return {}
    scale, num_good_steps, hysteresis = min(scaler.state() for scaler in scalers)
    return {"loss_scale": {"scale": scale, "num_good_steps": num_good_steps, "hysteresis": hysteresis}}


def saved_buffers(local_ranks: LocalRanks, rank: Any) -> list[tuple[str, Tensor]]:  # noqa: ANN401 - a runtime Rank
    """Return the buffers that belong in a checkpoint."""
    saved_names = set(local_ranks.trained.state_dict().keys())
    return [(name, tensor.detach()) for name, tensor in rank.interpreter.store.buffers.items() if name in saved_names]


def local_model_fingerprint(local_ranks: LocalRanks) -> dict[str, str]:
    """Return :func:`model_fingerprint` of the ranks' model."""
    return model_fingerprint(local_ranks.trained)


def model_fingerprint(model: nn.Module) -> dict[str, str]:
    """Return one line per parameter and saved buffer, which identifies the model."""
    params = dict(model.named_parameters())
    saved_names = model.state_dict().keys()
    fingerprints = fingerprint(
        {**params, **{name: value for name, value in model.named_buffers() if name in saved_names}}
    )
    return {
        name: description if name not in params or params[name].requires_grad else f"{description} frozen"
        for name, description in fingerprints.items()
    }


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at a path, or the newest intact one in a folder of checkpoints; warn of damaged newer ones.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoint = Checkpoint.open(path, check_state=check_train_state)
    for skipped in checkpoint.skipped:
        warn(f"{skipped.reason}; resumed from {checkpoint.folder.name} instead", RuntimeWarning, stacklevel=2)
    return checkpoint


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """What a run continues from.

    Args:
        path: a checkpoint, or a folder of them.
        if_missing: what happens if there is none: an ``error``, or the run ``starts``.
        batch_size: whether the run has to have the ``same`` batch size, or may have a ``new`` one.
    """

    path: Path
    if_missing: Literal["error", "start"] = "error"
    batch_size: Literal["same", "new"] = "same"


def find_checkpoint_together(local_ranks: LocalRanks, config: ResumeConfig) -> Checkpoint | None:
    """Return the checkpoint from which all ranks continue, None for a run that starts; a collective call.

    The first rank commits complete drafts of dead runs, verifies every byte, and decides for all.

    Raises:
        CheckpointError: there is no intact checkpoint, or a rank does not find the one that the first rank has found.
    """
    everyone = tuple(range(local_ranks.world.fabrics[0].num_ranks))
    checkpoint, failure = None, ""
    if local_ranks.world.fabrics[0].rank == 0:
        try:
            checkpoint = find_newest(config)
        except CheckpointError as error:
            failure = str(error)
    name = "" if checkpoint is None or checkpoint.folder == config.path else checkpoint.folder.name
    report: list[Json] = [checkpoint is not None, name, failure]
    gathered = local_ranks.world.run(lambda fabric: fabric.gather_values("checkpoint to load", report, everyone))[0]
    is_found, name, failure = cast("list[tuple[bool, str, str]]", gathered)[0]
    if failure:
        raise CheckpointError(failure)
    if not is_found or checkpoint is not None:
        return checkpoint
    try:
        return Checkpoint.open(config.path / name, check="sizes", check_state=check_train_state)
    except CheckpointError as error:
        raise CheckpointError(
            f"rank 0 continues from {config.path / name}, but on rank {local_ranks.world.fabrics[0].rank}: {error}; "
            "all ranks read the same checkpoint: give a folder on a disk that they share"
        ) from error


def find_newest(config: ResumeConfig) -> Checkpoint | None:
    """Return the checkpoint to continue from, after completing those of a dead run; None to start.

    Raises:
        CheckpointError: there is none where one is needed, or none is intact.
    """
    path = config.path
    if is_folder(path):
        recover_drafts(path)
    if not os.path.lexists(path) or (is_folder(path) and not is_checkpoint(path) and not step_folders(path)):
        if config.if_missing == "start":
            return None
        try:
            return find_checkpoint(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; for a run that starts where nothing is saved, give it as checkpoint_dir, with resume='auto'"
            ) from error
    return find_checkpoint(path)


def require_same_architecture(local_ranks: LocalRanks, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint is of this model, before anything is changed.

    Raises:
        CheckpointError: it is of another; the first differences are listed.
    """
    saved = cast("dict[str, str]", checkpoint.state["model"])  # full parameters, not shards
    replace(checkpoint, manifest=replace(checkpoint.manifest, model=saved)).check_model(
        local_model_fingerprint(local_ranks)
    )


def load_model(trained: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights and the saved buffers of a checkpoint into a model."""
    reader, saved_names = CheckpointReader.open(checkpoint), trained.state_dict().keys()
    with torch.no_grad():
        for name, param in trained.named_parameters():
            param.copy_(reader.read("model", name) if param.requires_grad else checkpoint.read(f"frozen:{name}"))
        for name, buffer in trained.named_buffers():
            if name in saved_names:
                assign_values(buffer, read_buffer(checkpoint, name))


def restore_checkpoint(
    local_ranks: LocalRanks, checkpoint: Checkpoint, *, has_weights: bool = False, has_optimizer_state: bool = False
) -> tuple[TrainProgress, dict[str, Any]]:
    """Load a checkpoint, written under any plan, into all ranks.

    Args:
        local_ranks: the ranks.
        checkpoint: the checkpoint.
        has_weights: whether the ranks have its weights and buffers already.
        has_optimizer_state: whether the ranks have got another state for their optimizers.

    Returns:
        The progress of the saved run, and its metadata.
    """
    state: Any = checkpoint.state
    reader = CheckpointReader.open(checkpoint)
    delayed: Mapping[str, Any] = state.get("delayed_grads", {"replicas": 0, "skipped": False, "mean_factor": 1.0})
    local_ranks.restore_delayed_grads(exist=delayed["replicas"] > 0 and local_ranks.plan.sync_schedule.staleness > 0)
    if delayed["replicas"] > 0 and not local_ranks.has_delayed_grads:
        warn(
            f"the gradient of step {state['step'] - 1}, which {state['plan']} had delayed, is dropped, "
            f"because {local_ranks.plan} delays no gradients",
            RuntimeWarning,
            stacklevel=2,
        )
    shard_map = local_ranks.shard_map()
    keys = reader.optimizer_keys()
    residuals = find_residuals(local_ranks, checkpoint)

    def work(fabric: Fabric) -> None:
        rank = local_ranks.ranks[fabric.rank]
        replica_reader = reader.for_replica(shard_map.replica_of_rank(fabric.rank), shard_map.num_replicas)
        if not has_weights:
            load_weights(shard_map, rank, lambda name: replica_reader.read("model", name))
        if not has_optimizer_state:
            scalars = replica_reader.scalars(state["scalars"])
            restore_optimizers(
                shard_map, rank, keys, lambda key, name: replica_reader.read_optional(f"optimizer.{key}", name), scalars
            )
        restore_error_feedback(rank, residuals, checkpoint.read)
        if scale := state.get("loss_scale"):
            rank.interpreter.state.loss_scaler.restore((scale["scale"], scale["num_good_steps"], scale["hysteresis"]))
        if local_ranks.has_delayed_grads:
            rank.interpreter.state.restore_delayed(
                is_skipped=bool(delayed["skipped"]), mean_factor=float(delayed["mean_factor"])
            )
            count = delayed["replicas"]
            restore_delayed_grads(
                shard_map,
                rank,
                count,
                lambda name, replica: reader.read_unsharded("delayed_grad", name, f"~{replica}/{count}"),
            )
        with torch.no_grad():
            for name, buffer in saved_buffers(local_ranks, rank) if not has_weights else ():
                assign_values(buffer, read_buffer(checkpoint, name))

    with torch.no_grad():
        for name, value in frozen_params(local_ranks.trained).items() if not has_weights else ():
            value.copy_(checkpoint.read(f"frozen:{name}"))
    local_ranks.world.run(work)
    local_ranks.import_frozen_params()
    local_ranks.stale_weights.mark()
    return TrainProgress(int(state["step"]), Cursor.from_dict(state["cursor"])), dict(state["extra"])


def read_buffer(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a buffer; the mean over ranks if they have saved their own."""
    entry = f"buffer:{name}"
    rank_entries = [name for name in checkpoint.names() if name.startswith(f"{entry}~")]
    return mean_over_replicas([checkpoint.read(name) for name in rank_entries or [entry]])


def find_residuals(local_ranks: LocalRanks, checkpoint: Checkpoint) -> list[str]:
    """Return the entries of error-feedback residuals, if the plan is the same; warn if it is not."""
    names = [name for name in checkpoint.names() if is_error_feedback(name)]
    layouts = {name.split("@", 1)[1] for name in names if name.startswith("residual@")}
    saved_by = str(checkpoint.state["plan"])
    if saved_by == str(local_ranks.plan) and layouts <= error_feedback_keys(local_ranks.shard_map()):
        return names
    if names:
        warn(
            f"{checkpoint.folder.name} was saved under {saved_by}, whose ranks had error-feedback residuals of "
            f"compressed gradients; {local_ranks.plan} has other ranks or codecs, so they are dropped; resume with the "
            "same plan to keep them",
            RuntimeWarning,
            stacklevel=2,
        )
    return []
