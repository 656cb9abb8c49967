"""Checkpoints of a run: every rank writes what it answers for, one rank commits, any layout reads them back."""

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
    Draft,
    Piece,
    ShardRecord,
    begin,
    commit,
    fingerprint,
    tidy,
    whole,
    write_shard,
)
from counterpoint.data.sampler import Cursor
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.runtime.aside import asides_of, late_pieces, restore_late
from counterpoint.runtime.build import slices_of
from counterpoint.runtime.state import frozen_values, mean_of, pieces_of, restore_optimizers, write_weights
from counterpoint.runtime.unsent import is_unsent, places_in, restore_unsent, unsent_pieces
from counterpoint.training.reader import Reader
from counterpoint.training.team import Team


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come.

    Args:
        step: steps that are done.
        cursor: the next batch.
    """

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)


def save(team: Team, root: Path, progress: Progress, extra: Mapping[str, Any], *, keep: int | None) -> Path:
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
    team.settle()
    return team.world.run(lambda fabric: _save_rank(team, fabric, root, (progress, extra, keep)))[0]


def make_root(team: Team, root: Path | None) -> None:
    """The folder of all checkpoints is there, so that a run does not learn at its end that it cannot be.

    Nothing is left in it of runs that died while they saved.

    Raises:
        CheckpointError: it cannot be made.
    """
    if root is None or team.world.fabrics[0].rank != 0:
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        tidy(root)
    except OSError as error:
        raise CheckpointError(
            f"the folder {root} for checkpoints cannot be made: {error.strerror}; choose another path"
        ) from None


def _save_rank(team: Team, fabric: Fabric, root: Path, what: tuple[Progress, Mapping[str, Any], int | None]) -> Path:
    progress, extra, keep = what
    everyone = tuple(range(fabric.num_ranks))
    rank = team.ranks[fabric.rank]
    book = team.book()
    pieces, scalars = pieces_of(book, rank)
    pieces += unsent_pieces(rank)
    pieces += late_pieces(book, rank) if team.has_late else []
    if fabric.rank == 0:
        pieces += [whole(f"buffer:{name}", tensor) for name, tensor in buffers_of(team, rank)]
        pieces += frozen_pieces(team)
    draft, failure = None, ""
    if fabric.rank == 0:
        try:
            draft = begin(root, progress.step)
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
    return _finish(team, fabric, draft, sent, (progress, extra, keep), Path(folder))


def _finish(
    team: Team,
    fabric: Fabric,
    draft: Draft | None,
    sent: list[Any],
    what: tuple[Progress, Mapping[str, Any], int | None],
    folder: Path,
) -> Path:
    progress, extra, keep = what
    failed = [f"rank {rank}: {failure}" for rank, (_, _, failure) in enumerate(sent) if failure]
    path, failure = folder.parent, "; ".join(failed)
    if draft is not None and not failure:
        merged: dict[str, Json] = {}
        for _, scalars, _ in sent:
            merged.update(scalars)
        state = state_of(team, progress, extra) | {"scalars": merged}
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


def frozen_pieces(team: Team) -> list[Piece]:
    """Return the parameters that are not trained, as one rank writes them for all."""
    return [whole(f"frozen:{name}", value) for name, value in frozen_values(team.model).items()]


def state_of(team: Team, progress: Progress, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds beside tensors and the plain numbers of optimizers."""
    return {
        "step": progress.step,
        "cursor": progress.cursor.to_dict(),
        "plan": str(team.plan),
        "replicas": team.book().num_replicas,
        "has_center": team.book().center is not None,
        "late": late_of(team),
        "slices": {name: list(how) for name, how in slices_of(team.parts.spec).items()} if team.parts else {},
        "model": model_print(team),
        "extra": dict(extra),
    }


def late_of(team: Team) -> dict[str, Json]:
    """Return how many replicas have set gradients aside, and whether these will be left out."""
    first = next(iter(team.ranks.values())).interpreter
    asides = asides_of(team.book(), first.fabric.rank) if team.has_late else []
    return {
        "replicas": max((aside.num_replicas for aside in asides), default=0),
        "left_out": first.state.leaves_out_late,
    }


def buffers_of(team: Team, rank: Any) -> list[tuple[str, Tensor]]:  # noqa: ANN401 - a runtime Rank
    """Return the buffers that belong into a checkpoint."""
    kept = set(team.model.state_dict().keys())
    return [(name, tensor.detach()) for name, tensor in rank.interpreter.store.buffers.items() if name in kept]


