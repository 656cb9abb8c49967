"""One process per rank, joined by gloo; torch's default process group is neither used nor touched."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.connections import Connections, Meeting
from counterpoint.fabric.deputy import Deputy
from counterpoint.fabric.fabric import Fabric, Finished, Group, Json, Work
from counterpoint.fabric.fingerprint import (
    Operation,
    check_group,
    check_peer,
    of_ranges,
    of_tensor,
    ranks,
    unexpected,
)  # fmt: skip
from counterpoint.fabric.gloo import AllreduceOptions, AllToAllOptions, BroadcastOptions, Gloo, GlooWork
from counterpoint.fabric.lanes import GLOO_TIMEOUT, Lane, Launch, Launched, Member, Start
from counterpoint.fabric.mail import Mail

NOTHING: Final = Finished()


class TorchFabric(Fabric):
    """One rank among processes; :func:`~counterpoint.fabric.meeting.connect` makes it.

    Cost:
        a message is copied once where it is sent and not where it is received; a collective is preceded by an exchange
        of 512 bytes among its members, which runs in the background until it is waited for.
    """

    def __init__(self, rank: int, num_ranks: int, deadline_s: float, meeting: Meeting | None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.deadline_s = deadline_s
        self._meeting = meeting
        self._lanes: dict[Group, Lane] = {}
        self._failure: str | None = None
        self._connections: Connections | None = None
        self._mail: Mail | None = None
        self._deputy: Deputy | None = None
        if meeting is not None:
            self._connections = Connections(rank, meeting, deadline_s)
            everybody = tuple(range(num_ranks))
            with self._waiting("the first connection", everybody):
                gloo = self._connections.open("mail", everybody)
                self._mail = Mail(rank, meeting.job, meeting.generation, gloo)
                self._lane(everybody)

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into a frame and hand it to gloo."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self._waiting(f"room to send {label}", (peer,)):
            self._living_mail().send(peer, label, tensors, self.deadline_s)

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Wait for the peer's next frame and verify it."""
        check_peer(peer, self.rank, self.num_ranks, label)
        with self._waiting(label, (peer,)):
            frame = self._living_mail().recv(peer, self.deadline_s)
            if frame.label != label:
                raise PeerError(unexpected(self.rank, label, peer, frame.label))
        return frame.tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Wait for a frame of any of the peers; gloo sees a lost peer here only by the deadline."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        with self._waiting("any message", peers):
            sender, frame = self._living_mail().recv_any(peers, self.deadline_s)
        return sender, frame.label, frame.tensors

    def all_reduce(self, label: str, tensor: Tensor, group: Group) -> Work:
        """Start gloo's own all-reduce; its order of addition is fixed, but depends on the number of ranks."""

        def launch(gloo: Gloo) -> Launched:
            target = tensor.detach()
            whole = target.contiguous()
            options = AllreduceOptions()
            options.timeout = GLOO_TIMEOUT
            works = [gloo.allreduce([whole], options)] if whole.numel() else []
            return works, None if whole is target else lambda: target.copy_(whole)

        return self._start(of_tensor("all_reduce sum", label, tensor, group), launch)

    def reduce_scatter(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start to exchange ranges; the sum is made here, in the order of the group, as on the local transport."""
        operation = of_ranges("reduce_scatter sum", label, whole, bounds, group)

        def launch(gloo: Gloo) -> Launched:
            index = group.index(self.rank)
            own = whole.detach()[bounds[index] : bounds[index + 1]]
            parts = own.new_empty((len(group), len(own)))
            sizes = [(end - start) * whole.element_size() for start, end in pairwise(bounds)]
            options = AllToAllOptions()
            options.timeout = GLOO_TIMEOUT
            work = gloo.alltoall_base(
                raw(parts), raw(whole), [sizes[index]] * len(group), sizes, options
            )  # sums are added here, in the order of the group: the same bits as on the local transport

            def add() -> None:
                torch.add(parts[0], parts[1], out=own)
                for part in parts[2:]:
                    own.add_(part)

            return [work], add

        return self._start(operation, launch)

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Start one broadcast per range, into its place."""
        operation = of_ranges("all_gather", label, whole, bounds, group)

        def launch(gloo: Gloo) -> Launched:
            ranges = [(index, whole[start:end]) for index, (start, end) in enumerate(pairwise(bounds))]
            return [spread(gloo, raw(part), index) for index, part in ranges if len(part)], None

        return self._start(operation, launch)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Start gloo's own broadcast."""

        def launch(gloo: Gloo) -> Launched:
            target = tensor.detach()
            whole = target.contiguous()
            works = [spread(gloo, raw(whole), group.index(root))] if whole.numel() else []
            return works, None if whole is target else lambda: target.copy_(whole)

        return self._start(of_tensor("broadcast", label, tensor, group, root=root), launch)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Exchange JSON inside the announcements, or by a second exchange where it is long."""
        written = json.dumps(value).encode()
        work = self._start(Operation("gather_values", label, group), None, written)
        work.wait()
        values = work.start.values if isinstance(work, TorchWork) else [written]
        return [json.loads(text) for text in values]

    def barrier(self, group: Group) -> None:
        """Exchange announcements, and nothing else."""
        self._start(Operation("barrier", "arrival", group), None).wait()

    def form(self, groups: Sequence[Group]) -> None:
        """Open the connections of the groups that this rank is in, in sorted order."""
        for group in sorted(set(groups)):
            if self.rank in group and len(group) > 1:
                operation = Operation("form", "group", group)
                check_group(operation, self.rank, self.num_ranks)
                with self._waiting("form of group", group):
                    self._lane(group)

    def stop(self, reason: str) -> None:
        """Post the reason in the store and cut all connections."""
        if self._connections is not None:
            self._fail(reason)

    def close(self) -> None:
        """Wait for what was sent, then let go of everything; cut it where something is still under way."""
        connections, mail = self._connections, self._mail
        if connections is None:
            return
        try:
            if self._failure is None and mail is not None:
                with self._waiting("the arrival of what was sent", self._others(range(self.num_ranks))):
                    mail.flush(self.deadline_s)
        finally:
            if self._failure is not None or not all(lane.is_quiet for lane in self._lanes.values()):
                connections.cut()
            self._failure = self._failure or "the fabric has been closed"
            if self._deputy is not None:
                self._deputy.close()
            for lane in self._lanes.values():
                lane.close()
            self._lanes.clear()
            connections.close()
            self._connections = self._mail = self._meeting = None

    def finish(self, start: Start, lane: Lane) -> None:
        """The collective is complete on this rank; a PeerError where it cannot be."""
        operation = start.operation
        with self._waiting(f"{operation.kind} of {operation.label}", self._others(operation.group)):
            lane.finish(start, self.deadline_s)

    def _start(self, operation: Operation, launch: Launch | None, value: bytes = b"") -> Work:
        check_group(operation, self.rank, self.num_ranks)
        if len(operation.group) == 1:
            return NOTHING
        with self._waiting(f"the start of {operation.kind} of {operation.label}", self._others(operation.group)):
            lane = self._lane(operation.group)
            start = lane.start(operation, launch, value)
            self._deputy = self._deputy or Deputy(partial(advance, self._lanes))
            self._deputy.wake()
            advance(self._lanes)
        return TorchWork(self, start, lane)

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

    def _others(self, group: Sequence[int]) -> list[int]:
        return [member for member in group if member != self.rank]

    @contextmanager
    def _waiting(self, what: str, peers: Sequence[int]) -> Iterator[None]:
        """Whatever goes wrong inside is a PeerError that says who waited for what, and for whom.

        Raises:
            PeerError: it has gone wrong, or had before.
        """
        if self._failure is not None:
            raise PeerError(self._failure)
        began = time.monotonic()
        try:
            yield
        except PeerError as error:
            raise self._fail(str(error)) from error
        except (TimeoutError, RuntimeError) as error:
            waited_s = time.monotonic() - began
            story = f"rank {self.rank} waited {waited_s:.1f} s for {what} with {ranks(peers)}"
            raise self._fail(f"{story}: {self._cause(error, waited_s)}") from error

    def _cause(self, error: Exception, waited_s: float) -> str:
        """Say why a wait has failed: another rank gave a reason, the deadline has passed, or a connection is lost."""
        stopped = self._connections.reason() if self._connections is not None else None
        if stopped is not None:
            return f"stopped because of {stopped}"
        if isinstance(error, TimeoutError) or waited_s >= 0.99 * self.deadline_s:
            return (
                f"the deadline of {self.deadline_s:.1f} s has passed; every member must come within "
                "it: look at what the "
                "others did instead, or raise the deadline where they are only slow"
            )
        return (
            f"the connection was lost ({first_words(error)}); a rank that ends takes its "
            "connections with it: look "
            "at the output of the rank that ended first"
        )

    def _fail(self, text: str) -> PeerError:
        """Return the error; the other ranks can read it, and their connections to this one are cut."""
        self._failure = text
        if self._connections is not None:
            self._connections.post_reason(text)
            self._connections.cut()
        return PeerError(text)


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


def advance(lanes: dict[Group, Lane]) -> bool:
    """Whatever has been announced on any lane is launched; return whether something has not."""
    left = [lane.advance() for lane in list(lanes.values())]  # all of them, whatever the first has left
    return any(left)


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, in its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def spread(gloo: Gloo, part: Tensor, root: int) -> GlooWork:
    """Start to replace the bytes by those of member ``root``."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = root, 0, GLOO_TIMEOUT
    return gloo.broadcast([part], options)


def first_words(error: Exception) -> str:
    """Return what an error of gloo says first, without its source file and its good wishes."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\]\s*", "", line.split("GLHF")[0]).strip(" .;,")
