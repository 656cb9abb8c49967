"""Check that replicas which keep their own weights still have equal ones: a checksum is sent with every commit.

Every update changes replicas equally, so they can only differ if something else changed one of them. The checksum is a
sum over the bits of one part of the weights per step, cycling through all parts, so its cost per step does not grow
with the model. Only if checksums differ, sums of every parameter are exchanged to name the first one that differs.
"""

from __future__ import annotations

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
from counterpoint.terminal_text import warn

NUM_CHECKED = 65536
"""Weights of a rank that are compared per step."""

MAX_PARTS = 8
"""Largest number of separate memory ranges that these come from."""

ROUNDING_TOLERANCE = 1e-6
"""Sums of a parameter's values differ by rounding if they differ by less than this, relative to their magnitudes."""

INT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaChecksum:
    """The groups of ranks that should hold equal weights, and the checksum of one rank's own.

    Args:
        groups: the ranks that hold the same weights.
        store: this rank's weights.
    """

    def __init__(self, groups: Sequence[Group], store: ParamStore) -> None:
        self.groups = groups
        self.parts = list(weight_parts(store)) if groups else []
        self.next_part = 0

    def checksum(self) -> int:
        """Return a checksum of less than 48 bits over the next part of the weights; 0 if nobody has the same."""
        if not self.parts:
            return 0
        checksum = 0
        sums = self._sums()
        for part in torch.stack(sums).tolist() if len(sums) > 1 else map(int, sums):  # every read waits for the device
            checksum = (31 * checksum + part) % (1 << 48)
        return checksum

    def checksum_tensor(self, device: torch.device) -> Tensor:
        """Return the same as a scalar of float64 on the weights' device, without waiting."""
        checksum = torch.zeros((), dtype=torch.int64, device=device)
        for part in self._sums():
            checksum = (31 * checksum + part) % (1 << 48)  # a sum that exceeds 64 bits has the same remainder
        return checksum.double()

    def _sums(self) -> list[Tensor]:
        sums: list[Tensor] = []
        count = 0
        for _ in range(min(len(self.parts), MAX_PARTS)):
            flat_params, start, stop = self.parts[self.next_part]
            sums.append(sum_bits(flat_params.replica_view(start, stop)))
            self.next_part, count = (self.next_part + 1) % len(self.parts), count + stop - start
            if count >= NUM_CHECKED:
                break
        return sums

    def compare(self, checksums: Mapping[int, int], group: Group, fabric: Fabric, step: int) -> None:
        """Raise if ranks that should hold equal weights do not; all members of a commit call it together.

        If they differ by rounding only, warn once and stop checking.

        Args:
            checksums: of each rank.
            group: the members of the commit.
            fabric: this rank's connection to them.
            step: the step being committed.

        Raises:
            DataError: some differ.
        """
        if all(
            len({checksums[rank] for rank in replica_group}) == 1
            for replica_group in self.groups
            if set(replica_group) <= set(group)
        ):
            return
        own_summaries: dict[str, Any] = {}
        for flat_params, start, stop in self.parts:
            for slot in flat_params.layout.slots:
                low, high = max(slot.start, start), min(slot.stop, stop)
                if low < high:
                    values = flat_params.replica_view(low, high)
                    known = own_summaries.get(slot.name, [0, 0.0, 0.0])
                    own_summaries[slot.name] = [a + b for a, b in zip(known, summarize_values(values), strict=True)]
        gathered: list[Any] = fabric.gather_values("replicas", own_summaries, group)
        summaries = dict(zip(group, gathered, strict=True))
        for replica_group in self.groups:
            if set(replica_group) <= set(group):
                require_equal_replicas({rank: summaries[rank] for rank in replica_group}, step)
        warn(
            f"replicas differ in step {step}, but by rounding only, because their processors round differently; the "
            "run "
            "continues without this check",
            RuntimeWarning,
            stacklevel=2,
        )
        self.groups, self.parts = (), []


def weight_parts(store: ParamStore) -> list[tuple[FlatParams, int, int]]:
    """Return the weights that a rank updates as ``(flat_params, start, stop)``, in parts short enough for one step."""
    parts = []
    for unit in store.units.values():
        update_shard = unit.role.update_shard
        for flat_params in unit.flat_params if update_shard is not None else ():
            if flat_params.offloaded_shard is not None:
                continue  # no other code can change it, and its file has a checksum
            low, high = flat_params.layout.element_range(update_shard or WHOLE)
            parts += [(flat_params, start, min(start + NUM_CHECKED, high)) for start in range(low, high, NUM_CHECKED)]
    return parts


def sum_bits(values: Tensor) -> Tensor:
    """Return the sum of the values' bits, read as integers, as a scalar tensor."""
    return values.detach().view(INT_DTYPES.get(values.element_size(), torch.int64)).sum(dtype=torch.int64)


def summarize_values(values: Tensor) -> list[float]:
    """Return the sum of the bits, of the values, and of their magnitudes; nan and inf count as 0."""
    real = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    wide = real.double().nan_to_num(0.0, 0.0, 0.0)
    return [int(sum_bits(values)), float(wide.sum()), float(wide.abs().sum())]


def require_equal_replicas(summaries: Mapping[int, Mapping[str, Sequence[float]]], step: int) -> None:
    """Raise unless ranks hold the same weights up to rounding.

    Args:
        summaries: for each rank, by parameter, the result of :func:`summarize_values`.
        step: the step being committed.

    Raises:
        DataError: they do not; the message names the first parameter and the ranks.
    """
    first, *_ = summaries.values()
    for name, (_, total, size) in first.items():
        if all(abs(other[name][1] - total) <= ROUNDING_TOLERANCE * size for other in summaries.values()):
            continue
        ranks_by_checksum: defaultdict[float, list[int]] = defaultdict(list)
        for rank, other in summaries.items():
            ranks_by_checksum[other[name][0]].append(rank)
        majority = max(ranks_by_checksum.values(), key=len)
        minority = [rank for rank in summaries if rank not in majority]
        raise DataError(
            f"replicas differ in step {step}, first in {name}, whose value on {format_ranks(minority)} is not that on "
            f"{format_ranks(majority)}; updates change all replicas equally, so other code changed it on some ranks: "
            "an in-place change in a callback or in the model; change weights equally on all ranks, and only between "
            "two calls of fit(), or between step.export_weights() and step.import_weights()"
        )
