"""``create``: make a store, and connect the ranks of a launcher to servers that rank 0 starts."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from pathlib import Path

from counterpoint.compat.kvstore.kvstore import KVStore
from counterpoint.compat.kvstore.local_store import LocalKVStore
from counterpoint.compat.kvstore.server_store import WAIT_S, KVStoreMember, ServerStore, make_job
from counterpoint.compat.kvstore.store_types import StoreType, parse_store_type
from counterpoint.errors import LaunchError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.launchers.server_processes import ServerProcesses, start_servers
from counterpoint.launchers.variables import kvstore_variables
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.process import join, read_job_file
from counterpoint.ps.session import Session
from counterpoint.training.distributed_world import open_world

POLL_S = 0.05


class RankMembership:
    """Membership of a rank in a job; it ends with the store, or with the process.

    Args:
        session: of this rank.
        servers: on rank 0, those that it has started.
    """

    def __init__(self, session: Session, servers: ServerProcesses | None) -> None:
        self._session, self._servers = session, servers
        atexit.register(self.end)

    def end(self) -> None:
        """Leave the job; rank 0 stops the servers after all ranks have left, or at once if it failed."""
        atexit.unregister(self.end)
        session, servers = self._session, self._servers
        if servers is not None and getattr(sys, "last_value", None) is None:
            never_set, deadline = threading.Event(), time.monotonic() + session.job.timeouts.lease_s
            while any(worker.name != session.name for worker in session.view.workers) and time.monotonic() < deadline:
                never_set.wait(POLL_S)
        session.close()
        if servers is not None:
            servers.close()


def join_ranks(environment: RankEnvironment, store_type: StoreType, num_servers: int) -> KVStoreMember:
    """Return this rank as a worker of a new job that all ranks join; all ranks call this.

    Args:
        environment: of this rank.
        store_type: of the store.
        num_servers: of the job.

    Raises:
        LaunchError: the ranks are on several hosts, or a server cannot be started.
        PlanError: the ranks ask for different stores.
    """
    if environment.local_world_size != environment.world_size:
        raise LaunchError(
            f"create({store_type.name!r}) with {environment.world_size} ranks, {environment.local_world_size} of them "
            "on "
            "this host: it starts servers on one host only; start them with `counterpoint serve`, and pass "
            "member=KVStoreMember(ps.process.join(job_file, name, key), rank, num_workers)"
        )
    wait_s = WAIT_S if environment.timeout_s is None else environment.timeout_s
    job = make_job(
        num_workers=environment.world_size, num_servers=num_servers, is_async=store_type.is_async, wait_s=wait_s
    )
    world = open_world(environment, environment.world_size, wait_s)

    def join_job(fabric: Fabric) -> KVStoreMember:
        """Join the servers that rank 0 has started; all ranks run this together."""
        all_ranks = tuple(range(fabric.num_ranks))
        requests = [
            str(request)
            for request in fabric.gather_values("kvstore kind", f"{store_type.name} {num_servers}", all_ranks)
        ]
        if len(set(requests)) > 1:
            other = next(rank for rank in all_ranks if requests[rank] != requests[0])
            raise PlanError(
                f"create: rank 0 asks for a store and servers {requests[0]!r}, rank {other} for {requests[other]!r}; "
                "all "
                "ranks must pass the same arguments"
            )
        servers = start_servers(job) if fabric.rank == 0 else None
        job_files = fabric.gather_values("kvstore servers", str(servers.contact_path) if servers else "", all_ranks)
        session = join(read_job_file(Path(str(job_files[0]))), f"worker-{fabric.rank}")
        fabric.barrier(all_ranks)
        return KVStoreMember(session, fabric.rank, fabric.num_ranks, RankMembership(session, servers).end)

    return world.run(join_job)[0]


def create(name: str = "local", *, servers: int | None = None, member: KVStoreMember | None = None) -> KVStore:
    """Return a new store.

    Args:
        name: ``local`` or ``device``, for the devices of this process; ``dist_sync``, ``dist_async``,
            ``dist_device_sync`` or ``dist_device_async``, for all ranks of a launcher, which all call this.
        servers: number of servers of a dist store; ``DMLC_NUM_SERVER``, or 1, by default. They are processes on this
            host, or in this process if it is the only worker.
        member: this worker's membership in an existing job.

    Raises:
        PlanError: the type is unknown, or the ranks ask for different stores.
        LaunchError: servers cannot be started, or ranks are on several hosts.

    Example:
        >>> import torch
        >>> kv = create("local")
        >>> kv.init(3, torch.ones(2, 3) * 2)
        >>> a = torch.zeros(2, 3)
        >>> kv.pull(3, out=a)
        >>> a
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    kind = parse_store_type(name)
    if not kind.is_dist:
        if servers is not None or member is not None:
            raise PlanError(f"create({name!r}): a store in this process has no servers; use create('dist_sync')")
        return KVStore(kind, LocalKVStore(kind))
    membership = _find_member(kind, servers) if member is None else member
    _check_job(kind, membership)
    return KVStore(kind, ServerStore(membership))


def _find_member(store_type: StoreType, servers: int | None) -> KVStoreMember:
    variables, environment = kvstore_variables(), detect()
    num_servers = variables.num_servers if servers is None else servers
    if environment is None and variables.role is not None:
        raise LaunchError(
            f"DMLC_ROLE={variables.role}: this process was started by MXNet's launcher, which is not supported; "
            "use `counterpoint run -n 2 train.py` instead of `launch.py -n 2 -s 1 python train.py`"
        )
    if environment is not None and environment.world_size > 1:
        return join_ranks(environment, store_type, num_servers)
    job = make_job(num_workers=1, num_servers=num_servers, is_async=store_type.is_async)
    return KVStoreMember(LocalJob(job).join("worker-0"), 0, 1)


def _check_job(store_type: StoreType, member: KVStoreMember) -> None:
    job = member.session.job
    expected = make_job(num_workers=member.num_workers, num_servers=job.num_servers, is_async=store_type.is_async)
    if job.consistency != expected.consistency or not 0 <= member.rank < member.num_workers:
        raise PlanError(
            f"create({store_type.name!r}) as rank {member.rank} of {member.num_workers} workers of job {job.name}, "
            "which "
            f"counts by {job.consistency}: make the job with make_job(num_workers={member.num_workers}, "
            "num_servers=..., "
            f"is_async={store_type.is_async})"
        )
