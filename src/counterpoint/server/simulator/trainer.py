"""A worker's program in the simulated world: take a task, read, compute, push, report; its model is two small keys."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from random import Random
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.server.actions import Action, Deliver
from counterpoint.server.calls import Checkpoint, Lease, Leased, Leave, Report, Task
from counterpoint.server.choices import Adagrad, Adam, Sgd, Uniform
from counterpoint.server.client import Call, Client
from counterpoint.server.job import Bsp, Job, Ssp
from counterpoint.server.messages import Enter, Init, Origin, Pull, Pulled, Push, Pushed, Refused, Rest, Spec
from counterpoint.server.placement import cut, shard_of_row

Answer: TypeAlias = object
Script: TypeAlias = Generator[list[Action], Answer, None]
Waiting: TypeAlias = Generator[list[Action], Answer, list[Answer]]

RANGE, TABLE = "range", "table"
SIZE, NUM_ROWS = 5, 12


class Unwelcome(Exception):  # noqa: N818 - it ends a script, nothing else
    """A request was refused that should not have been."""


def specs(job: Job, shard: int) -> list[Spec]:
    """Return the keys of a shard: a part of a range, and rows of a table."""
    place = cut(SIZE, job.num_shards)[shard]
    rule = (Sgd(0.1, momentum=0.9), Adagrad(0.1), Adam(0.1))[len(job.name) % 3]
    return [
        Spec(RANGE, "float64", place.low, place.high, 0, rule),
        Spec(TABLE, "float64", 0, NUM_ROWS, 2, Adagrad(0.1), Uniform(-1, 1)),
    ]


def first_range(spec: Spec) -> Tensor:
    """Return how a range begins."""
    return torch.arange(spec.low, spec.high, dtype=torch.float64) / 8


@lru_cache(maxsize=4096)
def rows_of(portion: int, shard: int, num_shards: int) -> Tensor:
    """Return the rows on a shard that a portion of data looks up."""
    rows = sorted({portion * 5 % NUM_ROWS, (portion * 7 + 3) % NUM_ROWS, portion % 4})
    return torch.tensor([row for row in rows if shard_of_row(row, num_shards) == shard], dtype=torch.int64)


def gradient(values: Tensor, portion: int) -> Tensor:
    """Return what a portion of data pushes, having read these values."""
    return values * 0.25 + ((portion * 7 + 1) % 11 - 5) * 0.125


class Trainer:
    """One life of a worker.

    Args:
        client: its side of the protocol.
        random: decides when it fails, and when it goes.
        trouble: the probability of each.
    """

    def __init__(self, client: Client, random: Random, trouble: float) -> None:
        self.client, self.job = client, client.job
        self._random, self._trouble = random, trouble
        self._has_entered = False
        self._script = self._work()
        self._has_begun = False
        self._leased: Answer = None
        self.is_done = False
        self.has_left = False
        self.error = ""

    def go_on(self, actions: Sequence[Action]) -> list[Action]:
        """Return what is to be done after the client's actions, answers that it delivers being taken in."""
        found: list[Action] = []
        if not self._has_begun and self.client.is_ready:
            self._has_begun = True
            found += next(self._script, [])
        for action in actions:
            if isinstance(action, Deliver):
                found += self._take(action.answer)
            else:
                found.append(action)
        return found

    def _take(self, answer: Answer) -> list[Action]:
        if not self._has_begun or self.is_done:
            return []
        try:
            return self._script.send(answer)
        except StopIteration:
            self.is_done = True
        except Unwelcome as error:
            self.is_done, self.error = True, str(error)
        return []

    def _work(self) -> Script:
        shards = range(self.job.num_shards)
        for shard in shards:
            for spec in specs(self.job, shard):
                value = None if spec.width else first_range(spec)
                yield from self._changes([(shard, lambda o, s=shard, k=spec, v=value: Init(o, s, k, v))])
        while True:
            task = yield from self._lease()
            if task is None:
                return
            if self._random.random() < self._trouble:
                yield from self._report(Report, task, "failed" if self._random.random() < 0.5 else "preempted")
                continue
            version = yield from self._train(task)
            yield from self._report(Report, task, "done", version)
            if self._random.random() < self._trouble:
                yield from self._call(Checkpoint)
            if self._random.random() < self._trouble / 2:
                yield from self._call(Leave)
                self.has_left = True
                return

    def _train(self, task: Task) -> Generator[list[Action], Answer, int]:
        newest = 0
        for number in range(task.start, task.stop):
            portion = task.epoch * self.job.work.num_portions + number
            if isinstance(self.job.consistency, Ssp) and not self._has_entered:
                yield from self._changes([(s, lambda o, s=s: Enter(o, s)) for s in range(self.job.num_shards)])
                self._has_entered = True
            least = portion // self.job.consistency.portions if isinstance(self.job.consistency, Bsp) else 0
            pulled = yield from self._pulls(portion, least)
            answers = yield from self._changes([(one.shard, self._push(one, portion)) for one in pulled])
            pushed = [answer for answer in answers if isinstance(answer, Pushed)]
            self._require_step(portion, least, pulled, pushed)
            newest = max(newest, *(answer.version for answer in pushed))
        return newest

    def _require_step(self, portion: int, step: int, pulled: Sequence[Pulled], pushed: Sequence[Pushed]) -> None:
        """Under bsp, what is counted of a portion was computed from its step's weights, all of them."""
        read = {one.version for one in pulled}
        if isinstance(self.job.consistency, Bsp) and read != {step} and any(answer.is_new for answer in pushed):
            raise Unwelcome(f"portion {portion} of step {step} was computed from versions {sorted(read)}, and counted")

    def _push(self, pulled: Pulled, portion: int) -> Callable[..., Push]:
        shard = pulled.shard
        rows = rows_of(portion, shard, self.job.num_shards) if pulled.key == TABLE else None
        values = gradient(pulled.values, portion)
        return lambda origin: Push(origin, shard, pulled.key, portion, pulled.version, values, rows)

    def _pulls(self, portion: int, least: int) -> Generator[list[Action], Answer, list[Pulled]]:
        actions: list[Action] = []
        is_bsp = isinstance(self.job.consistency, Bsp)
        for shard in range(self.job.num_shards):
            rows = rows_of(portion, shard, self.job.num_shards)
            for key, wanted in ((RANGE, None), (TABLE, rows)):
                _, more = self.client.pull(
                    shard,
                    lambda o, t, s=shard, k=key, r=wanted: Pull(o, s, k, t, least, r, is_bsp),  # type: ignore[misc]
                )
                actions += more
        answers = yield from self._wait(actions, 2 * self.job.num_shards)
        return [answer for answer in answers if isinstance(answer, Pulled)]

    def _changes(self, asked: Sequence[tuple[int, Callable[..., object]]]) -> Waiting:
        actions: list[Action] = []
        for shard, make in asked:
            _, more = self.client.change(shard, make)  # type: ignore[arg-type]
            actions += more
        return (yield from self._wait(actions, len(asked)))

    def _wait(self, actions: list[Action], count: int) -> Waiting:
        """Return as many answers of shards as were asked for."""
        answers: list[Answer] = []
        while len(answers) < count:
            answer = yield actions
            actions = []
            if isinstance(answer, Leased) or (isinstance(answer, Refused) and answer.shard < 0):
                self._leased = answer
                continue
            if isinstance(answer, Refused):
                raise Unwelcome(answer.text)
            answers.append(answer)
        return answers

    def _lease(self) -> Generator[list[Action], Answer, Task | None]:
        self._leased = yield self.client.ask(Lease)
        while isinstance(self._leased, Refused):
            if self._leased.reason != "later":
                raise Unwelcome(self._leased.text)
            self._leased = None
            if self._has_entered:
                self._has_entered = False
                yield from self._changes([(s, lambda o, s=s: Rest(o, s)) for s in range(self.job.num_shards)])
            if self._leased is None:
                self._leased = yield []
        return self._leased.task if isinstance(self._leased, Leased) else None

    def _report(self, make: type[Report], task: Task, outcome: str, version: int = 0) -> Script:
        yield from self._call(lambda origin: make(origin, task, outcome, version))  # type: ignore[arg-type]

    def _call(self, make: Callable[[Origin], Call]) -> Script:
        """Ask the coordinator, until it says that it is done."""
        answer = yield self.client.ask(make)
        while isinstance(answer, Refused):
            if answer.reason != "later":
                raise Unwelcome(answer.text)
            answer = yield []
