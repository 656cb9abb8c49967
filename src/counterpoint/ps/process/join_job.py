"""A worker of a job with real servers: its session, and the thread that carries its messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from counterpoint.errors import CounterpointError
from counterpoint.fabric.rendezvous import Address, RendezvousStore, local_address_towards
from counterpoint.ps.actions import PsAction
from counterpoint.ps.client import PsClient
from counterpoint.ps.process.job_file import JobEndpoint
from counterpoint.ps.process.node_runner import NodeRunner
from counterpoint.ps.worker_session import WorkerSession
from counterpoint.rpc.address import RpcAddress, TcpAddress, UnixAddress
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import JobKey

READY_TIMEOUT_S = 60.0
TOKEN_BITS = 62
LOOPBACK = "127.0.0.1"


def join(
    endpoint: JobEndpoint, name: str, key: JobKey | None = None, *, timeout_s: float = READY_TIMEOUT_S
) -> WorkerSession:
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
    place = None if endpoint.job.num_servers else RendezvousStore(local_address_for(endpoint.coordinator))
    loop = EventLoop()
    host = NodeRunner(endpoint.job, loop, JobCredentials(key, endpoint.job.name), endpoint.coordinator)
    address = "" if place is None else str(TcpAddress(place.address.host, place.address.port))
    client = PsClient(endpoint.job, name, secrets.randbits(TOKEN_BITS), address)
    session = WorkerSession(client, SocketTransport(loop, host, place))
    loop.start()
    try:
        host.run(session)
        return session.wait_ready(timeout_s)
    except BaseException:
        session.close()
        raise


def local_address_for(coordinator: RpcAddress) -> str:
    """Return this host's own address on the way to a coordinator; loopback where both are on one host."""
    if isinstance(coordinator, UnixAddress):
        return LOOPBACK
    return local_address_towards(Address(coordinator.host, coordinator.port))


class SocketTransport:
    """Carries a session's messages over the wire.

    Args:
        loop: turns in a thread of its own.
        host: of the session.
        place: where workers meet, if this one is the oldest of a job without servers; it is closed with the rest.
    """

    def __init__(self, loop: EventLoop, runner: NodeRunner, rendezvous: RendezvousStore | None = None) -> None:
        self._loop, self._runner, self._rendezvous = loop, runner, rendezvous

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The loop's."""
        return self._loop.lock

    def execute(self, actions: Sequence[PsAction]) -> None:
        """Messages are on their way; called with the lock."""
        self._runner.execute(list(actions))

    def batch(self) -> AbstractContextManager[None]:
        """Return a block whose messages leave in one go at its end; called without the lock."""
        return self._loop.cork()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition holds, or comes to hold within the time; called without the lock."""
        return self._loop.wait(condition, timeout_s)

    def can_send(self) -> bool:
        """Tell whether more may be sent."""
        return self._runner.connections.can_send

    @property
    def last_error(self) -> CounterpointError | None:
        """Why the last connection that was lost, or not made, is not there."""
        return self._runner.connections.last_error

    def close(self) -> None:
        """No connection and no thread is left."""
        self._runner.close()
        self._loop.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
