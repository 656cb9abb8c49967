"""Parameter servers: workers push gradients to ranks that keep the weights and apply the updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal

from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import ModelSpec, Unit
from counterpoint.optim.validation import renamed_parameters
from counterpoint.program.compression import find_codec
from counterpoint.program.instruction import (
    ApplyPushes,
    Collective,
    Commit,
    Free,
    Group,
    Instruction,
    Pull,
    Push,
    Recv,
    Send,
    Update,
    grad,
    weight,
)
from counterpoint.program.program import Program, RankProgram
from counterpoint.program.rewrite import map_parts, replicate, widen_commits
from counterpoint.ps.consistency import ConsistencyName, parse_consistency
from counterpoint.ps.placement import assign
from counterpoint.strategies.options import changed_options, format_term
from counterpoint.strategies.renamed import RENAMED
from counterpoint.strategies.replica_groups import receives_grad, updated_units, updating_ranks, uses_tree_reduce
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost, Strategy
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule


@renamed_parameters({"fetch_every": RENAMED["fetch_every"]})
@dataclass(frozen=True, slots=True)
class Server(Strategy):
    """Train on ``degree`` workers; ``servers`` more ranks keep and update the weights.

    Under ``bsp`` (bulk synchronous parallel) the servers wait for all workers, sum their gradients and update once.
    Under ``asp`` (asynchronous parallel) every push is an update, and its worker continues with the resulting weights.
    ``ssp`` (stale synchronous parallel) is ``asp`` with a bound: a worker gets weights only while it has pushed at most
    ``staleness`` times more often than the slowest, and waits until then. A worker may be a group of ranks that share
    their gradients already: the first rank that updates a unit communicates with its server.

    Args:
        degree: number of workers along the new axis.
        servers: number of ranks that keep weights; each unit is assigned to the server with the fewest bytes.
        consistency: ``bsp``, ``ssp`` or ``asp``.
        staleness: with ssp, by how many pushes a worker may be ahead of the slowest; with 0 all wait for the slowest.
        compress: codec of the gradients that are pushed: fp16, bf16, int8, int4, twobit:0.5, sign or topk:0.01.
        pull_every: with asp, a worker pushes in every step and pulls weights every this many steps.

    Promise:
        bsp gives the same results as single-process training. asp and ssp apply the gradient of the mean loss over the
        worker's own samples, if it has any, to weights that other workers may have updated since; the order of arrival
        is recorded in a journal and can be replayed exactly. ssp: between reading weights and applying their gradient
        there are at most (n-1) (2 staleness + 1) updates of other workers, which the server checks before it applies
        any. With ``compress`` the decoded gradient is applied; each worker adds its compression error to its next
        gradient (error feedback). Weights are sent uncompressed.

    Cost:
        Bytes sent per step: each worker its encoded gradients once; each server its weights once per worker.
        Memory: optimizer state only on the servers; with ``compress`` two error-feedback buffers on each worker.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; Li et al., Parameter Server, OSDI 2014.
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013 (ssp).
        MXNet's gradient compression, 2018 (twobit).
    """

    degree: int
    servers: int = 1
    consistency: ConsistencyName = "bsp"
    staleness: int = 0
    compress: str = ""
    pull_every: int = 1
    replies: bool = True

    axis: ClassVar[str] = "worker"

    def __post_init__(self) -> None:
        parse_consistency(self.consistency, staleness=self.staleness, slices_per_step=self.degree)
        if self.pull_every < 1 or (self.pull_every > 1 and self.consistency != "asp"):
            raise PlanError(
                f"pull_every={self.pull_every} of server must be a number of steps, and 1 unless consistency=asp: "
                f"workers of {self.consistency} need new weights in every step"
            )
        if self.compress:
            require_p2p_codec(self.compress)
        if self.servers < 1:
            raise PlanError(f"server({self.degree}, servers={self.servers}) has no server; give servers=1 or more")

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"servers={self.servers}", f"consistency={self.consistency}"]
        options += [f"staleness={self.staleness}"] if self.consistency == "ssp" else []
        return format_term("server", self.degree, [*options, *changed_options(self, "compress", "pull_every")])

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step is taken when: a worker pulls weights in the ``sync`` steps."""
        return SyncSchedule(self.pull_every)

    def variant(self, kind: StepKind) -> Server:
        """Return the strategy that builds the program of one kind of step."""
        return replace(self, replies=kind != "local")

    @property
    def is_synchronous(self) -> bool:
        """Whether the servers wait for all workers and update once."""
        return self.consistency == "bsp"

    @property
    def max_intervening_updates(self) -> int:
        """Under ssp, how many updates of others may happen between reading weights and applying their gradient.

        A worker that reads after its c-th push has seen at least c - staleness pushes of every other worker, and none
        of these has pushed more than c + staleness + 1 times when its next push is applied.
        """
        return (self.degree - 1) * (2 * self.staleness + 1)

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be split."""
        return "prefer_blocks" if self.servers > 1 else "whole"

    def num_ranks(self, inner: int) -> int:
        """Return all workers' ranks and the servers."""
        return inner * self.degree + self.servers

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program of the workers' ranks, followed by one rank for each server.

        Raises:
            PlanError: states are sharded, live on servers already, or are tensor-parallel.
        """
        self._check_unsharded(program)
        routing = _ServerRouting(self, program, model)
        workers = replicate(program, self.degree)
        if self.is_synchronous:
            workers = widen_commits(workers, self.degree)
        rank_programs = [routing.worker_program(rank, one) for rank, one in enumerate(workers.rank_programs)]
        rank_programs += [routing.server_program(index) for index in range(self.servers)]
        return Program(tuple(rank_programs))

    def _check_unsharded(self, program: Program) -> None:
        if uses_tree_reduce(program):
            raise PlanError(
                f"{self} comes after tree, where only the first replica updates; write data(...) instead of tree(...), "
                "so that each worker is a group of replicas"
            )
        for _, instruction in program.instructions():
            if isinstance(instruction, ApplyPushes) or receives_grad(instruction):
                raise PlanError(f"{self} is in a plan that has servers already; write one server(...)")
            if isinstance(instruction, Collective) and instruction.op == "reduce_scatter":
                raise PlanError(
                    f"{self} comes after zero, but a push has the whole gradient of a unit and zero shards it; write "
                    "data(...) instead of zero(...): only the servers keep optimizer state"
                )
        if any(rank_program.tp_degree > 1 for rank_program in program.rank_programs):
            bsp = replace(self, consistency="bsp", staleness=0)
            raise PlanError(
                f"{self} comes after tensor, each shard of which needs its own server; write {bsp} * tensor(...)"
            )

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the cost with gradients sent to the servers and weights sent back."""
        server_index = assign({unit: model.unit_bytes(unit) for unit in model.units}, self.servers)
        groups: dict[Unit, list[int]] = {}
        for index, rank in enumerate(inner.ranks):
            for unit in rank.updates:
                groups.setdefault(unit, []).append(index)
        sent = [rank.other_bytes for rank in inner.ranks]
        for unit, group in groups.items():
            size = inner.ranks[group[0]].updates[unit]
            pushed = model.unit_bytes(unit, self.compress) if self.compress else size
            sent[group[0]] += pushed + size * (len(group) - 1) * self.replies
        workers = tuple(
            replace(rank, other_bytes=num_bytes, updates={}) for rank, num_bytes in zip(inner.ranks, sent, strict=True)
        )
        kept = [
            {unit: Fraction(model.unit_bytes(unit)) for unit in model.units if server_index[unit] == index}
            for index in range(self.servers)
        ]
        servers = tuple(
            RankCost(
                (),
                0,
                units,
                other_bytes=self.degree * sum(units.values(), Fraction(0)) * self.replies,
                in_flight=0,
            )
            for units in kept
        )
        staleness = (
            self.max_intervening_updates
            if self.consistency == "ssp"
            else inner.staleness
            if self.is_synchronous
            else None
        )
        replicas = replace(inner, ranks=workers, staleness=staleness).replicate(self.degree)
        return replace(replicas, ranks=replicas.ranks + servers)


