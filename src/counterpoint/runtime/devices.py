"""The device that a model computes on: its random numbers, the tensors of a batch, and which plans can use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from counterpoint.errors import PlanError

CPU = torch.device("cpu")


def model_device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters; the CPU for a model without any.

    Raises:
        PlanError: they are on several devices.

    Example:
        >>> model_device(nn.Linear(2, 1))
        device(type='cpu')
    """
    return require_one_device((*model.named_parameters(), *model.named_buffers()))


def require_one_device(named_tensors: Iterable[tuple[str, Tensor]]) -> torch.device:
    """Return the device of tensors; the CPU if there is none.

    Raises:
        PlanError: they are on several devices.
    """
    first_on: dict[torch.device, str] = {}
    for name, tensor in named_tensors:
        first_on.setdefault(tensor.device, name)
    if len(first_on) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in first_on.items())
        raise PlanError(
            f"the model's parameters and buffers are on {len(first_on)} devices: {found}; move the whole model to one "
            "with model.to(device), and let pipeline(n) divide it into stages"
        )
    return next(iter(first_on), CPU)


def require_single_process(device: torch.device, num_local_ranks: int, num_ranks: int) -> None:
    """Raise if ranks in several processes would have to exchange tensors that are not in host memory.

    Raises:
        PlanError: they would.
    """
    if device.type != "cpu" and num_local_ranks < num_ranks:
        raise PlanError(
            f"the model is on {device}, but ranks in several processes exchange tensors in host memory only; move it "
            f"with model.cpu(), or train all {num_ranks} ranks in one process, without a launcher"
        )


def to_device(values: Any, device: torch.device) -> Any:  # noqa: ANN401 - any nest of tensors
    """Return the values with all tensors on the device; a copy from pinned memory is asynchronous."""
    if isinstance(values, Tensor):
        return values.to(device, non_blocking=True)
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, values)


class PendingScalars:
    """Scalars on a device that are read later, so that the host does not wait for the device when they are computed.

    On CUDA each is copied to pinned memory in the order of the stream, and reading waits for these copies only::

        device | forward | copy | backward .......... | update
        host   | launch forward, copy, backward | read | launch update

    Args:
        device: of the scalars.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._scalars: dict[int, Tensor] = {}
        self._last_copy: torch.cuda.Event | None = None

    def add(self, key: int, scalar: Tensor) -> None:
        """Remember a scalar, and start to copy it."""
        value = scalar.detach().double()
        if self.device.type == "cuda":
            pinned = torch.empty((), dtype=torch.float64, pin_memory=True)
            value = pinned.copy_(value, non_blocking=True)
            self._last_copy = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last_copy.record()
        self._scalars[key] = value

    def clear(self) -> None:
        """Forget all scalars."""
        self._scalars.clear()

    def read(self) -> dict[int, float]:
        """Return all scalars by key, and forget them; wait for the device if necessary."""
        if not self._scalars:
            return {}
        if self._last_copy is not None:
            self._last_copy.synchronize()
        values = torch.stack(list(self._scalars.values())).tolist()
        result = dict(zip(self._scalars, values, strict=True))
        self._scalars.clear()
        return result


def device_seeder(device: torch.device) -> Callable[[int], object] | None:
    """Return the function that seeds a device's own random numbers; None for the CPU."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index].manual_seed
    seeder: Callable[[int], object] = torch.get_device_module(device).manual_seed_all
    return seeder


def preserve_rng(device: torch.device, *, enabled: bool = True) -> AbstractContextManager[None]:
    """Return a context that restores the random state of the CPU and of the device at its end."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[], enabled=enabled)
    return torch.random.fork_rng(devices=[device.index], device_type=device.type, enabled=enabled)
