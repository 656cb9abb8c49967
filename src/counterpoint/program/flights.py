"""Which microbatches are between forward and backward, on which ranks and in which blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from counterpoint.program.instruction import Backward, Forward, Recompute


class Flights:
    """What has gone forward and not yet backward, and the most of it that a rank had at once.

    Args:
        num_ranks: how many ranks there are.
        heads: per rank the blocks at which microbatches are counted and summed; None for the block where most are.
    """

    def __init__(self, num_ranks: int, heads: Sequence[Sequence[int]] | None) -> None:
        self.heads = heads
        self.alive: set[tuple[int, int, int]] = set()
        self.halfway: set[tuple[int, int, int]] = set()
        self.repeated: set[tuple[int, int, int]] = set()
        self.counts: list[Counter[int]] = [Counter() for _ in range(num_ranks)]
        self.peak = [0] * num_ranks

    def begin(self, rank: int, word: Forward) -> str | None:
        """Note a forward; return what is wrong with it, if anything is."""
        key = (rank, word.block, word.micro)
        if key in self.alive:
            return "this microbatch has gone forward through this block already"
        self.alive.add(key)
        counts = self.counts[rank]
        counts[word.block] += 1
        now = counts[word.block] if self.heads is None else sum(counts[head] for head in self.heads[rank])
        self.peak[rank] = max(self.peak[rank], now)
        return None

    def again(self, rank: int, word: Recompute) -> str | None:
        """Note a forward that is computed again; return what is wrong with it, if anything is."""
        key = (rank, word.block, word.micro)
        if key not in self.alive or key in self.halfway:
            return "a block is recomputed for a backward that is still to come, on the rank that ran it forward"
        if key in self.repeated:
            return "this microbatch has been recomputed in this block already"
        self.repeated.add(key)
        return None

    def end(self, rank: int, word: Backward) -> str | None:
        """Note a backward or a part of one; return what is wrong with it, if anything is."""
        key = (rank, word.block, word.micro)
        if key not in self.alive:
            return "this microbatch did not go forward through this block on this rank"
        if word.has_input == (key in self.halfway):
            return "the weight part of a backward comes once, behind its input part"
        if not word.has_weight:
            self.halfway.add(key)
            return None
        self.halfway.discard(key)
        self.repeated.discard(key)
        self.alive.discard(key)
        self.counts[rank][word.block] -= 1
        return None
