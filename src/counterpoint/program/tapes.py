"""Which forwards keep what their backward needs, and which keep only what they read, to be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import Backward, Collective, Forward, Instruction, Recompute
from counterpoint.program.program import Words
from counterpoint.program.walk import show_places


@dataclass(frozen=True, slots=True)
class Again:
    """What a row computes again, by block and microbatch; in a stream microbatches are counted within their batch.

    Args:
        places: whose forward keeps only what it reads.
        fed: of these, the ones whose input the recomputation before makes, so that not even that is kept.
        stride: in a stream, how many microbatches a batch has.
    """

    places: frozenset[tuple[int, int]] = frozenset()
    fed: frozenset[tuple[int, int]] = frozenset()
    stride: int = 0

    def key(self, block: int, micro: int) -> tuple[int, int]:
        """Return how a block and a microbatch are called here."""
        return block, micro % self.stride if self.stride else micro


def computed_again(words: Sequence[Instruction], stride: int = 0) -> Again:
    """Return what a row computes again.

    What enters a block behind a sliced one is kept in any case: only a sum over all slices makes it.

    Args:
        words: a row.
        stride: in a stream, how many microbatches a batch has.

    Example:
        >>> again = computed_again((Forward(0, 0), Forward(1, 0), Recompute(0, 0), Recompute(1, 0)))
        >>> sorted(again.places), sorted(again.fed)
        ([(0, 0), (1, 0)], [(1, 0)])
    """
    empty = Again(stride=stride)
    sums = (word.value for word in words if isinstance(word, Collective))
    summed = {value.blocks[0] for value in sums if value.name == "y"}
    places: set[tuple[int, int]] = set()
    fed: set[tuple[int, int]] = set()
    before: Instruction | None = None
    for word in words:
        if isinstance(word, Recompute):
            places.add(empty.key(word.block, word.micro))
            if before == replace(word, block=word.block - 1) and word.block - 1 not in summed:
                fed.add(empty.key(word.block, word.micro))
        before = word
    return Again(frozenset(places), frozenset(fed), stride)


def most_tapes(words: Words) -> int:
    """Return how many blocks of microbatches have a tape at once, at most.

    A tape is what autograd keeps of one block and one microbatch: it is there from the forward or, where that is
    computed again, from then on, to the backward.
    """
    again = computed_again(words).places
    tapes: set[tuple[int, int]] = set()
    most = 0
    for word in words:
        match word:
            case Forward(block, micro) if (block, micro) not in again:
                tapes.add((block, micro))
            case Recompute(block, micro):
                tapes.add((block, micro))
            case Backward(block, micro) if word.has_weight:
                most = max(most, len(tapes))
                tapes.discard((block, micro))
            case _:
                pass
    return max(most, len(tapes))


def law_7_tapes_are_as_promised(rows: Sequence[Words], promised: Sequence[int | None]) -> None:
    """Prove that a rank has no more tapes at once than the plan promises.

    Args:
        rows: the flat rows.
        promised: per rank, the most blocks of microbatches with a tape at once; None where nothing is promised.

    Raises:
        ProgramError: law 7; a forward keeps its tape that was to be computed again.
    """
    for rank, (row, allowed) in enumerate(zip(rows, promised, strict=True)):
        if allowed is None or (most := most_tapes(row)) <= allowed:
            continue
        raise ProgramError(
            f"rank {rank} keeps what {most} backwards of blocks need at once; the plan promises to recompute so much "
            f"that it is at most {allowed}\n{show_places(rows, {rank: 0}, 'row')}",
            law=7,
        )
