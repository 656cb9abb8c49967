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

OTHER_NAMES = {
    "deepspeed": "zero2 or zero3",
    "dp": "data",
    "fsdp": "zero3",
    "fsdp2": "zero3",
    "fully_shard": "zero3",
    "megatron": "tensor",
    "pp": "pipeline",
    "tp": "tensor",
}
"""Strategies by names that other libraries have for them."""
