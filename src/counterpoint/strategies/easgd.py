"""Workers that update apart, and are drawn together by servers that keep a center."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Commit,
    Group,
    Instruction,
    Pull,
    Push,
    Update,
    weight,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import map_row, replicate
from counterpoint.ps.placement import assign
from counterpoint.strategies.local_sgd import require_unsharded
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule


@dataclass(frozen=True, slots=True)
class ElasticAveraging:
    """Let ``degree`` workers update apart, and draw each of them and a center together every ``every`` steps.

    A worker ``w`` that comes to the center ``c`` goes on with ``w - part (w - c)`` less the update of its step, whose
    gradient was taken at ``w``; the center goes on with ``c + part (w - c)``. Nobody waits for other workers: each
    commits by itself and meets the center when it comes there. A worker may be a group of ranks that share their
    gradients; its first holder of a unit talks to the center.

    Args:
        degree: number of workers along the new axis.
        servers: ranks that keep the center; units go to the one with the fewest bytes.
        part: of the way, between 0 and 1; the paper's alpha.
        every: a worker meets the center in every such step; the paper's tau.

    Promise:
        Each worker updates with the gradient of the mean loss over its own samples, clipped by its own norm. Meetings
        are journaled in their order and play back exactly. The model, and what an evaluation sees, is the center; a
        checkpoint has the center and every worker's weights and optimizer state.

    Cost:
        Bytes sent per step: in every ``every``-th each worker its weights once, each server its weights once per
        worker; nothing in between. Memory: optimizer state on every worker, none on the servers.

    Source:
        Zhang et al., Deep Learning with Elastic Averaging SGD, NIPS 2015, algorithm 1.
    """

    degree: int
    servers: int = 1
    alpha: str = "0.5"
    tau: int = 1
    exchanges: bool = True

    axis: ClassVar[str] = "worker"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"0\.\d*[1-9]\d*", self.alpha):
            raise PlanError(f"alpha={self.alpha} of easgd is not between 0 and 1; give a decimal fraction, alpha=0.5")
        if self.servers < 1 or self.tau < 1:
            raise PlanError(
                f"easgd({self.degree}, servers={self.servers}, tau={self.tau}) never meets a center; give "
                "servers=1 and tau=1, or more"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"servers={self.servers}", f"alpha={self.alpha}"]
        options += [f"tau={self.tau}"]
        return f"easgd({', '.join([str(self.degree), *options])})"

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be cut."""
        return "prefer_blocks" if self.servers > 1 else "whole"

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step comes when."""
        return SyncSchedule(self.tau)

    def variant(self, kind: StepKind) -> ElasticAveraging:
        """Return the strategy that makes the program of one kind of step."""
        return replace(self, exchanges=kind != "local")

    def num_ranks(self, inner: int) -> int:
        """Return all workers' ranks and the servers."""
        return inner * self.degree + self.servers

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program of one step for the workers' ranks, then one row for each server.

        Raises:
            PlanError: the weights are shared out, served or sliced already.
        """
        require_unsharded(program, str(self))
        if any(row.tp_degree > 1 for row in program.rank_programs):
            raise PlanError(f"{self} stands behind tensor, whose slices need a center each; write data(...) instead")
        meeting = _CenterExchange(
            self, program.num_ranks, _updating_ranks(program), _assign_servers(model, self.servers)
        )
        workers = replicate(program, self.degree)
        rows = [
            map_row(row, lambda words, at=rank: meeting.worker_instructions(at, words))
            for rank, row in enumerate(workers.rank_programs)
        ]  # type: ignore[misc]  # a default binds the rank
        return Program((*rows, *(RankProgram(tuple(meeting.server_instructions(at))) for at in range(self.servers))))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with weights going to the center and back, in a step that meets."""
        owners = _assign_servers(model, self.servers)
        sent = [rank.other_bytes for rank in inner.ranks]
        for unit, holders in _updating_rank_costs(inner).items():
            sent[holders[0]] += model.unit_bytes(unit) * len(holders) * self.exchanges
        workers = tuple(replace(rank, other_bytes=more) for rank, more in zip(inner.ranks, sent, strict=True))
        kept = [sum(model.unit_bytes(unit) for unit in model.units if owners[unit] == at) for at in range(self.servers)]
        servers = tuple(
            RankCost((), 0, {}, other_bytes=Fraction(self.degree * size * self.exchanges), in_flight=0) for size in kept
        )
        copies = replace(inner, ranks=workers, staleness=None, replicas_may_diverge=True).replicate(self.degree)
        return replace(copies, ranks=copies.ranks + servers)


def _assign_servers(model: ModelSpec, servers: int) -> dict[Unit, int]:
    return assign({unit: model.unit_bytes(unit) for unit in model.units}, servers)


def _updating_rank_costs(inner: CostEstimate) -> dict[Unit, list[int]]:
    found: dict[Unit, list[int]] = {}
    for index, rank in enumerate(inner.ranks):
        for unit in rank.updates:
            found.setdefault(unit, []).append(index)
    return found


def _updating_ranks(program: Program) -> dict[Unit, Group]:
    found: dict[Unit, list[int]] = {}
    for rank, row in enumerate(program.rank_programs):
        for word in row.body:
            if isinstance(word, Update):
                found.setdefault(word.unit, []).append(rank)
    return {unit: tuple(ranks) for unit, ranks in found.items()}


@dataclass(frozen=True, slots=True)
class _CenterExchange:
    """Who meets which part of the center.

    Args:
        plan: the strategy.
        inner: ranks of a worker.
        holders: the ranks of a worker that update each unit.
        owners: the server that keeps each unit.
    """

    plan: ElasticAveraging
    inner: int
    updating_ranks: dict[Unit, Group]
    server_index: dict[Unit, int]

    def worker_instructions(self, rank: int, words: Instructions) -> Iterable[Instruction]:
        """Yield a worker's words: it decides by itself, and meets the center behind that, before it updates."""
        units = sorted({word.unit for word in words if isinstance(word, Update)}, reverse=True)
        for word in words:
            yield replace(word, own=word.group) if isinstance(word, Commit) else word
            if isinstance(word, Commit) and self.plan.exchanges:
                leads = [unit for unit in units if rank % self.inner == self.updating_ranks[unit][0]]
                yield from (Push(weight(unit), self.server_of(unit)) for unit in leads)
                yield from (Pull(weight(unit), self.server_of(unit)) for unit in leads)
                yield from self.broadcasts(rank, units)

    def broadcasts(self, rank: int, units: Iterable[Unit]) -> Iterable[Instruction]:
        """Yield what hands a worker's weights on to its other ranks."""
        for unit in units:
            group = tuple(rank - rank % self.inner + member for member in self.updating_ranks[unit])
            if len(group) > 1:
                yield Collective("broadcast", weight(unit), group)

    def server_of(self, unit: Unit) -> int:
        """Return the rank that keeps a unit of the center."""
        return self.inner * self.plan.degree + self.server_index[unit]

    def server_instructions(self, index: int) -> Iterable[Instruction]:
        """Yield what a server does."""
        together: dict[Group, list[Unit]] = {}
        for unit in self.updating_ranks if self.plan.exchanges else ():
            if self.server_index[unit] == index:
                leaders = tuple(copy * self.inner + self.updating_ranks[unit][0] for copy in range(self.plan.degree))
                together.setdefault(leaders, []).append(unit)
        for workers, units in together.items():
            yield ApplyPushes(tuple(sorted(units)), workers, op="elastic_average", alpha=self.plan.alpha)
