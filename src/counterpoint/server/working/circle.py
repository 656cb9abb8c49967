"""The workers of a job without servers meet: all of a generation, at the place that the oldest of them keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from counterpoint.errors import PeerError, PlanError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.fabric.meeting import Address, Transport, connect
from counterpoint.server.calls import View
from counterpoint.server.messages import Member
from counterpoint.server.session import Session
from counterpoint.server.wire.place import TcpPlace, parse_place

LOOK_S = 0.2
"""So often who waits for others looks whether they still belong to the job."""


class JobStoppedError(PeerError):
    """The job cannot go on, and to meet again would not help."""


@dataclass(frozen=True, slots=True)
class Circle:
    """Workers that have met.

    Args:
        fabric: that joins them; rank 0 is the oldest.
        members: by rank.
        generation: in which they are all who belong to the job.
        look: returns who belongs to it by now.
    """

    fabric: Fabric
    members: tuple[Member, ...]
    generation: int
    look: Callable[[], View]

    @property
    def group(self) -> Group:
        """The ranks of all members."""
        return tuple(range(len(self.members)))

    @property
    def is_outdated(self) -> bool:
        """Whether others belong to the job by now."""
        return self.look().generation != self.generation

    def settle(self, work: Work) -> None:
        """The collective is complete.

        Raises:
            PeerError: somebody has gone, as a connection or the coordinator says, or does not come in time.
        """
        end = time.monotonic() + self.fabric.deadline_s
        while not work.completes_within(LOOK_S):
            staying = set(self.look().workers)
            gone = [member.name for member in self.members if member not in staying]
            if gone:
                raise PeerError(f"{', '.join(gone)} does not belong to the job any more, says the coordinator")
            if time.monotonic() > end:
                raise PeerError(
                    f"waited {self.fabric.deadline_s:g} s for the same step of {told_apart(self.members)}; look at "
                    "what they do, or give Patience a longer lease_s where they are only slow"
                )


@contextmanager
def met(
    session: Session, view: View, attempt: int, *, must_go: Callable[[], bool], transport: Transport = "auto"
) -> Iterator[Circle]:
    """Yield the workers of a generation, all of whom have come; at the end they are connected no longer.

    Args:
        session: of this worker.
        view: who belongs to the job.
        attempt: how often they have tried to meet before.
        must_go: asked while others are waited for: whether this worker waits no longer.
        transport: as in :func:`counterpoint.fabric.meeting.connect`.

    Raises:
        PeerError: one of them has not come in time, or is gone, or others belong to the job meanwhile.
        PlanError: there are several, but one of them cannot be reached.
    """
    members = tuple(sorted(view.workers, key=lambda member: member.incarnation))
    names = [member.name for member in members]
    if session.name not in names:
        raise PeerError(f"job {session.job.name} goes on without {session.name}")

    def look() -> View:
        return session.await_view(view.generation, 0.0)

    try:
        fabric = connect(
            names.index(session.name),
            len(members),
            address_of(members),
            job=f"{session.job.digest()}/{attempt}",
            generation=view.generation,
            deadline_s=session.job.patience.lease_s,
            transport=transport,
            is_vain=lambda: must_go() or look().generation != view.generation,
        )
    except PeerError as error:
        raise PeerError(f"generation {view.generation} of {told_apart(members)} has not met: {error}") from error
    try:
        yield Circle(fabric, members, view.generation, look)
    except BaseException as error:
        fabric.stop(f"{session.name}: {type(error).__name__}: {error}")
        raise
    finally:
        fabric.close()


def address_of(members: tuple[Member, ...]) -> Address:
    """Return where members meet, which is at the oldest.

    Raises:
        PlanError: it cannot be reached, and there are others.
    """
    place = parse_place(members[0].address) if members[0].address else None
    if isinstance(place, TcpPlace):
        return Address(place.host, place.port, kept_by="the oldest member")
    if len(members) > 1:
        raise PlanError(
            f"{told_apart(members)} cannot meet, for {members[0].name} gives no address; workers of a job without "
            "servers are processes that join by counterpoint.server.hosting.joining.join, and a LocalJob has one"
        )
    return Address("", 0)


def told_apart(members: tuple[Member, ...]) -> str:
    """Return the members by rank, for errors.

    Example:
        >>> told_apart((Member("worker-3", 1), Member("worker-1", 4)))
        'worker-3 (rank 0), worker-1 (rank 1)'
    """
    return ", ".join(f"{member.name} (rank {rank})" for rank, member in enumerate(members))
