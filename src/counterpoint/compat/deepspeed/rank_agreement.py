"""Compare configurations and options of ranks: one that differs would train each rank's part in another way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from counterpoint.compat.deepspeed.config import DeepSpeedConfig
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.optim.validation import shorten


def require_same_setup(
    fabric: Fabric, config: DeepSpeedConfig, optimizer: Optimizer, names: Mapping[int, str], scheduler: object
) -> None:
    """Check that all ranks have one configuration, one kind of optimizer with equal groups, and one schedule.

    Args:
        fabric: this rank's connection to the others.
        config: the configuration.
        optimizer: the optimizer.
        names: the name of a parameter by its ``id``.
        scheduler: what the script has given; None for that of the configuration.

    Raises:
        PlanError: they differ; the message has the keys and the values of two ranks.
    """
    ranks = tuple(range(fabric.num_ranks))
    own: Any = {path: repr(value) for path, value in config.values.items()}
    own |= {"optimizer": type(optimizer).__name__, "lr_scheduler": type(scheduler).__name__}
    for index, group in enumerate(optimizer.param_groups):
        trained = [names[id(param)] for param in group["params"] if param.requires_grad]
        for name, value in {**group, "params": trained}.items():
            own[f"optimizer.param_groups[{index}].{name}"] = repr(value)
    given: Any = fabric.gather_values("the configuration", own, ranks)
    for rank, other in enumerate(given):
        differing = [key for key in {**given[0], **other} if other.get(key) != given[0].get(key)]
        if differing:
            here, there = (
                ", ".join(f"{key}={shorten(values.get(key, 'nothing'))}" for key in differing)
                for values in (other, given[0])
            )
            raise PlanError(
                f"rank {rank} has {here}, and rank 0 has {there}; give all ranks the same configuration, optimizer and "
                "schedule"
            )


def option_numbers(optimizer: Optimizer) -> dict[str, float]:
    """Return the options of an optimizer's groups that are numbers, by name; None counts as infinity.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> numbers = option_numbers(torch.optim.Adam([weight], lr=0.5, betas=(0.75, 0.5)))
        >>> {name: numbers[name] for name in list(numbers)[:3]}
        {'param_groups[0].lr': 0.5, 'param_groups[0].betas[0]': 0.75, 'param_groups[0].betas[1]': 0.5}
    """
    numbers = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name == "params":
                continue
            key = f"param_groups[{index}].{name}"
            items = {f"{key}[{place}]": item for place, item in enumerate(value)} if isinstance(value, tuple) else {}
            for item_key, item in (items or {key: value}).items():
                if item is None or isinstance(item, int | float) or (isinstance(item, Tensor) and item.numel() == 1):
                    numbers[item_key] = math.inf if item is None else float(item)
    return numbers


def gather_norms(
    fabric: Fabric, optimizer: Optimizer, squared: float, *, has_set_weights: bool
) -> tuple[list[float], bool]:
    """Return a number of each rank, and check with the same message that the optimizer's options are equal.

    Args:
        fabric: this rank's connection to the others.
        optimizer: the optimizer.
        squared: the number of this rank.
        has_set_weights: whether the script on this rank has set weights since the last step.

    Returns:
        The numbers, and whether any rank has set weights.

    Raises:
        DataError: an option differs.
    """
    if fabric.num_ranks == 1:
        return [squared], False
    options, ranks = option_numbers(optimizer), tuple(range(fabric.num_ranks))
    row = torch.tensor([squared, float(has_set_weights), *options.values()], dtype=torch.float64)
    table = row.repeat(len(ranks))
    bounds = [len(row) * rank for rank in range(len(ranks) + 1)]
    fabric.all_gather("the norm of the gradients and the options of the update", table, bounds, ranks).wait()
    rows = table.view(len(ranks), -1).tolist()
    for rank, (_, _, *values) in enumerate(rows):
        for name, value, first in zip(options, values, rows[0][2:], strict=True):
            if repr(value) != repr(first):  # nan is equal to nan
                raise DataError(
                    f"rank {rank} has {name}={value:g} in its optimizer, and rank 0 has {first:g}; set the same on "
                    "all ranks, or the weights would differ"
                )
    return [row[0] for row in rows], any(row[1] for row in rows)
