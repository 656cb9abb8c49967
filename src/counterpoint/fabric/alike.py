"""What must be the same on all ranks that meet: checked before the first of them computes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from counterpoint.errors import PeerError


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    try:
        own = version("counterpoint")
    except PackageNotFoundError:  # run from its source, not installed
        own = "of the source tree"
    return {"counterpoint": own, "torch": torch.__version__}


def require_alike(place: str, facts: Sequence[Mapping[str, object]]) -> None:
    """All ranks were started alike.

    Args:
        place: where they meet, for errors.
        facts: what each rank says of itself, by name.

    Raises:
        PeerError: they were not.
    """
    for other, theirs in enumerate(facts):
        differing = [name for name, value in theirs.items() if value != facts[0].get(name)]
        if differing:
            which = "; ".join(
                f"{name} {facts[0].get(name)} on rank 0, {theirs[name]} on rank {other}" for name in differing
            )
            raise PeerError(
                f"the ranks at {place} differ: {which}; all ranks of a job must be started with one number of ranks, "
                "one set of versions (install them from one constraints file) and one job key (copy it to every host)"
            )
