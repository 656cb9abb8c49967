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
    Collective,
    Commit,
    Group,
    Instruction,
    Pull,
    Push,
    Serve,
    Update,
    weight,
)
from counterpoint.program.program import Program, Row, Words
from counterpoint.program.rewrite import map_row, replicate
from counterpoint.server.placement import assign
from counterpoint.strategies.local import require_whole
from counterpoint.strategies.rhythm import Rhythm, TurnName
from counterpoint.strategies.strategy import Forecast, Need, RankForecast


@dataclass(frozen=True, slots=True)
class Elastic:
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
    part: str = "0.5"
    every: int = 1
    meets: bool = True

    axis: ClassVar[str] = "worker"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"0\.\d*[1-9]\d*", self.part):
            raise PlanError(
                f"part={self.part} of elastic is no part of a way; give a number between 0 and 1 in digits, part=0.5"
            )
        if self.servers < 1 or self.every < 1:
            raise PlanError(
                f"elastic({self.degree}, servers={self.servers}, every={self.every}) never meets a center; give "
                "servers=1 and every=1, or more"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"servers={self.servers}", f"part={self.part}"]
        options += [f"every={self.every}"] if self.every != 1 else []
        return f"elastic({', '.join([str(self.degree), *options])})"

    @property
    def need(self) -> Need:
        """How finely the model should be cut."""
        return "wish" if self.servers > 1 else "none"

    @property
    def rhythm(self) -> Rhythm:
        """Which kind of step comes when."""
        return Rhythm(self.every)

    def at(self, turn: TurnName) -> Elastic:
        """Return the strategy that makes the program of one kind of step."""
        return replace(self, meets=turn != "quiet")

    def num_ranks(self, inner: int) -> int:
        """Return all workers' ranks and the servers."""
        return inner * self.degree + self.servers

    def refine(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program of one step for the workers' ranks, then one row for each server.

        Raises:
            PlanError: the weights are shared out, served or sliced already.
        """
        require_whole(program, str(self))
        if any(row.num_slices > 1 for row in program.rows):
            raise PlanError(f"{self} stands behind tensor, whose slices need a center each; write data(...) instead")
        meeting = _Meeting(self, program.num_ranks, _holders(program), _owners(model, self.servers))
        workers = replicate(program, self.degree)
        rows = [map_row(row, lambda words, at=rank: meeting.worker(at, words)) for rank, row in enumerate(workers.rows)]  # type: ignore[misc]  # a default binds the rank
        return Program((*rows, *(Row(tuple(meeting.server(at))) for at in range(self.servers))))

    def forecast(self, before: Forecast, model: ModelSpec) -> Forecast:
        """Return the forecast with weights going to the center and back, in a step that meets."""
        owners = _owners(model, self.servers)
        sent = [rank.sent for rank in before.ranks]
        for unit, holders in _first_updaters(before).items():
            sent[holders[0]] += model.unit_bytes(unit) * len(holders) * self.meets
        workers = tuple(replace(rank, sent=more) for rank, more in zip(before.ranks, sent, strict=True))
        kept = [sum(model.unit_bytes(unit) for unit in model.units if owners[unit] == at) for at in range(self.servers)]
        servers = tuple(
            RankForecast((), 0, {}, sent=Fraction(self.degree * size * self.meets), in_flight=0) for size in kept
        )
        copies = replace(before, ranks=workers, staleness=None, apart=True).copied(self.degree)
        return replace(copies, ranks=copies.ranks + servers)


def _owners(model: ModelSpec, servers: int) -> dict[Unit, int]:
    return assign({unit: model.unit_bytes(unit) for unit in model.units}, servers)


def _first_updaters(before: Forecast) -> dict[Unit, list[int]]:
    found: dict[Unit, list[int]] = {}
    for index, rank in enumerate(before.ranks):
        for unit in rank.updates:
            found.setdefault(unit, []).append(index)
    return found


def _holders(program: Program) -> dict[Unit, Group]:
    found: dict[Unit, list[int]] = {}
    for rank, row in enumerate(program.rows):
        for word in row.body:
            if isinstance(word, Update):
                found.setdefault(word.unit, []).append(rank)
    return {unit: tuple(ranks) for unit, ranks in found.items()}


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Who meets which part of the center.

    Args:
        plan: the strategy.
        inner: ranks of a worker.
        holders: the ranks of a worker that update each unit.
        owners: the server that keeps each unit.
    """

    plan: Elastic
    inner: int
    holders: dict[Unit, Group]
    owners: dict[Unit, int]

    def worker(self, rank: int, words: Words) -> Iterable[Instruction]:
        """Yield a worker's words: it decides by itself, and meets the center behind that, before it updates."""
        units = sorted({word.unit for word in words if isinstance(word, Update)}, reverse=True)
        for word in words:
            yield replace(word, own=word.group) if isinstance(word, Commit) else word
            if isinstance(word, Commit) and self.plan.meets:
                leads = [unit for unit in units if rank % self.inner == self.holders[unit][0]]
                yield from (Push(weight(unit), self.server_of(unit)) for unit in leads)
                yield from (Pull(weight(unit), self.server_of(unit)) for unit in leads)
                yield from self.copies(rank, units)

    def copies(self, rank: int, units: Iterable[Unit]) -> Iterable[Instruction]:
        """Yield what hands a worker's weights on to its other ranks."""
        for unit in units:
            group = tuple(rank - rank % self.inner + member for member in self.holders[unit])
            if len(group) > 1:
                yield Collective("broadcast", weight(unit), group)

    def server_of(self, unit: Unit) -> int:
        """Return the rank that keeps a unit of the center."""
        return self.inner * self.plan.degree + self.owners[unit]

    def server(self, index: int) -> Iterable[Instruction]:
        """Yield what a server does."""
        together: dict[Group, list[Unit]] = {}
        for unit in self.holders if self.plan.meets else ():
            if self.owners[unit] == index:
                leaders = tuple(copy * self.inner + self.holders[unit][0] for copy in range(self.plan.degree))
                together.setdefault(leaders, []).append(unit)
        for workers, units in together.items():
            yield Serve(tuple(sorted(units)), workers, verb="elastic_average", part=self.plan.part)
