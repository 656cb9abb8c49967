"""A coordinator or a server in this process, until it is told to stop."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from counterpoint.errors import CheckpointError
from counterpoint.server.coordinator import LOG, Coordinator
from counterpoint.server.hosting.contact import Contact
from counterpoint.server.hosting.folder import Parts, recovered_log, recovered_shard
from counterpoint.server.hosting.host import Host
from counterpoint.server.hosting.joining import TOKEN_BITS
from counterpoint.server.hosting.journals import journals_in
from counterpoint.server.job import Job
from counterpoint.server.node import Node
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.key import JobKey
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import Place

TURN_S = 3600.0


def serve_coordinator(
    contact: Contact,
    key: JobKey | None,
    folder: Path | None,
    *,
    is_over: Callable[[], bool],
    listens: Callable[[Place], None] | None = None,
) -> None:
    """The coordinator of a job has run, after what its log says, until it was over.

    Args:
        contact: where it listens.
        key: the job's; None among processes of one host that trust it.
        folder: of its log; without one it cannot be started again.
        is_over: tells whether to stop.
        listens: called with the place, once others can call.

    Raises:
        LaunchError: the place is taken, or beyond loopback and there is no key.
        CheckpointError: the log is damaged, or cannot be written.
    """
    lines = recovered_log(folder, LOG) if folder is not None else []
    with Loop() as loop:
        host = Host(contact.job, loop, Secret(key, contact.job.name), None, folder)
        found = host.post.listen(contact.coordinator)
        if listens is not None:
            listens(found)
        host.run(Coordinator(contact.job, lines, loop.clock()))
        _run(loop, host, is_over)
        host.close()


def serve_shards(  # noqa: PLR0913 - what a server is
    contact: Contact,
    name: str,
    place: Place,
    key: JobKey | None,
    folder: Path | None,
    *,
    cut: int | None = None,
    is_journaled: bool = False,
    is_over: Callable[[], bool],
    listens: Callable[[Place], None] | None = None,
) -> None:
    """A server of a job has run until it was over; a life that the others went on without was followed by another.

    Args:
        contact: where the coordinator listens.
        name: of the server; one at a time may have it.
        place: where the server listens.
        key: the job's; None among processes of one host that trust it.
        folder: for cuts, and for the logs of a shard that it keeps alone.
        cut: that the job goes on from; None where it has begun with nothing.
        is_journaled: whether everything that is counted is written to the folder's journals, to be looked at later.
        is_over: tells whether to stop.
        listens: called with the place and the port that it has got, once others can call.

    Raises:
        LaunchError: the place is taken, or beyond loopback and there is no key.
        CheckpointError: a log is damaged, or cannot be written.
    """
    with Loop() as loop:
        journal = journals_in(folder) if is_journaled and folder is not None else None
        host = Host(contact.job, loop, Secret(key, contact.job.name), contact.coordinator, folder, journal)
        found = host.post.listen(place)
        if listens is not None:
            listens(found)
        while not is_over():
            host.run(begun(contact.job, name, str(found), folder, cut))
            _run(loop, host, lambda: is_over() or bool(host.stopped))
            host.settle()
        host.close()


def begun(job: Job, name: str, address: str, folder: Path | None, cut: int | None = None) -> Node:
    """Return a server as it begins: with nothing, after its log, or from the cut that the job goes on from."""
    token = secrets.randbits(TOKEN_BITS)
    if folder is None:
        return Node(job, name, token, address)
    if job.num_servers > 1 or not job.is_logged:
        return Node(job, name, token, address, saved=Parts(folder, cut) if cut is not None else {})
    state, lines = recovered_shard(folder, 0)
    return Node(job, name, token, address, saved={} if state is None else {0: state}, logs={0: lines})


def _run(loop: Loop, host: Host, is_over: Callable[[], bool]) -> None:
    """The loop has turned until it was over; a disk that failed is raised."""
    while not loop.wait(lambda: is_over() or host.error is not None, TURN_S):
        continue
    if host.error is not None:
        raise CheckpointError(str(host.error)) from host.error
