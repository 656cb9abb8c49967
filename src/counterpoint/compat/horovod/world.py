"""The one connection of this process: Horovod's functions act on the process, so this is the only state they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from counterpoint.compat.horovod.errors import translate_peer_errors
from counterpoint.compat.horovod.handles import HandleTable, HorovodHandle, JoinableCollective, OpRequest, Result
from counterpoint.compat.horovod.join import JoinState
from counterpoint.compat.horovod.timeline import HorovodTimeline
from counterpoint.errors import LaunchError, PlanError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.shared_store import SharedStore
from counterpoint.launchers.environment import detect
from counterpoint.launchers.variables import horovod_variables
from counterpoint.training.distributed_world import open_world

DEADLINE_S = 600.0  # Horovod waits for ever; scripts may save or evaluate on one rank for a while


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Where each rank is: its place on its host, and how many are there.

    Args:
        local_ranks: by rank.
        local_sizes: by rank.
        rank: the own rank.
    """

    local_ranks: tuple[int, ...]
    local_sizes: tuple[int, ...]
    rank: int

    @property
    def cross_ranks(self) -> list[int]:
        """The ranks that have this one's place on their hosts."""
        own = self.local_ranks[self.rank]
        return [rank for rank, place in enumerate(self.local_ranks) if place == own]


class HorovodWorld:
    """One rank's connection to the others, its process sets and what is under way.

    Args:
        fabric: of this rank.
        places: of all ranks.
        fusion_bytes: the largest bucket of gradients.
        board: opens the board of all ranks; None where they need none.
    """

    def __init__(
        self,
        fabric: Fabric,
        topology: RankTopology,
        fusion_bytes: int,
        open_store: Callable[[], SharedStore | None] = lambda: None,
    ) -> None:
        self.fabric = fabric
        self.topology = topology
        self.fusion_bytes = fusion_bytes
        self.all_ranks: Group = tuple(range(fabric.num_ranks))
        self.process_sets: dict[int, Group] = {0: self.all_ranks}
        self.next_process_set_id = 1
        self.joined_results: dict[str, Tensor] = {}
        self.handles = HandleTable(self._wait_for_work)
        self.join_state = JoinState(fabric, open_store, self.handles.global_handles)
        self._next_sequence = 0

    def start(
        self, request: OpRequest, works: Callable[[], Sequence[Work]], finish: Callable[[], Result]
    ) -> HorovodHandle:
        """Return the handle of an operation that has been started.

        Args:
            call: what it is.
            works: starts the fabric's collectives.
            finish: returns the result, when they are complete.

        Raises:
            HorovodInternalError: another rank failed, or one that has joined cannot take part.
        """
        turn = -1
        if request.group == self.all_ranks:
            turn = self._next_sequence
            self._next_sequence += 1
        with translate_peer_errors(), torch.no_grad():
            self.join_state.announce(request, turn)
            return self.handles.add(HorovodHandle(request, works(), finish, turn))

    def all_gather_ints(self, what: str, name: str, local: Sequence[int], group: Group) -> list[list[int]]:
        """Return every member's numbers, when they are there; all give equally many."""
        count = len(local)
        whole = torch.zeros(count * len(group), dtype=torch.int64)
        bounds = [count * place for place in range(len(group) + 1)]
        place = group.index(self.fabric.rank)
        whole[bounds[place] : bounds[place + 1]] = torch.tensor(local, dtype=torch.int64)
        call = OpRequest(what, name, group)
        handle = self.start(
            call, lambda: [self.fabric.all_gather(f"{what} of {name}", whole, bounds, group)], lambda: whole
        )
        self.handles.finish(handle)
        return [[int(number) for number in row] for row in whole.view(len(group), count).tolist()]

    def join(self) -> int:
        """Return the rank that joined last: this rank has nothing more to give, and all have come to this point."""
        self.handles.finish_all()
        with translate_peer_errors():
            last, self._next_sequence = self.join_state.join(self._next_sequence, self._contribute_zeros)
        return last

    @torch.no_grad()
    def _contribute_zeros(self, parts: Sequence[JoinableCollective]) -> None:
        """Take part with zeros; what becomes of whole numbers is kept, for ranks agree by them."""
        works: list[Work] = []
        for part in parts:
            dtype = getattr(torch, part.dtype)
            if part.op == "gather":
                size = torch.Size(part.shape).numel()
                bounds = [size * place for place in range(len(self.all_ranks) + 1)]
                rows = torch.zeros(bounds[-1], dtype=dtype)
                works.append(self.fabric.all_gather(part.label, rows, bounds, self.all_ranks))
            else:
                zeros = torch.zeros(part.shape, dtype=dtype)
                works.append(self.fabric.all_reduce(part.label, zeros, self.all_ranks, part.op))
                if part.label.startswith(BUCKET_ORDER_LABEL):
                    self.joined_results[part.label] = zeros
        for work in works:
            work.wait()

    def _wait_for_work(self, work: Work, call: OpRequest) -> None:
        self.join_state.wait(work, call)

    def close_timeline(self) -> None:
        """The timeline is complete; nothing where there is none."""
        timeline, self.handles.timeline = self.handles.timeline, None
        if timeline is not None:
            timeline.close()


