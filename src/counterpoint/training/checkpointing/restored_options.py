"""The options of an optimizer's groups and the state of a scheduler, in the metadata of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim

from counterpoint.checkpoint import Checkpoint
from counterpoint.checkpoint.reader import state_error
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.checkpointing.train_state import find_scalar_flaw
from counterpoint.training.optimizer_state import (
    apply_group_options,
    find_form_flaw,
    find_schedule_flaw,
    from_json,
    get_group_options,
    to_json,
)

Scheduler = optim.lr_scheduler.LRScheduler


def describe_options(optimizer_spec: OptimizerSpec, scheduler: Scheduler | None) -> dict[str, Any]:
    """Return the metadata: the class of the optimizer, the options of its groups, and the scheduler's state."""
    return {
        "schedule": to_json(scheduler.state_dict()) if scheduler is not None else None,
        "optimizer": optimizer_spec.optimizer_class.__name__,
        "options": [get_group_options(group) for group in optimizer_spec.optimizer.param_groups],
    }


def require_same_options(optimizer_spec: OptimizerSpec, scheduler: Scheduler | None, checkpoint: Checkpoint) -> None:
    """Check that what a checkpoint has for the scheduler and the parameter groups has the form of theirs.

    Raises:
        CheckpointError: a value is none that this scheduler or optimizer could have saved.
    """
    metadata: Any = checkpoint.state["extra"]
    flaw = ""
    if scheduler is not None and metadata.get("schedule") is not None:
        flaw = find_schedule_flaw(metadata["schedule"], scheduler, "state.extra.schedule")
    groups = map(get_group_options, optimizer_spec.optimizer.param_groups)
    for index, (own, options) in enumerate(zip(groups, metadata.get("options", ()), strict=False)):
        flaw = flaw or find_form_flaw(options, own, f"state.extra.options[{index}]", lengths="same")
    own_scalars = optimizer_spec.list_scalars()
    if own_scalars is not None:
        flaw = flaw or find_scalar_flaw(checkpoint, own_scalars)
    if flaw:
        raise state_error(checkpoint, flaw)


def restore_options(optimizer_spec: OptimizerSpec, scheduler: Scheduler | None, metadata: Mapping[str, Any]) -> None:
    """Give the scheduler and the groups of the optimizer what a checkpoint's metadata have."""
    if scheduler is not None and metadata.get("schedule") is not None:
        scheduler.load_state_dict(from_json(metadata["schedule"], scheduler.state_dict()))
    groups = optimizer_spec.optimizer.param_groups
    for group, options in zip(groups, metadata.get("options", ()), strict=False):
        apply_group_options(group, options)
