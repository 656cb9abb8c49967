"""Coordinator, servers and workers over real sockets and a real disk."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from counterpoint.elastic.remote_module import RemoteModule
from counterpoint.errors import CheckpointError, DataError, LaunchError
from counterpoint.ps.actions import AppendLog
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.job_config import DataConfig, JobConfig
from counterpoint.ps.messages import PushRequest, SetMembers
from counterpoint.ps.process.disk_layout import complete_snapshots, log_path, read_records, resume
from counterpoint.ps.process.job_file import read_job_file, write_job_file
from counterpoint.ps.process.join_job import join
from counterpoint.ps.process.wal_writer import WalWriter, journal_folder, read_journals
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.session import NO_TASK_YET
from counterpoint.ps.shard import replay_journal
from counterpoint.ps.update_rules import Adagrad, ConstantInit, Sgd
from counterpoint.ps.write_ahead_log import JournalRecord
from counterpoint.rpc.job_key import new_key
from tests.elastic.worker_fixtures import SGD, max_relative_difference, mlp
from tests.ps.process.conftest import TIMEOUTS, wait_until

HALF = Sgd(0.5)
LARGE = 1_200_000


def job(consistency=None, **options):
    return JobConfig("hosted", consistency or Asp(), timeouts=TIMEOUTS, **options)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_tensors_come_back_as_they_were_pushed(threads, num_servers):
    with threads(job(num_servers=num_servers)).join("worker-0") as session:
        session.init("weight", torch.zeros(LARGE), HALF)
        session.push("weight", torch.arange(float(LARGE))).wait()
        out = torch.empty(LARGE)
        session.pull("weight", out=out).wait()
    assert torch.equal(out, torch.arange(float(LARGE)) / -2)


def test_rows_travel_alone(threads):
    with threads(job(num_servers=2)).join("worker-0") as session:
        session.init_rows("table", 10_000_000, 4, torch.float32, Adagrad(0.5), ConstantInit(1.0))
        rows = torch.tensor([3, 4, 9_999_999])
        session.push("table", torch.ones(3, 4), rows=rows).wait()
        assert torch.allclose(session.pull("table", rows=rows).wait().values, torch.full((3, 4), 0.5))


def test_many_requests_are_under_way_together(threads):
    with threads(job()).join("worker-0") as session:
        names = [f"key-{index}" for index in range(20)]
        for name in names:
            session.init(name, torch.zeros(100), HALF)
        pushes = [session.push(name, torch.ones(100)) for name in names]
        pulls = [session.pull(name) for name in names]
        assert all(one.wait().versions == (1,) for one in (*pushes, *pulls))


def test_two_workers_make_the_steps_of_bsp(threads):
    servers = threads(job(Bsp(2), data=DataConfig(4, 1, 1, 2)))

    def work(name):
        with servers.join(name) as session:
            session.init("weight", torch.zeros(3, dtype=torch.float64), HALF)
            while (task := session.lease(timeout_s=5.0)) is not None:
                session.pull("weight", min_versions=task.start // 2).wait()
                gradient = torch.full((3,), task.start + 1.0, dtype=torch.float64)
                session.push("weight", gradient, slice_index=task.start).wait()
                session.report(task, "done")
            actual[name] = session.pull("weight", min_versions=2).wait().values

    actual: dict[str, torch.Tensor] = {}
    workers = [threading.Thread(target=work, args=(f"worker-{index}",)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30.0)
    assert [value.tolist() for value in actual.values()] == [[-5.0] * 3] * 2


def test_what_is_not_finite_is_refused_and_changes_nothing(threads):
    with threads(job()).join("worker-0") as session:
        session.init("weight", torch.zeros(3), HALF)
        with pytest.raises(DataError, match="not finite"):
            session.push("weight", torch.full((3,), torch.nan)).wait()
        assert session.pull("weight").wait().versions == (0,)


def test_two_workers_cannot_have_one_name_and_the_first_continues(threads):
    servers = threads(job())
    with servers.join("worker-0") as session:
        session.init("weight", torch.zeros(3), HALF)
        with pytest.raises(LaunchError, match="worker-0 already belongs to the job"):
            servers.join("worker-0")
        assert session.push("weight", torch.ones(3)).wait().versions == (1,)


def test_a_worker_with_another_key_is_refused_without_other_information(threads):
    servers = threads(job())
    with pytest.raises(LaunchError, match=r"could not join job hosted: .*key"):
        join(servers.contact, "worker-0", new_key(), timeout_s=10.0)


def test_a_worker_with_another_job_is_reported(threads, tmp_path):
    servers = threads(job())
    write_job_file(servers.contact, tmp_path / "job.json")
    assert read_job_file(tmp_path / "job.json") == servers.contact
    other = type(servers.contact)(job(num_servers=2), servers.contact.coordinator)
    with pytest.raises(LaunchError, match="has another job configuration than this coordinator"):
        join(other, "worker-0", servers.key, timeout_s=10.0)


def test_a_job_without_its_coordinator_is_not_waited_for_forever(threads):
    servers = threads(job())
    servers.stop("coordinator")
    with pytest.raises(LaunchError, match=r"waited 0\.5 s for job hosted: no process listens"):
        join(servers.contact, "worker-0", servers.key, timeout_s=0.5)


@pytest.mark.long
def test_a_lone_server_and_the_coordinator_begin_again_after_their_logs(threads, tmp_path):
    servers = threads(job(data=DataConfig(2, 1)), tmp_path)
    with servers.join("worker-0") as session:
        session.init("weight", torch.zeros(3), HALF)
        session.report(session.lease(), "done")
        session.push("weight", torch.ones(3)).wait()
        for name, start in (("server-0", lambda: servers.start_server("server-0")),
                            ("coordinator", servers.start_coordinator)):  # fmt: skip
            servers.stop(name)
            start()
        assert session.push("weight", torch.ones(3)).wait(20.0).versions == (2,)
        session.report(session.lease(), "done")
        assert session.lease() is None


@pytest.mark.long
def test_what_two_servers_keep_is_not_lost_with_one(threads):
    servers = threads(job(num_servers=2))
    with servers.join("worker-0") as session:
        session.init("weight", torch.zeros(LARGE), HALF)
        session.push("weight", torch.ones(LARGE)).wait()
        servers.stop("server-0")
        servers.start_server("spare")
        assert session.push("weight", torch.ones(LARGE)).wait(20.0).versions == (2, 2)
        assert float(session.pull("weight").wait().values.sum()) == -LARGE


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_job_continues_from_its_last_snapshot_when_all_have_died(threads, tmp_path, num_servers):
    options = {"num_servers": num_servers, "data": DataConfig(3, 1), "is_logged": False}
    servers = threads(job(**options), tmp_path)
    with servers.join("worker-0") as session:
        session.init("weight", torch.zeros(LARGE), HALF)
        session.push("weight", torch.ones(LARGE)).wait()
        session.report(session.lease(), "done")
        snapshot_number = session.checkpoint()
        wait_until(lambda: snapshot_number in complete_snapshots(tmp_path, servers.contact.job))
        session.push("weight", torch.ones(LARGE)).wait()
        session.report(session.lease(), "done")
    servers.close()
    servers.running.clear()
    assert resume(tmp_path, job(**options)) == snapshot_number
    with threads(job(**options), tmp_path, snapshot=snapshot_number).join("worker-0") as session:
        session.init("weight", torch.zeros(LARGE), HALF)
        assert float(session.pull("weight").wait().values[0]) == -0.5
        assert session.lease().start == 1


@pytest.mark.long(quick=["65536-0"])
@pytest.mark.parametrize(("first", "second"), [(0, 1 << 16), (1 << 16, 0)])
def test_a_model_is_what_its_snapshot_says_whichever_modules_later_workers_would_put_together(
    threads, tmp_path, first, second
):
    servers = threads(job(num_servers=2), tmp_path)
    with servers.join("worker-0") as session:
        RemoteModule(mlp(), session, SGD, key_bytes=first).push_zeros(0)
        session.checkpoint()
        wait_until(lambda: complete_snapshots(tmp_path, servers.contact.job))
    servers.close()
    servers.running.clear()
    snapshot_number = resume(tmp_path, job(num_servers=2))
    with threads(job(num_servers=2), tmp_path, snapshot=snapshot_number).join("worker-1") as session:
        other = mlp()
        nn.init.zeros_(other.get_parameter("0.weight"))
        assert max_relative_difference(RemoteModule(other, session, SGD, key_bytes=second).export_weights(), mlp()) == 0


def test_who_waits_for_data_is_given_it_soon_after_others_are_done(threads):
    timeouts = replace(TIMEOUTS, resend_s=60.0)
    servers = threads(JobConfig("hosted", Asp(), timeouts=timeouts, data=DataConfig(1, 2)))
    with servers.join("worker-0") as first, servers.join("worker-1") as second, ThreadPoolExecutor(1) as waiting:
        task = first.lease()
        assert second.lease() is NO_TASK_YET
        actual = waiting.submit(second.lease, 50.0)
        first.report(task, "done")
        assert actual.result(timeout=10.0).epoch == 1


def test_a_job_without_a_whole_snapshot_cannot_be_gone_on_from(threads, tmp_path):
    servers = threads(job(num_servers=2), tmp_path)
    servers.join("worker-0").close()
    servers.close()
    with pytest.raises(CheckpointError, match="there is no complete snapshot in"):
        resume(tmp_path, job(num_servers=2))


def test_the_journals_of_servers_that_died_make_the_same_shard(threads, tmp_path):
    servers = threads(job(num_servers=2), tmp_path, is_journaled=True)
    with servers.join("worker-0") as session:
        session.init("weight", torch.zeros(8), HALF)
        for number in range(3):
            session.push("weight", torch.full((8,), float(number)), slice_index=number).wait()
        values = session.pull("weight").wait().values
    servers.close()
    (entries,) = [
        entries
        for entries in read_journals(tmp_path, 2).values()
        if any(isinstance(entry, PushRequest) for entry in entries)
    ]
    shards = [replay_journal(job(num_servers=2), index, entries) for index in (0, 1)]
    assert all(torch.equal(shard.keys["weight"].storage.tensors[0], values) for shard in shards)


@pytest.mark.long
def test_a_server_that_was_killed_before_its_journal_had_the_end_of_its_log_says_it_in_its_next_life(threads, tmp_path):
    for slice_index in (0, 1):
        servers = threads(job(), tmp_path, is_journaled=True)
        with servers.join(f"worker-{slice_index}") as session:
            session.init("weight", torch.zeros(8), HALF)
            session.push("weight", torch.ones(8), slice_index=slice_index).wait()
        servers.close()
        if not slice_index:
            (journal,) = journal_folder(tmp_path).glob("*.log")
            journal.write_bytes(b"")
    (entries,) = read_journals(tmp_path, 1).values()
    assert [entry.slice_index for entry in entries if isinstance(entry, PushRequest)] == [0, 1]


def test_queued_writes_are_in_the_folder_once_the_writer_is_idle(tmp_path):
    writer = WalWriter(tmp_path, lambda _: None, lambda _: None)
    for position in range(50):
        writer.enqueue(AppendLog("log", JournalRecord(0, position, SetMembers(1, ()), 0)))
    writer.flush()
    assert len(read_records(log_path(tmp_path, "log"))[0]) == 50
    writer.close()


def test_what_was_handed_on_last_fills_a_gap_between_certain_entries(tmp_path):
    writer = WalWriter(journal_folder(tmp_path), lambda _: None, lambda _: None)
    for log, position, generation, handed_on in [
        ("a-1", 0, 1, 0), ("b-1", 0, 9, 3), ("b-1", 1, 3, 3), ("c-1", 1, 2, 2), ("d-1", 2, 4, 0), ("b-1", 3, 9, 3),
    ]:  # fmt: skip
        writer.enqueue(AppendLog(log, JournalRecord(0, position, SetMembers(generation, ()), handed_on)))
    writer.close()
    assert read_journals(tmp_path, 1) == {0: [SetMembers(1, ()), SetMembers(3, ()), SetMembers(4, ())]}


def test_nothing_is_left_when_a_session_is_closed(threads):
    servers = threads(job())
    before = threading.active_count()
    servers.join("worker-0").close()
    assert threading.active_count() == before


def test_what_is_asked_together_is_answered_as_if_it_had_been_asked_in_turn(threads):
    sums = RowPooling(torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
    rows = torch.tensor([3, 9])
    with threads(job(num_servers=2)).join("worker-0") as session:
        session.init("weight", torch.zeros(3), HALF)
        session.init_rows("table", 10, 2, torch.float32, HALF, ConstantInit(1.0))
        with session.batch():
            pushed = session.push("weight", torch.ones(3)), session.push("table", torch.ones(2, 2), rows=rows)
            pulled = session.pull("weight"), session.pull("table", rows=rows, pooling=sums)
        assert [one.wait().versions for one in pushed] == [(1,), (1, 1)]
        assert [one.wait().values.tolist() for one in pulled] == [[-0.5] * 3, [[1.0] * 2, [0.5] * 2]]
