"""Checkpoints of a Spark training: slices written as a checkpoint that any plan can resume from, and read again."""

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
from counterpoint.runtime.optimizer_spec import OptimizerSpec, is_scalar_state
from counterpoint.runtime.params.flat_layout import FlatLayout
from counterpoint.runtime.state_dict import encode_scalar
from counterpoint.spark.weight_slices import decode_slice, encode_slice, param_views, partition_span
from counterpoint.training.checkpointing.save_restore import (
    CheckpointReader,
    TrainProgress,
    describe_optimizer,
    find_checkpoint,
    model_fingerprint,
    name_state_dict,
)
from counterpoint.training.optimizer_state import get_group_options


@dataclass(frozen=True, slots=True)
class SparkTrainingTarget:
    """The training as the driver knows it.

    Args:
        model: the user's.
        optimizer_spec: of its optimizer.
        layout: of its weights.
        plan: as text.
        batch_size: samples of a global batch.
        seed: of the sample order.
    """

    model: nn.Module
    optimizer_spec: OptimizerSpec
    layout: FlatLayout
    plan: str
    batch_size: int
    seed: int


def initial_slices(target: SparkTrainingTarget, num_partitions: int) -> list[bytes]:
    """Return the slices of the model's current weights, without optimizer state."""
    params = dict(target.model.named_parameters())
    flat = torch.cat([params[slot.name].detach().reshape(-1) for slot in target.layout.slots])
    return [encode_slice(flat[low:high].clone()) for low, high in _slice_bounds(target.layout, num_partitions)]


def load_into_model(target: SparkTrainingTarget, slices: Sequence[bytes]) -> None:
    """Copy the weights of the slices into the model."""
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
    """Write a checkpoint of the whole run, in the format of a :class:`Trainer`, and return its folder.

    Args:
        target: what is trained.
        slices: of all partitions, in order.
        progress: of the run.
        checkpoint_dir: folder of all checkpoints, visible to the driver.
        keep_last: number of checkpoints to keep; None keeps all.

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
        "delayed_grads": {"replicas": 0, "skipped": False},
        "slices": {},
        "model": model_fingerprint(model),
        "optimizer": describe_optimizer(target.optimizer_spec, model),
        "state_dict": name_state_dict(model),
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
    """Return the slices of a checkpoint written by any plan with any number of partitions.

    Raises:
        CheckpointError: it is missing or damaged, or of another model or optimizer.
    """
    checkpoint = find_checkpoint(path)
    state: Any = checkpoint.state
    if state["model"] != model_fingerprint(target.model):
        raise CheckpointError(f"{checkpoint.folder} is of another model; build the model as when it was saved")
    extra = state["extra"]
    for name, current in (("batch_size", target.batch_size), ("seed", target.seed),
                       ("optimizer", target.optimizer_spec.optimizer_class.__name__)):  # fmt: skip
        if extra.get(name, current) != current:
            raise CheckpointError(
                f"{path} was saved with {name.replace('_', ' ')} {extra[name]}, this run has {current}; a resumed "
                "run needs the same samples and optimizer; resume with the same, or start a new run"
            )
    reader = CheckpointReader.open(checkpoint)
    keys = reader.optimizer_keys()
    scalars = reader.scalars(state["scalars"])
    layout = target.layout
    weights = torch.cat([reader.read("model", slot.name).reshape(-1) for slot in layout.slots])
    state_vectors = {
        key: torch.cat([reader.read(f"optimizer.{key}", slot.name).reshape(-1) for slot in layout.slots])
        for key in keys
    }
    slices = []
    for partition, (first, last) in enumerate(_slice_bounds(layout, num_partitions)):
        parts = {
            key: param_views(layout, partition_span(partition, num_partitions), flat[first:last])
            for key, flat in state_vectors.items()
        }
        states: list[Mapping[str, Any]] = []
        for index, (_, start, _) in enumerate(layout.optimizer_ranges(partition_span(partition, num_partitions))):
            slot = next(slot for slot in layout.slots if slot.start <= start < slot.stop)
            scalar_state = scalars.get(slot.name, {})
            states.append({key: views[index][1].clone() for key, views in parts.items()} | scalar_state)
        slices.append(encode_slice(weights[first:last].clone(), states))
    return slices, TrainProgress(int(state["step"]), Cursor.from_dict(state["cursor"]))


def _slice_bounds(layout: FlatLayout, num_partitions: int) -> list[tuple[int, int]]:
    return [layout.element_range(partition_span(partition, num_partitions)) for partition in range(num_partitions)]


def _gather_slices(layout: FlatLayout, slices: Sequence[bytes]) -> tuple[dict[str, Tensor], dict[str, dict[str, Json]]]:
    """Return whole flat vectors, ``model`` and ``optimizer.KEY``, and the scalar state of every parameter."""
    pieces: dict[str, list[Tensor]] = {}
    scalars: dict[str, dict[str, Json]] = {slot.name: {} for slot in layout.slots}
    for partition, text in enumerate(slices):
        weights, states = decode_slice(text)
        pieces.setdefault("model", []).append(weights)
        for index, (_, start, stop) in enumerate(layout.optimizer_ranges(partition_span(partition, len(slices)))):
            param_state = states.get(index, {})
            scalar_keys = {
                key for key, value in param_state.items() if is_scalar_state(key, value, weights[: stop - start])
            }
            scalar_state = {key: encode_scalar(key, param_state[key]) for key in scalar_keys}
            for key in param_state.keys() - scalar_keys:
                pieces.setdefault(f"optimizer.{key}", []).append(param_state[key])
            for slot in layout.slots:
                if slot.start < stop and start < slot.stop:
                    scalars[slot.name] |= scalar_state
    return {name: torch.cat(parts) for name, parts in pieces.items()}, scalars
