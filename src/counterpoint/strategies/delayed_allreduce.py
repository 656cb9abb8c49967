"""Gradients that are summed while the next ones are computed, and applied one step late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    Collective,
    Commit,
    Free,
    Group,
    Instruction,
    SwapGradBuffers,
    Update,
    delayed_grad,
)
from counterpoint.program.program import Program, RankProgram, shift_microbatch
from counterpoint.program.rewrite import order_by_grad_completion, replicate, widen_commits
from counterpoint.strategies.local_sgd import require_unsharded
from counterpoint.strategies.strategy import CostEstimate, Granularity, ring_fraction


@dataclass(frozen=True, slots=True)
class DelayedAllReduce:
    """Replicas with two gradients: one is summed and applied, the other computed meanwhile.

    Args:
        degree: ranks along the new axis.
        name: what errors call it.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes it updates. Memory: one gradient more.

    Source:
        ChainerMN, ``create_multi_node_optimizer(..., double_buffering=True)``.
    """

    degree: int
    name: str

    axis: ClassVar[str] = "data"
    splits_batch: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "whole"

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the stream: a first step that applies nothing, steps that apply what the one before has computed.

        Raises:
            PlanError: the program is a stream already, its weights are shared out, or its sums have a code.
        """
        require_unsharded(program, self.name)
        code = next(
            (word.codec for _, word in program.instructions() if isinstance(word, Collective) and word.codec), ""
        )
        if code:
            raise PlanError(
                f"{self.name} stands behind gradients that are summed in the code {code}, but whether what that has "
                "not sent counts is decided in the same step; leave the code out, or staleness=1"
            )
        if program.is_async_pipeline:
            raise PlanError(f"{self.name} stands behind a plan that applies gradients late already; write one of both")
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)
        step = len(copies.micros)
        return Program(
            tuple(
                _delayed_rank_program(row, tuple(range(rank % stride, stride * self.degree, stride)), step)
                for rank, row in enumerate(copies.rank_programs)
            )
        )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with one all-reduce of what each rank updates, one update late."""
        ranks = tuple(
            replace(rank, other_bytes=rank.other_bytes + 2 * ring_fraction(self.degree) * sum(rank.updates.values()))
            for rank in inner.ranks
        )
        staleness = None if inner.staleness is None else inner.staleness + 1
        return replace(inner, ranks=ranks, staleness=staleness).replicate(self.degree)


def _delayed_rank_program(row: RankProgram, replicas: Group, step: int) -> RankProgram:
    units = order_by_grad_completion(row, [word.unit for word in row.body if isinstance(word, Update)])
    swaps = [SwapGradBuffers(unit) for unit in units]
    at = next((index for index, word in enumerate(row.body) if isinstance(word, Commit)), len(row.body))
    computed, decided = row.body[:at], row.body[at:]
    prologue = (*computed, *swaps, *(word for word in decided if not isinstance(word, Update)))
    body = (
        *_all_reduces(units, replicas, "start"),
        *computed,
        *_all_reduces(units, replicas, "wait"),
        *swaps,
        *decided,
    )
    epilogue = tuple(Free(delayed_grad(unit)) for unit in units)
    return replace(row, prologue=prologue, body=tuple(shift_microbatch(word, step) for word in body), epilogue=epilogue)


def _all_reduces(units: Sequence[Unit], replicas: Group, phase: Literal["start", "wait"]) -> list[Instruction]:
    return [Collective("all_reduce", delayed_grad(unit), replicas, phase) for unit in units]
