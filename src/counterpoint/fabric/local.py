"""All ranks in this process: a distributed run as an ordinary call, whatever order the system runs threads in."""

from __future__ import annotations

import json
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from counterpoint.errors import PeerError
from counterpoint.fabric.baton import Baton
from counterpoint.fabric.encounter import Encounter, Part
from counterpoint.fabric.fabric import Fabric, Finished, Group, Json, Verb, Work
from counterpoint.fabric.fingerprint import (
    Operation,
    check_group,
    check_peer,
    dtype_name,
    of_exchange,
    of_ranges,
    of_tensor,
    ranks,
    unexpected,
)  # fmt: skip
from counterpoint.fabric.frames import described

T = TypeVar("T")
NOTHING: Final = Finished()


class Square:
    """What the ranks of one world have in common: letters under way, and collectives that are not over."""

    def __init__(self) -> None:
        self.letters: defaultdict[tuple[int, int], deque[tuple[str, tuple[Tensor, ...]]]] = defaultdict(deque)
        self.encounters: dict[tuple[Group, int], Encounter] = {}
        self.turns: defaultdict[tuple[int, Group], int] = defaultdict(int)
        self.errors: dict[Group, str] = {}

    def meet(self, rank: int, operation: Operation, part: Part) -> Encounter:
        """Return the encounter of the operation's group whose turn it is for this rank, which has now arrived."""
        group = operation.group
        turn = self.turns[rank, group]
        self.turns[rank, group] += 1
        encounter = self.encounters.setdefault((group, turn), Encounter(group, turn))
        encounter.arrive(rank, operation, part)
        if encounter.error is not None:
            self.errors.setdefault(group, encounter.error)
        if encounter.complete:
            del self.encounters[group, turn]
        return encounter

    def clear(self) -> None:
        """Nothing is under way."""
        self.letters.clear()
        self.encounters.clear()
        self.turns.clear()
        self.errors.clear()


class LocalWork(Work):
    """A collective among ranks of this process."""

    def __init__(self, fabric: LocalFabric, operation: Operation, encounter: Encounter) -> None:
        self._fabric = fabric
        self._operation = operation
        self._encounter = encounter

    @property
    def is_complete(self) -> bool:
        """Whether the last member has arrived."""
        return self._encounter.over

    def wait(self) -> None:
        """Let the other ranks run until the last member has arrived."""
        encounter = self._encounter
        what = f"{self._operation.kind} of {self._operation.label} among {ranks(encounter.group)}"
        self._fabric.await_encounter(encounter, lambda: f"{what} with {ranks(encounter.missing)}")


