"""Gathering of outputs: what a loss of the whole batch costs, which every rank with the last block evaluates once."""

from __future__ import annotations

from counterpoint.model.spec import ModelSpec
from counterpoint.strategies.strategy import CostEstimate

GATHER_OUTPUTS_PASS = "gather_outputs"
"""Name of the pass."""


def estimate_gather_cost(inner: CostEstimate, model: ModelSpec) -> CostEstimate:
    """Return the cost with the gathering of outputs.

    Cost:
        Bytes sent per rank with the last block and step: the outputs of its microbatches, to each other rank that runs
        other ones: in a ring, the outputs of all microbatches but its own. Targets are not counted.
    """
    last_block = model.num_blocks - 1
    micro_bytes = model.outgoing_bytes(last_block) * inner.samples_per_microbatch
    return inner.add_sent_bytes(
        lambda rank: micro_bytes * (inner.num_micros - rank.num_micros) if last_block in rank.blocks else 0
    )
