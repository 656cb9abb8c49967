"""Read a checkpoint that DeepSpeed has written with ZeRO, by its file layout, without DeepSpeed.

::

    folder/latest                                            the tag of the newest checkpoint
    folder/TAG/mp_rank_00_model_states.pt                    stages 1, 2: the model, counts, schedule, client state
    folder/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: the same, of each rank, without weights
    folder/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     float32 weights and optimizer state of rank R

    stages 1, 2   a group of parameters, flat     [ w0 w0 w0 w0 | w0 w1 w1 -- ]     rank 0 | rank 1, padded at the end
    stage 3       each parameter by itself        [ w0 w0 w0 | w0 w0 -- ] [ w1 | w1 ]     every rank has a part of each

Weights are always the float32 ones, as with DeepSpeed's ``zero_to_fp32.py``. Files are loaded with
``weights_only=True``: tensors and plain values. The three classes of DeepSpeed's that its files name become
:class:`SavedObject`, which holds their values; any other class is refused, and no code of a file runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.serialization import safe_globals

from counterpoint.errors import CheckpointError, error_text
from counterpoint.file_reader import open_regular_file

MODEL_FILE = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt")
OTHER_PARALLELISM = {"layer_": "a pipeline", "expert_": "experts", "mp_rank_01": "tensor parallelism"}
KNOWN_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
        "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
        "checkpoint_parallel_dimensions", "num_experts", "universal_checkpoint_info",
    }
)  # fmt: skip
"""Keys of a model file that are DeepSpeed's own; the others are the client state."""
GROUP_STATE = frozenset({"params", "param_names", "step", "bias_correction", "name"})
"""Keys of a parameter group that are not options of torch's optimizers."""


class SavedObject:
    """The values of an object of DeepSpeed's, without its class."""


def _read_stage(value: int) -> int:
    return value


