"""A coordinator or a server in this process, until it is told to stop."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from counterpoint.errors import CheckpointError
from counterpoint.ps.coordinator import COORDINATOR_LOG, Coordinator
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.disk_layout import SnapshotShards, recover_log, recover_shard
from counterpoint.ps.process.job_file import JobEndpoint
from counterpoint.ps.process.join_job import TOKEN_BITS
from counterpoint.ps.process.node_runner import NodeRunner
from counterpoint.ps.process.wal_writer import journal_folder
from counterpoint.ps.server import ServerNode
from counterpoint.rpc.address import RpcAddress
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import JobKey

WAIT_SLICE_S = 3600.0


def serve_coordinator(
    endpoint: JobEndpoint,
    key: JobKey | None,
    folder: Path | None,
    *,
    should_stop: Callable[[], bool],
    on_listen: Callable[[RpcAddress], None] | None = None,
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
    lines = recover_log(folder, COORDINATOR_LOG) if folder is not None else []
    with EventLoop() as loop:
        host = NodeRunner(endpoint.job, loop, JobCredentials(key, endpoint.job.name), None, folder)
        found = host.connections.listen(endpoint.coordinator)
        if on_listen is not None:
            on_listen(found)
        host.run(Coordinator(endpoint.job, lines, loop.clock()))
        _run_until(loop, host, should_stop)
        host.close()


def serve_shards(  # noqa: PLR0913 - what a server is
    endpoint: JobEndpoint,
    name: str,
    address: RpcAddress,
    key: JobKey | None,
    folder: Path | None,
    *,
    snapshot: int | None = None,
    is_journaled: bool = False,
    should_stop: Callable[[], bool],
    on_listen: Callable[[RpcAddress], None] | None = None,
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
    with EventLoop() as loop:
        journal = journal_folder(folder) if is_journaled and folder is not None else None
        host = NodeRunner(
            endpoint.job, loop, JobCredentials(key, endpoint.job.name), endpoint.coordinator, folder, journal
        )
        found = host.connections.listen(address)
        if on_listen is not None:
            on_listen(found)
        while not should_stop():
            host.run(restore_server(endpoint.job, name, str(found), folder, snapshot))
            _run_until(loop, host, lambda: should_stop() or bool(host.stop_reason))
            host.flush()
        host.close()


def restore_server(
    job: JobConfig, name: str, address: str, folder: Path | None, snapshot: int | None = None
) -> ServerNode:
    """Return a server as it begins: with nothing, after its log, or from the cut that the job goes on from."""
    token = secrets.randbits(TOKEN_BITS)
    if folder is None:
        return ServerNode(job, name, token, address)
    if job.num_servers > 1 or not job.is_logged:
        return ServerNode(
            job, name, token, address, saved=SnapshotShards(folder, snapshot) if snapshot is not None else {}
        )
    state, lines = recover_shard(folder, 0)
    return ServerNode(job, name, token, address, saved={} if state is None else {0: state}, logs={0: lines})


def _run_until(loop: EventLoop, runner: NodeRunner, should_stop: Callable[[], bool]) -> None:
    """The loop has turned until it was over; a disk that failed is raised."""
    while not loop.wait(lambda: should_stop() or runner.error is not None, WAIT_SLICE_S):
        continue
    if runner.error is not None:
        raise CheckpointError(str(runner.error)) from runner.error