def model_print(team: Team) -> dict[str, str]:
    """Return :func:`print_of` the model of a team."""
    return print_of(team.model)


def print_of(model: nn.Module) -> dict[str, str]:
    """Return one line per parameter and saved buffer, by which another model is recognised."""
    params = dict(model.named_parameters())
    kept = model.state_dict().keys()
    prints = fingerprint({**params, **{name: value for name, value in model.named_buffers() if name in kept}})
    return {
        name: kind if name not in params or params[name].requires_grad else f"{kind} frozen"
        for name, kind in prints.items()
    }


def find(path: Path) -> Checkpoint:
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


def require_same_model(team: Team, checkpoint: Checkpoint) -> None:
    """Check that a checkpoint is of this model, before anything is changed.

    Raises:
        CheckpointError: it is of another; the first differences are listed.
    """
    saved = cast("dict[str, str]", checkpoint.state["model"])  # by the names of the model, not of its slices
    replace(checkpoint, manifest=replace(checkpoint.manifest, model=saved)).check_model(model_print(team))


def restore(team: Team, checkpoint: Checkpoint) -> tuple[Progress, dict[str, Any]]:
    """Put a checkpoint's state into all ranks, whatever plan wrote it.

    Returns:
        How far the saved run had come, and what was kept with it.
    """
    state: Any = checkpoint.state
    reader = Reader(
        checkpoint, state["slices"], int(state.get("replicas", 1)), has_center=state.get("has_center", False)
    )
    late: Mapping[str, Any] = state.get("late", {"replicas": 0, "left_out": False})
    team.has_late = late["replicas"] > 0 and team.plan.rhythm.late > 0
    if late["replicas"] > 0 and not team.has_late:
        warnings.warn(
            f"the gradient of step {state['step'] - 1}, which {state['plan']} had set aside, is applied by no step, "
            f"because {team.plan} sets none aside",
            RuntimeWarning,
            stacklevel=2,
        )
    book = team.book()
    keys = sorted(
        {name.split(":")[0].removeprefix("optimizer.") for name in checkpoint.names() if "optimizer." in name}
    )
    unsent = unsent_for(team, checkpoint)

    def work(fabric: Fabric) -> None:
        """A rank has what it had when this was saved: weights, state, gradients unsent or set aside, buffers."""
        rank = team.ranks[fabric.rank]
        mine = reader.of_replica(book.replica_of(fabric.rank), book.num_replicas)
        write_weights(book, rank, lambda name: mine.read("model", name))
        scalars = mine.scalars(state["scalars"])
        restore_optimizers(book, rank, keys, lambda key, name: mine.maybe(f"optimizer.{key}", name), scalars)
        restore_unsent(rank, unsent, checkpoint.read)
        if team.has_late:
            rank.interpreter.state.leaves_out_late = bool(late["left_out"])
            count = late["replicas"]
            restore_late(book, rank, count, lambda name, at: reader.whole("late", name, f"~{at}/{count}"))
        with torch.no_grad():
            for name, buffer in buffers_of(team, rank):
                buffer.copy_(read_buffer(checkpoint, name))

    with torch.no_grad():
        for name, value in frozen_values(team.model).items():
            value.copy_(checkpoint.read(f"frozen:{name}"))
    team.world.run(work)
    team.take_frozen()
    return Progress(int(state["step"]), Cursor.from_dict(state["cursor"])), dict(state["extra"])


def read_buffer(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a buffer; the mean of what ranks have that saved their own."""
    entry = f"buffer:{name}"
    own = [found for found in checkpoint.names() if found.startswith(f"{entry}~")]
    return mean_of([checkpoint.read(found) for found in own or [entry]])


def unsent_for(team: Team, checkpoint: Checkpoint) -> list[str]:
    """Return the entries of a checkpoint with what codes had not sent, if the plan is the same; warn if it is not."""
    names = [name for name in checkpoint.names() if is_unsent(name)]
    places = {name.split("@", 1)[1] for name in names if name.startswith("residual@")}
    saved_by = str(checkpoint.state["plan"])
    if saved_by == str(team.plan) and places <= places_in(team.book()):
        return names
    if names:
        warnings.warn(
            f"{checkpoint.folder.name} was saved under {saved_by}, whose ranks kept what they had not sent of their "
            f"gradients; {team.plan} has other ranks or codes, so that this is left out; resume with the same plan to "
            "go on with it",
            RuntimeWarning,
            stacklevel=2,
        )
    return []
