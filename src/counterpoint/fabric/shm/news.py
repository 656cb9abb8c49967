"""What the ranks of one host tell each other when they cannot go on, in the memory that they share."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from dataclasses import dataclass

from counterpoint.fabric.fabric import Group
from counterpoint.fabric.fingerprint import disagreement
from counterpoint.fabric.processes import has_ended
from counterpoint.fabric.shm.native import READING_BYTES, REASON_BYTES
from counterpoint.fabric.shm.recipes import Recipe


@dataclass(frozen=True, slots=True)
class News:
    """What one rank can read there, and write.

    Args:
        library: the native part.
        world: its handle.
        rank: the own rank.
        here: the ranks of this host; the library counts them from 0.
    """

    library: CDLL
    world: int
    rank: int
    here: Group

    def stopped(self) -> str | None:
        """Return "rank 2: why it stopped" of the first rank that said so, if it was another; None otherwise."""
        room = ctypes.create_string_buffer(REASON_BYTES)
        stopper = self.library.cp_stopped(self.world, room, REASON_BYTES)
        if stopper < 0 or self.here[stopper] == self.rank:
            return None
        return f"rank {self.here[stopper]}: {room.value.decode(errors='replace')}"

    def lost(self) -> str | None:
        """Say which rank has ended, or takes part in nothing more; None where no wait has found one."""
        place = self.library.cp_lost(self.world)
        if place < 0:
            return None
        rank = self.here[place]
        if self.library.cp_has_left(self.world, place):
            return f"rank {rank} has closed its fabric; look at the output of rank {rank}"
        return has_ended(rank)

    def post(self, reason: str) -> None:
        """Write the reason where all see it, unless another rank was first, and wake them."""
        raw = reason.encode()
        self.library.cp_stop(self.world, raw, len(raw))

    def disagreement(self, recipe: Recipe) -> str:
        """Say which members are about to do different things in the group of the recipe, and what."""
        turn = self.library.cp_num_done(recipe.group)
        seen = {}
        for place, member in enumerate(recipe.operation.group):
            print_, words = ctypes.create_string_buffer(16), ctypes.create_string_buffer(READING_BYTES)
            length = self.library.cp_notice(recipe.group, place, turn, print_, words)
            seen[member] = (print_.raw, words.raw[:length].decode(errors="replace"))
        return disagreement(seen, turn) or "the members of a group disagree"
