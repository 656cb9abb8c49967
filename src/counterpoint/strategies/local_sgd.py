"""Replicas that update apart for a while, and then average their weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import ApplyPushes, Collective, Commit, Instruction, Recv, Update, weight
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import replicate, widen_commits
from counterpoint.strategies.strategy import CostEstimate, Granularity, ring_fraction
from counterpoint.strategies.tree_reduce import uses_tree_reduce


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """One step of replicas that update apart: quiet, or one after which they average their weights.

    Args:
        degree: ranks along the new axis.
        meets: whether weights are averaged after the updates.
        name: what errors call it.

    Cost:
        Bytes sent per rank: nothing in a quiet step; ``2 (n-1)/n`` times its weights where it meets.

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
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program of one step; replicas agree on whether it counts, each has a mean of its own samples."""
        require_unsharded(program, self.name)
        stride = program.num_ranks
        copies = replicate(program, self.degree)
        agreeing = widen_commits(copies, self.degree)
        rows = []
        for rank, (own, wide) in enumerate(zip(copies.rank_programs, agreeing.rank_programs, strict=True)):
            twins = tuple(range(rank % stride, stride * self.degree, stride))
            body = tuple(_with_local_commits(own, wide))
            if self.averages:
                body = tuple(_average_after_updates(body, twins))
            rows.append(replace(wide, body=body))
        return Program(tuple(rows))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with one all-reduce of the weights that each rank updates, or with none."""
        if not self.averages:
            return replace(inner, replicas_may_diverge=True).replicate(self.degree)
        ranks = tuple(
            replace(rank, other_bytes=rank.other_bytes + 2 * ring_fraction(self.degree) * sum(rank.updates.values()))
            for rank in inner.ranks
        )
        return replace(inner, ranks=ranks).replicate(self.degree)


def require_unsharded(program: Program, name: str) -> None:
    """Check that every replica has whole weights and updates them by itself.

    Raises:
        PlanError: they are shared out, live on servers, or are updated by the first copy of a tree.
    """
    if uses_tree_reduce(program):
        raise PlanError(
            f"{name} stands behind tree, of whose copies only the first updates; write data(...) in its place, so that "
            "each replica has weights of its own"
        )
    for _, word in program.instructions():
        if isinstance(word, ApplyPushes) or (isinstance(word, Recv) and word.tensor.name == "grad"):
            raise PlanError(f"{name} stands behind server, whose workers update nothing; write {name} without server")
        if isinstance(word, Collective) and word.op in {"reduce_scatter", "all_gather"}:
            raise PlanError(
                f"{name} stands behind zero or a shared update, whose ranks update only their shares; write data(...) "
                "in its place, so that each replica has weights of its own"
            )


def _with_local_commits(own: RankProgram, wide: RankProgram) -> Iterable[Instruction]:
    """Yield the words of a replica, with commits of all replicas that keep the means apart."""
    for word, widened in zip(own.body, wide.body, strict=True):
        yield Commit(widened.group, word.group) if isinstance(word, Commit) and isinstance(widened, Commit) else word


def _average_after_updates(words: Instructions, replicas: tuple[int, ...]) -> Iterable[Instruction]:
    last = max((index for index, word in enumerate(words) if isinstance(word, Update)), default=-1)
    units = [word.unit for word in words if isinstance(word, Update)]
    for index, word in enumerate(words):
        yield word
        if index == last:
            yield from (Collective("all_reduce_mean", weight(unit), replicas) for unit in units)
