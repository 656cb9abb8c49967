"""Data parallelism: every replica runs the same program on its own microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Collective, Instruction, Serve, Update, grad
from counterpoint.program.program import Program, Row
from counterpoint.program.rewrite import before_commit, last_backward_first, replicate, widen_commits
from counterpoint.strategies.strategy import Forecast, Need, ring_share
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Data:
    """Copy the program ``degree`` times and sum the gradients of the copies before every update.

    With ``update="shared"`` each copy sums and updates only its share of the weights, which are then joined. Where the
    copies are on one host, they have weights in common that way, and nothing is sent at all.

    Args:
        degree: ranks along the new axis.
        update: ``own`` for every copy updates all, ``shared`` for each its share.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes it updates; sparse gradients, of which only
        rows travel, are counted as dense ones.
        Memory per rank: as without it; with a shared update optimizer state ``1/n``, on one host weights ``1/n``, too.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.
        Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
    """

    degree: int
    update: Literal["own", "shared"] = "own"

    axis: ClassVar[str] = "data"
    splits_batch: ClassVar[bool] = True
    need: ClassVar[Need] = "none"

    def __post_init__(self) -> None:
        if self.update not in {"own", "shared"}:
            raise PlanError(f"data has no update={self.update!r}; give update=own or update=shared")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return f"data({self.degree})" if self.update == "own" else f"data({self.degree}, update=shared)"

    @property
    def _sharing(self) -> Zero:
        return Zero(self.degree, level=1, name=str(self))

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for ``degree`` replicas.

        Raises:
            PlanError: the replicas push to an asynchronous server, which nobody could sum.
        """
        if any(isinstance(word, Serve) for _, word in program.words()):
            raise PlanError(
                f"{self} stands after an asynchronous server, whose updates cannot be summed over replicas; write "
                f"{self} before server(...), so that each group of replicas is one worker"
            )
        if self.degree == 1:
            return program
        if self.update == "shared":
            return self._sharing.lower(program, model)
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)

        def sums(rank: int, row: Row) -> list[Instruction]:
            twins = tuple(range(rank % stride, stride * self.degree, stride))
            units = [word.unit for word in row.body if isinstance(word, Update)]
            return [Collective("sum", grad(unit), twins) for unit in last_backward_first(row, units)]

        return before_commit(copies, sums)

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with one all-reduce of what each rank updates, or what amounts to it."""
        if self.update == "shared":
            return self._sharing.forecast(before, model)
        ranks = tuple(
            replace(rank, summed=rank.summed + 2 * ring_share(self.degree) * sum(rank.updates.values()))
            for rank in before.ranks
        )
        return replace(before, ranks=ranks).copied(self.degree)
