"""Make the torch optimizer and the learning rate scheduler of a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from torch import optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from counterpoint.compat.deepspeed.names import suggest_name
from counterpoint.compat.deepspeed.optimizers import OptimizerConfig
from counterpoint.compat.deepspeed.schedules import SchedulerConfig
from counterpoint.errors import PlanError

Made = TypeVar("Made")
SECOND_BETA = 0.99
"""The second of Adam's ``betas`` under OneCycle, which DeepSpeed sets, too."""


class ConfiguredLR(LRScheduler):
    """Set the learning rates of a DeepSpeed schedule, and under OneCycle Adam's first ``betas``.

    Args:
        optimizer: the rates of its groups are those that the schedule starts from.
        schedule: one of DeepSpeed's.
    """

    def __init__(self, optimizer: Optimizer, schedule: SchedulerConfig) -> None:
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        """Return the learning rate of each group after as many updates as ``step`` was called."""
        return list(self.schedule.learning_rates(self.last_epoch, [float(lr) for lr in self.base_lrs]))

    def step(self, epoch: int | None = None) -> None:
        """Set the rates for the next update."""
        super().step(epoch)
        momentum = self.schedule.momentum(self.last_epoch)
        if momentum is not None:
            for group in self.optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (momentum, SECOND_BETA)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the schedule, which the configuration has."""
        return {name: value for name, value in super().state_dict().items() if name != "schedule"}


def make_optimizer(config: OptimizerConfig, params: ParamsT) -> Optimizer:
    """Return an optimizer of some parameters.

    Raises:
        PlanError: torch's has no such parameter.
    """
    cls: type[Optimizer] = getattr(optim, config.name)
    return _make(cls, f"optimizer.params of {config.name}", (params,), config.params)


def make_scheduler(config: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """Return a schedule of the optimizer's learning rates.

    Raises:
        PlanError: torch's has no such parameter.
    """
    if not config.is_torch:
        return ConfiguredLR(optimizer, config)
    cls: type[LRScheduler] = getattr(lr_scheduler, config.name)
    return _make(cls, f"scheduler.params of {config.name}", (optimizer,), config.params)


def _make(cls: Callable[..., Made], owner: str, args: tuple[Any, ...], params: Any) -> Made:  # noqa: ANN401 - JSON
    """Call a class of torch's.

    Raises:
        PlanError: it has no such parameter, or does not accept the value of one.
    """
    known = list(signature(cls).parameters)[1:]
    for name in params:
        if name not in known:
            raise PlanError(f"{owner} has no {name!r}{suggest_name(name, known)}")
    try:
        return cls(*args, **params)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{owner} cannot be {dict(params)}: {error}") from error
