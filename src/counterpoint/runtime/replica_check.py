"""Whether replicas with weights of their own are still alike: a few of their bits travel with every commit.

Every update changes them alike, so they can only come to differ when something else changes one of them. A sum over
their bits is compared, of a part in each step and of all in turn, so that a step costs no more for a large model. It
travels in the commit, and nothing else is sent unless it differs.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoint.errors import DataError
from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.params.flat_params import FlatParams
from counterpoint.runtime.params.param_store import ParamStore

NUM_CHECKED = 65536
"""How many weights of a rank are compared in a step."""

MAX_PARTS = 8
"""In how many pieces of memory they lie at most."""

ROUNDING_TOLERANCE = 1e-6
"""Sums of a parameter's numbers that differ by less, relative to the sum of their magnitudes, differ by rounding."""

INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaChecksum:
    """The ranks that should hold the same weights as others, and what one of them says of its own.

    Args:
        groups: the ranks that hold the same weights.
        store: this rank's weights.
    """

    def __init__(self, groups: Sequence[Group], store: ParamStore) -> None:
        self.groups = groups
        self.parts = list(weight_parts(store)) if groups else []
        self.next_part = 0

    def checksum(self) -> int:
        """Return a number that is the same for the same weights, in the next part of them; fewer than 48 bits."""
        found, count = 0, 0
        for _ in range(min(len(self.parts), MAX_PARTS)):
            arena, start, stop = self.parts[self.next_part]
            found = (31 * found + sum_bits(arena.flat_view(start, stop))) % (1 << 48)
            self.next_part, count = (self.next_part + 1) % len(self.parts), count + stop - start
            if count >= NUM_CHECKED:
                break
        return found

    def compare(self, checksums: Mapping[int, int], group: Group, fabric: Fabric, step: int) -> None:
        """Check that ranks which should hold the same weights do; all members of a commit call it together.

        Args:
            marks: of each rank.
            group: who commits.
            fabric: the way to them.
            step: the one that is being committed.

        Raises:
            DataError: some differ.
        """
        if all(len({checksums[rank] for rank in twins}) == 1 for twins in self.groups if set(twins) <= set(group)):
            return
        mine: dict[str, Any] = {}
        for arena, start, stop in self.parts:
            for slot in arena.layout.slots:
                low, high = max(slot.start, start), min(slot.stop, stop)
                if low < high:
                    numbers = arena.flat_view(low, high)
                    known = mine.get(slot.name, [0, 0.0, 0.0])
                    mine[slot.name] = [a + b for a, b in zip(known, summarize_values(numbers), strict=True)]
        found: list[Any] = fabric.gather_values("replicas", mine, group)
        told = dict(zip(group, found, strict=True))
        for twins in self.groups:
            if set(twins) <= set(group):
                require_equal_replicas({rank: told[rank] for rank in twins}, step)
        warnings.warn(
            f"replicas differ in step {step}, but by rounding alone; their processors round differently: a run "
            "goes on, and whether replicas differ is no longer looked at",
            RuntimeWarning,
            stacklevel=2,
        )
        self.groups, self.parts = (), []


def weight_parts(store: ParamStore) -> list[tuple[FlatParams, int, int]]:
    """Return all weights that a rank keeps and updates, in parts that are not too long for one step."""
    found = []
    for unit in store.units.values():
        span = unit.role.update_shard
        for arena in unit.flat_params if span is not None else ():
            low, high = arena.layout.element_range(span or WHOLE)
            found += [(arena, at, min(at + NUM_CHECKED, high)) for at in range(low, high, NUM_CHECKED)]
    return found


def sum_bits(numbers: Tensor) -> int:
    """Return the sum over numbers taken for whole ones."""
    return int(numbers.detach().view(INT_DTYPES.get(numbers.element_size(), torch.int64)).sum(dtype=torch.int64))


def summarize_values(numbers: Tensor) -> list[float]:
    """Return the sum of the bits, of the numbers, and of their magnitudes; what is no number counts nothing."""
    real = torch.view_as_real(numbers.detach()) if numbers.is_complex() else numbers.detach()
    wide = real.double().nan_to_num(0.0, 0.0, 0.0)
    return [sum_bits(numbers), float(wide.sum()), float(wide.abs().sum())]


def require_equal_replicas(summaries: Mapping[int, Mapping[str, Sequence[float]]], step: int) -> None:
    """Check that ranks hold the same weights, but for rounding.

    Args:
        told: for each rank, by parameter, what :func:`summary` says.
        step: the one that is being committed.

    Raises:
        DataError: they do not; the message names the first parameter and the ranks.
    """
    first, *_ = summaries.values()
    for name, (_, total, size) in first.items():
        if all(abs(other[name][1] - total) <= ROUNDING_TOLERANCE * size for other in summaries.values()):
            continue
        held: defaultdict[float, list[int]] = defaultdict(list)
        for rank, other in summaries.items():
            held[other[name][0]].append(rank)
        most = max(held.values(), key=len)
        odd = [rank for rank in summaries if rank not in most]
        raise DataError(
            f"replicas differ in step {step}, first in {name}, which on {format_ranks(odd)} is not what it is on "
            f"{format_ranks(most)}; updates change all replicas alike, so something else changed it on some: a change in "
            "place by one rank, in a callback or in the model's own code; change weights on all ranks alike, and "
            "between two calls of fit(), or between step.export_weights() and step.import_weights()"
        )
