"""A session of a whole job in one thread: the requests of a worker's program, and their replies."""

import pytest
import torch

from counterpoint.errors import DataError, LaunchError, PeerError, PlanError
from counterpoint.ps.consistency import Asp, Bsp, Ssp
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import DataConfig, JobConfig, RetryPolicy
from counterpoint.ps.messages import ShardReplicas
from counterpoint.ps.session import NO_TASK_YET
from counterpoint.ps.shard import replay_journal
from counterpoint.ps.update_rules import Adagrad, Assign, ConstantInit, Sgd, UniformInit

HALF = Sgd(0.5)


def local(consistency=None, **options):
    return LocalJob(JobConfig("local", consistency or Asp(), **options), is_journaled=True)


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def servers(request):
    return local(num_servers=request.param)


@pytest.fixture
def session(servers):
    with servers.join("worker-0") as opened:
        opened.init("weight", torch.zeros(2, 3), HALF)
        yield opened


def test_a_pull_sees_what_the_same_session_has_pushed_before(session):
    session.push("weight", torch.ones(2, 3))
    assert torch.equal(session.pull("weight").wait().values, torch.full((2, 3), -0.5))


def test_a_second_worker_finds_the_key_as_the_first_one_made_and_changed_it(servers, session):
    session.push("weight", torch.ones(2, 3)).wait()
    with servers.join("worker-1") as second:
        second.init("weight", torch.ones(2, 3), HALF)
        result = second.pull("weight").wait()
    assert (float(result.values.sum()), result.versions) == (-3.0, (1,))


def test_what_was_pulled_is_the_workers_own(session):
    session.pull("weight").wait().values.fill_(7.0)
    assert not session.pull("weight").wait().values.any()


def test_a_pull_into_a_given_tensor_returns_that_tensor(session):
    out = torch.ones(2, 3)
    assert session.pull("weight", out=out).wait().values is out
    assert not out.any()


def test_a_large_key_is_divided_over_the_shards_and_comes_back_whole(servers, session):
    value = torch.arange(1_200_000.0)
    session.init("large", value, HALF)
    pulled = session.pull("large").wait()
    assert torch.equal(pulled.values, value)
    assert len(pulled.versions) == servers.job.num_shards


def test_rows_come_back_in_the_order_in_which_they_were_named(session):
    session.init_rows("table", 1000, 2, torch.float32, Adagrad(0.5), ConstantInit(1.0))
    rows = torch.tensor([1, 5, 6, 999])
    session.push("table", torch.arange(8.0).view(4, 2), rows=rows)
    result = session.pull("table", rows=torch.tensor([0, 5, 999])).wait().values
    assert torch.allclose(result, torch.tensor([[1.0, 1.0], [0.5, 0.5], [0.5, 0.5]]))


def test_a_table_may_have_more_rows_than_memory(session):
    session.init_rows("table", 1 << 50, 2, torch.float64, HALF, UniformInit(-1, 1))
    rows = torch.tensor([3, 1 << 49])
    assert torch.equal(session.pull("table", rows=rows).wait().values, session.pull("table", rows=rows).wait().values)


def test_a_step_of_bsp_is_applied_when_all_slices_are_there():
    job = local(Bsp(2), num_servers=2)
    first, second = (job.join(name) for name in ("worker-0", "worker-1"))
    for session in (first, second):
        session.init("weight", torch.zeros(1), HALF)
    half = first.push("weight", torch.ones(1), slice_index=0).wait()
    whole = second.push("weight", 2 * torch.ones(1), slice_index=1).wait()
    assert (half.versions, whole.versions) == ((0,), (1,))
    assert float(first.pull("weight", min_versions=1).wait().values) == -1.5


def test_a_slice_that_comes_twice_is_counted_once():
    session = local().join("worker-0")
    session.init("weight", torch.zeros(1), HALF)
    session.push("weight", torch.ones(1), slice_index=3).wait()
    assert session.push("weight", torch.ones(1), slice_index=3).wait().are_new == (False,)
    assert session.pull("weight").wait().versions == (1,)


def test_a_worker_of_ssp_waits_for_the_slowest_that_has_entered():
    job = local(Ssp(0))
    fast, slow = job.join("fast"), job.join("slow")
    for session in (fast, slow):
        session.init("weight", torch.zeros(1), HALF)
        session.join_clock()
    fast.push("weight", torch.ones(1)).wait()
    waiting = fast.pull("weight")
    assert not job.run_until(waiting.done, 5.0)
    slow.leave_clock()
    assert waiting.wait().versions == (1,)


