"""One server by itself: what it saves of its shards, and when."""

import pytest

from counterpoint.ps.actions import COORDINATOR, AppendJournal, SaveSnapshot, SendMessage, Shutdown
from counterpoint.ps.client import PsClient
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import (
    JobMember,
    JoinReply,
    MembershipView,
    Rejected,
    RequestHeader,
    SetMembers,
    ShardReplicas,
    SnapshotRequest,
    SnapshotSaved,
)
from counterpoint.ps.server import ServerNode

VIEW = MembershipView(1, (), (JobMember("server-0", 1),), (ShardReplicas("server-0", is_backup_ready=True),))


def leading():
    node = ServerNode(JobConfig("job", Asp()), "server-0", 7)
    node.on_event(JoinReply(7, 1, VIEW), 0.0)
    return node


def saves(node, snapshot_number):
    return [
        action.snapshot
        for action in node.on_event(SnapshotRequest(1, snapshot_number), 0.0)
        if isinstance(action, SaveSnapshot)
    ]


def test_a_repeated_snapshot_request_is_saved_once_and_confirmed_again():
    node = leading()
    assert saves(node, 0) == [0]
    expected_reply = SendMessage(COORDINATOR, SnapshotSaved(RequestHeader("server-0", 1, 1), 0, 0, 1))
    assert node.on_event(SnapshotRequest(1, 0), 0.0) == [expected_reply]


def test_a_snapshot_that_is_asked_for_once_more_after_a_later_one_stays_as_it_was_saved():
    """A message for cut 1 was four seconds on its way and came after cut 2: its part got data of the time between."""
    node = leading()
    assert [saves(node, 0), saves(node, 1)] == [[0], [1]]
    assert node.on_event(SnapshotRequest(1, 0), 0.0) == []


def test_an_incarnation_journals_the_entries_of_its_initial_log():
    """The life before was killed after an entry stood in the log and before it stood in the journal."""
    entries = [SetMembers(generation, ()) for generation in (1, 2)]
    node = ServerNode(JobConfig("job", Asp()), "server-0", 7, logs={0: entries})
    noted = [action for action in node.on_event(JoinReply(7, 1, VIEW), 0.0) if isinstance(action, AppendJournal)]
    assert noted[:2] == [AppendJournal(0, at, entry, is_committed=True) for at, entry in enumerate(entries)]
    assert [note.position for note in noted] == [0, 1, 2]


@pytest.mark.parametrize("generation", [1, 2])
def test_an_incarnation_ends_by_a_refusal_after_it_has_joined_not_by_a_late_one_before(generation):
    refused = Rejected(-1, 0, is_pull=False, reason="identity", text="gone", generation=generation)
    stops = [action for action in leading().on_event(refused, 0.0) if isinstance(action, Shutdown)]
    assert stops == ([Shutdown("gone")] if generation > 1 else [])


def test_a_worker_that_is_welcome_continues_where_the_refusal_of_its_handshake_comes_late():
    client = PsClient(JobConfig("job", Asp()), "worker-0", 7)
    client.on_event(JoinReply(7, 1, VIEW), 0.0)
    for generation, expected in ((1, []), (2, [Shutdown("gone")])):
        refused = Rejected(-1, 0, is_pull=False, reason="identity", text="gone", generation=generation)
        assert client.on_event(refused, 0.0) == expected
