"""Slices as the whole run's state at the driver: written as a checkpoint that any plan goes on from, and cut again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.checkpoint import save
from counterpoint.data.sampler import Cursor
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Json
from counterpoint.runtime.layout import Layout
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.state import is_plain_number, read_number, write_number
from counterpoint.spark.slices import parts_of, read_slice, span_of, write_slice
from counterpoint.training.reader import Reader
from counterpoint.training.saving import Progress, find, print_of
from counterpoint.training.settings import settings


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained, as the driver knows it.

    Args:
        model: the user's.
        face: its optimizer.
        layout: of its weights.
        plan: as text.
        batch_size: samples of a global batch.
        seed: of the order of samples.
    """

    model: nn.Module
    face: Face
    layout: Layout
    plan: str
    batch_size: int
    seed: int


def first_slices(subject: Subject, num_places: int) -> list[bytes]:
    """Return the slices of the model as it is, with no state yet."""
    params = dict(subject.model.named_parameters())
    flat = torch.cat([params[slot.name].detach().reshape(-1) for slot in subject.layout.slots])
    return [write_slice(flat[low:high].clone()) for low, high in _bounds(subject.layout, num_places)]


def put_back(subject: Subject, slices: Sequence[bytes]) -> None:
    """The model has the weights of the slices."""
    flat = torch.cat([read_slice(text)[0] for text in slices])
    params = dict(subject.model.named_parameters())
    with torch.no_grad():
        for slot in subject.layout.slots:
            params[slot.name].copy_(flat[slot.start : slot.stop].view(slot.shape))


def save_slices(subject: Subject, slices: Sequence[bytes], progress: Progress, root: Path, keep: int | None) -> Path:
    """Write a checkpoint of the whole run, as a :class:`Trainer` writes it; returns its folder.

    Args:
        subject: what is trained.
        slices: of all places, in order.
        progress: how far the run has come.
        root: the folder of all checkpoints, which the driver sees.
        keep: how many stay; None keeps all.

    Raises:
        CheckpointError: it could not be written.
    """
    layout = subject.layout
    flats, scalars = _gathered(layout, slices)
    tensors: dict[str, Tensor] = {}
    for name, flat in flats.items():
        for slot in layout.slots:
            tensors[f"{name}:{slot.name}"] = flat[slot.start : slot.stop].view(slot.shape)
    model = subject.model
    kept = model.state_dict().keys()
    tensors |= {f"frozen:{name}": param for name, param in model.named_parameters() if not param.requires_grad}
    tensors |= {f"buffer:{name}": buffer for name, buffer in model.named_buffers() if name in kept}
    state: dict[str, Any] = {
        "step": progress.step,
        "cursor": progress.cursor.to_dict(),
        "plan": subject.plan,
        "replicas": 1,
        "has_center": False,
        "late": {"replicas": 0, "left_out": False},
        "slices": {},
        "model": print_of(model),
        "extra": {
            "batch_size": subject.batch_size,
            "seed": subject.seed,
            "optimizer": subject.face.kind.__name__,
            "options": [settings(group) for group in subject.face.optimizer.param_groups],
        },
        "scalars": scalars,
    }
    return save(root, progress.step, {name: value.detach() for name, value in tensors.items()}, state, keep=keep)


def load_slices(subject: Subject, path: Path, num_places: int) -> tuple[list[bytes], Progress]:
    """Return the slices of a checkpoint, whatever plan and however many partitions have written it.

    Raises:
        CheckpointError: there is none, it is damaged, or of another model or optimizer.
    """
    checkpoint = find(path)
    state: Any = checkpoint.state
    if state["model"] != print_of(subject.model):
        raise CheckpointError(f"{checkpoint.folder} is of another model; build it as it was when it was saved")
    extra = state["extra"]
    for name, mine in (("batch_size", subject.batch_size), ("seed", subject.seed),
                       ("optimizer", subject.face.kind.__name__)):  # fmt: skip
        if extra.get(name, mine) != mine:
            raise CheckpointError(
                f"{path} was saved with {name.replace('_', ' ')} {extra[name]}, this run has {mine}; a run goes on "
                "only with the samples and the optimizer it had; resume with the same, or start a new run"
            )
    reader = Reader(
        checkpoint, state["slices"], int(state.get("replicas", 1)), has_center=state.get("has_center", False)
    )
    keys = sorted(
        {name.split(":")[0].removeprefix("optimizer.") for name in checkpoint.names() if name.startswith("optimizer.")}
    )
    scalars = reader.scalars(state["scalars"])
    layout = subject.layout
    weights = torch.cat([reader.read("model", slot.name).reshape(-1) for slot in layout.slots])
    kept = {
        key: torch.cat([reader.read(f"optimizer.{key}", slot.name).reshape(-1) for slot in layout.slots])
        for key in keys
    }
    found = []
    for place, (low, high) in enumerate(_bounds(layout, num_places)):
        parts = {key: parts_of(layout, span_of(place, num_places), flat[low:high]) for key, flat in kept.items()}
        states: list[Mapping[str, Any]] = []
        for at, (_, start, _) in enumerate(layout.updated(span_of(place, num_places))):
            slot = next(slot for slot in layout.slots if slot.start <= start < slot.stop)
            numbers = {key: read_number(value) for key, value in scalars.get(slot.name, {}).items()}
            states.append({key: found_parts[at][1].clone() for key, found_parts in parts.items()} | numbers)
        found.append(write_slice(weights[low:high].clone(), states))
    return found, Progress(int(state["step"]), Cursor.from_dict(state["cursor"]))


def _bounds(layout: Layout, num_places: int) -> list[tuple[int, int]]:
    return [layout.range_of(span_of(place, num_places)) for place in range(num_places)]


def _gathered(layout: Layout, slices: Sequence[bytes]) -> tuple[dict[str, Tensor], dict[str, dict[str, Json]]]:
    """Return whole flat vectors, ``model`` and ``optimizer.KEY``, and the plain numbers of every parameter."""
    pieces: dict[str, list[Tensor]] = {}
    scalars: dict[str, dict[str, Json]] = {slot.name: {} for slot in layout.slots}
    for place, text in enumerate(slices):
        weights, states = read_slice(text)
        pieces.setdefault("model", []).append(weights)
        for at, (_, start, stop) in enumerate(layout.updated(span_of(place, len(slices)))):
            kept = states.get(at, {})
            plain = {key for key, value in kept.items() if is_plain_number(key, value, weights[: stop - start])}
            numbers = {key: write_number(key, kept[key]) for key in plain}
            for key in kept.keys() - plain:
                pieces.setdefault(f"optimizer.{key}", []).append(kept[key])
            for slot in layout.slots:
                if slot.start < stop and start < slot.stop:
                    scalars[slot.name] |= numbers
    return {name: torch.cat(found) for name, found in pieces.items()}, scalars
