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
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.runtime.params.flat_layout import FlatLayout
from counterpoint.runtime.state_dict import decode_scalar, encode_scalar, is_scalar_state
from counterpoint.spark.weight_slices import decode_slice, encode_slice, param_views, partition_span
from counterpoint.training.checkpointing.save_restore import (
    CheckpointReader,
    TrainProgress,
    find_checkpoint,
    model_fingerprint,
)
from counterpoint.training.optimizer_state import get_group_options


@dataclass(frozen=True, slots=True)
class SparkTrainingTarget:
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
    optimizer_spec: OptimizerSpec
    layout: FlatLayout
    plan: str
    batch_size: int
    seed: int


def initial_slices(target: SparkTrainingTarget, num_partitions: int) -> list[bytes]:
    """Return the slices of the model as it is, with no state yet."""
    params = dict(target.model.named_parameters())
    flat = torch.cat([params[slot.name].detach().reshape(-1) for slot in target.layout.slots])
    return [encode_slice(flat[low:high].clone()) for low, high in _slice_bounds(target.layout, num_partitions)]


def load_into_model(target: SparkTrainingTarget, slices: Sequence[bytes]) -> None:
    """The model has the weights of the slices."""
    flat = torch.cat([decode_slice(text)[0] for text in slices])
    params = dict(target.model.named_parameters())
    with torch.no_grad():
        for slot in target.layout.slots:
            params[slot.name].copy_(flat[slot.start : slot.stop].view(slot.shape))


def save_slices(
    target: SparkTrainingTarget,
    slices: Sequence[bytes],
    progress: TrainProgress,
    checkpoint_dir: Path,
    keep_last: int | None,
) -> Path:
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
    layout = target.layout
    flats, scalars = _gather_slices(layout, slices)
    tensors: dict[str, Tensor] = {}
    for name, flat in flats.items():
        for slot in layout.slots:
            tensors[f"{name}:{slot.name}"] = flat[slot.start : slot.stop].view(slot.shape)
    model = target.model
    kept = model.state_dict().keys()
    tensors |= {f"frozen:{name}": param for name, param in model.named_parameters() if not param.requires_grad}
    tensors |= {f"buffer:{name}": buffer for name, buffer in model.named_buffers() if name in kept}
    state: dict[str, Any] = {
        "step": progress.step,
        "cursor": progress.cursor.to_dict(),
        "plan": target.plan,
        "replicas": 1,
        "has_center": False,
        "late": {"replicas": 0, "left_out": False},
        "slices": {},
        "model": model_fingerprint(model),
        "extra": {
            "batch_size": target.batch_size,
            "seed": target.seed,
            "optimizer": target.optimizer_spec.optimizer_class.__name__,
            "options": [get_group_options(group) for group in target.optimizer_spec.optimizer.param_groups],
        },
        "scalars": scalars,
    }
    return save(
        checkpoint_dir, progress.step, {name: value.detach() for name, value in tensors.items()}, state, keep=keep_last
    )


def load_slices(target: SparkTrainingTarget, path: Path, num_partitions: int) -> tuple[list[bytes], TrainProgress]:
    """Return the slices of a checkpoint, whatever plan and however many partitions have written it.

    Raises:
        CheckpointError: there is none, it is damaged, or of another model or optimizer.
    """
    checkpoint = find_checkpoint(path)
    state: Any = checkpoint.state
    if state["model"] != model_fingerprint(target.model):
        raise CheckpointError(f"{checkpoint.folder} is of another model; build it as it was when it was saved")
    extra = state["extra"]
    for name, mine in (("batch_size", target.batch_size), ("seed", target.seed),
                       ("optimizer", target.optimizer_spec.optimizer_class.__name__)):  # fmt: skip
        if extra.get(name, mine) != mine:
            raise CheckpointError(
                f"{path} was saved with {name.replace('_', ' ')} {extra[name]}, this run has {mine}; a run goes on "
                "only with the samples and the optimizer it had; resume with the same, or start a new run"
            )
    reader = CheckpointReader(
        checkpoint, state["slices"], int(state.get("replicas", 1)), has_center=state.get("has_center", False)
    )
    keys = sorted(
        {name.split(":")[0].removeprefix("optimizer.") for name in checkpoint.names() if name.startswith("optimizer.")}
    )
    scalars = reader.scalars(state["scalars"])
    layout = target.layout
    weights = torch.cat([reader.read("model", slot.name).reshape(-1) for slot in layout.slots])
    kept = {
        key: torch.cat([reader.read(f"optimizer.{key}", slot.name).reshape(-1) for slot in layout.slots])
        for key in keys
    }
    found = []
    for place, (low, high) in enumerate(_slice_bounds(layout, num_partitions)):
        parts = {
            key: param_views(layout, partition_span(place, num_partitions), flat[low:high])
            for key, flat in kept.items()
        }
        states: list[Mapping[str, Any]] = []
        for at, (_, start, _) in enumerate(layout.optimizer_ranges(partition_span(place, num_partitions))):
            slot = next(slot for slot in layout.slots if slot.start <= start < slot.stop)
            numbers = {key: decode_scalar(value) for key, value in scalars.get(slot.name, {}).items()}
            states.append({key: found_parts[at][1].clone() for key, found_parts in parts.items()} | numbers)
        found.append(encode_slice(weights[low:high].clone(), states))
    return found, TrainProgress(int(state["step"]), Cursor.from_dict(state["cursor"]))


def _slice_bounds(layout: FlatLayout, num_partitions: int) -> list[tuple[int, int]]:
    return [layout.element_range(partition_span(place, num_partitions)) for place in range(num_partitions)]


def _gather_slices(layout: FlatLayout, slices: Sequence[bytes]) -> tuple[dict[str, Tensor], dict[str, dict[str, Json]]]:
    """Return whole flat vectors, ``model`` and ``optimizer.LAYOUT_KEY``, and the plain numbers of every parameter."""
    pieces: dict[str, list[Tensor]] = {}
    scalars: dict[str, dict[str, Json]] = {slot.name: {} for slot in layout.slots}
    for place, text in enumerate(slices):
        weights, states = decode_slice(text)
        pieces.setdefault("model", []).append(weights)
        for at, (_, start, stop) in enumerate(layout.optimizer_ranges(partition_span(place, len(slices)))):
            kept = states.get(at, {})
            plain = {key for key, value in kept.items() if is_scalar_state(key, value, weights[: stop - start])}
            numbers = {key: encode_scalar(key, kept[key]) for key in plain}
            for key in kept.keys() - plain:
                pieces.setdefault(f"optimizer.{key}", []).append(kept[key])
            for slot in layout.slots:
                if slot.start < stop and start < slot.stop:
                    scalars[slot.name] |= numbers
    return {name: torch.cat(found) for name, found in pieces.items()}, scalars
