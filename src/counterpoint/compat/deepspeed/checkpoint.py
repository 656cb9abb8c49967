"""Checkpoints of a model that ``initialize`` returned; any number of ranks, at stages 0 to 2, continues from them.

::

    folder/latest                              the tag of the newest checkpoint
    folder/global_step7/model.state            weights, buffers, counts, options, schedule, client state; by rank 0
    folder/global_step7/optimizer-0-of-2.state     of each parameter, the range of elements that rank 0 updates, and its
    folder/global_step7/optimizer-1-of-2.state     state; likewise rank 1

A checkpoint that DeepSpeed has saved with ZeRO is read, too (:mod:`counterpoint.compat.deepspeed.zero_files`).
A checkpoint is written to a new folder and renamed. Files are encoded by :mod:`counterpoint.value_codec`; nothing is
pickled.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterpoint.compat.deepspeed.grad_update import GradientUpdate, ShardedUpdate, WholeUpdate
from counterpoint.compat.deepspeed.zero_files import ZeroCheckpoint, has_zero_files, read_zero_checkpoint
from counterpoint.errors import CheckpointError, CounterpointError, DataError, ProtocolError, error_text
from counterpoint.fabric.fabric import Fabric
from counterpoint.file_reader import open_regular_file
from counterpoint.file_writer import replace_file
from counterpoint.runtime.loss.loss_scale import LossScaler
from counterpoint.runtime.optimizer_spec import is_scalar_state
from counterpoint.training.checkpointing.save_restore import name_state_dict
from counterpoint.value_codec import decode_value, encode_value

FORMAT = "counterpoint deepspeed checkpoint 1"
TAG = re.compile(r"[\w.-]*\w[\w.-]*")
SHARD_FILE = re.compile(r"optimizer-([0-9]{1,6})-of-([0-9]{1,6})\.state")


class TrainedModel(Protocol):
    """What a checkpoint reads and writes of a ``DeepSpeedModel``, which describes each of them."""

    module: nn.Module
    update: GradientUpdate
    lr_scheduler: LRScheduler | None
    scaler: LossScaler
    global_steps: int
    skipped_steps: int
    micro_steps: int
    has_backward: bool

    @property
    def fabric(self) -> Fabric:
        """This rank's connection to the others."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...

    def gradient_accumulation_steps(self) -> int:
        """Return the microbatches of one step on one rank."""
        ...


class ParamState(NamedTuple):
    """The optimizer's state of a range of elements of one parameter.

    Args:
        start: the first element.
        stop: the one after the last.
        elements: tensors with a number for each element, without other dims.
        whole: values that belong to all of them, as the count of steps.
    """

    start: int
    stop: int
    elements: dict[str, Tensor]
    whole: dict[str, Any]


def save_checkpoint(wrapped: TrainedModel, folder: Path, tag: str | None, client_state: Mapping[str, Any]) -> bool:
    """Write a checkpoint; see ``DeepSpeedModel.save_checkpoint``.

    Raises:
        CheckpointError: it cannot be written on some rank.
        DataError: gradients of some microbatches wait for the update.
    """
    steps = wrapped.gradient_accumulation_steps()
    if wrapped.micro_steps % steps or wrapped.has_backward:
        raise DataError(
            f"save_checkpoint() was called after {wrapped.micro_steps % steps} of {steps} microbatches of a step, "
            "whose gradients would be lost; call it after the step() that updates"
        )
    tag = f"global_step{wrapped.global_steps}" if tag is None else str(tag)
    if TAG.fullmatch(tag) is None:
        raise CheckpointError(f"tag={tag!r} is not a name of a folder; give letters, digits, '_', '-' and '.'")
    fabric, draft = wrapped.fabric, folder / f".{tag}.draft"
    run_on_ranks(wrapped, f"begin {tag}", lambda: _make_draft(draft) if fabric.rank == 0 else None)

    def write() -> None:
        _write(draft / f"optimizer-{fabric.rank}-of-{fabric.num_ranks}.state", read_states(wrapped.update))
        if fabric.rank == 0:
            _write(draft / "model.state", _describe_run(wrapped, client_state))

    run_on_ranks(wrapped, f"write {tag}", write)
    run_on_ranks(wrapped, f"publish {tag}", lambda: _publish(folder, tag, draft) if fabric.rank == 0 else None)
    return True


def run_on_ranks(wrapped: TrainedModel, label: str, work: Callable[[], None]) -> None:
    """Do something on every rank, and raise on all of them if it fails on one.

    Raises:
        CheckpointError: it failed on some rank.
    """
    own, problem = None, ""
    try:
        work()
    except (OSError, CounterpointError) as error:
        own, problem = error, error_text(error) or type(error).__name__
    fabric = wrapped.fabric
    problems = fabric.gather_values(label, problem, tuple(range(fabric.num_ranks)))
    for rank, text in enumerate(problems):
        if text:
            raise CheckpointError(f"the checkpoint was not written: rank {rank} failed to {label}: {text}") from own


