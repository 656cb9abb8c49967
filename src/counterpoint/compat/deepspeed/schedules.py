"""Learning rate schedules of a DeepSpeed configuration, as formulas of the number of updates that were made.

A schedule is stepped after each update. Before the first step the rate is the first one below; after step number
``k`` it is that of ``i = k - 1``, so that an index is used twice where a schedule starts at its first value::

    updates that were made    0       1       2       3
    WarmupLR, linear, W = 4   min     min     1/4     2/4    of the way from min to max

Source:
    DeepSpeed 0.19, runtime/lr_schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from counterpoint.compat.deepspeed.names import suggest_name
from counterpoint.errors import PlanError

REQUIRED = "required"
Params: TypeAlias = Mapping[str, Any]
RateFn: TypeAlias = Callable[[Params, int, float], float]

WARMUP = MappingProxyType({"warmup_num_steps": 1000, "warmup_type": "log"})
SCHEDULE_PARAMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **WARMUP},
        "WarmupDecayLR": {"total_num_steps": REQUIRED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **WARMUP},
        "WarmupCosineLR": {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **WARMUP},
        "OneCycle": {
            "cycle_min_lr": REQUIRED,
            "cycle_max_lr": REQUIRED,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        },
        "LRRangeTest": {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
    }
)
"""DeepSpeed's schedules, their parameters and defaults."""

PER_GROUP = ("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr")
"""Parameters that may be a list with a number for each parameter group."""