def require_p2p_codec(compress: str) -> None:
    """Check that gradients can be sent to a server with a codec.

    Raises:
        PlanError: there is no such codec, or it works only in an all-reduce.
    """
    try:
        spec = find_codec(compress).spec
    except ProgramError as error:
        raise PlanError(str(error)) from None
    if not spec.works_point_to_point:
        raise PlanError(
            f"compress={compress} of server works only in an all-reduce, but each worker pushes to the servers "
            "separately; give fp16, bf16, int8, int4, twobit, sign or topk, or write data(...)"
        )


@dataclass(slots=True)
class _ServerRouting:
    """Which rank pushes which unit to which server.

    Args:
        plan: the strategy.
        program: of one worker.
        model: whose units are assigned to servers.
    """

    plan: Server
    program: Program
    model: ModelSpec
    updating_ranks: dict[Unit, Group] = field(init=False)
    server_index: dict[Unit, int] = field(init=False)

    def __post_init__(self) -> None:
        self.updating_ranks = updating_ranks(self.program)
        self.server_index = assign({unit: self.model.unit_bytes(unit) for unit in self.model.units}, self.plan.servers)

    @property
    def num_worker_ranks(self) -> int:
        """Number of ranks of all workers; those of the servers follow."""
        return self.program.num_ranks * self.plan.degree

    def server_of(self, unit: Unit) -> int:
        """Return the rank that keeps a unit."""
        return self.num_worker_ranks + self.server_index[unit]

    def worker_program(self, rank: int, rank_program: RankProgram) -> RankProgram:
        """Return a worker's rank program with pushes and pulls instead of updates, the last unit first.

        Of a worker's ranks that update a unit, the first communicates with its server and broadcasts the weight to
        the others.
        """
        inner = self.program.num_ranks
        pushes: list[Instruction] = []
        pulls: list[Instruction] = []
        for unit in sorted(updated_units(rank_program.body), reverse=True):
            is_leader = self.updating_ranks[unit][0] == rank % inner
            group = tuple(rank - rank % inner + member for member in self.updating_ranks[unit])
            pushes.append(self.push_instruction(unit) if is_leader else Free(grad(unit)))
            if is_leader and self.plan.replies:
                pulls.append(self.pull_instruction(unit))
            if len(group) > 1 and self.plan.replies:
                pulls.append(Collective("broadcast", weight(unit), group))
        return map_parts(rank_program, lambda body: self.replace_updates(body, pushes, pulls))

    def push_instruction(self, unit: Unit) -> Instruction:
        """Return the instruction with which a worker sends its gradient of a unit."""
        if self.plan.is_synchronous:
            return Send(grad(unit), self.server_of(unit), self.plan.compress)
        op: Literal["push", "push_no_reply"] = "push" if self.plan.replies else "push_no_reply"
        return Push(grad(unit), self.server_of(unit), self.plan.compress, op)

    def pull_instruction(self, unit: Unit) -> Instruction:
        """Return the instruction with which a worker receives the newest weight of a unit."""
        make = Recv if self.plan.is_synchronous else Pull
        return make(weight(unit), self.server_of(unit))

    def replace_updates(
        self, instructions: Sequence[Instruction], pushes: Sequence[Instruction], pulls: Sequence[Instruction]
    ) -> Iterable[Instruction]:
        """Yield the instructions with pushes instead of updates; a bsp worker commits after its push."""
        everyone = tuple(range(self.num_worker_ranks + self.plan.servers))
        for instruction in instructions:
            match instruction:
                case Commit() if self.plan.is_synchronous:
                    yield from (*pushes, Commit(everyone), *pulls)
                case Commit():
                    yield from (instruction, *pushes, *pulls)
                case Update():
                    pass
                case _:
                    yield instruction

    def leading_ranks(self, unit: Unit) -> Group:
        """Return the rank of each worker that communicates with the server of a unit."""
        return tuple(
            worker * self.program.num_ranks + self.updating_ranks[unit][0] for worker in range(self.plan.degree)
        )

    def server_program(self, index: int) -> RankProgram:
        """Return the rank program of a server; except under bsp, one instruction for each set of workers."""
        units = [unit for unit in self.model.units if self.server_index[unit] == index]
        if self.plan.is_synchronous:
            return RankProgram(tuple(self.bsp_server_instructions(units)))
        units_of: dict[Group, list[Unit]] = {}
        for unit in units:
            units_of.setdefault(self.leading_ranks(unit), []).append(unit)
        bound = self.plan.staleness if self.plan.consistency == "ssp" else None
        op: Literal["apply_and_reply", "apply"] = "apply_and_reply" if self.plan.replies else "apply"
        return RankProgram(tuple(ApplyPushes(tuple(kept), workers, bound, op) for workers, kept in units_of.items()))

    def bsp_server_instructions(self, units: Sequence[Unit]) -> Iterable[Instruction]:
        """Yield a server's instructions under bsp: receive all gradients, commit, update, send weights."""
        everyone = tuple(range(self.num_worker_ranks + self.plan.servers))
        last_first = sorted(units, reverse=True)
        for unit in last_first:
            yield from (Recv(grad(unit), rank, self.plan.compress) for rank in self.leading_ranks(unit))
        yield Commit(everyone)
        yield from (Update(unit) for unit in units)
        for unit in last_first:
            yield from (Send(weight(unit), rank) for rank in self.leading_ranks(unit))
