"""A session over whatever carries its messages: it divides requests over shards, and puts their answers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from counterpoint.errors import CounterpointError, LaunchError, PeerError, PlanError, ProtocolError
from counterpoint.server.actions import Action, Deliver, Stop
from counterpoint.server.asking import Asked, Carrier, PartAnswer
from counterpoint.server.calling import Calling
from counterpoint.server.calls import Checkpoint, Leased, Leave, Promised, Report, Task, View
from counterpoint.server.choices import Aggregate, Rule, Start
from counterpoint.server.client import Client
from counterpoint.server.form import Message
from counterpoint.server.keys import NAMES, Dense, Key, Table, require_kept, require_servers, require_value
from counterpoint.server.messages import (
    NO_PORTION,
    Done,
    Enter,
    Init,
    Origin,
    Outcome,
    Pull,
    Pulled,
    Push,
    Pushed,
    Refused,
    Rest,
    Spec,
)
from counterpoint.server.placement import home
from counterpoint.server.presence import Presence
from counterpoint.server.session import Given, Later, Pulls, Pushes, Versions
from counterpoint.server.states import Change
from counterpoint.server.sums import Sums

Result = TypeVar("Result")


class WorkerSession:
    """A worker's belonging to a job; see :class:`counterpoint.server.session.Session`.

    Args:
        client: its side of the protocol.
        carrier: of its messages.
    """

    def __init__(self, client: Client, carrier: Carrier) -> None:
        self.job, self.name = client.job, client.name
        self._client, self._carrier = client, carrier
        self._keys: dict[str, Key] = {}
        self._read: dict[str, Versions] = {}
        self._newest = 0
        self._changes: dict[tuple[int, int], tuple[Asked[object], int]] = {}
        self._pulls: dict[int, tuple[Asked[object], int]] = {}
        self._calling = Calling(client, carrier)
        self._error: CounterpointError | None = None
        self._has_left = False

    @property
    def presence(self) -> Presence:
        """Its belonging to the job."""
        return self._client.presence

    @property
    def view(self) -> View:
        """Who belongs to the job now, as far as this session has heard."""
        return self._client.presence.view

    def await_view(self, newer_than: int, wait_s: float) -> View:
        """Return who belongs to the job, as soon as that is of a newer generation, or the time is up."""
        self._carrier.wait(lambda: self.view.generation > newer_than or self._error is not None, wait_s)
        self._require_in()
        return self.view

    def on_event(self, message: Message | None, now: float) -> list[Action]:
        """Take in a message, or the time, and return what is to be sent; answers go to those who wait for them."""
        if self._has_left or self._error is not None:
            return []
        sends: list[Action] = []
        for action in self._client.on_event(message, now):
            if isinstance(action, Deliver):
                sends += self._take(action.answer)
            elif isinstance(action, Stop):
                self.fail(PeerError(f"{self.name}: {action.text}"))
            else:
                sends.append(action)
        return sends

    def fail(self, error: CounterpointError) -> None:
        """The session is over; whoever waits is told why."""
        self._error = self._calling.error = self._error or error
        for asked, _ in (*self._changes.values(), *self._pulls.values()):
            asked.fail(error)
        self._changes.clear()
        self._pulls.clear()

    def _take(self, answer: Pushed | Pulled | Done | Refused | Leased | Promised) -> list[Action]:
        if isinstance(answer, Leased | Promised) or answer.shard < 0:
            sends = self._calling.hear(answer)  # type: ignore[arg-type]
            if self._calling.error is not None:
                self.fail(self._calling.error)
            return sends
        if isinstance(answer, Pulled):
            asked, part = self._pulls.pop(answer.ticket)
        elif isinstance(answer, Refused) and answer.is_pull:
            asked, part = self._pulls.pop(answer.sequence)
        else:
            asked, part = self._changes.pop((answer.shard, answer.sequence))
        asked.answer(part, answer)
        return []

    # Requests to shards

    def init(self, key: str, value: Tensor, rule: Rule) -> None:
        """The key exists: as it is there already, or as this value."""
        require_kept(self.job, key, rule)
        require_value(key, value)
        dense = Dense(key, tuple(value.shape), value.dtype, home(key, value.numel(), self.job.num_shards))
        self._make(dense, list(dense.specs(rule)), [part.values.clone() for part in dense.parts(value, None)])

    def init_rows(self, key: str, rows: int, width: int, dtype: torch.dtype, rule: Rule, start: Start | Given) -> None:
        """The table of rows exists; its rows begin when they are first asked for."""
        if dtype not in NAMES or rows < 1 or width < 1:
            raise PlanError(
                f"{key} of {rows} x {width} {dtype}; a table has rows of one of {', '.join(NAMES.values())}"
            )
        if isinstance(rule, Aggregate):
            raise PlanError(f"rows of {key} without an optimizer on the server; give them a rule")
        require_kept(self.job, key, rule)
        table = Table(key, rows, width, dtype, self.job.num_shards)
        if isinstance(start, Given):
            parts = table.parts(start.values, start.rows)
            values, numbers = [part.values for part in parts], [part.rows for part in parts]
            self._make(table, list(table.specs(rule, start.others)), values, numbers)
        else:
            self._make(table, list(table.specs(rule, start)), [None] * self.job.num_shards)

    def _make(
        self, key: Key, specs: Sequence[Spec], values: Sequence[Tensor | None], rows: Sequence[Tensor | None] = ()
    ) -> None:
        begins = zip(key.shards, specs, values, rows or [None] * len(specs), strict=True)
        makes: list[tuple[int, Callable[[Origin], Change]]] = [
            (shard, lambda origin, shard=shard, begin=begin: Init(origin, shard, *begin))  # type: ignore[misc]
            for shard, *begin in begins
        ]
        self._change(f"the servers to make {key.name}", makes, lambda _: None).wait()
        self._keys[key.name] = key
        self._read.setdefault(key.name, (0,) * len(key.shards))

    def push(  # noqa: PLR0913 - what a push says, most by keyword
        self,
        key: str,
        values: Tensor,
        *,
        portion: int = NO_PORTION,
        read: Versions | None = None,
        rows: Tensor | None = None,
        code: str = "",
        sums: Sums | None = None,
    ) -> Asked[Pushes]:
        """A gradient is on its way; its tensors must stay as they are until it has been answered."""
        known = self._known(key)
        from_versions = self._read[key] if read is None else read
        if len(from_versions) != len(known.shards):
            raise PlanError(
                f"{len(from_versions)} versions of {key}, which has {len(known.shards)} parts; give so many"
            )
        makes: list[tuple[int, Callable[[Origin], Change]]] = [
            (
                part.shard,
                lambda origin, part=part, version=version: Push(  # type: ignore[misc]
                    origin, part.shard, key, portion, version, part.values, part.rows, code, part.sums
                ),
            )
            for part, version in zip(known.parts(values, rows, code, sums), from_versions, strict=True)
        ]
        return self._change(f"the servers to count a push to {key}", makes, self._pushed, values)

    def _pushed(self, answers: list[PartAnswer]) -> Pushes:
        found = [answer for answer in answers if isinstance(answer, Pushed)]
        versions = tuple(answer.version for answer in found)
        self._newest = max(self._newest, *versions)
        return Pushes(versions, tuple(answer.is_new for answer in found))

    def _change(
        self,
        what: str,
        makes: Sequence[tuple[int, Callable[[Origin], Change]]],
        finish: Callable[[list[PartAnswer]], Result],
        values: Tensor | None = None,
    ) -> Asked[Result]:
        asked = self._begin(what, len(makes), finish, values)
        with self._carrier.lock:
            for part, (shard, make) in enumerate(makes):
                sequence, actions = self._client.change(shard, make)
                self._changes[shard, sequence] = (asked, part)  # type: ignore[assignment]
                self._carrier.act(actions)
        return asked

    def _begin(
        self,
        what: str,
        num_parts: int,
        finish: Callable[[list[PartAnswer]], Result],
        values: Tensor | None = None,
    ) -> Asked[Result]:
        self._require_in()
        limit_s = self.job.patience.lease_s
        if not self._carrier.wait(self._carrier.has_room, limit_s):
            raise PeerError(f"waited {limit_s:g} s for servers to take what was sent before; look at what they do")
        return Asked(self._carrier, what, num_parts, finish, limit_s, values)

    def pull(
        self,
        key: str,
        *,
        rows: Tensor | None = None,
        least: Versions | int = 0,
        out: Tensor | None = None,
        is_exact: bool = False,
        sums: Sums | None = None,
    ) -> Asked[Pulls]:
        """What a key is, or some of its rows, or sums of these, is on its way."""
        known = self._known(key)
        wanted = known.wanted(rows, sums)
        if out is not None:
            known.require_out(out, rows, sums)
        bounds = (least,) * len(wanted) if isinstance(least, int) else least
        if len(bounds) != len(wanted):
            raise PlanError(f"{len(bounds)} versions of {key}, which has {len(wanted)} parts; give so many, or one")

        def finish(answers: list[PartAnswer]) -> Pulls:
            found = [answer for answer in answers if isinstance(answer, Pulled)]
            self._read[key] = tuple(answer.version for answer in found)
            return Pulls(known.joined([answer.values for answer in found], wanted, out), self._read[key])

        asked = self._begin(f"{key} at version {least} or newer", len(wanted), finish)
        with self._carrier.lock:
            for part, (one, bound) in enumerate(zip(wanted, bounds, strict=True)):
                ticket, actions = self._client.pull(
                    one.shard,
                    lambda origin, ticket, one=one, bound=bound: Pull(  # type: ignore[misc]
                        origin, one.shard, key, ticket, bound, one.rows, is_exact, one.sums
                    ),
                )
                self._pulls[ticket] = (asked, part)  # type: ignore[assignment]
                self._carrier.act(actions)
        return asked

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose pushes and pulls leave in one go at its end."""
        return self._carrier.together()

    def enter(self) -> None:
        """Others wait for this worker from now on (ssp); it comes before the pull for the first push."""
        makes = [(shard, lambda origin, shard=shard: Enter(origin, shard)) for shard in range(self.job.num_shards)]
        self._change("the servers to let this worker enter", makes, lambda _: None).wait()

    def rest(self) -> None:
        """Nobody waits for this worker any longer (ssp), until it enters again."""
        makes = [(shard, lambda origin, shard=shard: Rest(origin, shard)) for shard in range(self.job.num_shards)]
        self._change("the servers to let this worker rest", makes, lambda _: None).wait()

    def _known(self, key: str) -> Key:
        self._require_in()
        known = self._keys.get(key)
        if known is None:
            names = ", ".join(sorted(self._keys)) or "none"
            raise PlanError(f"there is no key {key!r}, only {names}; init, or init_rows, comes before push and pull")
        return known

    def _require_in(self) -> None:
        if self._error is not None:
            raise self._error
        if self._has_left:
            raise PlanError(f"{self.name} has left {self.job.name}; join again to ask for more")

    # Requests to the coordinator

    def await_ready(self, deadline_s: float) -> Self:
        """The session belongs to the job, and servers keep all shards.

        Raises:
            LaunchError: another worker has the name, this worker has another job, or nobody has answered in time.
        """
        is_told = self._carrier.wait(self._is_settled, deadline_s)
        trouble = self._carrier.trouble
        if not self._client.is_ready and self._error is None:
            here = f"{len(self.view.servers)} of {self.job.num_servers} servers are there"
            missing = here if self._client.presence.is_welcome else "the coordinator has not answered"
            waited = "could not join" if is_told else f"waited {deadline_s:g} s for"
            raise LaunchError(f"{self.name} {waited} job {self.job.name}: {trouble or missing}") from trouble
        self._require_in()
        return self

    def _is_settled(self) -> bool:
        """Whether it belongs to the job, or never will."""
        is_hopeless = isinstance(self._carrier.trouble, ProtocolError)
        return self._client.is_ready or self._error is not None or is_hopeless

    def lease(self, wait_s: float = 0.0) -> Task | Later | None:
        """Return data to work on; None when all data of all epochs has been counted."""
        self._require_in()
        return self._calling.lease(wait_s)

    def report(self, task: Task, outcome: Outcome, text: str = "") -> None:
        """The coordinator knows how a task ended; done means that all its pushes have been answered."""
        newest = self._newest
        self._require_in()
        self._calling.ask(lambda origin: Report(origin, task, outcome, newest, text))

    def checkpoint(self) -> int:
        """Return the number of a cut that will be saved as soon as no task is begun and not done."""
        self._require_in()
        require_servers(self.job, "a cut")
        told = self._calling.ask(Checkpoint)
        if not isinstance(told, Promised):
            raise PeerError(f"the coordinator answered {told} to a checkpoint; look at what it runs")
        return told.cut

    def leave(self) -> None:
        """The job goes on without this worker, and gives others what it had leased; nothing can be asked any more."""
        self._require_in()
        self._calling.ask(Leave)
        self._has_left = True

    def close(self) -> None:
        """The session has left, if it was still in and the job can be reached; nothing of it remains."""
        try:
            if self._error is None and not self._has_left and self._client.presence.is_welcome:
                self._calling.begin(Leave)
                self._calling.await_answer(self.job.patience.silence_s)
        finally:
            self._has_left = True
            self._carrier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
