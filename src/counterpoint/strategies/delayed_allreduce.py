"""Double buffering: gradients are all-reduced while the next step computes, and applied one step late.

::

    step 0 (fill)     compute grad 0 -> swap buffers                     (no update)
    step 1 (steady)   start all_reduce(grad 0)  compute grad 1  wait -> swap buffers -> update with grad 0
    step 2 (steady)   start all_reduce(grad 1)  compute grad 2  wait -> swap buffers -> update with grad 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Collective,
    Free,
    Group,
    Instruction,
    SwapGradBuffers,
    Update,
    delayed_grad,
)
from counterpoint.program.program import Program, RankProgram, shift_microbatch
from counterpoint.program.rewrite import order_by_grad_completion, split_at_commit
from counterpoint.strategies.replica_groups import map_replicas, require_unsharded, updated_units
from counterpoint.strategies.strategy import CostEstimate, Strategy, ring_fraction


@dataclass(frozen=True, slots=True)
class DelayedAllReduce(Strategy):
    """Replicas with two gradient buffers: one is all-reduced and applied while the other is computed.

    Args:
        degree: number of ranks along the new axis.
        name: the strategy as the user wrote it, for errors.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes that it updates. Memory: one more
        gradient.

    Source:
        ChainerMN, ``create_multi_node_optimizer(..., double_buffering=True)``.
    """

    degree: int
    name: str

    axis: ClassVar[str] = "data"

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program: its prologue is a step without an update, its body applies the previous gradient.

        Raises:
            PlanError: the program has a prologue already, its states are sharded, or its all-reduces are compressed.
        """
        require_unsharded(program, self.name)
        codec = next((one.codec for _, one in program.instructions() if isinstance(one, Collective) and one.codec), "")
        if codec:
            raise PlanError(
                f"cannot combine {self.name} with all-reduces compressed by {codec}: error feedback is finalized in "
                "the step that computes the gradient, which is applied one step later; drop the compression, or "
                "staleness=1"
            )
        if program.is_async_pipeline:
            raise PlanError(f"{self.name} comes after a strategy that delays gradients already; keep one of the two")
        num_micros = len(program.micros) * self.degree
        return map_replicas(program, self.degree, partial(_delayed_rank_program, num_micros=num_micros))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with one all-reduce of what each rank updates, applied one update late."""
        factor = 2 * ring_fraction(self.degree)
        late = replace(inner, staleness=None if inner.staleness is None else inner.staleness + 1)
        return late.add_sent_bytes(lambda rank: factor * rank.updated_bytes).replicate(self.degree)


def _delayed_rank_program(rank_program: RankProgram, group: Group, num_micros: int) -> RankProgram:
    body = rank_program.body
    units = order_by_grad_completion(rank_program, updated_units(body))
    swaps = [SwapGradBuffers(unit) for unit in units]
    compute, update = split_at_commit(body)
    fill = (*compute, *swaps, *(instruction for instruction in update if not isinstance(instruction, Update)))
    steady = (*_all_reduces(units, group, "start"), *compute, *_all_reduces(units, group, "wait"), *swaps, *update)
    drain = tuple(Free(delayed_grad(unit)) for unit in units)
    shifted = tuple(shift_microbatch(instruction, num_micros) for instruction in steady)
    return replace(rank_program, prologue=fill, body=shifted, epilogue=drain)


def _all_reduces(units: Sequence[Unit], group: Group, phase: Literal["start", "wait"]) -> list[Instruction]:
    return [Collective("all_reduce", delayed_grad(unit), group, phase) for unit in units]
