"""Which forwards keep what their backward needs, and which keep only what they read, to be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from counterpoint.errors import ProgramError
from counterpoint.program.execution_order import format_locations
from counterpoint.program.instruction import Backward, Collective, Compute, Forward, Instruction, Recompute
from counterpoint.program.program import Instructions


@dataclass(frozen=True, slots=True)
class RecomputeSet:
    """What a row computes again, by block and microbatch; in a stream microbatches are counted within their batch.

    Args:
        places: whose forward keeps only what it reads.
        fed: of these, the ones whose input the recomputation before makes, so that not even that is kept.
        stride: in a stream, how many microbatches a batch has.
    """

    recomputed: frozenset[tuple[int, int]] = frozenset()
    input_recomputed: frozenset[tuple[int, int]] = frozenset()
    microbatches_per_batch: int = 0

    def key(self, block: int, micro: int) -> tuple[int, int]:
        """Return how a block and a microbatch are called here."""
        return block, micro % self.microbatches_per_batch if self.microbatches_per_batch else micro


def find_recomputed(words: Sequence[Instruction], microbatches_per_batch: int = 0) -> RecomputeSet:
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
    empty = RecomputeSet(microbatches_per_batch=microbatches_per_batch)
    sums = (word.tensor for word in words if isinstance(word, Collective))
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
    return RecomputeSet(frozenset(places), frozenset(fed), microbatches_per_batch)


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """What a plan promises to compute again.

    Args:
        blocks: which blocks.
        keeps: what is left out: ``nothing``; a ``block`` whose backward is next; or a ``run`` of blocks that go
            forward on a microbatch and then backward, with nothing between.
    """

    blocks: frozenset[int]
    exempt: Literal["nothing", "block", "run"]

    def may_save_activations(self, computes: Sequence[Compute], at: int) -> bool:
        """Tell whether the forward at a place among what a rank computes may keep its tape."""
        first = computes[at]
        count = 1
        while self.exempt == "run" and computes[at + count : at + count + 1] == [_shift_block(first, count)]:
            count += 1
        behind = computes[at + count : at + 2 * count]
        down = [(first.block + up, first.micro) for up in reversed(range(count))]
        found = [(word.block, word.micro) for word in behind if isinstance(word, Backward) and word.computes_input_grad]
        return self.exempt != "nothing" and found == down


def _shift_block(word: Compute, by: int) -> Compute:
    return replace(word, block=word.block + by)


def peak_saved_activations(words: Instructions) -> int:
    """Return how many blocks of microbatches have a tape at once, at most.

    A tape is what autograd keeps of one block and one microbatch: it is there from the forward or, where that is
    computed again, from then on, to the backward; its input part, where that has two.
    """
    again = find_recomputed(words).recomputed
    tapes: set[tuple[int, int]] = set()
    most = 0
    for word in words:
        match word:
            case Forward(block, micro) if (block, micro) not in again:
                tapes.add((block, micro))
            case Recompute(block, micro):
                tapes.add((block, micro))
            case Backward(block, micro) if word.computes_input_grad:
                most = max(most, len(tapes))
                tapes.discard((block, micro))
            case _:
                pass
    return max(most, len(tapes))


def check_saved_activations(rows: Sequence[Instructions], bounds: Sequence[int]) -> None:
    """Prove that a rank has no more tapes at once than the plan promises.

    Args:
        rows: the flat rows.
        promised: per rank, the most blocks of microbatches with a tape at once.

    Raises:
        ProgramError: law 7; a forward keeps its tape that was to be computed again, or is computed again too early.
    """
    for rank, (row, allowed) in enumerate(zip(rows, bounds, strict=True)):
        if (most := peak_saved_activations(row)) <= allowed:
            continue
        raise ProgramError(
            f"rank {rank} keeps what {most} backwards of blocks need at once; the plan promises to recompute so much "
            f"that it is at most {allowed}\n{format_locations(rows, {rank: 0}, 'row')}",
            rule=7,
        )


def check_recompute_policy(rows: Sequence[Instructions], policy: RecomputePolicy) -> None:
    """Prove that of the promised blocks no forward keeps its tape but those that may.

    Raises:
        ProgramError: law 7; a forward keeps what its backward needs that was to be computed again.
    """
    for rank, row in enumerate(rows):
        again = find_recomputed(row).recomputed
        places = [index for index, word in enumerate(row) if isinstance(word, Compute)]
        computes = [word for word in row if isinstance(word, Compute)]
        for at, word in enumerate(computes):
            if not isinstance(word, Forward) or word.block not in policy.blocks or (word.block, word.micro) in again:
                continue
            if not policy.may_save_activations(computes, at):
                raise ProgramError(
                    f"rank {rank} keeps all that the backward of block {word.block} on microbatch {word.micro} needs; "
                    f"the plan promises to compute it again\n{format_locations(rows, {rank: places[at]}, 'here')}",
                    rule=7,
                )
