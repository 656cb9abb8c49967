"""Write a checkpoint of DeepSpeed's as one of this library's, which any plan continues from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from counterpoint.checkpoint import fingerprint, save
from counterpoint.compat.deepspeed.optimizers import resolve_optimizer
from counterpoint.compat.deepspeed.zero_files import ZeroCheckpoint, find_zero_folder, read_zero_checkpoint
from counterpoint.errors import PlanError
from counterpoint.optim.validation import checked_call
from counterpoint.runtime.optimizer_spec import is_scalar_state
from counterpoint.runtime.state_dict import encode_scalars
from counterpoint.terminal_text import warn
from counterpoint.training.optimizer_state import get_group_options, to_json


@checked_call
def import_checkpoint(folder: str | Path, output: str | Path, *, tag: str | None = None) -> Path:
    """Write a checkpoint that DeepSpeed has saved with ZeRO 1, 2 or 3 as one that ``step.load`` reads under any plan.

    Weights are the float32 ones, also those of runs in bf16 or fp16. Optimizer state, options, schedule and counts are
    kept; the position in the data and the client state are not.

    Args:
        folder: that DeepSpeed's ``save_checkpoint`` was given, or a folder in it.
        output: folder of checkpoints; created if it does not exist.
        tag: the name of one; that of the latest by default.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, it cannot be read, or the new one cannot be written.
    """
    saved = read_zero_checkpoint(find_zero_folder(Path(folder), tag))
    if saved.run["unknown"]:
        warn(
            f"{saved.folder} does not say which tensors {', '.join(saved.run['unknown'])} are (further names of tied "
            "ones at stage 3, as a rule), so an export of the new checkpoint lacks these names; training does not",
            RuntimeWarning,
            stacklevel=3,
        )
    tensors = {
        **{f"model:{name}": weight for name, weight in saved.trained.items()},
        **{f"frozen:{name}": value for name, value in saved.frozen.items()},
        **{f"buffer:{name}": value for name, value in saved.buffers.items()},
    }
    scalars: dict[str, dict[str, Any]] = {}
    for name, state in saved.states.items():
        whole = {key: value for key, value in state.items() if is_scalar_state(key, value, saved.trained[name])}
        scalars[name] = whole
        tensors |= {f"optimizer.{key}:{name}": value for key, value in state.items() if key not in whole}
    return save(Path(output), saved.run["steps"], tensors, _describe(saved, scalars))


def _describe(saved: ZeroCheckpoint, scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of the new checkpoint except tensors."""
    run, options = saved.run, [group.options for group in saved.groups]
    tensors: dict[str, Tensor] = {**saved.trained, **saved.frozen, **saved.buffers}
    frozen = {name: f"{text} frozen" for name, text in fingerprint(saved.frozen).items()}
    class_name = _optimizer_class(run["config"])
    scale, num_good_steps, hysteresis = run["loss_scale"]
    return {
        "step": run["steps"],
        "cursor": {"epoch": 0, "batch": run["steps"]},
        "plan": f"zero({run['num_ranks']}, level={run['stage']})",
        "replicas": 1,
        "slices": {},
        "loss_scale": {"scale": scale, "num_good_steps": num_good_steps, "hysteresis": hysteresis},
        "model": {**fingerprint(tensors), **frozen},
        "optimizer": {
            "class_name": class_name or "Optimizer",
            "param_groups": [{"params": group.names, "options": to_json(group.options)} for group in saved.groups],
        },
        "state_dict": {name: name for name in tensors} | run["aliases"],
        "scalars": encode_scalars(scalars),
        "extra": {
            "schedule": to_json(run["schedule"]),
            "options": [get_group_options(group) for group in options],
            **({"optimizer": class_name} if class_name else {}),
        },
    }


def _optimizer_class(config: Mapping[str, Any]) -> str:
    """Return the name of torch's class of the configured optimizer; empty if a script has made it."""
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        return ""
    try:
        return resolve_optimizer(section["type"], section.get("params") or {}).name
    except PlanError:  # an optimizer that is not made from a configuration here
        return ""
