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
WORD_BITS = 64


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
    def holds(self) -> NDArray[np.bool_]:
        """Whether a state holds a layer."""
        num_layers = len(self.profile.layers)
        bits = np.unpackbits(self._words.view(np.uint8), axis=1, count=num_layers, bitorder="little")
        return bits.view(np.bool_)

    @cached_property
    def inside(self) -> NDArray[np.bool_]:
        """Whether the first state is a part of the second, and smaller."""
        found = ~np.eye(self.count, dtype=np.bool_)
        for word in self._words.T:
            found &= (word[:, None] & ~word[None, :]) == 0
        return found

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
        if not self.profile.edges:
            return np.zeros(self.count)
        at = {layer.name: bit for bit, layer in enumerate(self.profile.layers)}
        edges = sorted({(at[one], at[other]) for one, other in self.profile.edges})
        firsts = [place for place, (one, _) in enumerate(edges) if not place or edges[place - 1][0] != one]
        makers, readers = np.array(edges).T
        is_cut = self.holds[:, makers] & ~self.holds[:, readers]
        sizes = np.array([layer.activation_bytes for layer in self.profile.layers])
        return _summed(np.logical_or.reduceat(is_cut, firsts, axis=1), sizes[makers[firsts]])

    def names(self, state: int) -> tuple[str, ...]:
        """Return the layers that a state holds."""
        return tuple(layer.name for bit, layer in enumerate(self.profile.layers) if self.held[state] >> bit & 1)

    @property
    def _words(self) -> NDArray[np.uint64]:
        """The layers of every state as bits of words, the first layer in the lowest bit of the first word."""
        num_words = len(self.profile.layers) // WORD_BITS + 1
        packed = b"".join(held.to_bytes(num_words * WORD_BITS // 8, "little") for held in self.held)
        return np.frombuffer(packed, dtype="<u8").reshape(self.count, num_words)

    def _sums(self, figures: list[float]) -> NDArray[np.float64]:
        return _summed(self.holds, np.array(figures))


def _summed(is_counted: NDArray[np.bool_], figures: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for every row the sum of those figures that count.

    Without BLAS, whose threads cost more than they save here, and which adds up in another order on another machine.
    """
    found: NDArray[np.float64] = np.einsum("sl,l->s", is_counted.astype(np.float64), figures)
    return found


def find_states(profile: Profile) -> States:
    """Return every cut of a profile, in an order in which a state comes behind all that are inside it.

    A chain of n layers has n + 1; a graph with branches has more, as many as ways to stop in the middle of them. A
    layer that takes no time and has no weights is held as soon as all that it reads is.

    Raises:
        PlanError: the layers read each other in a circle, or there are more than 4,096 cuts.
    """
    graph = _Graph.of(profile)
    start = graph.first()
    found, front = {0, start[0]}, [start]
    while front:
        held, ready = front.pop()
        for bit in ready:
            grown, more = graph.grown(held, bit)
            if grown not in found:
                found.add(grown)
                front.append((grown, [*(other for other in ready if other != bit), *more]))
        if len(found) > MOST_STATES:
            raise PlanError(
                f"a graph of {len(graph.needs)} layers can be cut at more than {MOST_STATES} places; join the layers "
                "of its branches to fewer"
            )
    if (1 << len(graph.needs)) - 1 not in found:
        raise PlanError("the layers of the profile read each other in a circle, so that none of them can be first")
    return States(profile, tuple(sorted(found, key=lambda held: (held.bit_count(), held))))


@dataclass(frozen=True, slots=True)
class _Graph:
    """Who reads whom, by places in a profile.

    Args:
        needs: for every layer those that it reads, as a set of bits.
        readers: for every layer those that read it.
        free: whether it takes no time and has no weights.
    """

    needs: list[int]
    readers: list[list[int]]
    free: list[bool]

    @classmethod
    def of(cls, profile: Profile) -> _Graph:
        """Return the graph of a profile."""
        at = {layer.name: place for place, layer in enumerate(profile.layers)}
        needs = [0] * len(at)
        readers: list[list[int]] = [[] for _ in at]
        for one, other in dict.fromkeys(profile.edges):
            needs[at[other]] |= 1 << at[one]
            readers[at[one]].append(at[other])
        return cls(needs, readers, [not layer.seconds and not layer.weight_bytes for layer in profile.layers])

    def first(self) -> tuple[int, list[int]]:
        """Return the smallest state, and the layers that can be added to it."""
        held, ready = 0, list[int]()
        for bit, needed in enumerate(self.needs):
            if not needed and self.free[bit]:
                held, more = self.grown(held, bit)
                ready += more
            elif not needed:
                ready.append(bit)
        return held, ready

    def grown(self, held: int, bit: int) -> tuple[int, list[int]]:
        """Return a state with one more layer and all without work that follow, and what only now can be added."""
        front, ready = [bit], list[int]()
        while front:
            last = front.pop()
            held |= 1 << last
            for reader in self.readers[last]:
                if not self.needs[reader] & ~held:
                    (front if self.free[reader] else ready).append(reader)
        return held, ready