class LocalFabric(Fabric):
    """One rank of a :class:`LocalWorld`.

    Its waits have no use for the deadline: when no rank can go on, that is seen at once, and says who waits for whom.
    """

    def __init__(self, rank: int, num_ranks: int, deadline_s: float, square: Square, baton: Baton | None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.deadline_s = deadline_s
        self._square = square
        self._baton = baton

    def wait_until(self, over: Callable[[], bool], what: Callable[[], str]) -> None:
        """It is over; until then, the other ranks have run."""
        if self._baton is not None:
            self._baton.wait(self.rank, over, what)

    def await_encounter(self, encounter: Encounter, what: Callable[[], str]) -> None:
        """It is over, and nothing has gone wrong in its group; members that disagreed before may never arrive.

        Raises:
            PeerError: the members disagree, or have before.
        """
        group, errors = encounter.group, self._square.errors
        self.wait_until(lambda: encounter.over or group in errors, what)
        if encounter.error is not None or not encounter.over:
            raise PeerError(encounter.error or errors[group])

    def send(self, peer: int, label: str, tensors: Sequence[Tensor]) -> None:
        """Put copies of the tensors into the peer's box."""
        check_peer(peer, self.rank, self.num_ranks, label)
        self._check()
        for tensor in tensors:
            described(tensor)
        copies = tuple(tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors)
        self._square.letters[self.rank, peer].append((label, copies))

    def recv(self, peer: int, label: str) -> tuple[Tensor, ...]:
        """Let others run until the peer's next message is in the box."""
        check_peer(peer, self.rank, self.num_ranks, label)
        letters = self._square.letters[peer, self.rank]
        self.wait_until(lambda: bool(letters), lambda: f"{label} from rank {peer}")
        found, tensors = letters.popleft()
        if found != label:
            story = unexpected(self.rank, label, peer, found)
            self.stop(story)
            raise PeerError(story)
        return tensors

    def recv_any(self, peers: Sequence[int]) -> tuple[int, str, tuple[Tensor, ...]]:
        """Take from the first of the peers, in the order given, that has written."""
        for peer in peers:
            check_peer(peer, self.rank, self.num_ranks, "any message")
        boxes = {peer: self._square.letters[peer, self.rank] for peer in peers}
        self.wait_until(lambda: any(boxes.values()), lambda: f"any message from {ranks(peers)}")
        peer = next(peer for peer in peers if boxes[peer])
        return (peer, *boxes[peer].popleft())

    def all_reduce(self, label: str, tensor: Tensor, group: Group, verb: Verb = "sum") -> Work:
        """Arrive; the last member adds up, in the order of the group."""
        return self._start(of_tensor(f"all_reduce {verb}", label, tensor, group), tensor)

    def reduce_scatter(
        self, label: str, whole: Tensor, bounds: Sequence[int], group: Group, verb: Verb = "sum"
    ) -> Work:
        """Arrive; the last member adds up each range for its owner, in the order of the group."""
        return self._start(of_ranges(f"reduce_scatter {verb}", label, whole, bounds, group), whole)

    def all_to_all(
        self, label: str, whole: Tensor, counts: Sequence[Sequence[int]], group: Group
    ) -> tuple[Tensor, Work]:
        """Arrive; the last member puts every range where it belongs."""
        operation = of_exchange(label, whole, counts, group, self.rank)
        if len(group) == 1:
            return whole.clone(), self._start(operation, None)
        place = group.index(self.rank)
        received = whole.new_empty(sum(row[place] for row in counts))
        return received, self._start(operation, (whole, received))

    def all_gather(self, label: str, whole: Tensor, bounds: Sequence[int], group: Group) -> Work:
        """Arrive; the last member copies every range to all."""
        return self._start(of_ranges("all_gather", label, whole, bounds, group), whole)

    def broadcast(self, label: str, tensor: Tensor, group: Group, root: int) -> Work:
        """Arrive; the last member copies the root's value to all."""
        return self._start(of_tensor("broadcast", label, tensor, group, root=root), tensor)

    def gather_values(self, label: str, value: Json, group: Group) -> list[Json]:
        """Arrive with a value, and wait for those of all members."""
        operation = Operation("gather_values", label, group)
        check_group(operation, self.rank, self.num_ranks)
        written = json.dumps(value).encode()
        if len(group) == 1:
            return [json.loads(written)]
        encounter = self._meet(operation, written)
        LocalWork(self, operation, encounter).wait()
        return [json.loads(encounter.parts[member]) for member in group]  # type: ignore[arg-type]  # all are bytes

    @property
    def hosts(self) -> Sequence[int]:
        """All ranks are here."""
        return [0] * self.num_ranks

    def shared(self, label: str, num_elements: int, dtype: torch.dtype, group: Group) -> Tensor | None:
        """Arrive; the first member brings the memory."""
        operation = Operation("shared", label, group, dtype_name(dtype), (num_elements,))
        check_group(operation, self.rank, self.num_ranks)
        mine = torch.zeros(num_elements, dtype=dtype) if self.rank == group[0] else None
        if len(group) == 1:
            return mine
        encounter = self._meet(operation, mine)
        LocalWork(self, operation, encounter).wait()
        found = encounter.parts[group[0]]
        assert isinstance(found, Tensor), "what the first member brings"
        return found

    def meet(self, label: str, group: Group) -> Work:
        """Arrive."""
        return self._start(Operation("barrier", label, group), None)

    def form(self, groups: Sequence[Group]) -> None:
        """Nothing is to be done: all ranks share one memory."""
        for group in groups:
            if self.rank in group:
                check_group(Operation("form", "group", group), self.rank, self.num_ranks)

    def stop(self, reason: str) -> None:
        """The other ranks are stopped where they wait."""
        if self._baton is not None:
            self._baton.fail(self.rank, reason)

    def close(self) -> None:
        """Nothing is to be done: the world owns the threads."""
        return

    def _check(self) -> None:
        if self._baton is not None:
            self._baton.check()

    def _start(self, operation: Operation, part: Part) -> Work:
        check_group(operation, self.rank, self.num_ranks)
        if len(operation.group) == 1:
            return NOTHING
        return LocalWork(self, operation, self._meet(operation, part))

    def _meet(self, operation: Operation, part: Part) -> Encounter:
        self._check()
        return self._square.meet(self.rank, operation, part)


class LocalWorld:
    """So many ranks in this process, to be run again and again.

    Messages and collectives that are under way when a run ends go on in the next; a run that fails drops them all.

    Example:
        >>> with LocalWorld(3) as world:
        ...     world.run(lambda fabric: fabric.gather_values("mine", fabric.rank * 10, (0, 1, 2))[2])
        [20, 20, 20]
    """

    def __init__(self, num_ranks: int, deadline_s: float = 30.0) -> None:
        self._square = Square()
        self._baton = Baton(num_ranks, deadline_s) if num_ranks > 1 else None
        if self._baton is not None:
            weakref.finalize(self, self._baton.close)  # a world that nobody holds leaves no threads
        self.fabrics: tuple[Fabric, ...] = tuple(
            LocalFabric(rank, num_ranks, deadline_s, self._square, self._baton) for rank in range(num_ranks)
        )

    def run(self, work: Callable[[Fabric], T]) -> list[T]:
        """Return what ``work`` returns on each rank; the first error is raised as it is, with a note of its rank."""
        if self._baton is None:
            return [work(self.fabrics[0])]
        results: dict[int, T] = {}

        def record(rank: int) -> None:
            results[rank] = work(self.fabrics[rank])

        try:
            self._baton.run(record)
        except BaseException:
            self._square.clear()
            raise
        return [results[rank] for rank in range(len(self.fabrics))]

    def close(self) -> None:
        """The threads are gone; a second call does nothing."""
        if self._baton is not None:
            self._baton.close()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
