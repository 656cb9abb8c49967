"""Data parallelism: every replica runs the same program on its own microbatches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Collective, Instruction, Serve, Update, grad
from counterpoint.program.program import Program, Row
from counterpoint.program.rewrite import before_commit, last_backward_first, replicate, widen_commits
from counterpoint.strategies.late import Late
from counterpoint.strategies.local import Local
from counterpoint.strategies.rhythm import Rhythm, TurnName
from counterpoint.strategies.strategy import Forecast, Need, Strategy, ring_share
from counterpoint.strategies.zero import Zero


@dataclass(frozen=True, slots=True)
class Data:
    """Copy the program ``degree`` times and sum the gradients of the copies before every update.

    With ``update="shared"`` each copy sums and updates only its share of the weights, which are then joined. Where the
    copies are on one host, they have weights in common that way, and nothing is sent at all.

    Gradients are summed once per step, after the last of its microbatches: with ``num_microbatches=k`` that is what
    DDP does with ``no_sync`` around all but one of k backwards, and Horovod with ``backward_passes_per_step=k``.

    With ``sync_every=k`` (local SGD) nothing is summed. Each copy updates its weights with the gradient of the mean
    loss over its own samples, clipped by its own norm, and after every k-th step the weights are averaged, each copy
    counted alike. Optimizer state (momentum) is never averaged: every copy keeps its own. With ``sync_first=m`` the
    first m steps sum gradients instead (post-local SGD), and the k-th step is counted from there.

    With ``staleness=1`` (double buffering) the gradients of a step are summed while the next one computes, and applied
    after it: ``w[t+1] = w[t] - lr * g(w[t-1])``. The first step of a fit applies nothing, and what its last step has
    computed is applied by no step, unless a resumed run goes on from its checkpoint. The norm is that of what is
    applied.

    Args:
        degree: ranks along the new axis.
        update: ``own`` for every copy updates all, ``shared`` for each its share.
        sync_every: average weights after so many steps instead of summing gradients in each; 1 sums gradients.
        sync_first: sum gradients in so many steps at the beginning.
        staleness: 0 for gradients that are applied in their own step, 1 for the step after it.

    Promise:
        The same numbers as on one rank, to rounding. Not so with the options that skip or delay sums. With sync_every=k
        copies differ for at most k-1 steps and are equal after the k-th; they agree in every step whether it counts.
        An evaluation, and the model after a fit, have the mean of all copies, and neither changes the copies; a
        checkpoint has every copy's own weights and state. With staleness=1 no gradient is more than one update old.

    Cost:
        Bytes sent per rank and step: ``2 (n-1)/n`` times the gradient bytes it updates; sparse gradients, of which only
        rows travel, are counted as dense ones. With sync_every=k on average ``1/k`` of that, all in every k-th step.
        Memory per rank: as without it; with a shared update optimizer state ``1/n``, on one host weights ``1/n``, too;
        with staleness=1 one gradient more.

    Source:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, section 3.
        Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training, 2020.
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, algorithm 1.
        Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020 (post-local SGD).
        ChainerMN, create_multi_node_optimizer(..., double_buffering=True).
    """

    degree: int
    update: Literal["own", "shared"] = "own"
    sync_every: int = 1
    sync_first: int = 0
    staleness: int = 0

    axis: ClassVar[str] = "data"
    splits_batch: ClassVar[bool] = True
    need: ClassVar[Need] = "none"

    def __post_init__(self) -> None:
        if self.update not in {"own", "shared"}:
            raise PlanError(f"data has no update={self.update!r}; give update=own or update=shared")
        if self.sync_every < 1 or self.sync_first < 0:
            raise PlanError(
                f"sync_every={self.sync_every}, sync_first={self.sync_first} of data are no numbers of steps; give "
                "sync_every=1 or more, and sync_first=0 or more"
            )
        if self.staleness not in {0, 1}:
            raise PlanError(f"data has no staleness={self.staleness}; there are two gradients: give staleness=0 or 1")
        if self.sync_first and self.sync_every == 1:
            raise PlanError(
                f"sync_first={self.sync_first} says how many steps sum gradients before sync_every=... begins; give "
                "sync_every=8, for one, as well"
            )
        if (self.update == "shared") + (self.sync_every > 1) + (self.staleness > 0) > 1:
            raise PlanError(
                f"{self} combines options of which each says what is done with a gradient; give one of update=shared, "
                "sync_every=... and staleness=1"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        shared = ", update=shared" if self.update == "shared" else ""
        every = f", sync_every={self.sync_every}" if self.sync_every != 1 else ""
        first = f", sync_first={self.sync_first}" if self.sync_first else ""
        late = f", staleness={self.staleness}" if self.staleness else ""
        return f"data({self.degree}{shared}{every}{first}{late})"

    @property
    def rhythm(self) -> Rhythm:
        """Which kind of step comes when."""
        return Rhythm(self.sync_every, self.sync_first, self.staleness) if self.degree > 1 else Rhythm()

    def at(self, turn: TurnName) -> Strategy:
        """Return the strategy that makes the program of one kind of step."""
        if turn in {"quiet", "meeting"}:
            return Local(self.degree, turn == "meeting", str(self))
        return replace(self, sync_every=1, sync_first=0)

    @property
    def _special(self) -> Strategy | None:
        """What does it instead, where gradients are not just summed and applied by all."""
        if self.update == "shared":
            return Zero(self.degree, level=1, name=str(self))
        if self.sync_every > 1:
            return Local(self.degree, meets=True, name=str(self))
        return Late(self.degree, str(self)) if self.staleness else None

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
        special = self._special
        if special is not None:
            return special.lower(program, model)
        stride = program.num_ranks
        copies = widen_commits(replicate(program, self.degree), self.degree)

        def sums(rank: int, row: Row) -> list[Instruction]:
            twins = tuple(range(rank % stride, stride * self.degree, stride))
            units = [word.unit for word in row.body if isinstance(word, Update)]
            return [Collective("sum", grad(unit), twins) for unit in last_backward_first(row, units)]

        return before_commit(copies, sums)

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with one all-reduce of what each rank updates, or what amounts to it."""
        special = self._special
        if special is not None and self.degree > 1:
            return special.forecast(before, model)
        ranks = tuple(
            replace(rank, summed=rank.summed + 2 * ring_share(self.degree) * sum(rank.updates.values()))
            for rank in before.ranks
        )
        return replace(before, ranks=ranks).copied(self.degree)
