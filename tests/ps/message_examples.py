"""One message of every kind."""

import torch

from counterpoint.ps import messages, messages as calls, messages as states, update_rules as choices
from counterpoint.ps.message_codec import PsMessage
from counterpoint.ps.row_pooling import RowPooling

ORIGIN = messages.RequestHeader("worker-1", 3, 7, 5, 4)
RANGE = messages.KeySpec("weight", "float32", 4, 8, 0, choices.Sgd(0.1, momentum=0.9))
TABLE = messages.KeySpec("table", "float32", 0, 1000, 2, choices.Adagrad(), choices.UniformInit(-0.1, 0.1, seed=3))
ROWS = torch.tensor([2, 40])
SUMS = RowPooling(torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
PUSH = messages.PushRequest(ORIGIN, 0, "table", 12, 3, torch.ones(2, 2), ROWS)
MEMBERS = (messages.JobMember("worker-1", 3, "127.0.0.1:4000"),)
TASK = calls.DataTask(0, 8, 12, 1)
COUNTS = states.KeyProgress(4, (0, 3, 5, 9), (states.WorkerClock("worker-1", 4),), (0, 1, 3, 2))
STATE = states.ShardState(
    9,
    7,
    MEMBERS,
    ("worker-1",),
    (states.ClientState("worker-1", 3, 5, (messages.PushReply(0, 4, 2), messages.Ack(0, 3))),),
    (
        states.KeyState(RANGE, COUNTS, (torch.arange(4.0), torch.zeros(4))),
        states.KeyState(
            TABLE, COUNTS, (torch.ones(2, 2),), ROWS, (states.PendingGradient(7, torch.ones(1, 2), ROWS[:1]),)
        ),
        states.KeyState(RANGE, COUNTS, (torch.ones(4), torch.ones(4)), None, (), torch.zeros(4)),
    ),
)
VIEW = calls.MembershipView(
    7, MEMBERS, (messages.JobMember("server-0", 1),), (calls.ShardReplicas("server-0", "server-1"),)
)

MESSAGES: list[PsMessage] = [
    messages.InitRequest(ORIGIN, 0, RANGE, torch.arange(4.0)),
    messages.InitRequest(ORIGIN, 0, TABLE),
    messages.InitRequest(ORIGIN, 0, TABLE, torch.ones(2, 2), ROWS),
    PUSH,
    messages.PushRequest(ORIGIN, 0, "weight", -1, 3, torch.ones(4)),
    messages.PushRequest(ORIGIN, 0, "weight", 5, 3, torch.zeros(1, dtype=torch.uint8), None, "twobit:0.5"),
    messages.PushRequest(ORIGIN, 0, "table", 12, 3, torch.ones(2, 2), ROWS, pooling=SUMS),
    messages.PullRequest(ORIGIN, 0, "table", 8, 0, ROWS),
    messages.PullRequest(ORIGIN, 0, "table", 8, 0, ROWS, pooling=SUMS),
    messages.PullRequest(ORIGIN, 0, "weight", 9, 2, exact_version=True),
    messages.JoinClock(ORIGIN, 0),
    messages.LeaveClock(ORIGIN, 0),
    messages.PushReply(0, 5, 4, is_new=False),
    messages.PullReply(0, 8, "table", 4, torch.zeros(2, 2)),
    messages.Ack(0, 5),
    messages.Rejected(0, 5, False, "later", "the backup is not complete", 7),
    states.InstallSnapshot(ORIGIN, 0, STATE),
    states.ReplicateEntry(ORIGIN, 0, 9, PUSH),
    states.ReplicateEntry(ORIGIN, 0, 9, messages.SetMembers(7, MEMBERS)),
    states.ReplicationAck(ORIGIN, 0, 10),
    calls.JoinRequest("worker-1", "worker", 99, "abc"),
    calls.JoinReply(99, 3, VIEW),
    VIEW,
    calls.Heartbeat(ORIGIN),
    calls.TaskRequest(ORIGIN),
    calls.TaskReply(5, TASK),
    calls.TaskReply(5, None),
    calls.TaskReport(ORIGIN, TASK, "done", 4),
    calls.LeaveRequest(ORIGIN),
    calls.BackupReady(ORIGIN, 0),
    calls.CheckpointRequest(ORIGIN),
    calls.CheckpointReply(5, 1),
    calls.SnapshotRequest(7, 1),
    calls.SnapshotSaved(ORIGIN, 0, 1, 9),
]
