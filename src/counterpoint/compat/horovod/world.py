"""The state that Horovod's functions share in a process: one connection to the other ranks."""

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
from counterpoint.errors import LaunchError, PeerError, PlanError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.shared_store import SharedStore
from counterpoint.launchers.environment import detect, read_job_key
from counterpoint.launchers.variables import horovod_variables
from counterpoint.rpc.job_key import JobKey, new_key
from counterpoint.training.distributed_world import open_world

TIMEOUT_S = 600.0  # Horovod has no timeout; scripts may save or evaluate on one rank for a while


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Placement of the ranks on hosts.

    Args:
        local_ranks: index of each rank on its host.
        local_sizes: number of ranks on the host of each rank.
        rank: this rank.
    """

    local_ranks: tuple[int, ...]
    local_sizes: tuple[int, ...]
    rank: int

    @property
    def cross_ranks(self) -> list[int]:
        """The ranks with this rank's local rank."""
        local_rank = self.local_ranks[self.rank]
        return [rank for rank, other_local_rank in enumerate(self.local_ranks) if other_local_rank == local_rank]


class HorovodWorld:
    """One rank's connection to the others, its process sets and its pending operations.

    Args:
        fabric: of this rank.
        topology: of all ranks.
        fusion_bytes: maximum size of a gradient bucket.
        open_store: opens the store of all ranks; returns None if there is none.
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
        """Start an operation and return its handle.

        Args:
            request: of the operation.
            works: starts the fabric's collectives.
            finish: returns the result after they are complete.

        Raises:
            HorovodInternalError: another rank failed, or a joined rank cannot take part.
        """
        sequence = -1
        if request.group == self.all_ranks:
            sequence = self._next_sequence
            self._next_sequence += 1
        with translate_peer_errors(), torch.no_grad():
            self.join_state.announce(request, sequence)
            return self.handles.add(HorovodHandle(request, works(), finish, sequence))

    def all_gather_ints(self, operation: str, name: str, local: Sequence[int], group: Group) -> list[list[int]]:
        """Return every member's ints; all members pass the same number of them."""
        count = len(local)
        gathered = torch.zeros(count * len(group), dtype=torch.int64)
        bounds = [count * position for position in range(len(group) + 1)]
        position = group.index(self.fabric.rank)
        gathered[bounds[position] : bounds[position + 1]] = torch.tensor(local, dtype=torch.int64)
        call = OpRequest(operation, name, group)
        handle = self.start(
            call, lambda: [self.fabric.all_gather(f"{operation} of {name}", gathered, bounds, group)], lambda: gathered
        )
        self.handles.finish(handle)
        return [[int(number) for number in row] for row in gathered.view(len(group), count).tolist()]

    def join(self) -> int:
        """Wait for all pending operations, then take part with zeros until all have joined; return the last to join."""
        self.handles.finish_all()
        with translate_peer_errors():
            last, self._next_sequence = self.join_state.join(self._next_sequence, self._contribute_zeros)
        return last

    @torch.no_grad()
    def _contribute_zeros(self, collectives: Sequence[JoinableCollective]) -> None:
        """Take part with zeros; keep the reduced bucket orders, which this rank needs later."""
        works: list[Work] = []
        for collective in collectives:
            dtype = getattr(torch, collective.dtype)
            if collective.op == "gather":
                size = torch.Size(collective.shape).numel()
                bounds = [size * index for index in range(len(self.all_ranks) + 1)]
                rows = torch.zeros(bounds[-1], dtype=dtype)
                works.append(self.fabric.all_gather(collective.label, rows, bounds, self.all_ranks))
            else:
                zeros = torch.zeros(collective.shape, dtype=dtype)
                works.append(self.fabric.all_reduce(collective.label, zeros, self.all_ranks, collective.op))
                if collective.label.startswith(BUCKET_ORDER_LABEL):
                    self.joined_results[collective.label] = zeros
        for work in works:
            work.wait()

    def _wait_for_work(self, work: Work, call: OpRequest) -> None:
        self.join_state.wait(work, call)

    def close_timeline(self) -> None:
        """Complete the timeline, if there is one."""
        timeline = self.handles.stop_timeline()
        if timeline is not None:
            timeline.close()


BUCKET_ORDER_LABEL = "the order of gradients"


@dataclass(slots=True)
class ProcessState:
    """The world of this process, set by ``init`` and ``shutdown``.

    Attributes:
        world: used by all functions.
        closed_worlds: earlier worlds; their pending operations may still use their tensors.
    """

    world: HorovodWorld | None = None
    closed_worlds: list[HorovodWorld] = field(default_factory=list)


PROCESS = ProcessState()


def open_process_world() -> HorovodWorld:
    """Return the world of this process's job; of one rank without a launcher."""
    environment = detect()
    variables = horovod_variables()
    size = 1 if environment is None else environment.world_size
    fabric = open_world(environment, size, TIMEOUT_S).fabrics[0]
    local = (0, 1, 0) if environment is None else (environment.local_rank, environment.local_world_size, 0)
    if size == 1 or environment is None:
        world = HorovodWorld(fabric, RankTopology((0,), (1,), 0), variables.fusion_bytes)
    else:
        host, key, served_store = environment.master_addr, read_job_key(environment), None
        if fabric.rank == 0:
            key = key or new_key()
            served_store = _serve_store(host, key)
            local = (*local[:2], served_store.port if served_store is not None else 0)
        own_key = "" if environment.key_file is not None or key is None else key.secret.hex()
        gathered: list[Any] = fabric.gather_values(
            "topology of ranks", [*local, variables.fusion_bytes, own_key], tuple(range(size))
        )
        local_ranks, local_sizes, ports, fusion, keys = zip(*gathered, strict=True)
        store_key = key or JobKey(bytes.fromhex(keys[0]))
        topology = RankTopology(local_ranks, local_sizes, fabric.rank)
        open_store = functools.cache(
            lambda: (
                served_store
                if served_store is not None
                else _connect_store(host, ports[0], store_key, fabric.timeout_s)
            )
        )
        world = HorovodWorld(fabric, topology, fusion[0], open_store)
    if variables.timeline is not None and fabric.rank == 0:
        world.handles.start_timeline(HorovodTimeline(variables.timeline, fabric.rank))
    return world


def _serve_store(host: str, key: JobKey) -> SharedStore | None:
    """Return a new store; None if this host cannot listen at its advertised address."""
    try:
        return SharedStore.serve(host, key)
    except LaunchError:
        return None


def _connect_store(host: str, port: int, key: JobKey, timeout_s: float) -> SharedStore | None:
    """Return rank 0's store; None if there is none, or rank 0 has exited, which the fabric reports."""
    if port == 0:
        return None
    try:
        return SharedStore.connect(host, port, key, timeout_s)
    except PeerError:
        return None


def current_world() -> HorovodWorld:
    """Return the world of this process.

    Raises:
        PlanError: ``init`` was not called, or ``shutdown`` was.
    """
    if PROCESS.world is None:
        raise PlanError("Horovod is not initialized; call hvd.init() first")
    return PROCESS.world
