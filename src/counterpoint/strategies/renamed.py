"""Earlier names of strategies, options and plan-file keys: an error for one of them gives the new name."""

from __future__ import annotations

RENAMED = {
    # strategies
    "elastic": "easgd",
    # options
    "cuts": "split_points",
    "every": "tau",
    "fetch_every": "pull_every",
    "order": "schedule",
    "part": "alpha",
    "sends": "send",
    "virtual": "chunks_per_stage",
    # values of options
    "send=early": "send=during_backward",
    "send=last": "send=after_backward",
    "update=own": "update=replicated",
    "update=shared": "update=sharded",
    # keys of a plan file
    "timing": "profile",
}


def renamed_hint(old: str) -> str:
    """Return a remedy for errors about an earlier name, or the empty string.

    Example:
        >>> renamed_hint("virtual"), renamed_hint("replicas")
        ('; virtual is now called chunks_per_stage', '')
    """
    return f"; {old} is now called {RENAMED[old]}" if old in RENAMED else ""
