"""How ballots reach all ranks of a commit: as a few numbers, with names behind them only where something is missing."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.runtime.vote import BALLOT_NUMBERS, Ballot, from_numbers, to_numbers


def gather_ballots(fabric: Fabric, ballot: Ballot, group: Group) -> list[Ballot]:
    """Return the ballots of all members, in their order; names travel only where parameters are missing."""
    count, place = len(group), group.index(fabric.rank)
    own = np.zeros((count, BALLOT_NUMBERS))
    own[place] = to_numbers(ballot)
    numbers = torch.from_numpy(own).view(-1)
    bounds = range(0, (count + 1) * BALLOT_NUMBERS, BALLOT_NUMBERS)
    fabric.all_gather("commit", numbers, bounds, group).wait()
    rows = numbers.view(count, BALLOT_NUMBERS).tolist()
    if not any(row[-1] for row in rows):
        return [from_numbers(row) for row in rows]
    found = fabric.gather_values("missing gradients", [ballot.is_idle, *ballot.missing], group)
    told = cast("list[tuple[bool, *tuple[str, ...]]]", found)
    return [from_numbers(row, names, is_idle=idle) for row, (idle, *names) in zip(rows, told, strict=True)]
