"""Full parameters out of a checkpoint: slices put together, of one replica or of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from counterpoint.checkpoint import Checkpoint
from counterpoint.fabric.fabric import Json
from counterpoint.runtime.state import mean_of


class Reader:
    """Reads full parameters, putting slices together; those of one replica, or the model's.

    Args:
        checkpoint: what is read.
        slices: for each sliced parameter its dim and the number of slices.
        num_replicas: how many replicas have saved their own.
        replica: whose is read; None for the model's.
        has_center: whether the last replica has what the model has, which is else the mean.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        slices: Mapping[str, tuple[int, int]],
        num_replicas: int,
        replica: int | None = None,
        *,
        has_center: bool = False,
    ) -> None:
        self.checkpoint = checkpoint
        self.slices = slices
        self.num_replicas = num_replicas
        self.replica = replica
        self.has_center = has_center
        self.names = set(checkpoint.names())

    def of_replica(self, replica: int, num_replicas: int) -> Reader:
        """Return the reader for a replica: of its own, where as many have saved theirs, else of the mean."""
        own = replica if num_replicas == self.num_replicas else None
        return Reader(self.checkpoint, self.slices, self.num_replicas, own, has_center=self.has_center)

    def endings(self, kind: str) -> list[str]:
        """Return what the names that are read end with, for weights or for what optimizers keep."""
        if self.num_replicas == 1:
            return [""]
        wanted = list(range(self.num_replicas)) if self.replica is None else [self.replica]
        if self.has_center and self.replica is None:
            wanted = wanted[-1:] if kind == "model" else wanted[:-1]
        return [f"~{replica}/{self.num_replicas}" for replica in wanted]

    def scalars(self, saved: Mapping[str, Mapping[str, Json]]) -> dict[str, Mapping[str, Json]]:
        """Return the plain numbers by parameter; of replicas whose mean is read, those of the first."""
        ending = self.endings("optimizer")[0]
        return {name.split("@")[0].split("~")[0]: found for name, found in saved.items() if name.endswith(ending)}

    def whole(self, kind: str, name: str, ending: str) -> Tensor:
        """Return a parameter's tensor of one kind in full, as it was saved with this ending."""
        if name not in self.slices:
            return self.checkpoint.read(f"{kind}:{name}{ending}")
        dim, count = self.slices[name]
        parts = [self.checkpoint.read(f"{kind}:{name}@{index}/{count}{ending}") for index in range(count)]
        return torch.cat(parts, dim=dim)

    def read(self, kind: str, name: str) -> Tensor:
        """Return a parameter's tensor of one kind in full."""
        return mean_of([self.whole(kind, name, ending) for ending in self.endings(kind)])

    def maybe(self, kind: str, name: str) -> Tensor | None:
        """Return a parameter's tensor of one kind in full; None when it was not saved."""
        at = f"@0/{self.slices[name][1]}" if name in self.slices else ""
        there = all(f"{kind}:{name}{at}{ending}" in self.names for ending in self.endings(kind))
        return self.read(kind, name) if there else None
