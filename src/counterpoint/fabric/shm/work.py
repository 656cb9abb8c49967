"""A collective in shared memory that has been started."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from counterpoint.fabric.fabric import Work
from counterpoint.fabric.shm.recipes import Recipe


class Carrier(Protocol):
    """The fabric, as its works see it."""

    def finish(self, recipe: Recipe, turn: int) -> None:
        """The collective is complete on this rank."""

    def look(self, recipe: Recipe, turn: int) -> bool:
        """Whether it is, without waiting."""

    def pause(self, recipe: Recipe, turn: int, seconds: float) -> bool:
        """Return whether it may still be complete: it is over, or so much time has passed."""

    def keep(self, recipe: Recipe, whole: Tensor) -> None:
        """What a collective needs that nobody will wait for lives as long as the fabric is open."""


class ShmWork(Work):
    """A collective in shared memory."""

    __slots__ = ("_fabric", "_recipe", "_target", "_turn", "_whole")

    def __init__(self, fabric: Carrier, recipe: Recipe, turn: int, whole: Tensor, target: Tensor | None) -> None:
        self._fabric: Carrier | None = fabric
        self._recipe = recipe
        self._turn = turn
        self._whole = whole
        self._target = target

    def is_over(self) -> bool:
        """Whether it is complete; a PeerError where it cannot be."""
        if self._fabric is not None and self._fabric.look(self._recipe, self._turn):
            self._complete()
        return self._fabric is None

    def pause(self, seconds: float) -> None:
        """Take part until it is over, or for so long."""
        if self._fabric is not None:
            self._fabric.pause(self._recipe, self._turn, seconds)

    def completes_within(self, seconds: float) -> bool:
        """Take part for that long, and look."""
        if self.is_over():
            return True
        if self._fabric is not None and not self._fabric.pause(self._recipe, self._turn, seconds):
            self.wait()  # says why it will not be
        return self.is_over()

    def wait(self) -> None:
        """Take part until it is complete; signals are served."""
        if self._fabric is not None:
            self._fabric.finish(self._recipe, self._turn)
            self._complete()

    def __del__(self) -> None:
        """The library may still read and write the tensors of a collective that nobody has waited for."""
        if self._fabric is not None:
            self._fabric.keep(self._recipe, self._whole)

    def _complete(self) -> None:
        self._fabric = None
        if self._target is not None:
            self._target.detach().copy_(self._whole)
