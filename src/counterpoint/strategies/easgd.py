"""Elastic averaging SGD: workers update independently, and exchange weights with a center kept by servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import ClassVar

from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.program.instruction import (
    ALPHA_PATTERN,
    ApplyPushes,
    Collective,
    Commit,
    Group,
    Instruction,
    Pull,
    Push,
    weight,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import map_parts, replicate
from counterpoint.ps.placement import assign
from counterpoint.strategies.replica_groups import require_unsharded, updated_units, updating_ranks
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule


@dataclass(frozen=True, slots=True)
class ElasticAveraging(Strategy):
    """``degree`` workers update independently; every ``tau`` steps each is averaged elastically with a center.

    When a worker with weights ``w`` exchanges them with the center ``c``, the worker continues with
    ``w - alpha (w - c)`` minus the update of its step, whose gradient was computed at ``w``, and the center becomes
    ``c + alpha (w - c)``. Workers do not wait for each other: each commits on its own. A worker may be a group of ranks
    that share their gradients: the first rank that updates a unit exchanges it with the center.

    Args:
        degree: number of workers along the new axis.
        servers: number of ranks that keep the center; each unit is assigned to the server with the fewest bytes.
        alpha: moving rate of the exchange, between 0 and 1, in decimal digits.
        tau: communication period: steps of a worker between two exchanges.

    Promise:
        Each worker updates with the gradient of the mean loss over its own samples, clipped by its own norm. The order
        of exchanges is recorded in a journal and can be replayed exactly. The trained model is the center, and
        evaluation uses it; a checkpoint has the center and every worker's weights and optimizer state.

    Cost:
        Bytes sent in every ``tau``-th step: each worker its weights once, each server its weights once per worker; none
        in other steps. Memory: optimizer state on every worker, none on the servers.

    Source:
        Zhang et al., Deep Learning with Elastic Averaging SGD, NIPS 2015, algorithm 1.
    """

    degree: int
    servers: int = 1
    alpha: str = "0.5"
    tau: int = 1
    exchanges: bool = True

    axis: ClassVar[str] = "worker"

    def __post_init__(self) -> None:
        if not re.fullmatch(rf"(?=.*[1-9]){ALPHA_PATTERN}", self.alpha):
            raise PlanError(f"alpha={self.alpha} of easgd is not between 0 and 1; give a decimal fraction, alpha=0.5")
        if self.servers < 1 or self.tau < 1:
            raise PlanError(
                f"easgd({self.degree}, servers={self.servers}, tau={self.tau}) has no exchange with a center; give "
                "servers=1 and tau=1, or more"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        return f"easgd({self.degree}, servers={self.servers}, alpha={self.alpha}, tau={self.tau})"

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be split."""
        return "prefer_blocks" if self.servers > 1 else "whole"

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step is taken when."""
        return SyncSchedule(self.tau)

    def variant(self, kind: StepKind) -> ElasticAveraging:
        """Return the strategy that builds the program of one kind of step."""
        return replace(self, exchanges=kind != "local")

    def num_ranks(self, inner: int) -> int:
        """Return all workers' ranks and the servers."""
        return inner * self.degree + self.servers

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program of one step of the workers' ranks, followed by one rank for each server.

        Raises:
            PlanError: states are sharded, live on servers, or are tensor-parallel.
        """
        require_unsharded(program, str(self))
        if any(rank_program.tp_degree > 1 for rank_program in program.rank_programs):
            raise PlanError(
                f"{self} comes after tensor, each shard of which needs its own center; write data(...) instead"
            )
        exchange = _CenterExchange(
            self, program.num_ranks, updating_ranks(program), _assign_servers(model, self.servers)
        )
        workers = [
            map_parts(rank_program, partial(exchange.worker_instructions, rank))
            for rank, rank_program in enumerate(replicate(program, self.degree).rank_programs)
        ]
        servers = [RankProgram(tuple(exchange.server_instructions(index))) for index in range(self.servers)]
        return Program((*workers, *servers))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with weights sent to the center and back in a step with an exchange."""
        server_index = _assign_servers(model, self.servers)
        sent = [rank.other_bytes for rank in inner.ranks]
        for unit in model.units:
            holders = [index for index, rank in enumerate(inner.ranks) if unit in rank.updates]
            if holders:
                sent[holders[0]] += model.unit_bytes(unit) * len(holders) * self.exchanges
        workers = tuple(replace(rank, other_bytes=num_bytes) for rank, num_bytes in zip(inner.ranks, sent, strict=True))
        replicas = replace(inner, ranks=workers, staleness=None, replicas_may_diverge=True).replicate(self.degree)
        center_bytes = [0] * self.servers
        for unit in model.units:
            center_bytes[server_index[unit]] += model.unit_bytes(unit)
        servers = tuple(
            RankCost((), 0, {}, other_bytes=Fraction(self.degree * num_bytes * self.exchanges), in_flight=0)
            for num_bytes in center_bytes
        )
        return replace(replicas, ranks=replicas.ranks + servers)


def _assign_servers(model: ModelSpec, servers: int) -> dict[Unit, int]:
    return assign({unit: model.unit_bytes(unit) for unit in model.units}, servers)


@dataclass(frozen=True, slots=True)
class _CenterExchange:
    """Which rank exchanges which unit with which server.

    Args:
        plan: the strategy.
        inner: number of ranks of a worker.
        updating_ranks: the ranks of a worker that update each unit; the first one exchanges it.
        server_index: the server that keeps each unit of the center.
    """

    plan: ElasticAveraging
    inner: int
    updating_ranks: dict[Unit, Group]
    server_index: dict[Unit, int]

    def worker_instructions(self, rank: int, instructions: Instructions) -> Iterator[Instruction]:
        """Yield a worker's instructions: it commits on its own, then exchanges weights, then updates."""
        units = sorted(updated_units(instructions), reverse=True)
        for instruction in instructions:
            if not isinstance(instruction, Commit):
                yield instruction
                continue
            yield replace(instruction, loss_group=instruction.group)
            if self.plan.exchanges:
                leads = [unit for unit in units if rank % self.inner == self.updating_ranks[unit][0]]
                yield from (Push(weight(unit), self.server_of(unit)) for unit in leads)
                yield from (Pull(weight(unit), self.server_of(unit)) for unit in leads)
                yield from self.broadcasts(rank, units)

    def broadcasts(self, rank: int, units: Iterable[Unit]) -> Iterator[Instruction]:
        """Yield the broadcasts of exchanged weights to the other ranks of a worker."""
        for unit in units:
            group = tuple(rank - rank % self.inner + member for member in self.updating_ranks[unit])
            if len(group) > 1:
                yield Collective("broadcast", weight(unit), group)

    def server_of(self, unit: Unit) -> int:
        """Return the rank that keeps a unit of the center."""
        return self.inner * self.plan.degree + self.server_index[unit]

    def server_instructions(self, index: int) -> Iterator[Instruction]:
        """Yield the instructions of a server: one for each set of workers."""
        units_of: dict[Group, list[Unit]] = {}
        for unit in self.updating_ranks if self.plan.exchanges else ():
            if self.server_index[unit] == index:
                leaders = tuple(
                    worker * self.inner + self.updating_ranks[unit][0] for worker in range(self.plan.degree)
                )
                units_of.setdefault(leaders, []).append(unit)
        for workers, units in units_of.items():
            yield ApplyPushes(tuple(sorted(units)), workers, op="elastic_average", alpha=self.plan.alpha)