def test_tasks_are_leased_until_all_are_done():
    session = local(data=DataConfig(num_slices=4, num_epochs=2, slices_per_task=2)).join("worker-0")
    seen = []
    while task := session.lease():
        seen.append((task.epoch, task.start, task.stop))
        session.report(task, "done")
    assert seen == [(0, 0, 2), (0, 2, 4), (1, 0, 2), (1, 2, 4)]


def test_who_finds_no_task_is_reported_later_and_gets_what_another_gives_back():
    job = local(data=DataConfig(num_slices=1, num_epochs=1))
    first, second = job.join("first"), job.join("second")
    task = first.lease()
    assert second.lease() is NO_TASK_YET
    assert second.lease(timeout_s=3.0) is NO_TASK_YET
    first.report(task, "preempted")
    assert second.lease(timeout_s=3.0).attempt == 1


def test_a_task_that_arrives_without_a_waiting_lease_goes_to_the_next_one():
    job = local(data=DataConfig(num_slices=1, num_epochs=1))
    first, second = job.join("first"), job.join("second")
    task = first.lease()
    assert second.lease() is NO_TASK_YET
    first.report(task, "preempted")
    job.advance(3.0)
    assert second.checkpoint() == 0
    assert second.lease().attempt == 1


def test_who_leaves_gives_its_task_to_others():
    job = local(data=DataConfig(num_slices=1, num_epochs=1))
    first, second = job.join("first"), job.join("second")
    first.lease()
    first.leave()
    assert second.lease().attempt == 1
    with pytest.raises(PlanError, match="first has left local"):
        first.lease()


def test_a_snapshot_is_saved_when_no_task_is_begun_and_not_done(servers):
    job = local(num_servers=2, data=DataConfig(num_slices=2, num_epochs=1))
    session = job.join("worker-0")
    task = session.lease()
    assert session.checkpoint() == 0
    job.advance(5.0)
    assert not job.snapshots
    session.report(task, "done")
    job.advance(5.0)
    assert job.snapshots[0].keys() == {0, 1}


@pytest.mark.parametrize("ask", ["push", "pull"])
def test_a_wait_for_a_lost_job_fails_at_once(ask):
    job = local(is_logged=False)
    session = job.join("worker-0")
    session.init("weight", torch.zeros(2), HALF)
    job.kill("server-0")
    waiting = session.push("weight", torch.ones(2)) if ask == "push" else session.pull("weight")
    job.start_server("server-0")
    with pytest.raises(PeerError, match="worker-0: server server-0 restarted while it held the only copy of shards"):
        waiting.wait()
    assert job.now < job.job.timeouts.failure_timeout_s + 3 * job.job.timeouts.heartbeat_s
    with pytest.raises(PeerError, match="restart from the last checkpoint"):
        session.lease()


@pytest.mark.parametrize(("num_servers", "killed"), [(1, "server-0"), (2, "server-0"), (3, "server-1")])
def test_no_acknowledged_update_is_lost_with_a_server(num_servers, killed):
    job = local(num_servers=num_servers)
    session = job.join("worker-0")
    session.init("weight", torch.zeros(1_200_000), HALF)
    session.push("weight", torch.ones(1_200_000)).wait()
    job.kill(killed)
    job.start_server(f"{killed}-again" if num_servers > 1 else killed)
    counted = session.push("weight", torch.ones(1_200_000)).wait()
    assert set(counted.versions) == {2}
    assert torch.equal(session.pull("weight").wait().values, torch.full((1_200_000,), -1.0))


def test_a_coordinator_continues_after_its_log():
    job = local(data=DataConfig(num_slices=2, num_epochs=1))
    session = job.join("worker-0")
    session.report(session.lease(), "done")
    job.kill("coordinator")
    job.start_coordinator()
    session.report(session.lease(), "done")
    assert session.lease() is None


def test_the_journal_makes_the_same_shard_again():
    job = local(num_servers=2)
    session = job.join("worker-0")
    session.init("weight", torch.zeros(4), HALF)
    for number in range(3):
        session.push("weight", torch.full((4,), float(number))).wait()
    (place,) = (index for index in (0, 1) if job.node(f"server-{index}").shard_replicas[index].shard.keys)
    entries = [job.journals[place][at] for at in sorted(job.journals[place])]
    assert (
        replay_journal(job.job, place, entries).digest()
        == job.node(f"server-{place}").shard_replicas[place].shard.digest()
    )


