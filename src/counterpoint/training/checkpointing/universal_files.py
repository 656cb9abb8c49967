"""The files of DeepSpeed's universal checkpoint, which it loads at any ZeRO stage and on any number of ranks.

::

    output/latest_universal                                  the tag
    output/global_step7/mp_rank_00_model_states.pt           model, counts, schedule; for stages 1 and 2
    output/global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt     counts and schedule; for stage 3
    output/global_step7/zero/optimizer_state.pt              options of the groups
    output/global_step7/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt     of the parameter NAME

Source:
    Lian et al., Universal Checkpointing, 2024; the loaders of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from counterpoint.checkpoint import Checkpoint
from counterpoint.errors import CheckpointError
from counterpoint.terminal_text import warn
from counterpoint.training.optimizer_state import from_json

MEANS = ("exp_avg", "exp_avg_sq")
LAYOUT_VERSION = "0.19.8"
"""The version of DeepSpeed's whose files these are; its loaders ask for one."""


def universal_files(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of each file of torch's by its path in the output folder.

    Args:
        checkpoint: of a training run.
        weights: its parameters and buffers by the names of ``state_dict()``.
        optimizer: its optimizer's state, as torch's ``state_dict()`` has it.

    Raises:
        CheckpointError: the optimizer is none of Adam's, or DeepSpeed cannot have its state.
    """
    state: Any = checkpoint.state
    own: Mapping[str, str] = state.get("state_dict", {name: name for name in weights})
    trained = {name for name in state["model"] if is_trained(checkpoint, name)}
    require_file_names(checkpoint, trained)
    saved_groups = [group["params"] for group in state["optimizer"]["param_groups"]]
    numbers = dict(enumerate(name for names in saved_groups for name in names))
    states = {numbers[index]: entries for index, entries in optimizer["state"].items()}
    step = require_adam(checkpoint, states, trained.intersection(chain(*saved_groups)))
    names = [[name for name in group if name in trained] for group in saved_groups]
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"params": [index]}
        for index, group in enumerate(optimizer["param_groups"])
    ]
    warn_of_limits(checkpoint, groups, [name for name in state["model"] if name not in trained])
    tag = f"global_step{checkpoint.step}"
    run = describe_run(checkpoint, names, {alias: name for alias, name in own.items() if alias != name})
    buffers = [entry.removeprefix("buffer:").split("~")[0] for entry in checkpoint.names() if entry[:7] == "buffer:"]
    model = {**run, "module": dict(weights), "buffer_names": list(dict.fromkeys(buffers))}
    model["param_shapes"] = [{name: weights[name].shape for name in group} for group in names]
    files: dict[str, Any] = {
        f"{tag}/mp_rank_00_model_states.pt": model,
        f"{tag}/zero_pp_rank_0_mp_rank_00_model_states.pt": {**model, "module": {}},
        f"{tag}/zero/optimizer_state.pt": {
            "ds_version": LAYOUT_VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups},
        },
    }
    for name in (name for group in names for name in group):
        folder, weight = f"{tag}/zero/{name}", weights[name].float()
        means = {key: states.get(name, {}).get(key, torch.zeros_like(weight)) for key in MEANS}
        files |= {
            f"{folder}/{key}.pt": {"param": value.contiguous()} for key, value in {"fp32": weight, **means}.items()
        }
        files[f"{folder}/step.pt"] = step
    return files


def is_trained(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor of the model is a parameter that the run trains."""
    return any(
        entry.startswith((f"model:{name}@", f"model:{name}~")) or entry == f"model:{name}"
        for entry in checkpoint.names()
    )


def require_file_names(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Check that the name of each parameter can be that of a folder.

    Raises:
        CheckpointError: one would be a path to elsewhere.
    """
    found = next((name for name in sorted(names) if name in {"", ".", ".."} or re.search(r"[/\\\0]", name)), None)
    if found is not None:
        raise CheckpointError(
            f"{checkpoint.folder} has the parameter {found!r}, but DeepSpeed's universal checkpoint has a folder of "
            "the name of each parameter; rename it, or export it with the format pt"
        )


def require_adam(checkpoint: Checkpoint, states: Mapping[str, Mapping[str, Any]], trained: Collection[str]) -> Tensor:
    """Return the number of steps that Adam has taken.

    Args:
        checkpoint: for the message.
        states: of the parameters that have one.
        trained: the names of all that should.

    Raises:
        CheckpointError: the state is not that of Adam, or parameters have taken other numbers of steps.
    """
    missing = sorted({*trained} - states.keys())
    if states and missing:
        raise CheckpointError(
            f"{checkpoint.folder} has no optimizer state of {missing[0]}, which no gradient has reached, but "
            "DeepSpeed's universal checkpoint has one number of steps for all; export it with the format pt, "
            "and load the files in the script"
        )
    others = {key for state in states.values() for key in state} ^ {*MEANS, "step"}
    steps = sorted({float(state["step"]) for state in states.values() if "step" in state})
    if others or len(steps) != 1:
        what = f"optimizer state {', '.join(sorted(others))}" if others else f"steps {steps}"
        raise CheckpointError(
            f"{checkpoint.folder} differs by {what} from Adam's exp_avg, exp_avg_sq and one number of steps, which "
            "DeepSpeed's universal checkpoint has; export it with the format pt, and load the files in the script"
        )
    return torch.tensor(steps[0])


def warn_of_limits(checkpoint: Checkpoint, groups: list[dict[str, Any]], untrained: list[str]) -> None:
    """Warn of what DeepSpeed does not restore from such files."""
    texts = []
    if untrained:
        texts.append(
            f"frozen parameters and buffers ({', '.join(untrained)}); load them into the model before "
            "initialize, from the entry module of mp_rank_00_model_states.pt"
        )
    if len(groups) > 1:
        texts.append(
            f"at stage 3 the options of the {len(groups)} groups: all get those of the first, and torch's Adam "
            "one count of steps that each group increments; load it at stage 1 or 2"
        )
    if texts:
        warn(
            f"DeepSpeed does not restore from a universal checkpoint of {checkpoint.folder}: {'; '.join(texts)}",
            RuntimeWarning,
            stacklevel=4,
        )


def describe_run(checkpoint: Checkpoint, names: list[list[str]], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of a model file except tensors."""
    state: Any = checkpoint.state
    schedule = from_json(state["extra"].get("schedule") or {}, {})
    updates = int(schedule.get("last_epoch", checkpoint.step))
    return {
        "optimizer": None,
        "param_shapes": [],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {alias: name for alias, name in aliases.items() if any(name in group for group in names)},
        "lr_scheduler": {**schedule, "last_batch_iteration": updates - 1},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": checkpoint.step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": LAYOUT_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
