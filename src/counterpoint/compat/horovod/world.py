"""The one connection of this process: Horovod's functions act on the process, so this is the only state they share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from counterpoint.compat.horovod.errors import as_horovod_raises
from counterpoint.compat.horovod.handles import Call, Outstanding, Part, Pending, Result
from counterpoint.compat.horovod.joining import Joining
from counterpoint.compat.horovod.timeline import Timeline
from counterpoint.errors import LaunchError, PlanError
from counterpoint.fabric.board import Board
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.launchers.environment import detect
from counterpoint.launchers.variables import horovod_variables
from counterpoint.training.world import open_world

DEADLINE_S = 600.0  # Horovod waits for ever; scripts may save or evaluate on one rank for a while


@dataclass(frozen=True, slots=True)
class Places:
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
        self, fabric: Fabric, places: Places, fusion_bytes: int, board: Callable[[], Board | None] = lambda: None
    ) -> None:
        self.fabric = fabric
        self.places = places
        self.fusion_bytes = fusion_bytes
        self.everybody: Group = tuple(range(fabric.num_ranks))
        self.sets: dict[int, Group] = {0: self.everybody}
        self.num_sets = 1
        self.mirrored: dict[str, Tensor] = {}
        self.outstanding = Outstanding(self._wait)
        self.joining = Joining(fabric, board, self.outstanding.of_all_ranks)
        self._turn = 0

    def start(self, call: Call, works: Callable[[], Sequence[Work]], finish: Callable[[], Result]) -> Pending:
        """Return the handle of an operation that has been started.

        Args:
            call: what it is.
            works: starts the fabric's collectives.
            finish: returns the result, when they are complete.

        Raises:
            HorovodInternalError: another rank failed, or one that has joined cannot take part.
        """
        turn = -1
        if call.group == self.everybody:
            turn = self._turn
            self._turn += 1
        with as_horovod_raises(), torch.no_grad():
            self.joining.announce(call, turn)
            return self.outstanding.add(Pending(call, works(), finish, turn))

    def numbers(self, what: str, name: str, own: Sequence[int], group: Group) -> list[list[int]]:
        """Return every member's numbers, when they are there; all give equally many."""
        count = len(own)
        whole = torch.zeros(count * len(group), dtype=torch.int64)
        bounds = [count * place for place in range(len(group) + 1)]
        place = group.index(self.fabric.rank)
        whole[bounds[place] : bounds[place + 1]] = torch.tensor(own, dtype=torch.int64)
        call = Call(what, name, group)
        handle = self.start(
            call, lambda: [self.fabric.all_gather(f"{what} of {name}", whole, bounds, group)], lambda: whole
        )
        self.outstanding.finish(handle)
        return [[int(number) for number in row] for row in whole.view(len(group), count).tolist()]

    def join(self) -> int:
        """Return the rank that joined last: this rank has nothing more to give, and all have come to this point."""
        self.outstanding.finish_all()
        with as_horovod_raises():
            last, self._turn = self.joining.join(self._turn, self._mirror)
        return last

    @torch.no_grad()
    def _mirror(self, parts: Sequence[Part]) -> None:
        """Take part with zeros; what becomes of whole numbers is kept, for ranks agree by them."""
        works: list[Work] = []
        for part in parts:
            dtype = getattr(torch, part.dtype)
            if part.verb == "gather":
                size = torch.Size(part.shape).numel()
                bounds = [size * place for place in range(len(self.everybody) + 1)]
                rows = torch.zeros(bounds[-1], dtype=dtype)
                works.append(self.fabric.all_gather(part.label, rows, bounds, self.everybody))
            else:
                zeros = torch.zeros(part.shape, dtype=dtype)
                works.append(self.fabric.all_reduce(part.label, zeros, self.everybody, part.verb))
                if part.label.startswith(AGREEMENT):
                    self.mirrored[part.label] = zeros
        for work in works:
            work.wait()

    def _wait(self, work: Work, call: Call) -> None:
        self.joining.wait(work, call)

    def close_timeline(self) -> None:
        """The timeline is complete; nothing where there is none."""
        timeline, self.outstanding.timeline = self.outstanding.timeline, None
        if timeline is not None:
            timeline.close()


AGREEMENT = "the order of gradients"


@dataclass(slots=True)
class Slot:
    """Where the world of this process is kept; it changes with ``init`` and ``shutdown``.

    Attributes:
        world: the one that functions act on.
        past: those that were left; what they had under way may still use their tensors.
    """

    world: HorovodWorld | None = None
    past: list[HorovodWorld] = field(default_factory=list)


PROCESS = Slot()


def open_process_world() -> HorovodWorld:
    """Return the world of the job that this process is a rank of; of one rank where no launcher started it."""
    environment = detect()
    variables = horovod_variables()
    size = 1 if environment is None else environment.world_size
    fabric = open_world(environment, size, DEADLINE_S).fabrics[0]
    own = (0, 1, 0) if environment is None else (environment.local_rank, environment.local_world_size, 0)
    if size == 1 or environment is None:
        world = HorovodWorld(fabric, Places((0,), (1,), 0), variables.fusion_bytes)
    else:
        host, kept = environment.master_addr, None
        if fabric.rank == 0:
            kept = _keep(host, fabric.deadline_s)
            own = (*own[:2], kept.port if kept is not None else 0)
        told: list[Any] = fabric.gather_values("places of ranks", [*own, variables.fusion_bytes], tuple(range(size)))
        local_ranks, local_sizes, ports, fusion = zip(*told, strict=True)
        places = Places(local_ranks, local_sizes, fabric.rank)
        board = functools.cache(lambda: kept if kept is not None else _visit(host, ports[0], fabric.deadline_s))
        world = HorovodWorld(fabric, places, fusion[0], board)
    if variables.timeline is not None and fabric.rank == 0:
        world.outstanding.timeline = Timeline(variables.timeline, fabric.rank)
    return world


def _keep(host: str, deadline_s: float) -> Board | None:
    """Return a new board; None where this host cannot listen at the address by which it is known."""
    try:
        return Board.keep(host, deadline_s)
    except LaunchError:
        return None


def _visit(host: str, port: int, deadline_s: float) -> Board | None:
    """Return the board of rank 0; None where there is none, or that rank has ended, which the fabric will tell."""
    if port == 0:
        return None
    try:
        return Board.visit(host, port, deadline_s)
    except RuntimeError:
        return None


def the_world() -> HorovodWorld:
    """Return the world of this process.

    Raises:
        PlanError: there is none yet, or no more.
    """
    if PROCESS.world is None:
        raise PlanError(
            "Horovod has not been initialized; its functions need to know the other ranks: call hvd.init() first"
        )
    return PROCESS.world
