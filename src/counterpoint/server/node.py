"""A server: the shards it keeps, first or as a backup, and what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from counterpoint.server.actions import COORDINATOR, Action, Save, Send, Stop, answer
from counterpoint.server.calls import Complete, Cut, Keepers, Saved, View, Welcome
from counterpoint.server.form import Message
from counterpoint.server.holding import Backed, Primary, recalled, recovered
from counterpoint.server.job import Job
from counterpoint.server.messages import Enter, Init, Members, Pull, Push, Reason, Refused, Rest
from counterpoint.server.presence import Presence
from counterpoint.server.shard import Shard
from counterpoint.server.states import Change, Entry, Install, Kept, Replicate, ShardState


class Node:
    """One life of a server.

    Args:
        job: what all agree on.
        name: of the server.
        token: a number that no other life has drawn.
        address: where it is reached.
        saved: the state of shards in the checkpoint that the job goes on from.
        logs: what stands in the logs of shards that it keeps alone.
    """

    def __init__(
        self,
        job: Job,
        name: str,
        token: int,
        address: str = "",
        *,
        saved: Mapping[int, ShardState] | None = None,
        logs: Mapping[int, Sequence[Entry]] | None = None,
    ) -> None:
        self.job, self.name = job, name
        self.presence = Presence(job, name, "server", token, address)
        self.holdings: dict[int, Primary | Backed] = {}
        self._saved, self._logs = dict(saved or {}), dict(logs or {})
        self._cuts: dict[int, tuple[int, int]] = {}

    @property
    def generation(self) -> int:
        """The newest that it knows."""
        return self.presence.view.generation

    def on_event(self, message: Message | None, now: float) -> list[Action]:
        """Take in a message, or the time, and return what is to be done about it.

        Args:
            message: what came; None where only time has passed.
            now: what the clock says.
        """
        return list(self._events(message, now))

    def _events(self, message: Message | None, now: float) -> Iterator[Action]:
        match message:
            case None:
                yield from self.presence.pass_time(now)
                yield from self._repeat(now)
            case Welcome() | View():
                if self.presence.hear(message):
                    yield from self._adopt(now)
            case Init() | Push() | Enter() | Rest() | Pull():
                yield from self._request(message, now)
            case Install() | Replicate():
                yield from self._keep(message)
            case Kept():
                yield from self._kept(message, now)
            case Cut():
                yield from self._cut(message)
            case Refused() if self.presence.is_refused(message):
                yield Stop(message.text)
            case _:
                pass

    def _adopt(self, now: float) -> Iterator[Action]:
        """The newest view counts."""
        view = self.presence.view
        if self.presence.is_expelled:
            yield Stop(f"generation {view.generation} goes on without this life of {self.name}")
            return
        for index, keepers in enumerate(view.shards):
            if self.name == keepers.primary:
                yield from self._lead(index, keepers, now)
            elif self.name == keepers.backup:
                self._back(index, keepers)
            elif self.name != keepers.former:
                self.holdings.pop(index, None)
            elif isinstance(held := self.holdings.get(index), Primary):
                self.holdings[index] = Backed(held.shard)

    def _new(self, index: int) -> Shard:
        """Return a shard as the job begins, or as its log says."""
        return recovered(Shard(self.job, index, self._saved.get(index)), self._logs.pop(index, ()))

    def _lead(self, index: int, keepers: Keepers, now: float) -> Iterator[Action]:
        held = self.holdings.get(index)
        if isinstance(held, Backed) and held.shard is None:
            yield Stop(f"{self.name} is to lead shard {index}, of which it has nothing")
            return
        if isinstance(held, Primary):
            is_same_pair = held.keepers.backup == keepers.backup
            if not is_same_pair:
                held.pending.clear()
            held.is_installed = held.is_installed and is_same_pair and keepers.is_complete
            held.keepers = keepers
            held.reads.clear()
        else:
            lines = self._logs.get(index, ())
            held = self.holdings[index] = Primary((held and held.shard) or self._new(index), keepers)
            yield from recalled(held.shard, lines)
        view = self.presence.view
        origin = self.presence.origin()
        yield from held.again(origin, now)
        yield from held.append(origin, Members(view.generation, view.workers), now)

    def _back(self, index: int, keepers: Keepers) -> None:
        held = self.holdings.get(index)
        if not keepers.is_complete:
            self.holdings[index] = Backed(None if held is None else held.shard)
        elif held is None:
            self.holdings[index] = Backed(self._new(index), is_installed=True)

    def _request(self, message: Change | Pull, now: float) -> Iterator[Action]:
        held = self.holdings.get(message.shard)
        origin = message.origin
        if origin.generation != self.generation or not isinstance(held, Primary):
            text = f"generation {origin.generation} was asked for; {self.name} knows {self.generation}"
            yield self._refusal(message, "generation", text)
            return
        lives = {worker.name: worker.incarnation for worker in self.presence.view.workers}
        if lives.get(origin.member) != origin.incarnation:
            text = f"life {origin.incarnation} of {origin.member} does not belong to generation {self.generation}"
            yield self._refusal(message, "identity", text)
        elif isinstance(message, Pull):
            yield from held.pull(message)
        else:
            yield from held.ask(self.presence.origin(), message, now)

    def _refusal(self, message: Change | Pull, reason: Reason, text: str) -> Send:
        is_pull = isinstance(message, Pull)
        number = message.ticket if isinstance(message, Pull) else message.origin.sequence
        refused = Refused(message.shard, number, is_pull, reason, text, self.generation)
        return answer(message.origin, refused)

    def _keep(self, message: Install | Replicate) -> Iterator[Action]:
        """Yield what a backup answers to its primary."""
        held = self.holdings.get(message.shard)
        if message.origin.generation != self.generation or not isinstance(held, Backed):
            return
        if message.origin.member != self.presence.view.shards[message.shard].primary:
            return
        yield from held.keep(self.job, message)
        if held.is_installed and held.shard is not None:
            yield Send(message.origin.member, Kept(self.presence.origin(), message.shard, held.shard.position))

    def _kept(self, message: Kept, now: float) -> Iterator[Action]:
        held = self.holdings.get(message.shard)
        if message.origin.generation != self.generation or not isinstance(held, Primary):
            return
        if message.origin.member != held.keepers.backup:
            return
        if held.keepers.is_complete:
            yield from held.keep(message.position)
        elif not held.is_installed:
            held.is_installed = True
            yield Send(COORDINATOR, Complete(self.presence.origin(), message.shard))
            yield from held.again(self.presence.origin(), now)

    def _repeat(self, now: float) -> Iterator[Action]:
        """Yield once more what has not been answered for a while."""
        for index, held in self.holdings.items():
            if not isinstance(held, Primary) or now - held.sent_at < self.job.patience.retry_s:
                continue
            if not held.keepers.is_complete and held.is_installed:
                yield Send(COORDINATOR, Complete(self.presence.origin(), index))
            if held.pending or not held.keepers.is_complete:
                yield from held.again(self.presence.origin(), now)

    def _cut(self, message: Cut) -> Iterator[Action]:
        """Yield the shards that it keeps first, as parts of a cut; of one that has a later one behind it, nothing.

        Cuts follow one another, so who asks for an earlier one was heard late. That one is whole, and the shards have
        counted more since.
        """
        if message.generation != self.generation:
            return
        for index, held in self.holdings.items():
            if not isinstance(held, Primary) or not held.keepers.is_complete:
                continue
            cut, position = self._cuts.get(index, (-1, 0))
            if message.cut < cut:
                continue
            if cut != message.cut:
                position = held.shard.position
                self._cuts[index] = message.cut, position
                yield Save(message.cut, index, held.shard.state)
            yield Send(COORDINATOR, Saved(self.presence.origin(), index, message.cut, position))
