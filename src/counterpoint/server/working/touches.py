"""Rows of a table that a minibatch has looked up, and those that the next ones will."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.server.session import Pending, Pulls
from counterpoint.server.working.bags import Bags
from counterpoint.server.working.rows import Distinct


@dataclass(slots=True)
class Touch:
    """Rows that have been looked up.

    Attributes:
        rows: their numbers, ascending.
        leaf: what they were, and zeros behind them where the padding row was among them.
        is_complete: whether their gradient has come.
        bags: of which the leaf is the sums; None where it is the rows.
    """

    rows: Tensor
    leaf: Tensor
    is_complete: bool = False
    bags: Bags | None = None


@dataclass(slots=True)
class Ahead:
    """Rows that are fetched before they are looked up.

    Attributes:
        wanted: what will be looked up.
        early: the answer that is under way, to all rows; None if there is none before the push that is still to come.
        late: places of rows that are to be asked for after that push, or have been.
        newer: the answer to these, under way.
        bags: whose sums are fetched instead of the rows.
    """

    wanted: Distinct
    early: Pending[Pulls] | None = None
    late: Tensor | None = None
    newer: Pending[Pulls] | None = None
    bags: Bags | None = None

    def fits(self, rows: Tensor, bags: Bags | None) -> bool:
        """Tell whether this is what is looked up."""
        is_same = self.bags is None if bags is None else bags.equals(self.bags)
        return is_same and (self.wanted.rows is rows or torch.equal(self.wanted.rows, rows))