STAND_INS = [
    (SavedObject, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (SavedObject, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (SavedObject, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_read_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]
"""What stands for the names that DeepSpeed's files have; nothing of DeepSpeed is imported."""


class SavedGroup(NamedTuple):
    """A group of parameters.

    Args:
        names: of its parameters, in their order.
        options: of the optimizer for them.
    """

    names: list[str]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ZeroCheckpoint:
    """A model with its optimizer's state, whole.

    Args:
        folder: of its files.
        trained: the float32 weights.
        frozen: parameters that are not trained; those in 16 bits are widened to float32.
        buffers: of the first rank.
        states: the optimizer's state of each parameter, in its shape, and its scalars.
        groups: of the optimizer.
        run: ``stage``, ``num_ranks``, ``steps``, ``skipped_steps``, ``schedule``, ``loss_scale``, ``config``,
            ``aliases`` (further names of tied tensors), ``unknown`` (names in the model whose tensors are not known),
            ``client_state``.
    """

    folder: Path
    trained: dict[str, Tensor]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    states: dict[str, dict[str, Any]]
    groups: list[SavedGroup]
    run: dict[str, Any]


class _Shard(NamedTuple):
    """What one rank has: flat weights, the state of each, and the groups, of which stage 3 may cut one into several."""

    stage: int
    num_ranks: int
    flats: list[Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    paddings: Any
    loss_scaler: Any


def find_zero_folder(folder: Path, tag: str | None = None) -> Path:
    """Return the folder with the files of a checkpoint of DeepSpeed's.

    Args:
        folder: of all checkpoints, or of one.
        tag: of the checkpoint; the latest by default.

    Raises:
        CheckpointError: the folder has no such files.
    """
    if tag is None and not has_zero_files(folder):
        try:
            with open_regular_file(folder / "latest") as file:
                tag = file.read(256).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{folder} has no files of DeepSpeed's and no readable file latest with the name of a folder: {error}; "
                "give the folder that save_checkpoint was given, or tag="
            ) from error
    path = folder if tag is None else folder / tag
    if tag is not None and (Path(tag).name != tag or not has_zero_files(path)):
        raise CheckpointError(f"{path} has no *_model_states.pt of DeepSpeed; give another folder or another tag")
    return path


def has_zero_files(folder: Path) -> bool:
    """Return whether a folder has the files of a checkpoint of DeepSpeed's."""
    return folder.is_dir() and any(MODEL_FILE.fullmatch(path.name) for path in folder.iterdir())


def read_zero_checkpoint(folder: Path) -> ZeroCheckpoint:
    """Return the checkpoint whose files are in a folder.

    Raises:
        CheckpointError: a file is missing, damaged or has objects of unknown classes, or it is not one of ZeRO 1 to 3
            alone.
    """
    model_files, optimizer_files = _list_files(folder)
    models, contents = [_load(path) for path in model_files], [_load(path) for path in optimizer_files]
    try:
        shards = [_read_shard(content, path) for content, path in zip(contents, optimizer_files, strict=True)]
        _require_complete(folder, shards, len(models))
        return _assemble(folder, models, shards)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} cannot be put together: {type(error).__name__}: {error_text(error)}; copy all files of one "
            "checkpoint again, or save it again with a present version of DeepSpeed"
        ) from error


def _list_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the model files and the optimizer files, each by rank.

    Raises:
        CheckpointError: there are none, or they are of other kinds of parallelism.
    """
    names = sorted(path.name for path in folder.iterdir())
    for prefix, kind in OTHER_PARALLELISM.items():
        found = next((name for name in names if name.startswith(prefix) or f"_{prefix}_" in name), None)
        if found is not None:
            raise CheckpointError(
                f"{folder} has {found}, which is of {kind}, and only ZeRO without other parallelism is read; "
                "consolidate it with DeepSpeed, and load the weights into the model before training"
            )
    models = [(int(match[1] or 0), name) for name in names if (match := MODEL_FILE.fullmatch(name))]
    optimizers = [(int(match[1]), name) for name in names if (match := OPTIMIZER_FILE.fullmatch(name))]
    if not models or not optimizers:
        remedy = (
            "at stage 0 the model file has all as plain torch state: load its entries module and optimizer with "
            "torch.load(path, weights_only=True)"
        )
        if (folder / "zero").is_dir():
            remedy = "it is a universal checkpoint: give the folder that ds_to_universal.py was given"
        raise CheckpointError(f"{folder} has no files *_optim_states.pt of ZeRO's ranks; {remedy}")
    for kind, files in (("model", models), ("optimizer", optimizers)):
        if [rank for rank, _ in sorted(files)] != [*range(len(files))]:
            raise CheckpointError(
                f"{folder} has the {kind} files {', '.join(name for _, name in files)}, but one of each rank is "
                "read; copy the files of all ranks of one checkpoint into an empty folder"
            )
    return [folder / name for _, name in sorted(models)], [folder / name for _, name in sorted(optimizers)]


def _load(path: Path) -> dict[str, Any]:
    """Return the content of a file of torch's.

    Raises:
        CheckpointError: it cannot be read, or has objects that are neither tensors nor plain values.
    """
    try:
        with open_regular_file(path) as file, safe_globals(STAND_INS):  # type: ignore[arg-type]
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        name = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, UnpicklingError) else None
        if name:
            raise CheckpointError(
                f"{path} has an object of {name[1]}, which is not read: only tensors and plain values are; save the "
                "checkpoint again without it in client_state"
            ) from error
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error_text(error)}; copy the file again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} has a {type(content).__name__}, but DeepSpeed saves a dict; copy the file again")
    return content


def _read_shard(content: Mapping[str, Any], path: Path) -> _Shard:
    """Return what an optimizer file has, of either layout.

    Raises:
        CheckpointError: it has another layout.
    """
    saved = content.get("optimizer_state_dict", {})
    stage = saved.get("zero_stage")
    base = saved.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if stage not in {1, 2, 3} or not isinstance(base, dict):
        elastic = isinstance(base, list)
        raise CheckpointError(
            f"{path} has stage {stage} and optimizer state as {'a list' if elastic else type(base).__name__}, but "
            "stages 1 to 3 with a dict are read; "
            + ("save again with zero_optimization.elastic_checkpoint false" if elastic else "copy the file again")
        )
    flats = saved["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
    count = saved["partition_count"]
    states = [base["state"].get(index, {}) for index in range(len(flats))]
    return _Shard(
        stage, max(count) if isinstance(count, list) else count, list(flats), states, list(base["param_groups"]),
        saved.get("param_alignment_paddings"), saved.get("loss_scaler"),
    )  # fmt: skip


def _require_complete(folder: Path, shards: Sequence[_Shard], num_models: int) -> None:
    """Check that the files of all ranks are there.

    Raises:
        CheckpointError: some are missing, or are of another checkpoint.
    """
    stage, num_ranks = shards[0].stage, shards[0].num_ranks
    if any((shard.stage, shard.num_ranks) != (stage, num_ranks) for shard in shards) or len(shards) != num_ranks:
        raise CheckpointError(
            f"{folder} has the optimizer files of {len(shards)} ranks, and its first one is of {num_ranks} ranks at "
            f"stage {stage}; copy the files of all ranks of one checkpoint"
        )
    if num_models != (num_ranks if stage == 3 else 1):
        raise CheckpointError(
            f"{folder} has {num_models} model files, but stage {stage} on {num_ranks} ranks has "
            f"{num_ranks if stage == 3 else 1}; copy the files of all ranks of one checkpoint"
        )


def _assemble(folder: Path, models: Sequence[Mapping[str, Any]], shards: Sequence[_Shard]) -> ZeroCheckpoint:
    """Return the whole checkpoint."""
    model, first = models[0], shards[0]
    walk = _walk_params if first.stage == 3 else _walk_groups
    groups = [SavedGroup([], _options(group)) for group in first.groups]
    trained: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for group, name, weight, state in walk(model["param_shapes"], shards):
        groups[group].names.append(name)
        trained[name], states[name] = weight, _state(state, first.groups[group])
    buffers = {name: _widen(model["module"][name]) for name in model["buffer_names"] if name in model["module"]}
    aliases = {alias: name for alias, name in dict(model["shared_params"] or {}).items() if name in trained}
    frozen = _read_frozen(models, first.stage, {*trained, *buffers, *aliases})
    aliases |= _find_aliases(model["module"], {**trained, **frozen, **buffers}, aliases)
    known = {*trained, *buffers, *frozen, *aliases}
    run = {
        "stage": first.stage,
        "num_ranks": first.num_ranks,
        "steps": int(model["global_steps"]),
        "skipped_steps": int(model["skipped_steps"]),
        "schedule": _schedule(model["lr_scheduler"], groups),
        "loss_scale": _loss_scale(first.loss_scaler),
        "config": dict(model.get("ds_config") or {}),
        "aliases": {alias: name for alias, name in aliases.items() if alias not in {*trained, *frozen, *buffers}},
        "unknown": [name for name in model["module"] if name not in known],
        "client_state": {key: value for key, value in model.items() if key not in KNOWN_KEYS},
    }
    return ZeroCheckpoint(folder, trained, frozen, buffers, states, groups, run)


def _walk_groups(
    param_shapes: Sequence[Mapping[str, Sequence[int]]], shards: Sequence[_Shard]
) -> Iterator[tuple[int, str, Tensor, dict[str, Any]]]:
    """Yield each parameter of stages 1 and 2 with its group, weight and state.

    Raises:
        ValueError: the ranks' parts are too short.
    """
    paddings = shards[0].paddings
    for group, shapes in enumerate(param_shapes):
        flat = torch.cat([shard.flats[group] for shard in shards])
        parts = {
            key: torch.cat([shard.states[group][key][: shard.flats[group].numel()] for shard in shards])
            for key, value in shards[0].states[group].items()
            if _is_flat(value, shards[0].flats[group])
        }
        offset = 0
        for index, (name, shape) in enumerate(shapes.items()):
            stop = offset + math.prod(shape)
            if stop > flat.numel():
                raise ValueError(f"{name} ends at element {stop} of {flat.numel()}")
            state = {key: value[offset:stop].view(tuple(shape)) for key, value in parts.items()}
            scalars = {key: value for key, value in shards[0].states[group].items() if key not in parts}
            yield group, name, flat[offset:stop].view(tuple(shape)), {**scalars, **state}
            offset = stop + (paddings[group][index] if paddings else 0)


def _walk_params(
    param_shapes: Sequence[Mapping[str, Sequence[int]]], shards: Sequence[_Shard]
) -> Iterator[tuple[int, str, Tensor, dict[str, Any]]]:
    """Yield each parameter of stage 3 with its group, weight and state.

    Raises:
        ValueError: the ranks' parts are too short.
    """
    first, num_ranks = shards[0], len(shards)
    bounds = list(accumulate(flat.numel() for flat in first.flats))
    flats = [torch.cat(shard.flats) for shard in shards]
    keys = [key for key, value in first.states[0].items() if _is_flat(value, first.flats[0])]
    parts = {key: [torch.cat([state[key] for state in shard.states]) for shard in shards] for key in keys}
    group_of_flat = {flat: index for index, group in enumerate(first.groups) for flat in group["params"]}

    def take(values: Sequence[Tensor], offset: int, shape: Sequence[int]) -> Tensor:
        length = math.ceil(math.prod(shape) / num_ranks)
        joined = torch.cat([value[offset : offset + length] for value in values])
        return joined[: math.prod(shape)].view(tuple(shape))

    offset = 0
    for name, shape in ((name, shape) for shapes in param_shapes for name, shape in shapes.items()):
        flat = next(index for index, bound in enumerate(bounds) if offset < bound)
        state = {key: take(values, offset, shape) for key, values in parts.items()}
        scalars = {key: value for key, value in first.states[flat].items() if key not in parts}
        yield group_of_flat[flat], name, take(flats, offset, shape), {**scalars, **state}
        offset += math.ceil(math.prod(shape) / num_ranks)
    if offset != bounds[-1]:
        raise ValueError(f"the parameters have {offset} elements of a rank's {bounds[-1]}")


def _is_flat(value: object, flat: Tensor) -> bool:
    """Return whether an entry of the optimizer's state has a number for each element; stages 1 and 2 pad it."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() >= flat.numel()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that torch's optimizer has.

    Raises:
        ValueError: one has no counterpart there.
    """
    if group.get("bias_correction") is False:
        raise ValueError("the optimizer had bias_correction=false, and torch's Adam always corrects")
    return {key: value for key, value in group.items() if key not in GROUP_STATE}


def _state(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter as torch's optimizers keep it: the count of steps is a tensor."""
    step = state.get("step", group.get("step") if state else None)
    counted = {} if step is None else {"step": torch.tensor(float(step))}
    return {**counted, **{key: value for key, value in state.items() if key != "step"}}


def _read_frozen(models: Sequence[Mapping[str, Any]], stage: int, known: set[str]) -> dict[str, Tensor]:
    """Return the parameters that are not trained: at stage 3 joined from the ranks' parts."""
    if stage != 3:
        found: dict[str, Tensor] = {}
        places = {_place(value) for name, value in models[0]["module"].items() if name in known}
        for name, value in models[0]["module"].items():
            if name not in known and isinstance(value, Tensor) and _place(value) not in places:
                found[name] = _widen(value)
                places.add(_place(value))
        return found
    shapes = models[0].get("frozen_param_shapes") or {}
    joined = {name: torch.cat([model["frozen_param_fragments"][name] for model in models]) for name in shapes}
    return {name: _widen(joined[name][: math.prod(shape)].view(tuple(shape))) for name, shape in shapes.items()}


def _find_aliases(
    module: Mapping[str, Any], tensors: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Return further names of tensors whose memory the file has once; weights are empty at stage 3."""
    first = {_place(module[name]): name for name in reversed([*tensors]) if name in module and module[name].numel()}
    return {
        name: first[_place(value)]
        for name, value in module.items()
        if name not in tensors and name not in aliases and isinstance(value, Tensor) and _place(value) in first
    }


def _place(value: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return value.data_ptr(), tuple(value.shape), value.stride()


def _widen(value: Tensor) -> Tensor:
    """Return a tensor of 16 bits in float32, and others as they are."""
    return value.float() if value.dtype in {torch.float16, torch.bfloat16} else value


def _schedule(saved: Mapping[str, Any] | None, groups: Sequence[SavedGroup]) -> dict[str, Any] | None:
    """Return the state of the learning rate schedule as torch's schedulers keep it."""
    if saved is None or "last_batch_iteration" not in saved:
        return None if saved is None else dict(saved)
    updates = int(saved["last_batch_iteration"]) + 1
    rates = [group.options["lr"] for group in groups]
    return {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}


def _loss_scale(scaler: Any) -> tuple[float, int, int]:  # noqa: ANN401 - one of two classes
    """Return the scale of the loss, the good steps since it has changed, and the hysteresis."""
    scale = float(getattr(scaler, "cur_scale", 1.0))
    if not hasattr(scaler, "scale_window"):
        return scale, 0, 1
    since = scaler.cur_iter - scaler.last_overflow_iter - 1
    return scale, max(0, since % scaler.scale_window), int(scaler.cur_hysteresis)
