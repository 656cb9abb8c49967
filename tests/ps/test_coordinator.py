import math
from typing import Any

import pytest

from counterpoint.errors import PlanError
from counterpoint.ps.actions import AppendLog, SendMessage
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.coordinator import Coordinator
from counterpoint.ps.coordinator_state import assign_replicas, remove_replica
from counterpoint.ps.job_config import DataConfig, JobConfig, Timeouts
from counterpoint.ps.messages import (
    Ack,
    DataTask,
    Heartbeat,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    MembershipView,
    Rejected,
    RequestHeader,
    ShardReplicas,
    TaskReply,
    TaskReport,
    TaskRequest,
)

JOB = JobConfig("job", Asp(), num_servers=2, data=DataConfig(4, 1, 2))


def hello(name="worker", token=7, job=JOB):
    return JoinRequest(name, "worker" if name.startswith("worker") else "server", token, job.digest())


def sent(actions, kind):
    return [
        action.message for action in actions if isinstance(action, SendMessage) and isinstance(action.message, kind)
    ]


def origin(coordinator, sequence=0):
    member = coordinator.state.members["worker"]
    return RequestHeader("worker", member.joined.incarnation, coordinator.state.generation, sequence)


def with_worker():
    coordinator = Coordinator(JOB)
    coordinator.on_event(hello(), 0.0)
    return coordinator


def test_jobs_with_one_second_as_integer_and_as_float_are_equal():
    digests = {JobConfig("job", Asp(), timeouts=Timeouts(heartbeat_s=seconds)).digest() for seconds in (1, 1.0)}
    assert len(digests) == 1


BAD_JOBS = {
    "no heartbeat": lambda: Timeouts(heartbeat_s=0),
    "a negative limit": lambda: Timeouts(resend_s=-1.0),
    "a limit that is not a number": lambda: Timeouts(lease_s=math.nan),
    "a limit that never passes": lambda: Timeouts(failure_timeout_s=math.inf),
    "tasks of a terabyte": lambda: DataConfig(num_slices=10**12, num_epochs=1),
    "a billion servers": lambda: JobConfig("job", Asp(), 10**9),
    "a negative capacity": lambda: JobConfig("job", Asp(), capacity_bytes=-1),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_job_that_would_spin_wait_forever_or_fill_the_memory_is_refused(name):
    with pytest.raises(PlanError, match=r"; give "):
        BAD_JOBS[name]()


def test_a_second_member_of_one_name_is_refused_while_the_first_is_alive():
    (refused,) = sent(with_worker().on_event(hello(token=8), 1.0), Rejected)
    assert refused.reason == "identity"
    assert "worker already belongs to the job, as incarnation 1; its last message was 1.0 s ago" in refused.text


def test_a_repeated_join_request_is_answered_again_and_joins_once():
    coordinator = with_worker()
    actions = coordinator.on_event(hello(), 1.0)
    assert [welcome.incarnation for welcome in sent(actions, JoinReply)] == [1]
    assert coordinator.state.generation == 1


def test_who_comes_for_another_job_is_refused():
    (refused,) = sent(Coordinator(JOB).on_event(hello(job=JobConfig("other", Asp())), 0.0), Rejected)
    assert "another job" in refused.text


def test_a_decision_is_written_before_it_is_reported():
    kinds = [type(action) for action in Coordinator(JOB).on_event(hello(), 0.0)]
    assert kinds == [AppendLog, SendMessage, SendMessage]


def test_a_lease_that_is_asked_for_again_is_the_same_task():
    coordinator = with_worker()
    first, again = (sent(coordinator.on_event(TaskRequest(origin(coordinator)), 0.0), TaskReply) for _ in range(2))
    assert first == again == [TaskReply(0, DataTask(0, 0, 2))]


def test_a_task_whose_worker_falls_silent_is_given_to_another():
    coordinator = with_worker()
    coordinator.on_event(TaskRequest(origin(coordinator)), 0.0)
    coordinator.on_event(None, 100.0)
    assert coordinator.state.tasks.next_task() == DataTask(0, 0, 2, attempt=1)
    assert coordinator.state.members == {}


def test_a_coordinator_continues_from_its_log():
    coordinator = Coordinator(JOB)
    actions = [*coordinator.on_event(hello(), 0.0)]
    actions += coordinator.on_event(TaskRequest(origin(coordinator)), 0.0)
    actions += coordinator.on_event(TaskReport(origin(coordinator, 1), DataTask(0, 0, 2), "done", 3), 0.0)
    lines: list[Any] = [action.record for action in actions if isinstance(action, AppendLog)]
    again = Coordinator(JOB, lines, 5.0)
    assert again.state.view == coordinator.state.view
    assert again.state.tasks.done == coordinator.state.tasks.done
    assert sent(again.on_event(TaskReport(origin(again, 1), DataTask(0, 0, 2), "done", 3), 5.0), Ack) == [Ack(-1, 1)]


def test_an_evicted_incarnation_is_reported():
    coordinator = with_worker()
    coordinator.on_event(None, 100.0)
    (refused,) = sent(coordinator.on_event(Heartbeat(RequestHeader("worker", 1, 1)), 101.0), Rejected)
    assert "incarnation 1 of worker does not belong to the job" in refused.text


def test_shards_are_given_out_when_all_servers_are_there():
    coordinator = Coordinator(JOB)
    coordinator.on_event(hello("server-0"), 0.0)
    assert coordinator.state.replicas == []
    (view, _) = sent(coordinator.on_event(hello("server-1"), 0.0), MembershipView)
    assert [(one.primary, one.backup) for one in view.replicas] == [("server-0", "server-1"), ("server-1", "server-0")]


def test_the_last_copy_of_a_shard_is_never_given_up():
    kept = assign_replicas(ShardReplicas("a", "b", True), {"b": 0, "c": 0})
    assert kept == ShardReplicas("b", "c", former_replica="a")
    assert assign_replicas(kept, {"a": 0, "c": 0}) == ShardReplicas("a", "c", former_replica="b")
    assert remove_replica(ShardReplicas("b", "c"), "b") is None
    assert remove_replica(kept, "b") == ShardReplicas("a")


def test_no_server_is_replaced_without_another_one():
    assert assign_replicas(ShardReplicas("a", "b", True), {"b": 0}) == ShardReplicas("a", "b", True)


def test_a_job_without_servers_is_lost_with_its_last_worker_if_anything_was_done():
    job = JobConfig("job", Bsp(2), num_servers=0, data=DataConfig(4, 1, 2, 2))
    coordinator = Coordinator(job)
    coordinator.on_event(hello(job=job), 0.0)
    (leased,) = sent(coordinator.on_event(TaskRequest(origin(coordinator)), 0.0), TaskReply)
    coordinator.on_event(TaskReport(origin(coordinator, 1), leased.task, "done"), 0.0)
    coordinator.on_event(LeaveRequest(origin(coordinator, 2)), 0.0)
    (refused,) = sent(coordinator.on_event(hello("worker", 8, job), 1.0), Rejected)
    assert (refused.reason, coordinator.state.loss_reason) == ("lost", refused.text)
    assert "the last worker of job job left, and the weights are lost with it, after 1 tasks" in refused.text
