"""The program of a simulated worker: take a task, pull, compute, push, report; its model is two small keys."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.ps.actions import DeliverReply, PsAction
from counterpoint.ps.client import CoordinatorCall, PsClient
from counterpoint.ps.consistency import Bsp, Ssp, find_step
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import (
    CheckpointRequest,
    DataTask,
    InitRequest,
    JoinClock,
    KeySpec,
    LeaveClock,
    LeaveRequest,
    PullReply,
    PullRequest,
    PushReply,
    PushRequest,
    Rejected,
    RequestHeader,
    TaskReply,
    TaskReport,
    TaskRequest,
)
from counterpoint.ps.placement import shard_of_row, split_range
from counterpoint.ps.update_rules import Adagrad, Adam, Sgd, UniformInit

Reply: TypeAlias = object
Script: TypeAlias = Generator[list[PsAction], Reply, None]
WaitingScript: TypeAlias = Generator[list[PsAction], Reply, list[Reply]]

RANGE_KEY, TABLE_KEY = "range", "table"
SIZE, NUM_ROWS = 5, 12


class UnexpectedRejection(Exception):  # noqa: N818 - it ends a script, nothing else
    """A request was rejected that should have been accepted."""


def key_specs(job: JobConfig, shard: int) -> list[KeySpec]:
    """Return the keys of a shard: a range of a dense key, and rows of a table."""
    key_range = split_range(SIZE, job.num_shards)[shard]
    rule = (Sgd(0.1, momentum=0.9), Adagrad(0.1), Adam(0.1))[len(job.name) % 3]
    return [
        KeySpec(RANGE_KEY, "float64", key_range.low, key_range.high, 0, rule),
        KeySpec(TABLE_KEY, "float64", 0, NUM_ROWS, 2, Adagrad(0.1), UniformInit(-1, 1)),
    ]


def initial_range(spec: KeySpec) -> Tensor:
    """Return the initial values of a dense range."""
    return torch.arange(spec.low, spec.high, dtype=torch.float64) / 8


@lru_cache(maxsize=4096)
def rows_of_slice(slice_index: int, shard: int, num_shards: int) -> Tensor:
    """Return the rows on a shard that a data slice looks up."""
    rows = sorted({slice_index * 5 % NUM_ROWS, (slice_index * 7 + 3) % NUM_ROWS, slice_index % 4})
    return torch.tensor([row for row in rows if shard_of_row(row, num_shards) == shard], dtype=torch.int64)


def slice_gradient(values: Tensor, slice_index: int) -> Tensor:
    """Return the gradient of a data slice at these values."""
    return values * 0.25 + ((slice_index * 7 + 1) % 11 - 5) * 0.125


class SimulatedWorker:
    """One incarnation of a worker.

    Args:
        client: its protocol state machine.
        random: decides when it fails or leaves.
        failure_probability: of each.
    """

    def __init__(self, client: PsClient, random: Random, failure_probability: float) -> None:
        self.client, self.job = client, client.job
        self._random, self._failure_probability = random, failure_probability
        self._is_in_clock = False
        self._script = self._run()
        self._has_begun = False
        self._leased: Reply = None
        self.is_done = False
        self.has_left = False
        self.error = ""

    def step(self, actions: Sequence[PsAction]) -> list[PsAction]:
        """Process the client's actions, and return the actions to execute."""
        requested: list[PsAction] = []
        if not self._has_begun and self.client.is_ready:
            self._has_begun = True
            requested += next(self._script, [])
        for action in actions:
            if isinstance(action, DeliverReply):
                requested += self._on_reply(action.reply)
            else:
                requested.append(action)
        return requested

    def _on_reply(self, reply: Reply) -> list[PsAction]:
        if not self._has_begun or self.is_done:
            return []
        try:
            return self._script.send(reply)
        except StopIteration:
            self.is_done = True
        except UnexpectedRejection as error:
            self.is_done, self.error = True, str(error)
        return []

    def _run(self) -> Script:
        shards = range(self.job.num_shards)
        for shard in shards:
            for spec in key_specs(self.job, shard):
                value = None if spec.width else initial_range(spec)
                yield from self._write_all([(shard, lambda o, s=shard, k=spec, v=value: InitRequest(o, s, k, v))])
        while True:
            task = yield from self._request_task()
            if task is None:
                return
            if self._random.random() < self._failure_probability:
                yield from self._report(TaskReport, task, "failed" if self._random.random() < 0.5 else "preempted")
                continue
            version = yield from self._train(task)
            yield from self._report(TaskReport, task, "done", version)
            if self._random.random() < self._failure_probability:
                yield from self._call(CheckpointRequest)
            if self._random.random() < self._failure_probability / 2:
                yield from self._call(LeaveRequest)
                self.has_left = True
                return

    def _train(self, task: DataTask) -> Generator[list[PsAction], Reply, int]:
        newest = 0
        for number in range(task.start, task.stop):
            slice_index = task.epoch * self.job.data.num_slices + number
            if isinstance(self.job.consistency, Ssp) and not self._is_in_clock:
                yield from self._write_all([(s, lambda o, s=s: JoinClock(o, s)) for s in range(self.job.num_shards)])
                self._is_in_clock = True
            min_version, _ = find_step(self.job.consistency, slice_index)
            pulled = yield from self._pull_all(slice_index, min_version)
            replies = yield from self._write_all(
                [(pull_reply.shard, self._push(pull_reply, slice_index)) for pull_reply in pulled]
            )
            pushed = [reply for reply in replies if isinstance(reply, PushReply)]
            self._check_step(slice_index, min_version, pulled, pushed)
            newest = max(newest, *(reply.version for reply in pushed))
        return newest

    def _check_step(
        self, slice_index: int, step: int, pulled: Sequence[PullReply], pushed: Sequence[PushReply]
    ) -> None:
        """Check that under bsp, what is counted of a slice was computed from the weights of its step only."""
        read = {pull_reply.version for pull_reply in pulled}
        if isinstance(self.job.consistency, Bsp) and read != {step} and any(reply.is_new for reply in pushed):
            raise UnexpectedRejection(
                f"slice {slice_index} of step {step} was computed from versions {sorted(read)}, and counted"
            )

    def _push(self, pulled: PullReply, slice_index: int) -> Callable[..., PushRequest]:
        shard = pulled.shard
        rows = rows_of_slice(slice_index, shard, self.job.num_shards) if pulled.key == TABLE_KEY else None
        values = slice_gradient(pulled.values, slice_index)
        return lambda header: PushRequest(header, shard, pulled.key, slice_index, pulled.version, values, rows)

    def _pull_all(self, slice_index: int, min_version: int) -> Generator[list[PsAction], Reply, list[PullReply]]:
        actions: list[PsAction] = []
        is_bsp = isinstance(self.job.consistency, Bsp)
        for shard in range(self.job.num_shards):
            rows = rows_of_slice(slice_index, shard, self.job.num_shards)
            for key, row_ids in ((RANGE_KEY, None), (TABLE_KEY, rows)):
                _, more = self.client.pull(
                    shard,
                    lambda o, t, s=shard, k=key, r=row_ids: PullRequest(o, s, k, t, min_version, r, is_bsp),  # type: ignore[misc]
                )
                actions += more
        replies = yield from self._wait(actions, 2 * self.job.num_shards)
        return [reply for reply in replies if isinstance(reply, PullReply)]

    def _write_all(self, writes: Sequence[tuple[int, Callable[..., object]]]) -> WaitingScript:
        actions: list[PsAction] = []
        for shard, make in writes:
            _, more = self.client.write(shard, make)  # type: ignore[arg-type]
            actions += more
        return (yield from self._wait(actions, len(writes)))

    def _wait(self, actions: list[PsAction], count: int) -> WaitingScript:
        """Return as many replies of shards as were requested."""
        replies: list[Reply] = []
        while len(replies) < count:
            reply = yield actions
            actions = []
            if isinstance(reply, TaskReply) or (isinstance(reply, Rejected) and reply.shard < 0):
                self._leased = reply
                continue
            if isinstance(reply, Rejected):
                raise UnexpectedRejection(reply.text)
            replies.append(reply)
        return replies

    def _request_task(self) -> Generator[list[PsAction], Reply, DataTask | None]:
        self._leased = yield self.client.call_coordinator(TaskRequest)
        while isinstance(self._leased, Rejected):
            if self._leased.reason != "later":
                raise UnexpectedRejection(self._leased.text)
            self._leased = None
            if self._is_in_clock:
                self._is_in_clock = False
                yield from self._write_all([(s, lambda o, s=s: LeaveClock(o, s)) for s in range(self.job.num_shards)])
            if self._leased is None:
                self._leased = yield []
        return self._leased.task if isinstance(self._leased, TaskReply) else None

    def _report(self, make: type[TaskReport], task: DataTask, outcome: str, version: int = 0) -> Script:
        yield from self._call(lambda header: make(header, task, outcome, version))  # type: ignore[arg-type]

    def _call(self, make: Callable[[RequestHeader], CoordinatorCall]) -> Script:
        """Call the coordinator until it acknowledges."""
        reply = yield self.client.call_coordinator(make)
        while isinstance(reply, Rejected):
            if reply.reason != "later":
                raise UnexpectedRejection(reply.text)
            reply = yield []
