"""Local SGD: replicas update independently for some steps, and then average their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import ApplyPushes, Collective, Commit, Instruction
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.rewrite import replicate, widen_commits
from counterpoint.strategies.replica_groups import add_after_updates, receives_grad, replica_group
from counterpoint.strategies.strategy import CostEstimate, Granularity, ring_fraction
from counterpoint.strategies.tree_reduce import uses_tree_reduce


@dataclass(frozen=True, slots=True)
class LocalSGD:
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
    splits_batch: ClassVar[bool] = True
    granularity: ClassVar[Granularity] = "whole"

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return self.name

    def num_ranks(self, inner: int) -> int:
        """Return ``degree`` times as many ranks."""
        return inner * self.degree

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model unchanged."""
        return model

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
        ranks = tuple(
            replace(rank, other_bytes=rank.other_bytes + 2 * ring_fraction(self.degree) * sum(rank.updates.values()))
            for rank in inner.ranks
        )
        return replace(inner, ranks=ranks).replicate(self.degree)


def require_unsharded(program: Program, name: str) -> None:
    """Check that every replica holds whole weights and updates them itself.

    Raises:
        PlanError: states are sharded, weights live on servers, or only the root of a tree updates.
    """
    if uses_tree_reduce(program):
        raise PlanError(
            f"{name} comes after tree, where only the first replica updates; write data(...) instead of tree(...), so "
            "that each replica updates its own weights"
        )
    for _, instruction in program.instructions():
        if isinstance(instruction, ApplyPushes) or receives_grad(instruction):
            raise PlanError(f"{name} comes after server, whose workers do not update; write {name} without server")
        if isinstance(instruction, Collective) and instruction.op in {"reduce_scatter", "all_gather"}:
            raise PlanError(
                f"{name} comes after zero or update=sharded, whose ranks update only their shards; write data(...) "
                "instead, so that each replica updates its own weights"
            )


def _with_local_commits(own: RankProgram, wide: RankProgram) -> Iterator[Instruction]:
    """Yield a replica's instructions; its commit includes all replicas, but its loss is averaged over its own ranks."""
    for instruction, widened in zip(own.body, wide.body, strict=True):
        if isinstance(instruction, Commit) and isinstance(widened, Commit):
            yield Commit(widened.group, instruction.group)
        else:
            yield instruction
