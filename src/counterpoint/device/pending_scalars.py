"""Scalars that are read later, so that the host does not wait for the device when they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoint.device.accelerator import Accelerator, HostCopy


class PendingScalars:
    """Scalars on a device by key; each is copied to the host in the order of the stream, and read later.

    Reading waits for these copies only::

        device | forward | copy | backward .......... | update
        host   | launch forward, copy, backward | read | launch update

    Args:
        accelerator: of the scalars.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._scalars: dict[int, HostCopy] = {}
        self.on_device: dict[int, Tensor] = {}  # by key, until they are read or cleared

    def add(self, key: int, scalar: Tensor) -> None:
        """Remember a scalar, and start to copy it."""
        self.on_device[key] = scalar.detach().double()
        self._scalars[key] = self.accelerator.start_copy_to_host(self.on_device[key])

    def clear(self) -> None:
        """Forget all scalars."""
        self._scalars.clear()
        self.on_device.clear()

    def read(self) -> dict[int, float]:
        """Return all scalars by key, and forget them; wait for the last copy if necessary."""
        if not self._scalars:
            return {}
        copies = list(self._scalars.values())
        copies[-1].wait()  # the others have arrived before
        values = torch.stack([copy.tensor for copy in copies]).tolist()
        result = dict(zip(self._scalars, values, strict=True))
        self.clear()
        return result
