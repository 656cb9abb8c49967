"""Run a coordinator or a server in this process until it is asked to stop."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from counterpoint.checkpoint.folder_lock import FolderLock, lock_folder
from counterpoint.errors import CheckpointError
from counterpoint.ps.coordinator import COORDINATOR_LOG, Coordinator
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.disk_layout import SnapshotShards, recover_log, recover_shard
from counterpoint.ps.process.job_file import JobEndpoint
from counterpoint.ps.process.join_job import TOKEN_BITS
from counterpoint.ps.process.node_runner import NodeRunner
from counterpoint.ps.process.wal_writer import journal_folder, write_failure
from counterpoint.ps.server import ServerNode
from counterpoint.rpc.address import RpcAddress
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import JobKey

WAIT_SLICE_S = 3600.0
COORDINATOR_LOCK = "coordinator.lock"


def serve_coordinator(
    endpoint: JobEndpoint,
    key: JobKey | None,
    folder: Path | None,
    *,
    should_stop: Callable[[], bool],
    on_listen: Callable[[RpcAddress], None] | None = None,
) -> None:
    """Run the coordinator of a job, from its log, until ``should_stop`` returns True.

    Args:
        endpoint: address to listen at.
        key: of the job; None if all addresses are UNIX sockets.
        folder: of its log; without one it cannot be restarted.
        should_stop: tells whether to stop.
        on_listen: called with the address once others can connect.

    Raises:
        LaunchError: the address is in use, or of TCP without a key.
        CheckpointError: the log is damaged, cannot be written, or is written by another coordinator.
    """
    with ExitStack() as stack:
        if folder is not None:
            stack.callback(lock_log(folder).release)
        records = recover_log(folder, COORDINATOR_LOG) if folder is not None else []
        loop = stack.enter_context(EventLoop())
        runner = NodeRunner(endpoint.job, loop, JobCredentials(key, endpoint.job.name), None, folder)
        address = runner.connections.listen(endpoint.coordinator)
        if on_listen is not None:
            on_listen(address)
        runner.run(Coordinator(endpoint.job, records, loop.clock()))
        _run_until(loop, runner, should_stop)
        runner.close()


def lock_log(folder: Path) -> FolderLock:
    """Lock the folder of a coordinator's log, which is created if it does not exist.

    Raises:
        CheckpointError: it cannot be written, or another coordinator has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_folder(folder, "", "give another --folder", name=COORDINATOR_LOCK)
    except OSError as error:
        raise write_failure(folder, error) from error


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
    """Run a server of a job until ``should_stop`` returns True; an evicted incarnation is followed by another.

    Args:
        endpoint: address of the coordinator.
        name: of the server; unique among live members.
        address: to listen at.
        key: of the job; None if all addresses are UNIX sockets.
        folder: for snapshots, and for the log of a shard without a backup.
        snapshot: that the job restarts from; None if it starts from scratch.
        is_journaled: whether to write all changes to the folder's journals, for replay.
        should_stop: tells whether to stop.
        on_listen: called with the actual address once others can connect.

    Raises:
        LaunchError: the address is in use, or of TCP without a key.
        CheckpointError: a log is damaged, or cannot be written.
    """
    with EventLoop() as loop:
        journal = journal_folder(folder) if is_journaled and folder is not None else None
        runner = NodeRunner(
            endpoint.job, loop, JobCredentials(key, endpoint.job.name), endpoint.coordinator, folder, journal
        )
        listen_address = runner.connections.listen(address)
        if on_listen is not None:
            on_listen(listen_address)
        while not should_stop():
            runner.run(restore_server(endpoint.job, name, str(listen_address), folder, snapshot))
            _run_until(loop, runner, lambda: should_stop() or bool(runner.stop_reason))
            runner.flush()
        runner.close()


def restore_server(
    job: JobConfig, name: str, address: str, folder: Path | None, snapshot: int | None = None
) -> ServerNode:
    """Return a server in its initial state: empty, from its log, or from the snapshot that the job restarts from."""
    token = secrets.randbits(TOKEN_BITS)
    if folder is None:
        return ServerNode(job, name, token, address)
    if job.num_servers > 1 or not job.is_logged:
        return ServerNode(
            job, name, token, address, saved=SnapshotShards(folder, snapshot) if snapshot is not None else {}
        )
    state, records = recover_shard(folder, 0)
    return ServerNode(job, name, token, address, saved={} if state is None else {0: state}, logs={0: records})


def _run_until(loop: EventLoop, runner: NodeRunner, should_stop: Callable[[], bool]) -> None:
    """Run the loop until ``should_stop`` returns True; raise CheckpointError if the disk fails."""
    while not loop.wait(lambda: should_stop() or runner.error is not None, WAIT_SLICE_S):
        continue
    if runner.error is not None:
        raise CheckpointError(str(runner.error)) from runner.error