def test_the_journal_has_entries_passed_on_by_a_server_that_never_learned_of_its_promotion():
    """The primary sends the last push to its backup, which sends it to a new backup as part of a state; then both die."""
    job = local(num_servers=3)
    session = job.join("worker-0")
    session.init("weight", torch.zeros(4), HALF)
    (place,) = (at for at in range(3) if job.node(f"server-{at}").shard_replicas[at].shard.keys)
    first, second, third = (f"server-{(place + more) % 3}" for more in range(3))
    pushed = session.push("weight", torch.ones(4))
    one, other = (job.node(name).shard_replicas[place].shard for name in (first, second))
    assert job.run_until(lambda: other.position > one.position, 1)
    job.kill(first)
    assert job.run_until(
        lambda: job.coordinator.state.replicas[place] == ShardReplicas(second, third, is_backup_ready=True), 60
    )
    job.kill(second)
    job.start_server("server-3")
    assert pushed.wait().versions == (1,)
    shard, journal = job.node(third).shard_replicas[place].shard, job.journals[place]
    assert replay_journal(job.job, place, [journal[at] for at in sorted(journal)]).digest() == shard.digest()


BAD = {
    "unknown key": (lambda s: s.push("bias", torch.ones(1)), PlanError, "unknown key 'bias'.*weight"),
    "pull before init": (lambda s: s.pull("bias"), PlanError, "call init or init_rows before"),
    "wrong shape": (lambda s: s.push("weight", torch.ones(3)), PlanError, r"float32 \(3,\) .* which is .*\(2, 3\)"),
    "wrong dtype": (lambda s: s.push("weight", torch.ones(2, 3).double()), PlanError, "float64"),
    "not finite": (lambda s: s.push("weight", torch.full((2, 3), torch.nan)).wait(), DataError, "not finite"),
    "begins not finite": (lambda s: s.init("bias", torch.full((2,), torch.inf), HALF), DataError, "not finite"),
    "another shape": (lambda s: s.init("weight", torch.ones(7), HALF), PlanError, "weight exists as KeySpec"),
    "another rule": (lambda s: s.init("weight", torch.zeros(2, 3), Sgd(0.1)), PlanError, "exists as"),
    "no optimizer": (lambda s: s.init("bias", torch.ones(1), Assign()), PlanError, "which asp needs"),
    "whole numbers": (lambda s: s.init("bias", torch.ones(1).int(), HALF), PlanError, "int32"),
    "rows of a tensor": (lambda s: s.pull("weight", rows=torch.tensor([1])), PlanError, "is a dense key"),
    "versions": (lambda s: s.push("weight", torch.ones(2, 3), read_versions=(0, 0)), PlanError, "2 versions of weight"),
    "future": (lambda s: s.push("weight", torch.ones(2, 3), read_versions=(9,)).wait(), PlanError, "at version 9"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_refused_by_whose_fault_it_is(session, name):
    request, error, text = BAD[name]
    with pytest.raises(error, match=text):
        request(session)
    assert session.push("weight", torch.ones(2, 3)).wait().versions == (1,)


@pytest.mark.parametrize(
    ("rows", "text"), [([3, 1], "do not ascend"), ([1, 1], "ascend strictly"), ([-1], "-1"), ([10], "which has 10")]
)
def test_invalid_rows_are_refused(session, rows, text):
    session.init_rows("table", 10, 2, torch.float32, HALF, ConstantInit())
    with pytest.raises(PlanError, match=text):
        session.pull("table", rows=torch.tensor(rows))


def test_a_full_server_says_what_to_do():
    session = local(capacity_bytes=100).join("worker-0")
    with pytest.raises(PlanError, match="use more servers or a larger capacity_bytes"):
        session.init("weight", torch.zeros(1000), HALF)


def test_two_workers_cannot_have_one_name(servers, session):
    with pytest.raises(LaunchError, match="worker-0 already belongs to the job"):
        servers.join("worker-0")
    assert session.push("weight", torch.ones(2, 3)).wait().versions == (1,)


def test_a_request_without_a_reply_raises_an_error_that_names_the_server(servers, session):
    for name in ("server-0", "server-1", "server-2"):
        servers.kill(name)
    with pytest.raises(PeerError, match=r"waited 2 s for weight .* 1 of 1 replies missing"):
        session.pull("weight").wait(2.0)


def test_a_job_whose_task_fails_too_often_reports_it_and_stops():
    session = local(data=DataConfig(num_slices=1, num_epochs=1), retry_policy=RetryPolicy(max_failures=0)).join(
        "worker-0"
    )
    session.report(session.lease(), "failed", "the file is gone")
    with pytest.raises(PeerError, match="the file is gone"):
        session.lease()


def test_a_worker_that_was_silent_for_too_long_is_reported_that_the_job_continues_without_it():
    job = local()
    session = job.join("worker-0")
    session.init("weight", torch.zeros(1), HALF)
    job.pause("worker-0")
    job.advance(10.0)
    job.resume("worker-0")
    with pytest.raises(PeerError, match="worker-0 does not belong to the job"):
        session.push("weight", torch.ones(1)).wait(10.0)
