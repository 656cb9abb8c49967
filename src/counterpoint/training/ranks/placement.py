"""Put what is trained on the device that was asked for."""

from __future__ import annotations

from torch import nn, optim

from counterpoint.device.accelerator import Accelerator
from counterpoint.device.select import DeviceArgument, LocalRank, computes_nothing, move_model, select_accelerator
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.training.ranks.device_memory import describe_model, explain_full_device


def place_model(
    device: DeviceArgument | None,
    model: nn.Module,
    loss: object,
    optimizers: tuple[optim.Optimizer, ...],
    environment: RankEnvironment | None,
) -> Accelerator | None:
    """Move a model, a loss that is a module, and the state of their optimizers to a device; return its accelerator.

    Args:
        device: as asked for.
        model: the user's; its parameters stay the same objects.
        loss: the user's.
        optimizers: on their parameters.
        environment: what a launcher set for this process.

    Returns:
        None if neither the user nor the launcher asks for a device, or nothing is computed: the model stays where it
        is.

    Raises:
        PlanError: there is no such device.
    """
    local_rank = LocalRank()
    if environment is not None:
        local_rank = LocalRank(environment.local_rank, environment.local_world_size)
        device = environment.device if device is None else device
    if device is None or computes_nothing():
        return None
    accelerator = select_accelerator(device, local_rank)
    modules = [module for module in (model, loss) if isinstance(module, nn.Module)]
    with explain_full_device(accelerator, lambda: describe_model(modules), "while the model is moved to it"):
        move_model(modules, optimizers, accelerator.device)
    return accelerator
