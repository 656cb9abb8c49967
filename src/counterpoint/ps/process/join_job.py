"""Join a job with real servers as a worker: its session, and the thread that transports its messages."""

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
    """Join a job and return the session of the new worker.

    A thread sends and receives its messages and heartbeats while the worker's own thread computes.

    Args:
        endpoint: the job and its coordinator.
        name: of the worker; unique among live members.
        key: of the job; None if all addresses are UNIX sockets.
        timeout_s: longest wait for the coordinator and the servers.

    Raises:
        LaunchError: the name is taken, the job is another one, or no reply in time; the error says why.
    """
    rendezvous = None if endpoint.job.num_servers else RendezvousStore(local_address_for(endpoint.coordinator), key)
    loop = EventLoop()
    host = NodeRunner(endpoint.job, loop, JobCredentials(key, endpoint.job.name), endpoint.coordinator)
    address = "" if rendezvous is None else str(TcpAddress(rendezvous.address.host, rendezvous.address.port))
    client = PsClient(endpoint.job, name, secrets.randbits(TOKEN_BITS), address)
    session = WorkerSession(client, SocketTransport(loop, host, rendezvous), key)
    loop.start()
    try:
        host.run(session)
        return session.wait_ready(timeout_s)
    except BaseException:
        session.close()
        raise


def local_address_for(coordinator: RpcAddress) -> str:
    """Return this host's address on the route to a coordinator; loopback if both are on one host."""
    if isinstance(coordinator, UnixAddress):
        return LOOPBACK
    return local_address_towards(Address(coordinator.host, coordinator.port))


class SocketTransport:
    """Transport of a session's messages over sockets.

    Args:
        loop: event loop, run by a thread of its own.
        runner: of the session.
        rendezvous: store at which workers of a job without servers rendezvous, if hosted here; closed with the rest.
    """

    def __init__(self, loop: EventLoop, runner: NodeRunner, rendezvous: RendezvousStore | None = None) -> None:
        self._loop, self._runner, self._rendezvous = loop, runner, rendezvous

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Lock of the event loop."""
        return self._loop.lock

    def execute(self, actions: Sequence[PsAction]) -> None:
        """Send messages; called with the lock held."""
        self._runner.execute(list(actions))

    def batch(self) -> AbstractContextManager[None]:
        """Return a context whose messages are sent together at its end; called without the lock."""
        return self._loop.cork()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Tell whether the condition becomes true within the time; called without the lock."""
        return self._loop.wait(condition, timeout_s)

    def can_send(self) -> bool:
        """Tell whether more may be sent."""
        return self._runner.connections.can_send

    @property
    def last_error(self) -> CounterpointError | None:
        """Why the last connection that failed or ended did so."""
        return self._runner.connections.last_error

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._runner.close()
        self._loop.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
