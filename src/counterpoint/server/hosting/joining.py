"""A worker of a job with real servers: its session, and the thread that carries its messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from counterpoint.errors import CounterpointError
from counterpoint.fabric.meeting import Address, interface_towards
from counterpoint.fabric.standing import StandingPlace
from counterpoint.server.actions import Action
from counterpoint.server.client import Client
from counterpoint.server.hosting.contact import Contact
from counterpoint.server.hosting.host import Host
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.key import JobKey
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import Place, TcpPlace, UnixPlace
from counterpoint.server.worker import WorkerSession

READY_S = 60.0
TOKEN_BITS = 62
LOOPBACK = "127.0.0.1"


def join(contact: Contact, name: str, key: JobKey | None = None, *, deadline_s: float = READY_S) -> WorkerSession:
    """Return the session of a new worker, which belongs to the job.

    A thread carries its messages and gives signs of life, while the worker's own computes.

    Args:
        contact: where the job is found.
        name: of the worker; one at a time may have it.
        key: the job's; None among processes of one host that trust it.
        deadline_s: how long to wait for the coordinator, and for servers.

    Raises:
        LaunchError: the name is taken, the job is another one, or nobody has answered in time; the error says why.
    """
    place = None if contact.job.num_servers else StandingPlace(interface_of(contact.coordinator))
    loop = Loop()
    host = Host(contact.job, loop, Secret(key, contact.job.name), contact.coordinator)
    address = "" if place is None else str(TcpPlace(place.address.host, place.address.port))
    client = Client(contact.job, name, secrets.randbits(TOKEN_BITS), address)
    session = WorkerSession(client, LoopCarrier(loop, host, place))
    loop.start()
    try:
        host.run(session)
        return session.await_ready(deadline_s)
    except BaseException:
        session.close()
        raise


def interface_of(coordinator: Place) -> str:
    """Return this host's own address on the way to a coordinator; loopback where both are on one host."""
    if isinstance(coordinator, UnixPlace):
        return LOOPBACK
    return interface_towards(Address(coordinator.host, coordinator.port))


class LoopCarrier:
    """Carries a session's messages over the wire.

    Args:
        loop: turns in a thread of its own.
        host: of the session.
        place: where workers meet, if this one is the oldest of a job without servers; it is closed with the rest.
    """

    def __init__(self, loop: Loop, host: Host, place: StandingPlace | None = None) -> None:
        self._loop, self._host, self._place = loop, host, place

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The loop's."""
        return self._loop.lock

    def act(self, actions: Sequence[Action]) -> None:
        """Messages are on their way; called with the lock."""
        self._host.act(list(actions))

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose messages leave in one go at its end; called without the lock."""
        return self._loop.gathering()

    def wait(self, holds: Callable[[], bool], deadline_s: float) -> bool:
        """Tell whether the condition holds, or comes to hold within the time; called without the lock."""
        return self._loop.wait(holds, deadline_s)

    def has_room(self) -> bool:
        """Tell whether more may be sent."""
        return self._host.post.has_room

    @property
    def trouble(self) -> CounterpointError | None:
        """Why the last connection that was lost, or not made, is not there."""
        return self._host.post.last_error

    def close(self) -> None:
        """No connection and no thread is left."""
        self._host.close()
        self._loop.close()
        if self._place is not None:
            self._place.close()
