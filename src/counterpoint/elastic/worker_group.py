"""The workers of a job without servers meet: all of a generation, at the place that the oldest of them keeps."""

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
"""So often who waits for others looks whether they still belong to the job."""


class JobStoppedError(PeerError):
    """The job cannot go on, and to meet again would not help."""


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that have met.

    Args:
        fabric: that joins them; rank 0 is the oldest.
        members: by rank.
        generation: in which they are all who belong to the job.
        look: returns who belongs to it by now.
    """

    fabric: Fabric
    members: tuple[JobMember, ...]
    generation: int
    current_view: Callable[[], MembershipView]

    @property
    def ranks(self) -> Group:
        """The ranks of all members."""
        return tuple(range(len(self.members)))

    @property
    def is_outdated(self) -> bool:
        """Whether others belong to the job by now."""
        return self.current_view().generation != self.generation

    def wait(self, work: Work) -> None:
        """The collective is complete.

        Raises:
            PeerError: somebody has gone, as a connection or the coordinator says, or does not come in time.
        """
        end = time.monotonic() + self.fabric.timeout_s
        while not work.completes_within(POLL_S):
            staying = set(self.current_view().workers)
            gone = [member.name for member in self.members if member not in staying]
            if gone:
                raise PeerError(f"{', '.join(gone)} does not belong to the job any more, says the coordinator")
            if time.monotonic() > end:
                raise PeerError(
                    f"waited {self.fabric.timeout_s:g} s for the same step of {format_members(self.members)}; look at "
                    "what they do, or give Patience a longer lease_s where they are only slow"
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
    """Yield the workers of a generation, all of whom have come; at the end they are connected no longer.

    Args:
        session: of this worker.
        view: who belongs to the job.
        attempt: how often they have tried to meet before.
        must_go: asked while others are waited for: whether this worker waits no longer.
        transport: as in :func:`counterpoint.fabric.rendezvous.connect`.

    Raises:
        PeerError: one of them has not come in time, or is gone, or others belong to the job meanwhile.
        PlanError: there are several, but one of them cannot be reached.
    """
    members = tuple(sorted(view.workers, key=lambda member: member.incarnation))
    names = [member.name for member in members]
    if session.name not in names:
        raise PeerError(f"job {session.job.name} goes on without {session.name}")

    def look() -> MembershipView:
        return session.wait_view(view.generation, 0.0)

    try:
        fabric = connect(
            names.index(session.name),
            len(members),
            rendezvous_address(members),
            job=f"{session.job.digest()}/{attempt}",
            generation=view.generation,
            timeout_s=session.job.timeouts.lease_s,
            transport=transport,
            should_cancel=lambda: should_stop() or look().generation != view.generation,
        )
    except PeerError as error:
        raise PeerError(f"generation {view.generation} of {format_members(members)} has not met: {error}") from error
    try:
        yield WorkerGroup(fabric, members, view.generation, look)
    except BaseException as error:
        fabric.abort(f"{session.name}: {type(error).__name__}: {error}")
        raise
    finally:
        fabric.close()


def rendezvous_address(members: tuple[JobMember, ...]) -> Address:
    """Return where members meet, which is at the oldest.

    Raises:
        PlanError: it cannot be reached, and there are others.
    """
    place = parse_address(members[0].address) if members[0].address else None
    if isinstance(place, TcpAddress):
        return Address(place.host, place.port, store_owner="the oldest member")
    if len(members) > 1:
        raise PlanError(
            f"{format_members(members)} cannot meet, for {members[0].name} gives no address; workers of a job without "
            "servers are processes that join by counterpoint.ps.process.join_job.join, and a LocalJob has one"
        )
    return Address("", 0)


def format_members(members: tuple[JobMember, ...]) -> str:
    """Return the members by rank, for errors.

    Example:
        >>> told_apart((Member("worker-3", 1), Member("worker-1", 4)))
        'worker-3 (rank 0), worker-1 (rank 1)'
    """
    return ", ".join(f"{member.name} (rank {rank})" for rank, member in enumerate(members))
