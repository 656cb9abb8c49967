"""What one rank's steps leave behind: what was decided, what a server answered, and when calls were made."""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.runtime.vote import Verdict


@dataclass(frozen=True, slots=True)
class Served:
    """One push to a server: which unit, from which worker, and which version was there afterwards.

    That version is what the worker gets back, or a later one where it has to wait for slower workers. A push that
    brings no gradient makes no version; it is noted because of what the worker got back.
    """

    unit: tuple[int, ...]
    worker: int
    version: int


@dataclass(slots=True)
class Note:
    """What the interpreter tells of a call, or of a transfer beside it: the words of the row it was, and its times."""

    start: int
    stop: int
    start_s: float
    stop_s: float
    is_transfer: bool = False


@dataclass(slots=True)
class RankState:
    """What one rank's step left behind.

    Args:
        verdict: of the last commit; None for a rank that commits nothing.
        decided: how many of the step's commits are over.
        skipped: steps left out in a row.
        leaves_out: whether the updates behind the last commit are left out.
        leaves_out_late: whether those with the gradients that were set aside will be.
        has_told: whether it has been said that parameters get gradients on some ranks only.
        journal: the pushes that a server has applied, in order.
        notes: the calls of the last step with their times, when they are kept.
    """

    verdict: Verdict | None = None
    decided: int = 0
    skipped: int = 0
    leaves_out: bool = False
    leaves_out_late: bool = False
    has_told: bool = False
    journal: list[Served] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
