"""One message of every kind."""

import torch

from counterpoint.server import calls, choices, messages, states
from counterpoint.server.form import Message
from counterpoint.server.sums import Sums

ORIGIN = messages.Origin("worker-1", 3, 7, 5, 4)
RANGE = messages.Spec("weight", "float32", 4, 8, 0, choices.Sgd(0.1, momentum=0.9))
TABLE = messages.Spec("table", "float32", 0, 1000, 2, choices.Adagrad(), choices.Uniform(-0.1, 0.1, seed=3))
ROWS = torch.tensor([2, 40])
SUMS = Sums(torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
PUSH = messages.Push(ORIGIN, 0, "table", 12, 3, torch.ones(2, 2), ROWS)
MEMBERS = (messages.Member("worker-1", 3, "127.0.0.1:4000"),)
TASK = calls.Task(0, 8, 12, 1)
COUNTS = states.Counts(4, (0, 3, 5, 9), (states.Clock("worker-1", 4),), (0, 1, 3, 2))
STATE = states.ShardState(
    9,
    7,
    MEMBERS,
    ("worker-1",),
    (states.Session("worker-1", 3, 5, (messages.Pushed(0, 4, 2), messages.Done(0, 3))),),
    (
        states.KeyState(RANGE, COUNTS, (torch.arange(4.0), torch.zeros(4))),
        states.KeyState(TABLE, COUNTS, (torch.ones(2, 2),), ROWS, (states.Held(7, torch.ones(1, 2), ROWS[:1]),)),
        states.KeyState(RANGE, COUNTS, (torch.ones(4), torch.ones(4)), None, (), torch.zeros(4)),
    ),
)
VIEW = calls.View(7, MEMBERS, (messages.Member("server-0", 1),), (calls.Keepers("server-0", "server-1"),))

MESSAGES: list[Message] = [
    messages.Init(ORIGIN, 0, RANGE, torch.arange(4.0)),
    messages.Init(ORIGIN, 0, TABLE),
    messages.Init(ORIGIN, 0, TABLE, torch.ones(2, 2), ROWS),
    PUSH,
    messages.Push(ORIGIN, 0, "weight", -1, 3, torch.ones(4)),
    messages.Push(ORIGIN, 0, "weight", 5, 3, torch.zeros(1, dtype=torch.uint8), None, "twobit:0.5"),
    messages.Push(ORIGIN, 0, "table", 12, 3, torch.ones(2, 2), ROWS, sums=SUMS),
    messages.Pull(ORIGIN, 0, "table", 8, 0, ROWS),
    messages.Pull(ORIGIN, 0, "table", 8, 0, ROWS, sums=SUMS),
    messages.Pull(ORIGIN, 0, "weight", 9, 2, is_exact=True),
    messages.Enter(ORIGIN, 0),
    messages.Rest(ORIGIN, 0),
    messages.Pushed(0, 5, 4, is_new=False),
    messages.Pulled(0, 8, "table", 4, torch.zeros(2, 2)),
    messages.Done(0, 5),
    messages.Refused(0, 5, False, "later", "the backup is not complete", 7),
    states.Install(ORIGIN, 0, STATE),
    states.Replicate(ORIGIN, 0, 9, PUSH),
    states.Replicate(ORIGIN, 0, 9, messages.Members(7, MEMBERS)),
    states.Kept(ORIGIN, 0, 10),
    calls.Hello("worker-1", "worker", 99, "abc"),
    calls.Welcome(99, 3, VIEW),
    VIEW,
    calls.Heartbeat(ORIGIN),
    calls.Lease(ORIGIN),
    calls.Leased(5, TASK),
    calls.Leased(5, None),
    calls.Report(ORIGIN, TASK, "done", 4),
    calls.Leave(ORIGIN),
    calls.Complete(ORIGIN, 0),
    calls.Checkpoint(ORIGIN),
    calls.Promised(5, 1),
    calls.Cut(7, 1),
    calls.Saved(ORIGIN, 0, 1, 9),
]
