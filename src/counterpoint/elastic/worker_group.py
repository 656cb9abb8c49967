"""Rendezvous of the workers of a job without servers: all of a generation, at the store of the oldest member."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from counterpoint.errors import PeerError, PlanError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.rendezvous import Address, Transport, connect
from counterpoint.ps.messages import JobMember, MembershipView
from counterpoint.ps.session import Session
from counterpoint.rpc.address import TcpAddress, parse_address

POLL_S = 0.2
"""How often a waiting worker checks whether the others still belong to the job."""


class JobStoppedError(PeerError):
    """The job cannot continue, and another rendezvous would not help."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers connected by a fabric.

    Args:
        fabric: that connects them; rank 0 is the oldest member.
        members: by rank.
        generation: of which they are all members.
        current_view: returns the newest view.
    """

    fabric: Fabric
    members: tuple[JobMember, ...]
    generation: int
    current_view: Callable[[], MembershipView]

    @property
    def ranks(self) -> Group:
        """Ranks of all members."""
        return tuple(range(len(self.members)))

    @property
    def is_outdated(self) -> bool:
        """Whether there is a newer generation."""
        return self.current_view().generation != self.generation

    def wait(self, work: Work) -> None:
        """Wait until a collective is complete.

        Raises:
            PeerError: a member has left, by a connection error or by the coordinator, or does not join the collective
                in time.
        """
        end = time.monotonic() + self.fabric.timeout_s
        while not work.completes_within(POLL_S):
            current_members = set(self.current_view().workers)
            missing = [member.name for member in self.members if member not in current_members]
            if missing:
                raise PeerError(f"{', '.join(missing)} left the job, according to the coordinator")
            if time.monotonic() > end:
                raise PeerError(
                    f"waited {self.fabric.timeout_s:g} s for the same step of {format_members(self.members)}; check "
                    "what they do, or give Timeouts a longer lease_s if they are only slow"
                )


@contextmanager
def form_group(
    session: Session,
    view: MembershipView,
    attempt: int,
    *,
    should_stop: Callable[[], bool],
    transport: Transport = "auto",
) -> Iterator[WorkerGroup]:
    """Return a context with the connected workers of a generation; they are disconnected at its end.

    Args:
        session: of this worker.
        view: the generation.
        attempt: number of earlier attempts.
        should_stop: polled while waiting: whether this worker stops waiting.
        transport: as in :func:`counterpoint.fabric.rendezvous.connect`.

    Raises:
        PeerError: a member does not arrive in time, has left, or there is a newer generation.
        PlanError: there are several members, but one has no address.
    """
    members = tuple(sorted(view.workers, key=lambda member: member.incarnation))
    names = [member.name for member in members]
    if session.name not in names:
        raise PeerError(f"job {session.job.name} continues without {session.name}")

    def read_view() -> MembershipView:
        return session.wait_view(view.generation, 0.0)

    try:
        fabric = connect(
            names.index(session.name),
            len(members),
            rendezvous_address(members),
            key=session.job_key,
            job=f"{session.job.digest()}/{attempt}",
            generation=view.generation,
            timeout_s=session.job.timeouts.lease_s,
            transport=transport,
            should_cancel=lambda: should_stop() or read_view().generation != view.generation,
        )
    except PeerError as error:
        raise PeerError(
            f"generation {view.generation} of {format_members(members)} did not rendezvous: {error}"
        ) from error
    try:
        yield WorkerGroup(fabric, members, view.generation, read_view)
    except BaseException as error:
        fabric.abort(f"{session.name}: {type(error).__name__}: {error}")
        raise
    finally:
        fabric.close()


def rendezvous_address(members: tuple[JobMember, ...]) -> Address:
    """Return the address at which members rendezvous, which is the oldest member's.

    Raises:
        PlanError: it has none, and there are other members.
    """
    address = parse_address(members[0].address) if members[0].address else None
    if isinstance(address, TcpAddress):
        return Address(address.host, address.port, store_owner="the oldest member")
    if len(members) > 1:
        raise PlanError(
            f"{format_members(members)} cannot rendezvous, since {members[0].name} has no address; workers of a job "
            "without servers are processes that join by counterpoint.ps.process.join_job.join, and a LocalJob has one"
        )
    return Address("", 0)


def format_members(members: tuple[JobMember, ...]) -> str:
    """Return the members by rank, for errors.

    Example:
        >>> format_members((JobMember("worker-3", 1), JobMember("worker-1", 4)))
        'worker-3 (rank 0), worker-1 (rank 1)'
    """
    return ", ".join(f"{member.name} (rank {rank})" for rank, member in enumerate(members))
