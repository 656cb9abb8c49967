"""Updates on the host of weights that are on a device: state stays in host memory, weights and gradients travel.

::

    device   weight ...... grad ......                                    weight
                  | copies of the next tensors, during this update           ^
    host          v          v                                               |
             target, target.grad --optimizer, with its state--> target ------+

Where ranks hold casts, the optimizer's target is the master weights themselves, which stay on the host: only gradients
go there, and casts come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from counterpoint.device.accelerator import Accelerator, HostCopy, copy_to_device
from counterpoint.model.spec import Unit
from counterpoint.runtime.offload.offloaded_state import (
    MASTER,
    OffloadConfig,
    StateDtypes,
    absent_values,
    only_targets,
)
from counterpoint.runtime.params.flat_params import FlatParams


class HostTargets:
    """The tensors on the host that stand for ranges of a device's flat weights while an optimizer updates them.

    Args:
        accelerator: of the device.
        places: the flat parameters of each target, with its first element and one past its last.
        targets: what the optimizer has; without memory, but for master weights.
    """

    def __init__(
        self, accelerator: Accelerator, places: Sequence[tuple[FlatParams, int, int]], targets: Sequence[Tensor]
    ) -> None:
        self.accelerator, self.places, self.targets = accelerator, places, targets
        self.copies: dict[int, tuple[HostCopy | None, HostCopy | None]] = {}  # of weights and gradients, by index

    def start(self, index: int, *, is_skipped: bool) -> None:
        """Start to copy a target's weights and gradient to the host, if there is a target of this index."""
        if index >= len(self.targets) or index in self.copies:
            return
        storage, low, high = self.places[index]
        copy = self.accelerator.start_copy_to_host
        weights = None if storage.layout.holds_casts else copy(storage.flat_view(low, high))
        grad = None if is_skipped else copy(storage.grads.optimizer_grad(low, high))
        self.copies[index] = weights, grad

    def load(self, index: int) -> None:
        """Wait for the copies of a target, and let it have them."""
        weights, grad = self.copies.pop(index)
        target = self.targets[index]
        if weights is not None:
            target.data = weights.wait()
        target.grad = None if grad is None else grad.wait()

    def store(self, index: int) -> None:
        """Copy a target's updated weights, or casts of them, to the device."""
        target, (storage, low, high) = self.targets[index], self.places[index]
        target.grad = None
        if storage.layout.holds_casts:
            casts = target.data.view(-1).to(storage.layout.held_dtype)
            storage.weights.data[low:high].copy_(copy_to_device(self.accelerator, casts))
        else:
            storage.flat_view(low, high).data.copy_(copy_to_device(self.accelerator, target.data))
            target.data = absent_values(target)


def make_host_target(tensor: Tensor) -> Tensor:
    """Return a target on the host for a range of a device's weights, without memory."""
    like = torch.empty(0, dtype=tensor.dtype).new_empty(1).expand(tensor.shape)
    return nn.Parameter(absent_values(like), requires_grad=False)


class HostState:
    """The optimizer state of one rank on a device, in host memory, where it is updated.

    It never moves, so that nothing has to be fetched or written.

    Args:
        config: of the run.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.chunks: dict[tuple[Unit, ...], list[tuple[int, int]]] = {}  # first target, and one past the last
        self.optimizers: dict[tuple[Unit, ...], tuple[optim.Optimizer, Sequence[Tensor]]] = {}

    def add(
        self,
        units: tuple[Unit, ...],
        optimizer: optim.Optimizer,
        targets: Sequence[Tensor],
        state_dtypes: Sequence[StateDtypes],
    ) -> None:
        """Keep the state of an optimizer; make memory for targets that are master weights."""
        chunks, num_bytes = [[0, 0]], 0
        for index, (target, dtypes) in enumerate(zip(targets, state_dtypes, strict=True)):
            own = target.numel() * sum(dtype.itemsize for dtype in dtypes.values())
            if num_bytes and num_bytes + own > self.config.chunk_bytes:
                chunks, num_bytes = [*chunks, [index, index]], 0
            chunks[-1][1], num_bytes = index + 1, num_bytes + own
            if MASTER in dtypes:
                target.data = torch.empty(target.shape, dtype=target.dtype)
        self.chunks[units] = [(first, stop) for first, stop in chunks]
        self.optimizers[units] = optimizer, targets

    def update(self, units: tuple[Unit, ...], step_targets: Callable[[int, int], None]) -> None:
        """Update chunk by chunk, so that copies of the next one are made during the update of this one."""
        optimizer, targets = self.optimizers[units]
        for first, stop in self.chunks[units]:
            with only_targets(optimizer, targets[first:stop]):
                step_targets(first, stop)

    def read_state(self, optimizer: optim.Optimizer, target: Tensor) -> dict[str, Any]:
        """Return the state of a target."""
        return dict(optimizer.state.get(target, {}))

    def write_state(self, optimizer: optim.Optimizer, target: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of a target."""
        if state:
            optimizer.state[target] = dict(state)
        else:
            optimizer.state.pop(target, None)

    def read_master(self, target: Tensor) -> Tensor:
        """Return the values of a target that is master weights."""
        return target.data

    def write_master(self, target: Tensor, start: int, values: Tensor) -> None:
        """Write flat values to a target that is master weights, from an element on."""
        target.data.view(-1)[start : start + values.numel()].copy_(values)
