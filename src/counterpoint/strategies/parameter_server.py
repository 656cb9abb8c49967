"""Parameter servers: workers hand gradients to ranks that keep the weights and apply the updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal, TypeAlias, get_args

from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import ModelSpec, Unit
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
from counterpoint.program.rewrite import map_row, replicate, widen_commits
from counterpoint.ps.placement import assign
from counterpoint.strategies.strategy import CostEstimate, Granularity, RankCost
from counterpoint.strategies.sync_schedule import StepKind, SyncSchedule
from counterpoint.strategies.tree_reduce import uses_tree_reduce

ConsistencyModel: TypeAlias = Literal["bsp", "ssp", "asp"]


@dataclass(frozen=True, slots=True)
class Server:
    """Set ``degree`` workers side by side and let ``servers`` more ranks keep and update the weights.

    Under ``bsp`` the servers wait for all workers, add their gradients and update once; under ``asp`` every
    push is an update of its own and its worker goes on with what came out. ``ssp`` is ``asp`` with a bound: a worker is
    given weights only while it has pushed at most ``staleness`` times more often than the slowest, and waits until
    then. A worker may itself be a group of ranks that already share their gradients: its first holder of a unit talks
    to the server.

    Args:
        degree: number of workers along the new axis.
        servers: ranks that keep weights; units go to the one with the fewest bytes.
        consistency: ``bsp``, ``ssp`` or ``asp``.
        staleness: with ssp, how many pushes ahead of the slowest a worker may go on; with 0 all wait for the slowest.
        compress: the code in which gradients travel to the servers: fp16, bf16, int8, twobit:0.5, sign or topk:0.01.
        fetch_every: with asp, a worker pushes in every step and is given weights in every such step only.

    Promise:
        bsp changes no numbers. asp and ssp apply, to weights that other workers have changed meanwhile, the gradient of
        the mean loss over the worker's own samples, none where it has none; the order of arrival is journaled and
        replays exactly. ssp: between reading weights and applying their gradient come at most
        (n-1) (2 staleness + 1) updates of others, which the server checks before it applies any. With ``compress`` what
        is applied is what the gradients have become in the code; each worker keeps what it has not sent and adds it to
        its next gradient. Weights come back as they are.

    Cost:
        Bytes sent per step: each worker its gradients once, in their code; each server its weights once per worker.
        Memory: optimizer state only on the servers; with ``compress`` on each worker what it has not sent, twice.

    Source:
        Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; Li et al., Parameter Server, OSDI 2014.
        Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013 (ssp).
        MXNet's gradient compression, 2018 (twobit).
    """

    degree: int
    servers: int = 1
    consistency: ConsistencyModel = "bsp"
    staleness: int = 0
    compress: str = ""
    fetch_every: int = 1
    replies: bool = True

    axis: ClassVar[str] = "worker"
    splits_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.consistency not in get_args(ConsistencyModel):
            raise PlanError(f"server has the consistencies bsp, ssp and asp, not {self.consistency!r}")
        if self.staleness < 0 or (self.staleness and self.consistency != "ssp"):
            raise PlanError(
                f"staleness={self.staleness} of server is a number of pushes, from 0, and a bound for consistency=ssp; "
                f"{self.consistency} has none: give consistency=ssp, staleness=1, for one"
            )
        if self.fetch_every < 1 or (self.fetch_every > 1 and self.consistency != "asp"):
            raise PlanError(
                f"fetch_every={self.fetch_every} of server is a number of steps, from 1, and 1 but with "
                f"consistency=asp: {self.consistency} lets workers go on by the weights that it gives them"
            )
        if self.compress:
            require_p2p_codec(self.compress)
        if self.servers < 1:
            raise PlanError(
                f"server({self.degree}, servers={self.servers}) keeps its weights nowhere; give servers=1 or more"
            )

    def __str__(self) -> str:
        """Write the strategy as in a plan."""
        options = [f"servers={self.servers}", f"consistency={self.consistency}"]
        options += [f"staleness={self.staleness}"] if self.consistency == "ssp" else []
        options += [f"compress={self.compress}"] if self.compress else []
        options += [f"fetch_every={self.fetch_every}"] if self.fetch_every != 1 else []
        return f"server({', '.join([str(self.degree), *options])})"

    @property
    def sync_schedule(self) -> SyncSchedule:
        """Which kind of step comes when: a worker is given weights where it meets the servers' answer."""
        return SyncSchedule(self.fetch_every)

    def variant(self, kind: StepKind) -> Server:
        """Return the strategy that makes the program of one kind of step."""
        return replace(self, replies=kind != "local")

    @property
    def is_synchronous(self) -> bool:
        """Whether the servers wait for all workers and update once."""
        return self.consistency == "bsp"

    @property
    def max_intervening_updates(self) -> int:
        """Under ssp, how many updates of others may come between reading weights and applying their gradient.

        A worker that reads after its c-th push has seen c - staleness pushes of every other one, and none of these has
        pushed more than c + staleness + 1 times when its next push is applied.
        """
        return (self.degree - 1) * (2 * self.staleness + 1)

    @property
    def granularity(self) -> Granularity:
        """How finely the model should be cut."""
        return "prefer_blocks" if self.servers > 1 else "whole"

    def num_ranks(self, inner: int) -> int:
        """Return all workers' ranks and the servers."""
        return inner * self.degree + self.servers

    def split_model(self, model: ModelSpec) -> ModelSpec:
        """Return the model as it is."""
        return model

    def lower(self, program: Program, model: ModelSpec) -> Program:
        """Return the program for the workers' ranks, then one row for each server.

        Raises:
            PlanError: the weights are shared out, served or sliced already.
        """
        if uses_tree_reduce(program):
            raise PlanError(
                f"{self} stands behind tree, of whose copies only the first updates; write data(...) in its place, so "
                "that each worker is a group of replicas"
            )
        for _, word in program.instructions():
            if isinstance(word, ApplyPushes | Recv) and (isinstance(word, ApplyPushes) or word.tensor.name == "grad"):
                raise PlanError(f"{self} stands in a plan that has servers already; write one server(...)")
            if isinstance(word, Collective) and word.op == "reduce_scatter":
                raise PlanError(
                    f"{self} stands behind zero, whose ranks hold shares that no single push could carry; write "
                    "data(...) instead of zero(...), the servers keep the optimizer state anyway"
                )
        if any(row.tp_degree > 1 for row in program.rank_programs):
            bsp = replace(self, consistency="bsp", staleness=0)
            raise PlanError(f"{self} stands behind tensor, whose slices need a server each; write {bsp} * tensor(...)")
        shop = _ServerRouting(self, program, model)
        workers = replicate(program, self.degree)
        if self.is_synchronous:
            workers = widen_commits(workers, self.degree)
        rows = [shop.worker_program(rank, row) for rank, row in enumerate(workers.rank_programs)]
        rows += [shop.server_program(index) for index in range(self.servers)]
        return Program(tuple(rows))

    def estimate_cost(self, inner: CostEstimate, model: ModelSpec) -> CostEstimate:
        """Return the forecast with gradients going to the servers and weights coming back."""
        owners = assign({unit: model.unit_bytes(unit) for unit in model.units}, self.servers)
        groups: dict[Unit, list[int]] = {}
        for index, rank in enumerate(inner.ranks):
            for unit in rank.updates:
                groups.setdefault(unit, []).append(index)
        sent = [rank.other_bytes for rank in inner.ranks]
        for unit, holders in groups.items():
            size = inner.ranks[holders[0]].updates[unit]
            pushed = model.unit_bytes(unit, self.compress) if self.compress else size
            sent[holders[0]] += pushed + size * (len(holders) - 1) * self.replies
        workers = tuple(
            replace(rank, other_bytes=more, updates={}) for rank, more in zip(inner.ranks, sent, strict=True)
        )
        kept = [
            {unit: Fraction(model.unit_bytes(unit)) for unit in model.units if owners[unit] == index}
            for index in range(self.servers)
        ]
        servers = tuple(
            RankCost(
                (), 0, units, other_bytes=self.degree * sum(units.values(), Fraction(0)) * self.replies, in_flight=0
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
        copies = replace(inner, ranks=workers, staleness=staleness).replicate(self.degree)
        return replace(copies, ranks=copies.ranks + servers)


def require_p2p_codec(compress: str) -> None:
    """Check that gradients can travel to a server in a code.

    Raises:
        PlanError: there is no such code, or it is about a sum.
    """
    try:
        kind = find_codec(compress).spec
    except ProgramError as wrong:
        raise PlanError(str(wrong)) from None
    if not kind.works_point_to_point:
        raise PlanError(
            f"compress={compress} of server is about what all workers sum together, but each sends to the servers by "
            "itself; give fp16, bf16, int8, twobit, sign or topk, or write data(...)"
        )


@dataclass(slots=True)
class _ServerRouting:
    """Who pushes what to whom."""

    plan: Server
    program: Program
    model: ModelSpec
    updating_ranks: dict[Unit, Group] = field(init=False)
    server_index: dict[Unit, int] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[Unit, list[int]] = {}
        for rank, row in enumerate(self.program.rank_programs):
            for word in row.body:
                if isinstance(word, Update):
                    found.setdefault(word.unit, []).append(rank)
        self.updating_ranks = {unit: tuple(ranks) for unit, ranks in found.items()}
        self.server_index = assign({unit: self.model.unit_bytes(unit) for unit in self.model.units}, self.plan.servers)

    @property
    def num_worker_ranks(self) -> int:
        """The ranks of all workers together; those of the servers follow."""
        return self.program.num_ranks * self.plan.degree

    def server_of(self, unit: Unit) -> int:
        """Return the rank that keeps a unit."""
        return self.num_worker_ranks + self.server_index[unit]

    def worker_program(self, rank: int, row: RankProgram) -> RankProgram:
        """Return a worker's row with servers instead of updates, the last unit first.

        Of the ranks of a worker that hold a unit, the first talks to its server and hands on the weight to the others.
        """
        inner = self.program.num_ranks
        units = [word.unit for word in row.body if isinstance(word, Update)]
        leads = {unit: self.updating_ranks[unit][0] == rank % inner for unit in units}
        give: list[Instruction] = []
        take: list[Instruction] = []
        for unit in sorted(units, reverse=True):
            group = tuple(rank - rank % inner + member for member in self.updating_ranks[unit])
            give.append(self.push_instruction(unit) if leads[unit] else Free(grad(unit)))
            if leads[unit] and self.plan.replies:
                take.append(self.pull_instruction(unit))
            if len(group) > 1 and self.plan.replies:
                take.append(Collective("broadcast", weight(unit), group))
        return map_row(row, lambda words: self.replace_updates(words, give, take))

    def push_instruction(self, unit: Unit) -> Instruction:
        """Return the word with which a worker gives its gradient of a unit away."""
        if self.plan.is_synchronous:
            return Send(grad(unit), self.server_of(unit), self.plan.compress)
        return Push(
            grad(unit), self.server_of(unit), self.plan.compress, "push" if self.plan.replies else "push_no_reply"
        )

    def pull_instruction(self, unit: Unit) -> Instruction:
        """Return the word with which a worker gets the newest weight of a unit."""
        make = Recv if self.plan.is_synchronous else Pull
        return make(weight(unit), self.server_of(unit))

    def replace_updates(
        self, words: Sequence[Instruction], pushes: Sequence[Instruction], pulls: Sequence[Instruction]
    ) -> Iterable[Instruction]:
        """Yield the words with pushes instead of updates; a bsp worker commits with the servers after its push."""
        everyone = tuple(range(self.num_worker_ranks + self.plan.servers))
        for word in words:
            match word:
                case Commit() if self.plan.is_synchronous:
                    yield from (*pushes, Commit(everyone), *pulls)
                case Commit():
                    yield from (word, *pushes, *pulls)
                case Update():
                    pass
                case _:
                    yield word

    def leading_ranks(self, unit: Unit) -> Group:
        """Return the rank of each worker that talks to the server about a unit."""
        return tuple(copy * self.program.num_ranks + self.updating_ranks[unit][0] for copy in range(self.plan.degree))

    def server_program(self, index: int) -> RankProgram:
        """Return what a server does for the units it keeps; without bsp, one word for each set of workers."""
        units = [unit for unit in self.model.units if self.server_index[unit] == index]
        if self.plan.is_synchronous:
            return RankProgram(tuple(self.bsp_server_instructions(units)))
        together: dict[Group, list[Unit]] = {}
        for unit in units:
            together.setdefault(self.leading_ranks(unit), []).append(unit)
        bound = self.plan.staleness if self.plan.consistency == "ssp" else None
        verb: Literal["apply_and_reply", "apply"] = "apply_and_reply" if self.plan.replies else "apply"
        return RankProgram(tuple(ApplyPushes(tuple(kept), workers, bound, verb) for workers, kept in together.items()))

    def bsp_server_instructions(self, units: Sequence[Unit]) -> Iterable[Instruction]:
        """Yield a server's words under bsp: it takes all gradients, commits with everybody, updates, sends weights."""
        everyone = tuple(range(self.num_worker_ranks + self.plan.servers))
        latest_first = sorted(units, reverse=True)
        yield from (
            Recv(grad(unit), rank, self.plan.compress) for unit in latest_first for rank in self.leading_ranks(unit)
        )
        yield Commit(everyone)
        yield from (Update(unit) for unit in units)
        yield from (Send(weight(unit), rank) for unit in latest_first for rank in self.leading_ranks(unit))
