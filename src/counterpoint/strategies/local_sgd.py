"""Local SGD: replicas update independently for some steps, and then average their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import Commit, Instruction
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.rewrite import replicate, widen_commits
from counterpoint.strategies.replica_groups import add_after_updates, replica_group, require_unsharded
from counterpoint.strategies.strategy import CostEstimate, Strategy, ring_fraction


@dataclass(frozen=True, slots=True)
class LocalSGD(Strategy):
    """One step of replicas that update independently, with or without the averaging of their weights.

    Args:
        degree: number of ranks along the new axis.
        averages: whether weights are averaged after the updates.
        name: the strategy as the user wrote it, for errors.

    Cost:
        Bytes sent per rank: none in a local step; ``2 (n-1)/n`` times its weights in a step that averages.

    Source:
        Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, algorithm 1.
    """

    degree: int
    averages: bool
    name: str

    axis: ClassVar[str] = "data"

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program of one step: replicas commit together, each with the mean over its own samples."""
        require_unsharded(program, self.name)
        stride = program.num_ranks
        local = replicate(program, self.degree)
        joint = widen_commits(local, self.degree)
        rank_programs = []
        for rank, (own, wide) in enumerate(zip(local.rank_programs, joint.rank_programs, strict=True)):
            body = tuple(_with_local_commits(own, wide))
            if self.averages:
                group = replica_group(rank, stride, self.degree)
                body = tuple(add_after_updates(body, "all_reduce_mean", group))
            rank_programs.append(replace(wide, body=body))
        return Program(tuple(rank_programs))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with one all-reduce of the weights that each rank updates, or with none."""
        if not self.averages:
            return replace(inner, replicas_may_diverge=True).replicate(self.degree)
        factor = 2 * ring_fraction(self.degree)
        return inner.add_sent_bytes(lambda rank: factor * rank.updated_bytes).replicate(self.degree)


def _with_local_commits(own: RankProgram, wide: RankProgram) -> Iterator[Instruction]:
    """Yield a replica's instructions; its commit includes all replicas, but its loss is averaged over its own ranks."""
    for instruction, widened in zip(own.body, wide.body, strict=True):
        if isinstance(instruction, Commit) and isinstance(widened, Commit):
            yield Commit(widened.group, instruction.group)
        else:
            yield instruction
