"""The numbers of a key as they were: before its last step, or at a moment that is looked at later."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Earlier:
    """The numbers of a key before its last step, for whoever has to compute a portion of that step once more.

    Of a portion whose worker died, some keys may have counted its push, and gone on to the next step with it. Whoever
    repeats the portion reads all keys as they were before.

    Args:
        values: of a range all of them, of a table those of the rows that the step changed.
        rows: which these are; None for a range.
    """

    values: Tensor
    rows: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A key's numbers at one moment, without a copy of them: a table that is to change them copies them before.

    Args:
        parts: its numbers, and those of its rule.
        rows: of a table, in the order of the parts; None for a range.
        earlier: the numbers before the last step, where they are kept.
    """

    parts: tuple[Tensor, ...]
    rows: Tensor | None
    earlier: Earlier | None
