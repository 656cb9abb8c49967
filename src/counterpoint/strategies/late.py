"""Gradients that are summed while the next ones are computed, and applied one step late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import Collective, Commit, Group, Instruction, Release, Swap, Update, late
from counterpoint.program.program import Program, Row, moved
from counterpoint.program.rewrite import last_backward_first, replicate, widen_commits
from counterpoint.strategies.local import require_whole
from counterpoint.strategies.strategy import Forecast, Need, ring_share


@dataclass(frozen=True, slots=True)
class Late:
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
    need: ClassVar[Need] = "none"

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the stream: a first step that applies nothing, steps that apply what the one before has computed.

        Raises:
            PlanError: the program is a stream already, its weights are shared out, or its sums have a code.
        """
        require_whole(program, self.name)
        code = next((word.code for _, word in program.words() if isinstance(word, Collective) and word.code), "")
        if code:
            raise PlanError(
                f"{self.name} stands behind gradients that are summed in the code {code}, but whether what that has "
                "not sent counts is decided in the same step; leave the code out, or staleness=1"
            )
        if program.is_stream:
            raise PlanError(f"{self.name} stands behind a plan that applies gradients late already; write one of both")
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)
        step = len(copies.micros)
        return Program(
            tuple(
                _stream(row, tuple(range(rank % stride, stride * self.degree, stride)), step)
                for rank, row in enumerate(copies.rows)
            )
        )

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with one all-reduce of what each rank updates, one update late."""
        ranks = tuple(
            replace(rank, sent=rank.sent + 2 * ring_share(self.degree) * sum(rank.updates.values()))
            for rank in before.ranks
        )
        staleness = None if before.staleness is None else before.staleness + 1
        return replace(before, ranks=ranks, staleness=staleness).copied(self.degree)


def _stream(row: Row, twins: Group, step: int) -> Row:
    units = last_backward_first(row, [word.unit for word in row.body if isinstance(word, Update)])
    swaps = [Swap(unit) for unit in units]
    at = next((index for index, word in enumerate(row.body) if isinstance(word, Commit)), len(row.body))
    computed, decided = row.body[:at], row.body[at:]
    prologue = (*computed, *swaps, *(word for word in decided if not isinstance(word, Update)))
    body = (*_sums(units, twins, "start"), *computed, *_sums(units, twins, "wait"), *swaps, *decided)
    epilogue = tuple(Release(late(unit)) for unit in units)
    return replace(row, prologue=prologue, body=tuple(moved(word, step) for word in body), epilogue=epilogue)


def _sums(units: Sequence[Unit], twins: Group, phase: Literal["start", "wait"]) -> list[Instruction]:
    return [Collective("all_reduce", late(unit), twins, phase) for unit in units]
