"""What the ranks of one host tell each other when they cannot go on, in the memory that they share."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from dataclasses import dataclass

from counterpoint.fabric.fingerprint import disagreement
from counterpoint.fabric.shm.native import READING_BYTES, REASON_BYTES
from counterpoint.fabric.shm.recipes import Recipe


@dataclass(frozen=True, slots=True)
class News:
    """What one rank can read there, and write.

    Args:
        library: the native part.
        world: its handle.
        rank: the own rank.
    """

    library: CDLL
    world: int
    rank: int

    def stopped(self) -> str | None:
        """Return "rank 2: why it stopped" of the first rank that said so, if it was another; None otherwise."""
        room = ctypes.create_string_buffer(REASON_BYTES)
        stopper = self.library.cp_stopped(self.world, room, REASON_BYTES)
        return None if stopper in {-1, self.rank} else f"rank {stopper}: {room.value.decode(errors='replace')}"

    def lost(self) -> str | None:
        """Say which rank has ended, or takes part in nothing more; None where no wait has found one."""
        lost = self.library.cp_lost(self.world)
        if lost < 0:
            return None
        ended = "has closed its fabric" if self.library.cp_has_left(self.world, lost) else "has ended"
        return f"rank {lost} {ended}; look at the output of rank {lost}"

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
