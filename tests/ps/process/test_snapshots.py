"""A shard is saved while its server goes on: on a disk that takes long, and by a server that dies at any moment."""

import os
import re
from contextlib import contextmanager

import pytest
import torch

from counterpoint.errors import CheckpointError
from counterpoint.ps.actions import COORDINATOR, AppendLog, SaveSnapshot, SendMessage
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import (
    Heartbeat,
    JobMember,
    KeyProgress,
    KeySpec,
    KeyState,
    RequestHeader,
    SetMembers,
    ShardState,
    SnapshotSaved,
)
from counterpoint.ps.process.disk_layout import SnapshotShards, log_path, recover_shard, snapshot_path
from counterpoint.ps.process.job_file import JobEndpoint
from counterpoint.ps.process.node_runner import NodeRunner
from counterpoint.ps.process.serve import COORDINATOR_LOCK, serve_coordinator
from counterpoint.ps.process.wal_writer import WalWriter
from counterpoint.ps.shard import PsShard
from counterpoint.ps.update_rules import Sgd
from counterpoint.ps.write_ahead_log import JobLost, encode_record
from counterpoint.rpc.address import parse_address
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.handshake import JobCredentials
from tests.ps.process.conftest import TIMEOUTS, wait_until

ORIGIN = RequestHeader("server-0", 1, 1)
LARGE = 1_200_000
WEIGHT = KeySpec("weight", "float32", 0, LARGE, 0, Sgd(1.0))


def job(num_servers=1):
    return JobConfig("saved", Asp(), num_servers, timeouts=TIMEOUTS)


def members(number):
    return SetMembers(number, (JobMember("worker-0", number),))


class RecordingMachine:
    """A state machine that records its messages."""

    def __init__(self):
        self.received = []

    def on_event(self, message, now):
        self.received += [] if message is None else [message]
        return []


@contextmanager
def slow_disk(part):
    """The part of a cut is being written, and is not complete before the block is left; then its disk fails."""
    part.parent.mkdir(parents=True, exist_ok=True)
    pipe = part.with_name(f".{part.name}.{os.getpid()}")
    os.mkfifo(pipe)

    def begun():
        began.append(os.open(pipe, os.O_RDONLY))

    began: list[int] = []
    yield begun
    os.close(began.pop())


def test_a_server_sends_heartbeats_while_it_saves_a_shard(tmp_path):
    """It was taken for dead: what it sent waited until a large shard was on the disk."""
    place, recorder = parse_address(f"unix:test-{os.getpid()}-ear"), RecordingMachine()
    state = ShardState(0, 0, keys=(KeyState(WEIGHT, KeyProgress(0), (torch.zeros(LARGE),)),))
    with EventLoop() as loop:
        hosts = (
            NodeRunner(job(), loop, JobCredentials(None, "saved")),
            NodeRunner(job(), loop, JobCredentials(None, "saved"), place, tmp_path),
        )
        hosts[0].connections.listen(place)
        for host, machine in zip(hosts, (recorder, RecordingMachine()), strict=True):
            host.run(machine)  # type: ignore[arg-type]  # all that a host asks of it is on_event
        with slow_disk(snapshot_path(tmp_path, 0, 0)) as begun:
            messages = SnapshotSaved(ORIGIN, 0, 0, 0), Heartbeat(ORIGIN)
            hosts[1].execute([SaveSnapshot(0, 0, state), *(SendMessage(COORDINATOR, message) for message in messages)])
            begun()
            loop.wait_for(lambda: len(recorder.received) > 0, 20.0, "a sign of life")
            assert recorder.received == [Heartbeat(ORIGIN)]
        for host in hosts:
            host.close()


def test_what_is_pushed_while_shards_are_being_saved_is_answered(threads, tmp_path):
    servers = threads(job(2), tmp_path)
    with servers.join("worker-0") as session, slow_disk(snapshot_path(tmp_path, 0, 0)) as begun:
        session.init("weight", torch.zeros(LARGE), Sgd(1.0))
        session.checkpoint()
        begun()
        assert session.push("weight", torch.ones(LARGE)).wait(20.0).versions == (1, 1)
        assert float(session.pull("weight").wait(20.0).values.sum()) == -LARGE
    wait_until(lambda: servers.failures)
    assert "cannot write" in str(servers.failures.pop())


