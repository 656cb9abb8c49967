"""The places where a graph of layers can be cut: every set of layers that holds all that its members read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from counterpoint.errors import PlanError
from counterpoint.planner.profile import Profile

MOST_STATES = 4096


@dataclass(frozen=True)
class States:
    """All cuts of a profile, the empty one first; a stage is what one cut holds and another inside it does not.

    Args:
        profile: whose.
        held: for every state its layers, as a set of bits in the order of the profile.
    """

    profile: Profile
    held: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many there are, the empty one among them."""
        return len(self.held)

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """Whether the first state is a part of the second, and smaller."""
        return np.array([[one != other and one & other == one for other in self.held] for one in self.held])

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of all layers that a state holds."""
        return self._sums([layer.seconds for layer in self.profile.layers])

    @cached_property
    def forward_s(self) -> NDArray[np.float64]:
        """Of these the seconds forward."""
        return self._sums([layer.forward_s for layer in self.profile.layers])

    @cached_property
    def weight_bytes(self) -> NDArray[np.float64]:
        """Bytes of their weights."""
        return self._sums([layer.weight_bytes for layer in self.profile.layers])

    @cached_property
    def activation_bytes(self) -> NDArray[np.float64]:
        """Bytes of all that they hand on."""
        return self._sums([layer.activation_bytes for layer in self.profile.layers])

    @cached_property
    def readers(self) -> dict[int, int]:
        """For every layer that others read, by its place in the profile, these as a set of bits."""
        at = {layer.name: bit for bit, layer in enumerate(self.profile.layers)}
        found: defaultdict[int, int] = defaultdict(int)
        for one, other in self.profile.edges:
            found[at[one]] |= 1 << at[other]
        return dict(found)

    @cached_property
    def crossing_bytes(self) -> NDArray[np.float64]:
        """Bytes of what layers inside hand on to layers outside; each once."""
        sizes = [layer.activation_bytes for layer in self.profile.layers]
        return np.array(
            [
                sum(sizes[bit] for bit, all_of in self.readers.items() if held >> bit & 1 and all_of & ~held)
                for held in self.held
            ]
        )

    def names(self, state: int) -> tuple[str, ...]:
        """Return the layers that a state holds."""
        return tuple(layer.name for bit, layer in enumerate(self.profile.layers) if self.held[state] >> bit & 1)

    def _sums(self, figures: list[float]) -> NDArray[np.float64]:
        bits = np.array([[held >> bit & 1 for bit in range(len(figures))] for held in self.held], dtype=np.float64)
        found: NDArray[np.float64] = bits @ np.array(figures)
        return found


def find_states(profile: Profile) -> States:
    """Return every cut of a profile, in an order in which a state comes behind all that are inside it.

    A chain of n layers has n + 1; a graph with branches has more, as many as ways to stop in the middle of them. A
    layer that takes no time and has no weights is held as soon as all that it reads is.

    Raises:
        PlanError: the layers read each other in a circle, or there are more than 4,096 cuts.
    """
    needs = _needs(profile)
    free = [bit for bit, layer in enumerate(profile.layers) if not layer.seconds and not layer.weight_bytes]
    start = _closed(0, free, needs)
    found, front = {0, start}, [start]
    while front:
        held = front.pop()
        for bit, needed in enumerate(needs):
            if held >> bit & 1 or needed & ~held:
                continue
            grown = _closed(held | 1 << bit, free, needs)
            if grown not in found:
                found.add(grown)
                front.append(grown)
        if len(found) > MOST_STATES:
            raise PlanError(
                f"a graph of {len(needs)} layers can be cut at more than {MOST_STATES} places; join the layers of its "
                "branches to fewer"
            )
    if (1 << len(needs)) - 1 not in found:
        raise PlanError("the layers of the profile read each other in a circle, so that none of them can be first")
    return States(profile, tuple(sorted(found, key=lambda held: (held.bit_count(), held))))


def _needs(profile: Profile) -> list[int]:
    """Return for every layer those that it reads, as a set of bits."""
    at = {layer.name: bit for bit, layer in enumerate(profile.layers)}
    needs = [0] * len(at)
    for one, other in profile.edges:
        needs[at[other]] |= 1 << at[one]
    return needs


def _closed(held: int, free: list[int], needs: list[int]) -> int:
    """Return a state with all layers without work that can be held along with it."""
    while more := [bit for bit in free if not held >> bit & 1 and not needs[bit] & ~held]:
        held |= sum(1 << bit for bit in more)
    return held
