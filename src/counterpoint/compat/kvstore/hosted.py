"""Servers for the ranks that a launcher started on this host: rank 0 starts them, and ends them when all have left."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from pathlib import Path

from counterpoint.compat.kvstore.kinds import Kind
from counterpoint.compat.kvstore.served import WAIT_S, Member, job_of
from counterpoint.errors import LaunchError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.launchers.environment import RankEnvironment
from counterpoint.launchers.serving import ServerProcesses, start
from counterpoint.server.hosting import join, read_contact
from counterpoint.server.session import Session
from counterpoint.training.world import open_world

LOOK_S = 0.05


class Stay:
    """A rank's time in a job; it ends with the store, or with the process.

    Args:
        session: of this rank.
        servers: on rank 0, what it has started.
    """

    def __init__(self, session: Session, servers: ServerProcesses | None) -> None:
        self._session, self._servers = session, servers
        atexit.register(self.end)

    def end(self) -> None:
        """This rank has left; the servers are gone when all have, or when this rank has failed."""
        atexit.unregister(self.end)
        session, servers = self._session, self._servers
        if servers is not None and getattr(sys, "last_value", None) is None:
            pause, end = threading.Event(), time.monotonic() + session.job.patience.lease_s
            while any(worker.name != session.name for worker in session.view.workers) and time.monotonic() < end:
                pause.wait(LOOK_S)
        session.close()
        if servers is not None:
            servers.close()


def join_ranks(environment: RankEnvironment, kind: Kind, num_servers: int) -> Member:
    """Return this rank as a worker of a new job, of which all ranks are workers; all of them call this.

    Args:
        environment: what the launcher told.
        kind: of the store.
        num_servers: of the job.

    Raises:
        LaunchError: the ranks are on several hosts, or a server cannot be started.
        PlanError: other ranks ask for another store.
    """
    if environment.local_world_size != environment.world_size:
        raise LaunchError(
            f"create({kind.name!r}) among {environment.world_size} ranks, of which {environment.local_world_size} are "
            "on this host: servers of several hosts are started by `counterpoint serve`; join them, and pass "
            "member=Member(hosting.join(contact, name, key), rank, num_workers)"
        )
    wait_s = WAIT_S if environment.deadline_s is None else environment.deadline_s
    job = job_of(num_workers=environment.world_size, num_servers=num_servers, is_async=kind.is_async, wait_s=wait_s)
    world = open_world(environment, environment.world_size, wait_s)

    def meet(fabric: Fabric) -> Member:
        """Return this rank's membership of servers that rank 0 has started; all ranks come here together."""
        everybody = tuple(range(fabric.num_ranks))
        meant = [str(asked) for asked in fabric.gather_values("kvstore kind", f"{kind.name} {num_servers}", everybody)]
        if len(set(meant)) > 1:
            other = next(rank for rank in everybody if meant[rank] != meant[0])
            raise PlanError(
                f"create: rank 0 asks for a store and servers {meant[0]!r}, rank {other} for {meant[other]!r}; all "
                "ranks call it with the same arguments"
            )
        servers = start(job) if fabric.rank == 0 else None
        found = fabric.gather_values("kvstore servers", str(servers.contact_path) if servers else "", everybody)
        session = join(read_contact(Path(str(found[0]))), f"worker-{fabric.rank}")
        fabric.barrier(everybody)
        return Member(session, fabric.rank, fabric.num_ranks, Stay(session, servers).end)

    return world.run(meet)[0]