def test_a_server_that_dies_after_a_save_may_save_the_same_snapshot_again(tmp_path):
    """Its log then had the same name twice, and the second time was deleted with what was counted since."""
    shard = PsShard(job(), 0)
    for first in (1, 3):
        writer = WalWriter(tmp_path, lambda _: None, lambda _: None)
        for number in (first, first + 1):
            shard.apply(members(number))
            writer.enqueue(AppendLog("shard-0", members(number)))
            if number == first:
                writer.enqueue(SaveSnapshot(0, 0, shard.state))
        writer.close()
    state, lines = recover_shard(tmp_path, 0)
    assert state is not None
    assert (state.position, lines) == (3, [members(4)])


def test_a_server_that_died_before_its_shard_was_saved_continues_from_the_log_before(tmp_path):
    log_path(tmp_path, "shard-0").write_bytes(encode_record(members(1)))
    log_path(tmp_path, "shard-0", (0, 1)).touch()
    assert recover_shard(tmp_path, 0) == (None, [members(1)])
    assert not log_path(tmp_path, "shard-0", (0, 1)).exists()


def test_a_log_without_the_shard_that_it_continues_from_is_no_log(tmp_path):
    log_path(tmp_path, "shard-0", (0, 1)).write_bytes(encode_record(members(2)))
    with pytest.raises(CheckpointError, match=r"continues after 1 entries, but .* is not a snapshot of them"):
        recover_shard(tmp_path, 0)


def test_a_folder_has_one_coordinator_at_a_time_and_names_the_other(threads, tmp_path):
    """Two of them wrote to one log, and each continued from the decisions of both."""
    servers = threads(job(), tmp_path)
    wait_until(lambda: (tmp_path / COORDINATOR_LOCK).exists() and (tmp_path / COORDINATOR_LOCK).read_text())
    other = JobEndpoint(JobConfig("other", Asp()), parse_address(f"unix:test-{os.getpid()}-other"))
    with pytest.raises(
        CheckpointError, match=rf"another run uses {tmp_path}: pid {os.getpid()} on .*: give another --fo"
    ):
        serve_coordinator(other, None, tmp_path, should_stop=lambda: True)
    servers.stop("coordinator")
    serve_coordinator(other, None, tmp_path / "new", should_stop=lambda: True)
    (tmp_path / "file").touch()
    assert not (tmp_path / COORDINATOR_LOCK).exists()
    with pytest.raises(
        CheckpointError, match=r"cannot write to .*: Not a directory; free space, or use another folder"
    ):
        serve_coordinator(other, None, tmp_path / "file" / "a", should_stop=lambda: True)


def test_names_in_a_folder_that_are_not_ours_are_passed_over_and_links_are_not_written_through(tmp_path):
    for name in ("shard-0.a-b.log", "shard-0.1-2.log", "shard-0.000001-2-3.log"):
        (tmp_path / name).touch()
    snapshot_path(tmp_path, 0, 0).parent.mkdir(parents=True)
    snapshot_path(tmp_path, 0, 0).with_name("shard-x").touch()
    assert recover_shard(tmp_path, 0) == (None, [])
    assert not list(SnapshotShards(tmp_path, 0))
    for make in (lambda path: path.symlink_to(tmp_path / "precious"), os.mkfifo):
        failures: list[Exception] = []
        writer = WalWriter(tmp_path / "logs", lambda _: None, failures.append)
        (tmp_path / "logs" / "a.log").unlink(missing_ok=True)
        make(tmp_path / "logs" / "a.log")
        writer.enqueue(AppendLog("a", JobLost("gone")))
        writer.flush()
        writer.close()
        assert re.match(r"cannot write to .*: (Too many levels|No such device)", str(failures[0]))
    assert not (tmp_path / "precious").exists()
