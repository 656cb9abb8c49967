"""The coordinator: one state machine that says who belongs to the job, who keeps what, and which data is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from counterpoint.server.actions import Action, Send, Write, answer
from counterpoint.server.book import Book, Life
from counterpoint.server.calls import (
    Checkpoint,
    Complete,
    Cut,
    Heartbeat,
    Hello,
    Keepers,
    Lease,
    Leave,
    Report,
    Saved,
    Task,
    Welcome,
)
from counterpoint.server.form import Message
from counterpoint.server.job import Job
from counterpoint.server.lines import (
    Asked,
    Assigned,
    Decision,
    Drained,
    Ended,
    Given,
    Gone,
    Joined,
    Lost,
    Overdue,
    Stored,
)
from counterpoint.server.messages import Done, Origin, Reason, Refused
from counterpoint.server.staffing import staffed

LOG = "coordinator"
MOST_LASTED = 101
"""Of so many tasks that were done last, it is known how long they took."""


class Coordinator:
    """Decides, writes down, answers.

    Args:
        job: what all agree on.
        lines: the log of an earlier life; nothing in it is decided twice.
        now: what the clock says; silence and leases of before count from here.
    """

    def __init__(self, job: Job, lines: Sequence[Decision] = (), now: float = 0.0) -> None:
        self.job = job
        self.book = Book(job, lines)
        self._digest = job.digest()
        self._heard = dict.fromkeys(self.book.lives, now)
        self._leased = {task: now for task, _ in self.book.queue.doing.values()}
        self._lasted_s: deque[float] = deque(maxlen=MOST_LASTED)
        self._asked_at = now
        self._actions: list[Action] = []

    def on_event(self, message: Message | None, now: float) -> list[Action]:
        """Take in a message, or the time, and return what is to be done about it.

        Args:
            message: what came; None where only time has passed.
            now: what the clock says.
        """
        self._actions = []
        generation = self.book.generation
        match message:
            case Hello() if self.book.lost:
                self._refuse(Origin(message.name, 0, 0), "lost", self.book.lost)
            case None:
                self._pass_time(now)
            case Hello():
                self._greet(message, now)
            case Heartbeat() | Complete() | Saved():
                self._hear(message, now)
            case Lease() | Report() | Checkpoint() | Leave():
                self._answer(message, now)
            case _:
                pass
        if self.book.is_forsaken:
            self._decide(
                Lost(
                    f"the last worker of job {self.job.name} has gone, and the weights with it, when "
                    f"{len(self.book.queue.done)} tasks were done; start the job anew: from the last checkpoint, if "
                    "its workers have saved one"
                )
            )
        if self.book.generation != generation:
            view = self.book.view
            self._actions += [Send(name, view) for name in self.book.lives]
        return self._actions

    def _decide(self, line: Decision) -> None:
        self._actions.append(Write(LOG, line))
        self.book.apply(line)

    def _refuse(self, origin: Origin, reason: Reason, text: str) -> None:
        refused = Refused(-1, origin.sequence, False, reason, text, self.book.generation)
        self._actions.append(answer(origin, refused))

    def _greet(self, hello: Hello, now: float) -> None:
        life = self.book.lives.get(hello.name)
        if hello.job != self._digest:
            text = f"{hello.name} has another job than this coordinator; start all with the same settings"
            self._refuse(Origin(hello.name, 0, 0), "identity", text)
            return
        if life is not None and life.joined.token != hello.token and not self._replace(hello, life, now):
            return
        if hello.name not in self.book.lives:
            if hello.role == "server" and len(self.book.keepers) == 0 and self._is_full():
                return
            self._decide(Joined(hello.name, hello.role, hello.token, self.book.incarnation + 1, hello.address))
        self._heard[hello.name] = now
        incarnation = self.book.lives[hello.name].joined.incarnation
        self._actions.append(Send(hello.name, Welcome(hello.token, incarnation, self.book.view)))

    def _is_full(self) -> bool:
        return len(self.book.names("server")) >= self.job.num_servers

    def _replace(self, hello: Hello, life: Life, now: float) -> bool:
        """Somebody comes with the name of a member: the member is gone, if it has been silent for long."""
        silent_s = now - self._heard[hello.name]
        if silent_s <= self.job.patience.silence_s:
            text = (
                f"{hello.name} belongs to the job already, as life {life.joined.incarnation}, heard {silent_s:.1f} s "
                f"ago; a name is one member's: give another, or wait until the other has been silent for "
                f"{self.job.patience.silence_s:g} s"
            )
            self._refuse(Origin(hello.name, 0, 0), "identity", text)
            return False
        if self.book.is_last(hello.name):
            shards = [index for index, one in enumerate(self.book.keepers) if one.primary == hello.name]
            self._decide(
                Lost(
                    f"server {hello.name} has begun anew while it alone kept shards {shards}, whose newest updates are "
                    "lost; go on from the last checkpoint"
                )
            )
            return False
        self._decide(Gone(hello.name))
        return True

    def _is_known(self, origin: Origin) -> bool:
        life = self.book.lives.get(origin.member)
        return life is not None and life.joined.incarnation == origin.incarnation

    def _hear(self, message: Heartbeat | Complete | Saved, now: float) -> None:
        origin = message.origin
        if not self._is_known(origin):
            text = f"life {origin.incarnation} of {origin.member} does not belong to the job; say hello as a new one"
            self._refuse(origin, "identity", text)
            return
        self._heard[origin.member] = now
        if self.book.lost and self.book.lives[origin.member].joined.role == "worker":
            self._refuse(origin, "over", self.book.lost)
        if origin.generation != self.book.generation:
            self._actions.append(Send(origin.member, self.book.view))
        elif isinstance(message, Complete) and message.shard < len(self.book.keepers):
            keepers = self.book.keepers[message.shard]
            if keepers.primary == origin.member and not keepers.is_complete:
                self._decide(Assigned(message.shard, Keepers(keepers.primary, keepers.backup, is_complete=True)))
        elif isinstance(message, Saved) and self._is_wanted(message):
            self._decide(Stored(message.cut, message.shard, message.position))

    def _is_wanted(self, saved: Saved) -> bool:
        cut = self.book.cut
        is_here = cut is not None and cut.is_drained and cut.number == saved.cut and saved.shard not in cut.positions
        return is_here and saved.shard < len(self.book.keepers)

    def _answer(self, message: Lease | Report | Checkpoint | Leave, now: float) -> None:
        origin = message.origin
        if not self._is_known(origin):
            text = f"life {origin.incarnation} of {origin.member} does not belong to the job; say hello as a new one"
            self._refuse(origin, "identity", text)
            return
        life = self.book.lives[origin.member]
        self._heard[origin.member] = now
        if origin.sequence == life.upcoming:
            self._carry_out(message, now)
        if life.reply is not None and life.reply.sequence == origin.sequence:
            self._actions.append(answer(origin, life.reply))

    def _carry_out(self, message: Lease | Report | Checkpoint | Leave, now: float) -> None:
        origin = message.origin
        match message:
            case Lease():
                self._give(origin, now)
            case Report():
                since = self._leased.pop(message.task, None)
                if since is not None and message.outcome == "done":
                    self._lasted_s.append(now - since)
                self._decide(
                    Ended(origin.member, origin.sequence, message.task, message.outcome, message.version, message.text)
                )
            case Checkpoint():
                self._decide(Asked(origin.member, origin.sequence))
            case Leave() if self.book.is_needed(origin.member) and not self._may_leave(origin.member, now):
                text = f"{origin.member} alone keeps a shard; once another has it too, it may go"
                self._refuse(origin, "later", text)
            case Leave():
                self._decide(Gone(origin.member))
                self._actions.append(answer(origin, Done(-1, origin.sequence)))

    def _give(self, origin: Origin, now: float) -> None:
        stopped = self.book.lost or self.book.queue.stopped
        if stopped:
            self._refuse(origin, "lost", stopped)
            return
        task = self.book.queue.upcoming(begun_only=self.book.cut is not None)
        slow = self._slow_task(origin.member, now) if task == "later" else None
        if slow is not None:
            self._decide(Overdue(slow))
            task = self.book.queue.upcoming(begun_only=True)
        if task == "later":
            self._refuse(origin, "later", "all tasks that may be begun are being done")
            return
        if isinstance(task, Task):
            self._leased[task] = now
        self._decide(Given(origin.member, origin.sequence, task))

    def _slow_task(self, worker: str, now: float) -> Task | None:
        """Return the task of another worker that is to be given to this one, too; None where all go on as usual."""
        if not self.job.budget.backup_after or not self._lasted_s:
            return None
        usual_s = max(median(self._lasted_s), self.job.patience.beat_s)
        others = [
            (self._leased.get(task, now), task) for task, owner in self.book.queue.doing.values() if owner != worker
        ]
        since, slowest = min(others, key=lambda pair: pair[0], default=(now, None))
        return slowest if now - since > self.job.budget.backup_after * usual_s else None

    def _may_leave(self, name: str, now: float) -> bool:
        """Tell whether everything that a server keeps is kept completely by another that is heard."""
        heard = self.book.load(self._silent(now))
        kept = [one for one in self.book.keepers if name in {one.primary, one.backup, one.former}]
        return all(one.is_complete and {one.primary, one.backup} <= heard.keys() for one in kept)

    def _silent(self, now: float) -> set[str]:
        limit_s = self.job.patience.silence_s
        return {name for name in self.book.lives if now - self._heard.get(name, now) > limit_s}

    def _pass_time(self, now: float) -> None:
        silent = self._silent(now)
        for index, keepers in enumerate(self.book.keepers):
            wanted = staffed(keepers, self.book.load(silent))
            if wanted != keepers:
                self._decide(Assigned(index, wanted))
        for name in sorted(silent):
            if not self.book.is_needed(name):
                self._decide(Gone(name))
        doing = {task for task, _ in self.book.queue.doing.values()}
        self._leased = {task: self._leased.get(task, now) for task in doing}
        for task, since in list(self._leased.items()):
            if now - since > self.job.patience.lease_s:
                self._decide(Overdue(task))
                del self._leased[task]
        self._advance_cut(now)

    def _advance_cut(self, now: float) -> None:
        cut = self.book.cut
        if cut is None or not self.book.keepers:
            return
        if not cut.is_drained:
            if not self.book.queue.is_settled:
                return
            self._decide(Drained(cut.number))
        elif now - self._asked_at < self.job.patience.retry_s:
            return
        self._asked_at = now
        waiting = {keepers.primary for index, keepers in enumerate(self.book.keepers) if index not in cut.positions}
        self._actions += [Send(name, Cut(self.book.generation, cut.number)) for name in sorted(waiting)]