BUCKET_ORDER_LABEL = "the order of gradients"


@dataclass(slots=True)
class ProcessState:
    """Where the world of this process is kept; it changes with ``init`` and ``shutdown``.

    Attributes:
        world: the one that functions act on.
        past: those that were left; what they had under way may still use their tensors.
    """

    world: HorovodWorld | None = None
    closed_worlds: list[HorovodWorld] = field(default_factory=list)


PROCESS = ProcessState()


def open_process_world() -> HorovodWorld:
    """Return the world of the job that this process is a rank of; of one rank where no launcher started it."""
    environment = detect()
    variables = horovod_variables()
    size = 1 if environment is None else environment.world_size
    fabric = open_world(environment, size, DEADLINE_S).fabrics[0]
    own = (0, 1, 0) if environment is None else (environment.local_rank, environment.local_world_size, 0)
    if size == 1 or environment is None:
        world = HorovodWorld(fabric, RankTopology((0,), (1,), 0), variables.fusion_bytes)
    else:
        host, kept = environment.master_addr, None
        if fabric.rank == 0:
            kept = _serve_store(host, fabric.timeout_s)
            own = (*own[:2], kept.port if kept is not None else 0)
        told: list[Any] = fabric.gather_values("places of ranks", [*own, variables.fusion_bytes], tuple(range(size)))
        local_ranks, local_sizes, ports, fusion = zip(*told, strict=True)
        places = RankTopology(local_ranks, local_sizes, fabric.rank)
        board = functools.cache(lambda: kept if kept is not None else _connect_store(host, ports[0], fabric.timeout_s))
        world = HorovodWorld(fabric, places, fusion[0], board)
    if variables.timeline is not None and fabric.rank == 0:
        world.handles.timeline = HorovodTimeline(variables.timeline, fabric.rank)
    return world


def _serve_store(host: str, deadline_s: float) -> SharedStore | None:
    """Return a new board; None where this host cannot listen at the address by which it is known."""
    try:
        return SharedStore.serve(host, deadline_s)
    except LaunchError:
        return None


def _connect_store(host: str, port: int, deadline_s: float) -> SharedStore | None:
    """Return the board of rank 0; None where there is none, or that rank has ended, which the fabric will tell."""
    if port == 0:
        return None
    try:
        return SharedStore.connect(host, port, deadline_s)
    except RuntimeError:
        return None


def current_world() -> HorovodWorld:
    """Return the world of this process.

    Raises:
        PlanError: there is none yet, or no more.
    """
    if PROCESS.world is None:
        raise PlanError(
            "Horovod has not been initialized; its functions need to know the other ranks: call hvd.init() first"
        )
    return PROCESS.world