TORCH_SCHEDULERS = (
    "LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
"""Schedulers of ``torch.optim.lr_scheduler`` that a configuration may name."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """A schedule.

    Args:
        name: of DeepSpeed's schedule, or of a class in ``torch.optim.lr_scheduler``.
        params: its arguments; for one of DeepSpeed's, all of them.
    """

    name: str
    params: Params

    @property
    def is_torch(self) -> bool:
        """Whether it is torch's."""
        return self.name not in SCHEDULE_PARAMS

    def learning_rates(self, num_updates: int, initial_lrs: Sequence[float]) -> list[float]:
        """Return the learning rate of each parameter group after so many updates.

        Args:
            num_updates: how many were made.
            initial_lrs: those that the optimizer was made with.

        Example:
            >>> schedule = resolve_scheduler(
            ...     "WarmupLR", {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
            ... )
            >>> [schedule.learning_rates(num_updates, [1.0])[0] for num_updates in range(7)]
            [0.0, 0.0, 0.1, 0.2, 0.30000000000000004, 0.4, 0.4]
        """
        params = {"warmup_max_lr": None, **self.params}
        if params["warmup_max_lr"] is None:
            params["warmup_max_lr"] = initial_lrs[0]
        return [
            RATES[self.name](_params_of_group(params, group, len(initial_lrs)), num_updates, initial_lr)
            for group, initial_lr in enumerate(initial_lrs)
        ]

    def momentum(self, num_updates: int) -> float | None:
        """Return the first of Adam's ``betas`` after so many updates; None if the schedule does not change it."""
        if self.name != "OneCycle" or not self.params["cycle_momentum"]:
            return None
        params, first = self.params, num_updates == 0
        low, high, total = params["cycle_min_mom"], params["cycle_max_mom"], sum(_half_cycles(params))
        if first:
            return float(low)
        if num_updates - 1 < total:
            return float(high - (high - low) * _cycle_fraction(params, num_updates))
        if not params["decay_step_size"] or not params["decay_mom_rate"]:
            return float(high)
        return float(high * (1 + params["decay_mom_rate"] * (num_updates - total) / params["decay_step_size"]))


def resolve_scheduler(name: str, params: Params) -> SchedulerConfig:
    """Return a schedule with its defaults.

    Args:
        name: ``scheduler.type`` of the configuration.
        params: ``scheduler.params``.

    Raises:
        PlanError: there is no such schedule or parameter, one is missing, or one is out of range.
    """
    if name in TORCH_SCHEDULERS:
        return SchedulerConfig(name, dict(params))
    if name not in SCHEDULE_PARAMS:
        known = (*SCHEDULE_PARAMS, *TORCH_SCHEDULERS)
        raise PlanError(f"scheduler.type={name!r} is not one of {', '.join(known)}{suggest_name(name, known)}")
    defaults = SCHEDULE_PARAMS[name]
    for key in params:
        if key not in defaults:
            raise PlanError(f"scheduler.params of {name} has no {key!r}{suggest_name(key, list(defaults))}")
    values = {**defaults, **params}
    missing = [key for key, value in values.items() if value == REQUIRED]
    if missing:
        raise PlanError(f"scheduler.params of {name} has no {' and no '.join(missing)}, which it needs; give it")
    for key, value in values.items():
        if value is None and defaults[key] is not None:
            default = "it has no default" if defaults[key] == REQUIRED else f"leave it out for {defaults[key]}"
            raise PlanError(f"scheduler.params.{key} of {name} is null; give a value: {default}")
        _check_param(f"scheduler.params.{key}", key, value)
    return SchedulerConfig(name, values)


def _check_param(path: str, key: str, value: object) -> None:
    """Check the type of a parameter, and the range of those that a formula divides by.

    Raises:
        PlanError: it is wrong.
    """
    if key == "warmup_type":
        if value not in ("log", "linear"):
            raise PlanError(f"{path}={value!r} is not log or linear; write log, which DeepSpeed takes instead")
        return
    if key in ("cycle_momentum", "lr_range_test_staircase"):
        if type(value) is not bool:
            raise PlanError(f"{path}={value!r} is not true or false")
        return
    numbers = value if isinstance(value, list) and key in PER_GROUP else [value]
    if value is not None and not all(type(number) in {int, float} for number in numbers):
        raise PlanError(f"{path}={value!r} is not a number{', or a list of some' if key in PER_GROUP else ''}")
    least = {"warmup_num_steps": 0, "cycle_first_step_size": 1, "lr_range_test_step_size": 1}.get(key)
    if least is not None and not value >= least:  # type: ignore[operator]  # a number
        raise PlanError(f"{path}={value!r} is not a number of steps; give {least} or more")


def _params_of_group(params: Params, group: int, num_groups: int) -> Params:
    """Return the parameters with the numbers of one parameter group.

    Raises:
        PlanError: a list has another number of entries.
    """
    for key in PER_GROUP:
        if isinstance(params.get(key), list) and len(params[key]) != num_groups:
            raise PlanError(
                f"scheduler.params.{key} has {len(params[key])} numbers for {num_groups} parameter groups; give one "
                "for each, or one for all"
            )
    return {
        key: value[group] if key in PER_GROUP and isinstance(value, list) else value for key, value in params.items()
    }


def _warmup_fraction(params: Params, index: int) -> float | None:
    """Return the part of the warm-up that is done; None after it."""
    num_steps = max(2, params["warmup_num_steps"])
    if index >= num_steps:
        return None
    if params["warmup_type"] == "log":
        return math.log(index + 1) / math.log(num_steps)
    return float(index / num_steps)


def warmup_lr(params: Params, num_updates: int, _initial_lr: float) -> float:
    """Increase the rate to ``warmup_max_lr``, where it stays."""
    low, high = params["warmup_min_lr"], params["warmup_max_lr"]
    if num_updates == 0:
        return float(low)
    fraction = _warmup_fraction(params, num_updates - 1)
    return float(low + (high - low) * (1.0 if fraction is None else fraction))


def warmup_decay_lr(params: Params, num_updates: int, _initial_lr: float) -> float:
    """Increase the rate to ``warmup_max_lr``, then decrease it linearly to ``warmup_min_lr``."""
    low, high, index = params["warmup_min_lr"], params["warmup_max_lr"], num_updates - 1
    if num_updates == 0:
        return float(low)
    fraction = _warmup_fraction(params, index)
    if fraction is None:
        num_decays = max(1.0, params["total_num_steps"] - max(2, params["warmup_num_steps"]))
        fraction = max(0.0, (params["total_num_steps"] - index) / num_decays)
    return float(low + (high - low) * fraction)


def warmup_cosine_lr(params: Params, num_updates: int, initial_lr: float) -> float:
    """Increase the rate from a part of the optimizer's own to all of it, then decrease it along a half cosine."""
    low, index = params["warmup_min_ratio"], num_updates - 1
    if num_updates == 0:
        return 0.0
    fraction = _warmup_fraction(params, index)
    if fraction is not None:
        return float(initial_lr * (low + fraction * (1.0 - low)))
    num_warmups, least = max(2, params["warmup_num_steps"]), params["cos_min_ratio"]
    progress = min(1.0, (index - num_warmups + 1) / max(1, params["total_num_steps"] - num_warmups))
    ratio = least + (1.0 - least) * (1 + math.cos(math.pi * progress)) / 2
    return float(initial_lr * max(0.0, ratio))


def _half_cycles(params: Params) -> tuple[float, float]:
    first, second = params["cycle_first_step_size"], params["cycle_second_step_size"]
    return float(first), float(first if second is None else second)


def _cycle_fraction(params: Params, num_updates: int) -> float:
    """Return where in a cycle the rate is: 0 at its minimum, 1 at its maximum, in stairs if there are some."""
    first, second = _half_cycles(params)
    ratio = first / (first + second)
    cycles = num_updates / (first + second)
    position = 1.0 + cycles - math.floor(1 + cycles)
    rises = position <= ratio
    stairs = params["cycle_first_stair_count"]
    if not rises and params["cycle_second_stair_count"] is not None:
        stairs = params["cycle_second_stair_count"]
    if stairs <= 0:
        return position / ratio if rises else (position - 1) / (ratio - 1)
    step = num_updates % (first + second)
    position = step * stairs / first if step <= first else (first + second - step) * stairs / second
    return float(math.floor(position) / stairs)


def one_cycle(params: Params, num_updates: int, _initial_lr: float) -> float:
    """Increase the rate to ``cycle_max_lr`` and decrease it again, then let it decay."""
    low, high, total = params["cycle_min_lr"], params["cycle_max_lr"], sum(_half_cycles(params))
    if num_updates == 0:
        return float(low)
    if num_updates - 1 < total:
        return float(low + (high - low) * _cycle_fraction(params, num_updates))
    if not params["decay_step_size"] or not params["decay_lr_rate"]:
        return float(low)
    return float(low / (1 + params["decay_lr_rate"] * (num_updates - total) / params["decay_step_size"]))


def lr_range_test(params: Params, num_updates: int, _initial_lr: float) -> float:
    """Increase the rate without end, to find the largest one that trains."""
    interval = num_updates / params["lr_range_test_step_size"]
    if params["lr_range_test_staircase"]:
        interval = math.floor(interval)
    return float(params["lr_range_test_min_lr"] * (1 + params["lr_range_test_step_rate"] * interval))


RATES: Mapping[str, RateFn] = MappingProxyType(
    {
        "WarmupLR": warmup_lr,
        "WarmupDecayLR": warmup_decay_lr,
        "WarmupCosineLR": warmup_cosine_lr,
        "OneCycle": one_cycle,
        "LRRangeTest": lr_range_test,
    }
)
