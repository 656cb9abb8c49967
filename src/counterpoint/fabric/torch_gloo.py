"""One process per rank, joined by gloo; torch's default process group is neither used nor touched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.connections import Connections, Meeting
from counterpoint.fabric.deputy import Deputy
from counterpoint.fabric.encounter import reduce_in_order
from counterpoint.fabric.fabric import Finished, Group, Json, Verb, Work
from counterpoint.fabric.fingerprint import (
    Operation,
    check_group,
    check_peer,
    of_exchange,
    of_ranges,
    of_tensor,
    unexpected,
)  # fmt: skip
from counterpoint.fabric.gloo import Gloo
from counterpoint.fabric.joined import JoinedFabric
from counterpoint.fabric.lanes import VALUE_BYTES, Lane, Launch, Member, Start, as_tensor
from counterpoint.fabric.mail import Mail
from counterpoint.fabric.processes import Processes, has_ended, neighbours, processes_of
from counterpoint.fabric.wire import Launched, add_up, collect, raw, spread, swap
from counterpoint.fabric.workspace import Desk, Workspace

NOTHING: Final = Finished()


class TorchFabric(JoinedFabric):
    """One rank among processes; :func:`~counterpoint.fabric.meeting.connect` makes it.

    Cost:
        a message is copied once where it is sent and not where it is received; a collective is preceded by an exchange
        of 512 bytes among its members, which runs in the background until it is waited for.
    """

    def __init__(self, rank: int, num_ranks: int, deadline_s: float, meeting: Meeting | None) -> None:
        super().__init__(rank, num_ranks, deadline_s)
        self._meeting = meeting
        self._lanes: dict[Group, Lane] = {}
        self._connections: Connections | None = None
        self._mail: Mail | None = None
        self._deputy: Deputy | None = None
        self.workspace = Workspace()
        self._processes = Processes([])
        self.followers: list[Callable[[], bool]] = []  # what else its deputy does; each says whether something is left
        if meeting is not None:
            self._processes = processes_of(meeting.store, neighbours(meeting.store, rank, num_ranks), rank, num_ranks)
            self._connections = Connections(rank, meeting, deadline_s)
            everybody = tuple(range(num_ranks))
            with self.waiting("the first connection", everybody):
                gloo = self._connections.open("mail", everybody)
                self._mail = Mail(rank, meeting.job, meeting.generation, gloo)
                self._lane(everybody)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into a frame and hand it to gloo."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.waiting(f"room to send {label}", (peer,)):
            self._living_mail().send(peer, label, tensors, self.deadline_s)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next frame and verify it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self.waiting(label, (peer,)):
            frame = self._living_mail().recv(peer, self.deadline_s)
            if frame.label != label:
                raise PeerError(unexpected(self.rank, label, peer, frame.label))
        return frame.tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a frame of any of the peers; gloo sees a lost peer here only by the deadline."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self.waiting("any message", peers):
            sender, frame = self._living_mail().recv_any(peers, self.deadline_s)
        return sender, frame.label, frame.tensors

    def recv_soon(self, peers: Sequence[int], seconds: float) -> tuple[int, str, tuple[Tensor, ...]] | None:
        """Return what :meth:`recv_any` does, or None where no frame has begun to come within so long."""
        with self.waiting("any message", peers):
            found = self._living_mail().recv_soon(peers, seconds, self.deadline_s)
        return None if found is None else (found[0], found[1].label, found[1].tensors)

    def all_reduce(self, label: str, tensor: Tensor, group: Group, verb: Verb = "sum") -> Work:
        """Start gloo's own all-reduce; its order of addition is fixed, but depends on the number of ranks."""

        def launch(gloo: Gloo) -> Launched:
            return add_up(gloo, tensor.detach(), verb, len(group))

        return self.start(of_tensor(f"all_reduce {verb}", label, tensor, group), launch)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, verb: Verb = "sum"
    ) -> Work:
        """Start to exchange ranges; the sum is made here, in the order of the group, as on the local transport."""
        operation = of_ranges(f"reduce_scatter {verb}", label, whole, bounds, group)

        def launch(gloo: Gloo) -> Launched:
            """Every member's part of this rank's range is on its way; they are added once all are here."""
            index = group.index(self.rank)
            own = whole.detach()[bounds[index] : bounds[index + 1]]
            desk = Desk(self.workspace)
            parts = desk.empty(len(group) * len(own), own.dtype).view(len(group), -1)
            sizes = [(end - start) * whole.element_size() for start, end in pairwise(bounds)]
            gives = torch.split(raw(whole[bounds[0] : bounds[-1]]), sizes)
            works, place = swap(gloo, [raw(part) for part in parts], gives, max(sizes), Desk(self.workspace))

            def add() -> None:
                """Sums are made here, in the order of the group: the same bits as on the local transport."""
                if place is not None:
                    place()
                own.copy_(reduce_in_order(list(parts), verb))
                desk.clear()

            return works, add

        return self.start(operation, launch)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Start gloo's own exchange, on bytes."""
        operation = of_exchange(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), NOTHING
        place, size = group.index(self.rank), whole.element_size()
        theirs = [row[place] for row in counts]
        received = whole.new_empty(sum(theirs))

        def launch(gloo: Gloo) -> Launched:
            incoming, outgoing = [count * size for count in theirs], [count * size for count in counts[place]]
            takes, gives = torch.split(raw(received), incoming), torch.split(raw(whole), outgoing)
            return swap(gloo, takes, gives, max(map(max, counts)) * size, Desk(self.workspace))

        return received, self.start(operation, launch)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to send the own range to all others at once; short ranges travel inside of the announcements."""
        operation = of_ranges("all_gather", label, whole, bounds, group)
        ranges = list(pairwise(bounds))
        sizes = [(stop - start) * whole.element_size() for start, stop in ranges]
        if self.rank in group and min(sizes, default=0) > 0 and max(sizes) <= VALUE_BYTES:
            start, stop = ranges[group.index(self.rank)]

            def take(values: Sequence[bytes]) -> None:
                raw(whole[bounds[0] : bounds[-1]]).copy_(as_tensor(b"".join(values)))

            return self.start(operation, None, raw(whole[start:stop].clone()).numpy().tobytes(), take)

        def launch(gloo: Gloo) -> Launched:
            target = raw(whole[bounds[0] : bounds[-1]])
            return collect(gloo, target, sizes, Desk(self.workspace)) if len(target) else ([], None)

        return self.start(operation, launch)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start gloo's own broadcast."""

        def launch(gloo: Gloo) -> Launched:
            target = tensor.detach()
            whole = target.contiguous()
            works = [spread(gloo, raw(whole), group.index(root))] if whole.numel() else []
            return works, None if whole is target else lambda: target.copy_(whole)

        return self.start(of_tensor("broadcast", label, tensor, group, root=root), launch)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange JSON inside the announcements, or by a second exchange where it is long."""
        written = json.dumps(value).encode()
        work = self.start(Operation("gather_values", label, group), None, written)
        work.wait()
        values = work.start.values if isinstance(work, TorchWork) else [written]
        return [json.loads(text) for text in values]

    def meet(self, label: str, group: Group) -> Work:
        """Start to exchange announcements, and nothing else."""
        return self.start(Operation("barrier", label, group), None)

    def form(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = Operation("form", "group", group)
                check_group(operation, self.rank, self.num_ranks)
                with self.waiting("form of group", group):
                    self._lane(group)

    def stop(self, reason: str) -> None:
        """Post the reason in the store and cut all connections."""
        if self._connections is not None:
            self.fail(reason)

    def close(self) -> None:
        """Wait for what was sent, then let go of everything; cut it where something is still under way."""
        connections, mail = self._connections, self._mail
        if connections is None:
            return
        try:
            if self.failure is None and mail is not None:
                with self.waiting("the arrival of what was sent", self.others(range(self.num_ranks))):
                    mail.flush(self.deadline_s)
        finally:
            is_quiet = all(lane.is_quiet for lane in self._lanes.values()) and (mail is None or mail.is_quiet)
            if self.failure is not None or not is_quiet:
                connections.cut()
            self.failure = self.failure or "the fabric has been closed"
            if self._deputy is not None:
                self._deputy.close()
            for lane in self._lanes.values():
                lane.close()
            self._lanes.clear()
            connections.close()
            self._processes.close()
            self._connections = self._mail = self._meeting = None

    def finish(self, start: Start, lane: Lane) -> None:
        """The collective is complete on this rank; a PeerError where it cannot be."""
        operation = start.operation
        with self.waiting(f"{operation.kind} of {operation.label}", self.others(operation.group)):
            lane.finish(start, self.deadline_s)

    def start(
        self,
        operation: Operation,
        launch: Launch | None,
        value: bytes = b"",
        take: Callable[[Sequence[bytes]], object] | None = None,
    ) -> Work:
        """Announce a collective; when all members have announced the same, ``launch`` starts it, on some thread."""
        self.check(operation)
        if len(operation.group) == 1:
            return NOTHING
        with self.waiting(f"the start of {operation.kind} of {operation.label}", self.others(operation.group)):
            lane = self._lane(operation.group)
            start = lane.start(operation, launch, value, take)
            self._deputy = self._deputy or Deputy(self._advance)
            self._deputy.wake()
            self._advance()
        return TorchWork(self, start, lane)

    def check(self, operation: Operation) -> None:
        """The operation is one that this rank may start; a ProgramError where it is not."""
        check_group(operation, self.rank, self.num_ranks)

    def connection(self, name: str, group: Group) -> Gloo:
        """Return a connection of its own among the ranks of the group, all of which have come to open it."""
        with self.waiting(f"the connection for {name}", self.others(group)):
            if self._connections is None:
                raise RuntimeError("the fabric has been closed")
            return self._connections.open(name, group)

    def _advance(self) -> bool:
        """Whatever has been announced on any lane is launched; return whether something is left to do."""
        left = [lane.advance() for lane in list(self._lanes.values())]  # all of them, whatever the first has left
        return any([*left, *(follow() for follow in self.followers)])

    def _lane(self, group: Group) -> Lane:
        """Return the group's lane; all members have come where it is new."""
        if group not in self._lanes:
            if self._connections is None or self._meeting is None:
                raise RuntimeError("the fabric has been closed")
            announcements = self._connections.open("announcements", group)
            data = self._connections.open("data", group)
            member = Member(self._meeting.job, self._meeting.generation, self.rank, group)
            self._lanes[group] = Lane(member, announcements, data)
        return self._lanes[group]

    def _living_mail(self) -> Mail:
        if self._mail is None:
            raise RuntimeError("the fabric has been closed")
        return self._mail

    def stopped(self) -> str | None:
        """Look into the store."""
        return self._connections.reason() if self._connections is not None else None

    def ended(self) -> str | None:
        """Look for a rank of this host whose process has ended."""
        rank = self._processes.ended()
        return None if rank is None else has_ended(rank)

    def cause_of(self, error: Exception) -> str:
        """Gloo has lost a connection."""
        return (
            f"the connection was lost ({first_words(error)}); a rank that ends takes its connections with it: look at "
            "the output of the rank that ended first"
        )

    def tell_others(self, reason: str) -> None:
        """Post the reason, and cut this rank's connections."""
        if self._connections is not None:
            self._connections.post_reason(reason)
            self._connections.cut()


class TorchWork(Work):
    """A collective among processes."""

    def __init__(self, fabric: TorchFabric, start: Start, lane: Lane) -> None:
        self.start = start
        self._fabric = fabric
        self._lane: Lane | None = lane

    def wait(self) -> None:
        """Wait within the deadline; signals are served."""
        if self._lane is not None:
            self._fabric.finish(self.start, self._lane)
            self._lane = None

    @property
    def is_complete(self) -> bool:
        """Whether gloo has ended it; what its end leaves to be done is done where it is waited for."""
        return self._lane is None or (self.start.launched and all(work.is_completed() for work in self.start.works))

    def completes_within(self, seconds: float) -> bool:
        """Wait for that long; what goes wrong otherwise is told by :meth:`wait`."""
        if self._lane is not None and self._fabric.failure is None:
            try:
                self._lane.finish(self.start, seconds)
            except TimeoutError:
                return False
            except (PeerError, RuntimeError):
                self.wait()
        self.wait()
        return True


def first_words(error: Exception) -> str:
    """Return what an error of gloo says first, without its source file and its good wishes."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", line.split("GLHF")[0]).strip(" .;,")