def _make_draft(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def _publish(folder: Path, tag: str, draft: Path) -> None:
    """Rename the complete draft, in place of an earlier checkpoint of this tag, and write the tag of the latest one."""
    target, old = folder / tag, folder / f".{tag}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    replace_file(folder / "latest", tag)
    shutil.rmtree(old, ignore_errors=True)


def _describe_run(wrapped: TrainedModel, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rank 0 writes."""
    scheduler = wrapped.lr_scheduler
    return {
        "model": dict(wrapped.module.state_dict()),
        "counts": [wrapped.global_steps, wrapped.skipped_steps, wrapped.micro_steps],
        "loss_scale": list(wrapped.scaler.state()),
        "options": [
            {name: value for name, value in group.items() if name != "params"}
            for group in wrapped.optimizer.param_groups
        ],
        "scheduler": None if scheduler is None else dict(scheduler.state_dict()),
        "client_state": dict(client_state),
    }


def read_states(update: GradientUpdate) -> dict[str, Any]:
    """Return the optimizer's state on this rank by the name of each parameter, as ``ParamState`` has it."""
    entries: dict[str, Any] = {}
    if isinstance(update, WholeUpdate):
        for group in update.groups if update.fabric.rank == 0 else ():
            for name, param in zip(group.names, group.params, strict=True):
                elements, whole = split_state(update, param)
                entries[name] = [0, param.numel(), elements, whole]
    if isinstance(update, ShardedUpdate):
        for shard in update.shards:
            elements, whole = split_state(update, shard.param)
            first = shard.bounds[update.fabric.rank]
            for name, start, stop, place in shard.ranges(update.fabric.rank):
                low = place - first
                parts = {key: value[low : low + stop - start] for key, value in elements.items()}
                entries[name] = [start, stop, parts, whole]
    return entries


def split_state(update: GradientUpdate, param: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the optimizer keeps for each element of a tensor, flat, and what it keeps for all of them."""
    elements, whole = {}, {}
    for key, value in update.optimizer.state.get(param, {}).items():
        if is_scalar_state(key, value, param) or value.numel() != param.numel():
            whole[key] = value
        else:
            elements[key] = value.reshape(-1)
    return elements, whole


def load_checkpoint(wrapped: TrainedModel, folder: Path, tag: str | None) -> tuple[str | None, Any]:
    """Continue from a checkpoint; see ``DeepSpeedModel.load_checkpoint``.

    Raises:
        CheckpointError: it cannot be read, or is of another model or optimizer.
    """
    if tag is None:
        try:
            with open_regular_file(folder / "latest") as file:
                tag = file.read(256).decode()
        except FileNotFoundError:
            return None, None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{folder / 'latest'} cannot be read: {error}; give the tag of a checkpoint"
            ) from error
    if TAG.fullmatch(tag) is None:
        raise CheckpointError(f"tag={tag!r} is not a name of a folder; give letters, digits, '_', '-' and '.'")
    path = folder / tag
    try:
        if has_zero_files(path):
            run, states = convert_zero_checkpoint(read_zero_checkpoint(path), wrapped)
        else:
            run, states = _read(path / "model.state"), _read_shards(path)
        _restore(wrapped, run, states)
        return str(path), run["client_state"]
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} does not fit the model, its optimizer or its schedule: {error_text(error)}; build the same ones "
            "as for the checkpoint"
        ) from error


def convert_zero_checkpoint(
    saved: ZeroCheckpoint, wrapped: TrainedModel
) -> tuple[dict[str, Any], dict[str, list[ParamState]]]:
    """Return what DeepSpeed has saved as the content of the files here.

    Raises:
        ValueError: it is of another model.
    """
    tensors = {**saved.trained, **saved.frozen, **saved.buffers}
    names = name_state_dict(wrapped.module)
    missing, others = {*names.values()} - tensors.keys(), tensors.keys() - {*names.values()}
    if missing or others:
        raise ValueError(f"the file and the model do not share {', '.join(sorted({*missing, *others}))}")
    position, update = 0, wrapped.update
    trained = [update.names[id(param)] for param, requires_grad in update.given if requires_grad]
    for index, group in enumerate(saved.groups):
        own, position = trained[position : position + len(group.names)], position + len(group.names)
        if {*own} != {*group.names}:
            raise ValueError(f"group {index} of the optimizer has {', '.join(own)}, and saved were {group.names}")
    states = {}
    for name, state in saved.states.items():
        weight = saved.trained[name]
        whole = {key: value for key, value in state.items() if is_scalar_state(key, value, weight)}
        elements = {key: value.reshape(-1) for key, value in state.items() if key not in whole}
        states[name] = [ParamState(0, weight.numel(), elements, whole)]
    steps = saved.run["steps"]
    run = {
        "model": {name: tensors[stored] for name, stored in names.items()},
        "counts": [steps, saved.run["skipped_steps"], steps * wrapped.gradient_accumulation_steps()],
        "loss_scale": list(saved.run["loss_scale"]),
        "options": [group.options for group in saved.groups],
        "scheduler": saved.run["schedule"],
        "client_state": saved.run["client_state"],
    }
    return run, states


def _restore(wrapped: TrainedModel, run: Mapping[str, Any], states: Mapping[str, list[ParamState]]) -> None:
    """Load what was read.

    Raises:
        ValueError: a part is of another model, optimizer or schedule.
    """
    groups, options = wrapped.optimizer.param_groups, run["options"]
    if len(groups) != len(options):
        raise ValueError(f"it has {len(options)} groups of parameters, and the optimizer {len(groups)}")
    if (run["scheduler"] is None) != (wrapped.lr_scheduler is None):
        raise ValueError("one of both has a schedule")
    wrapped.zero_grad()
    wrapped.has_backward = False
    wrapped.module.load_state_dict(run["model"])
    write_states(wrapped.update, states)
    for group, values in zip(groups, options, strict=True):
        group.update(values)
    if wrapped.lr_scheduler is not None:
        wrapped.lr_scheduler.load_state_dict(run["scheduler"])
    wrapped.global_steps, wrapped.skipped_steps, wrapped.micro_steps = run["counts"]
    scale, num_good_steps, hysteresis = run["loss_scale"]
    wrapped.scaler.restore((scale, num_good_steps, hysteresis))


def write_states(update: GradientUpdate, states: Mapping[str, list[ParamState]]) -> None:
    """Set the optimizer's state on this rank to its part of the states of all parameters."""
    update.optimizer.state.clear()
    if isinstance(update, WholeUpdate):
        for group in update.groups:
            for name, param in zip(group.names, group.params, strict=True):
                elements, whole = join_states(take_range(states[name], 0, param.numel()))
                views = {key: value.view(param.shape) for key, value in elements.items()}
                update.optimizer.state[param] = {**views, **whole}
    if isinstance(update, ShardedUpdate):
        for shard in update.shards:
            ranges = shard.ranges(update.fabric.rank)
            parts = [part for name, start, stop, _ in ranges for part in take_range(states[name], start, stop)]
            elements, whole = join_states(parts)
            update.optimizer.state[shard.param] = {**elements, **whole}


def take_range(saved: list[ParamState], start: int, stop: int) -> list[ParamState]:
    """Return the states of a range of a parameter's elements, in their order, from the ranges that were saved.

    Raises:
        ValueError: an element is in none of them.
    """
    parts, position = [], start
    for entry in sorted(saved, key=lambda entry: entry.start):
        low, high = position, min(entry.stop, stop)
        if entry.start <= low < high:
            elements = {key: value[low - entry.start : high - entry.start] for key, value in entry.elements.items()}
            parts.append(ParamState(low, high, elements, entry.whole))
            position = high
    if position != stop:
        raise ValueError(f"the state of the elements from {position} to {stop} of a parameter is missing")
    return parts


def join_states(parts: list[ParamState]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of consecutive ranges; what belongs to all elements is that of the first one."""
    if not parts:
        return {}, {}
    elements = {key: torch.cat([part.elements[key] for part in parts]) for key in parts[0].elements}
    whole = {key: value.clone() if isinstance(value, Tensor) else value for key, value in parts[0].whole.items()}
    return elements, whole


def _write(path: Path, content: Mapping[str, Any]) -> None:
    replace_file(path, bytes(encode_value({FORMAT: content}, path.stem)))


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file.

    Raises:
        CheckpointError: it cannot be read, or has another format.
    """
    try:
        with open_regular_file(path) as file:
            content = decode_value(file.read())
    except (OSError, ProtocolError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; give a folder that save_checkpoint has written"
        ) from error
    found = content.get(FORMAT) if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} is not a part of such a checkpoint; give a folder that save_checkpoint has written"
        )
    return found


def _read_shards(folder: Path) -> dict[str, list[ParamState]]:
    """Return the saved ranges of each parameter.

    Raises:
        CheckpointError: the file of a rank is missing or has another format.
    """
    states: dict[str, list[ParamState]] = {}
    for path in _find_shards(folder):
        for name, entry in _read(path).items():
            match entry:
                case [int(start), int(stop), dict(elements), dict(whole)]:
                    states.setdefault(name, []).append(ParamState(start, stop, elements, whole))
                case _:
                    raise CheckpointError(f"{path} has no range of {name}; save the checkpoint again")
    return states


def _find_shards(folder: Path) -> Iterator[Path]:
    """Yield the file of every rank.

    Raises:
        CheckpointError: one is missing.
    """
    found = {path.name: match for path in folder.iterdir() if (match := SHARD_FILE.fullmatch(path.name))}
    if not found:
        raise CheckpointError(f"{folder} has no file optimizer-0-of-1.state or of more ranks; copy all of its files")
    num_ranks = int(next(iter(found.values()))[2])
    for rank in range(num_ranks):
        name = f"optimizer-{rank}-of-{num_ranks}.state"
        if name not in found:
            raise CheckpointError(
                f"{folder} has no {name}, the state of rank {rank} of {num_ranks}; copy all of its files"
            )
        yield folder / name
