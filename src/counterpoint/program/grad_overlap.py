"""Which sums of gradients may begin before the backward that completes them is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from counterpoint.program.instruction import Backward, Collective, Group, Instruction, Recv, Send
from counterpoint.program.program import Instructions, Program

OverlapMap: TypeAlias = Mapping[int, tuple[Collective, ...]]
"""For the place of a backward in a row the sums that may begin during it, in the order of the row."""


def overlappable_reductions(program: Program, rank: int) -> OverlapMap:
    """Return which sums or shares of gradients a rank may begin in parts while it computes the last of them.

    These are started right behind a backward; between the two the row only moves activations and starts others of this
    kind. Nothing else of the group can stand there, so that parts which are begun earlier, in the same order on all
    members, keep the group's order. Where the rows of members differ in this, none of them begins early.

    Args:
        program: all rows.
        rank: whose row.
    """
    own = reductions_after_backward(program.rank_programs[rank].body)
    groups = {word.group for words in own.values() for word in words}
    alike = {group for group in groups if len({_reduction_signature(program, member, group) for member in group}) == 1}
    chosen = {at: tuple(word for word in words if word.group in alike) for at, words in own.items()}
    return {at: words for at, words in chosen.items() if words}


def reductions_after_backward(words: Instructions) -> OverlapMap:
    """Return the sums and shares that are started right behind a backward, by the place of the backward."""
    found: dict[int, list[Collective]] = {}
    last: int | None = None
    for index, word in enumerate(words):
        if isinstance(word, Backward):
            last = None if word.part else index  # parts make gradients without autograd's telling
        elif last is not None and _is_started_grad_reduction(word):
            assert isinstance(word, Collective), "a sum"
            found.setdefault(last, []).append(word)
        elif not (isinstance(word, Send | Recv) and word.tensor.micro is not None):
            last = None
    return {at: tuple(sums) for at, sums in found.items()}


def _is_started_grad_reduction(word: Instruction) -> bool:
    return (
        isinstance(word, Collective)
        and word.op in {"all_reduce", "reduce_scatter"}
        and word.tensor.name == "grad"
        and word.phase == "start"
        and not word.codec
    )


def _reduction_signature(program: Program, member: int, group: Group) -> tuple[tuple[tuple[object, ...], ...], ...]:
    """Return what a member may begin early with its group, backward by backward."""
    found = (
        tuple((word.op, word.tensor) for word in words if word.group == group)
        for words in reductions_after_backward(program.rank_programs[member].body).values()
    )
    return tuple(sums for sums in found if sums)
