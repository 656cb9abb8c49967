"""``create``: which worker this is, and where its values are kept."""

from __future__ import annotations

from counterpoint.compat.kvstore.face import KVStore
from counterpoint.compat.kvstore.hosted import join_ranks
from counterpoint.compat.kvstore.kinds import Kind, kind_of
from counterpoint.compat.kvstore.local import LocalStore
from counterpoint.compat.kvstore.served import Member, ServedStore, job_of
from counterpoint.errors import LaunchError, PlanError
from counterpoint.launchers.environment import detect
from counterpoint.launchers.variables import kvstore_variables
from counterpoint.server.local import LocalJob


def create(name: str = "local", *, servers: int | None = None, member: Member | None = None) -> KVStore:
    """Return a store.

    Args:
        name: ``local`` or ``device``, for the devices of this process; ``dist_sync``, ``dist_async``,
            ``dist_device_sync`` or ``dist_device_async``, for all ranks that a launcher started, which all call this.
        servers: how many servers a dist store has; ``DMLC_NUM_SERVER``, or one, if not given. They are processes of
            this host, and parts of this process where it is the only worker.
        member: which worker of which job this is, for those who host one themselves.

    Raises:
        PlanError: there is no such store, or other ranks ask for another one.
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
    kind = kind_of(name)
    if not kind.is_dist:
        if servers is not None or member is not None:
            raise PlanError(f"create({name!r}): a store in this process has no servers; create('dist_sync')")
        return KVStore(kind, LocalStore(kind))
    found = _member(kind, servers) if member is None else member
    _require_job(kind, found)
    return KVStore(kind, ServedStore(found))


def _member(kind: Kind, servers: int | None) -> Member:
    variables, environment = kvstore_variables(), detect()
    num_servers = variables.num_servers if servers is None else servers
    if environment is None and variables.role is not None:
        raise LaunchError(
            f"DMLC_ROLE={variables.role}: MXNet's launcher has started this process, whose servers and schedulers are "
            "copies of the script; write `counterpoint run -n 2 train.py` for `launch.py -n 2 -s 1 python train.py`"
        )
    if environment is not None and environment.world_size > 1:
        return join_ranks(environment, kind, num_servers)
    job = job_of(num_workers=1, num_servers=num_servers, is_async=kind.is_async)
    return Member(LocalJob(job).join("worker-0"), 0, 1)


def _require_job(kind: Kind, member: Member) -> None:
    job = member.session.job
    meant = job_of(num_workers=member.num_workers, num_servers=job.num_servers, is_async=kind.is_async)
    if job.consistency != meant.consistency or not 0 <= member.rank < member.num_workers:
        raise PlanError(
            f"create({kind.name!r}) as rank {member.rank} of {member.num_workers} workers of job {job.name}, which "
            f"counts by {job.consistency}: make the job with job_of(num_workers={member.num_workers}, num_servers=..., "
            f"is_async={kind.is_async})"
        )
