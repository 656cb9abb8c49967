"""One legal global order of a program, or the reason there is none.

The walk is what makes distributed behaviour an ordinary loop: the ledger, the simulator and the tests all follow
it. A send never waits, a receive waits for its send, a collective waits until all members have reached it, a
start never waits, a wait passes once every member has started.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Forward,
    Free,
    Group,
    Instruction,
    Pull,
    Push,
    Recompute,
    Recv,
    Send,
    SwapGradBuffers,
    TensorRef,
    Update,
)
from counterpoint.program.program import Instructions
from counterpoint.program.text import format_instruction, format_operation, format_tensor_ref


def execution_order(rows: Sequence[Instructions]) -> Iterator[tuple[int, int]]:
    """Yield ``(rank, index)`` so that no instruction comes before what it waits for.

    The order is deterministic: each rank goes as far as it can, then the next one that can move. The members of
    a collective come one after the other, in rank order.

    Args:
        rows: flat rows, from :meth:`counterpoint.program.program.RandomProgram.unroll`.

    Raises:
        ProgramError: every unfinished rank waits for another one (law 2), or the members of a group do not
            call the same collectives in the same order (law 3).
    """
    return _EagerExecution(rows).run()


def check_rendezvous_sends(rows: Sequence[Instructions], recv_buffer_depth: int = 0) -> None:
    """Walk the rows with sends that block until their receive is posted.

    Adjacent sends and receives of a row are posted together, as one batch, also those before and behind a
    recomputation: it stands there to have what is received behind it come meanwhile.

    Args:
        rows: flat rows.
        room: how many messages from each peer a rank has room for before it posts their receives.

    Raises:
        ProgramError: the rows only work as long as something buffers more of their messages (law 2).
    """
    for _ in _RendezvousExecution(rows, recv_buffer_depth).run():
        pass


_LOCAL_INSTRUCTIONS = (Forward, Recompute, Backward, Update, SwapGradBuffers, Free)
"""Instructions that wait for nobody and that nobody waits for."""


class GroupInterner:
    """Numbers for groups: equal groups have equal numbers, and a group of a thousand ranks is hashed once.

    Rows share their groups as objects, so that looking one up by identity is enough after the first time.
    """

    def __init__(self) -> None:
        self.by_identity: dict[int, tuple[Group, int]] = {}
        self.by_members: dict[Group, int] = {}
        self.members: list[frozenset[int]] = []

    def intern(self, group: Group) -> int:
        """Return the number of a group."""
        found = self.by_identity.get(id(group))
        if found is None:
            number = self.by_members.setdefault(group, len(self.members))
            if number == len(self.members):
                self.members.append(frozenset(group))
            self.by_identity[id(group)] = found = (group, number)  # kept, so that no other object gets its identity
        return found[1]


class _EagerExecution:
    """How far each rank has come, and what is under way."""

    def __init__(self, rows: Sequence[Instructions]) -> None:
        self.rows = rows
        self.cursor = [0] * len(rows)
        self.num_sent: Counter[tuple[TensorRef, int, int]] = Counter()
        self.num_pushed: Counter[tuple[TensorRef, int, int]] = Counter()
        self.num_replied: Counter[tuple[TensorRef, int, int]] = Counter()
        self.groups = GroupInterner()
        self.collective_order: defaultdict[int, list[tuple[str, TensorRef | None]]] = defaultdict(list)
        self.num_called: Counter[tuple[int, int]] = Counter()
        self.num_arrived: Counter[tuple[int, int]] = Counter()
        self.started: dict[tuple[int, int, str, TensorRef], int] = {}
        self.arrived: defaultdict[int, list[int]] = defaultdict(list)
        self.queue = deque(range(len(rows)))
        self.waiters: defaultdict[object, list[int]] = defaultdict(list)

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield the words of all rows, as rank and index, in an order in which they may take place.

        Raises:
            ProgramError: law 2, where ranks wait for each other; law 3, where members of a group call other things.
        """
        while self.queue:
            rank = self.queue.popleft()
            yield from self.advance_rank(rank)
        stuck = [rank for rank, row in enumerate(self.rows) if self.cursor[rank] < len(row)]
        if stuck:
            raise ProgramError(self.describe_deadlock(stuck), rule=2)

    def advance_rank(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the words that a rank can take now, and those of ranks that it meets in a collective."""
        row = self.rows[rank]
        while self.cursor[rank] < len(row):
            word = row[self.cursor[rank]]
            match word:
                case _ if type(word) in _LOCAL_INSTRUCTIONS:
                    yield rank, self.cursor[rank]
                    self.cursor[rank] += 1
                case Collective(phase="") | Commit():
                    members = self.join_collective(rank, word)
                    if members is None:
                        return
                    for member in members:
                        yield member, self.cursor[member]
                        self.cursor[member] += 1
                    self.queue.extend(member for member in members if member != rank)
                case _:
                    waits_for = self.blocked_on(rank, word)
                    if waits_for is not None:
                        self.waiters[waits_for].append(rank)
                        return
                    yield rank, self.cursor[rank]
                    self.cursor[rank] += 1

    def wake(self, key: object) -> None:
        """Ranks that wait for this key go on."""
        self.queue.extend(self.waiters.pop(key, ()))

    def blocked_on(self, rank: int, word: Instruction) -> object | None:
        """Move past the word and return None, or return the key of what it waits for."""
        match word:
            case Send(value, peer):
                self.num_sent[value, rank, peer] += 1
                self.wake((value, rank, peer))
            case Recv(value, peer):
                return self.consume(self.num_sent, (value, peer, rank))
            case Collective(phase="start"):
                self.start_collective(rank, word)
            case Collective(phase="wait"):
                return self.wait_collective(rank, word)
            case Push(value, peer):
                self.num_pushed[value, rank, peer] += 1
                self.wake(("server", peer))
            case Pull(value, peer):
                return self.consume(self.num_replied, (value, peer, rank))
            case ApplyPushes():
                return self.apply_pushes(rank, word)
            case _:
                pass
        return None

    def consume(self, counts: Counter[tuple[TensorRef, int, int]], key: tuple[TensorRef, int, int]) -> object | None:
        """Take one of what is counted under a key and return None, or return the key to wait for."""
        if counts[key] == 0:
            return key
        counts[key] -= 1
        return None

    def apply_pushes(self, rank: int, word: ApplyPushes) -> object | None:
        """Use up one push of each worker, answer all, and return None; or return the key to wait for."""
        name: Literal["grad", "weight"] = "grad" if word.applies_gradients else "weight"
        pushes = [(TensorRef(name, unit), worker, rank) for worker in word.workers for unit in word.units]
        if any(self.num_pushed[key] == 0 for key in pushes):
            return "server", rank
        self.num_pushed.subtract(pushes)
        for worker in word.workers if word.replies else ():
            for unit in word.units:
                key = (TensorRef("weight", unit), rank, worker)
                self.num_replied[key] += 1
                self.wake(key)
        return None

    def record_call(self, rank: int, word: Collective | Commit) -> tuple[int, int]:
        """Note that a rank calls its group's next collective; return the numbers of the group and of the call."""
        name = ("commit", None) if isinstance(word, Commit) else (format_operation(word), word.tensor)
        group = self.groups.intern(word.group)
        number = self.num_called[group, rank]
        calls = self.collective_order[group]
        if rank not in self.groups.members[group]:
            text = format_instruction(word)
            raise ProgramError(
                f"rank {rank} calls {text}, of which it is no member\n{self.format_rows([rank])}", rule=3
            )
        if number == len(calls):
            calls.append(name)
        elif calls[number] != name:
            other = next(member for member in word.group if self.num_called[group, member] > number)
            raise ProgramError(self.describe_mismatch(rank, other, word, number), rule=3)
        self.num_called[group, rank] += 1
        self.num_arrived[group, number] += 1
        return group, number

    def join_collective(self, rank: int, word: Collective | Commit) -> Sequence[int] | None:
        """Return the members of a collective, in order, if its last one is here now; else None."""
        group, number = self.record_call(rank, word)
        self.arrived[group].append(rank)
        if self.num_arrived[group, number] < len(word.group):
            return None
        self.wake((group, number))
        return sorted(self.arrived.pop(group))

    def start_collective(self, rank: int, word: Collective) -> None:
        """A collective is under way on this rank; whoever waits for it goes on if it is on all members."""
        group, number = self.record_call(rank, word)
        self.started[rank, group, word.op_name, word.tensor] = number
        if self.num_arrived[group, number] == len(word.group):
            self.wake((group, number))

    def wait_collective(self, rank: int, word: Collective) -> object | None:
        """Return None where all members have started it, or the key to wait for.

        Raises:
            ProgramError: law 3, this rank has not started it.
        """
        group = self.groups.intern(word.group)
        key = (rank, group, word.op_name, word.tensor)
        if key not in self.started:
            text = format_instruction(word)
            raise ProgramError(
                f"rank {rank} waits with {text} for what it never started\n{self.format_rows([rank])}", rule=3
            )
        if self.num_arrived[group, self.started[key]] < len(word.group):
            return group, self.started[key]
        del self.started[key]
        return None

    def describe_mismatch(self, rank: int, other: int, word: Collective | Commit, number: int) -> str:
        """Return the text for two ranks of a group that call different things."""
        verb, value = self.collective_order[self.groups.intern(word.group)][number]
        first = verb if value is None else f"{verb}({format_tensor_ref(value)})"
        return (
            f"rank {rank} calls {format_instruction(word)} where rank {other} of the same group called {first}; all "
            f"members of a group call the same collectives in the same order\n{self.format_rows([rank])}"
        )

    def describe_deadlock(self, stuck: Sequence[int]) -> str:
        """Return the text for ranks that wait for each other."""
        head = f"deadlock: {len(stuck)} of {len(self.rows)} ranks wait for each other"
        return f"{head}\n{self.format_rows(stuck)}"

    def format_rows(self, ranks: Sequence[int]) -> str:
        """Return the rows of ranks, each with the word that it has come to."""
        return format_locations(self.rows, {rank: self.cursor[rank] for rank in ranks}, "waits here")


class _RendezvousExecution(_EagerExecution):
    """A walk in which a send waits until the peer has room for it, or has come to a batch that holds its receive."""

    def __init__(self, rows: Sequence[Instructions], recv_buffer_depth: int) -> None:
        super().__init__(rows)
        self.notified_cursor = [0] * len(rows)
        self.recv_buffer_depth = recv_buffer_depth
        self.num_unreceived: Counter[tuple[int, int]] = Counter()

    def blocked_on(self, rank: int, word: Instruction) -> object | None:
        """Move past the word and return None, or return the key to wait for, which may be room at a peer."""
        match word:
            case Send(value, peer):
                if self.num_unreceived[rank, peer] >= self.recv_buffer_depth and not self.has_posted_recv(
                    value, rank, peer
                ):
                    return "batch", peer
                self.num_unreceived[rank, peer] += 1
            case Recv(value, peer) if self.num_sent[value, peer, rank]:
                self.num_unreceived[peer, rank] -= 1
            case _:
                pass
        return super().blocked_on(rank, word)

    def advance_rank(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the words that a rank can take now; then those that wait for its next batch go on."""
        yield from super().advance_rank(rank)
        if (
            self.notified_cursor[rank] != self.cursor[rank]
        ):  # a rank that has not moved has no new batch: two would wake
            self.notified_cursor[rank] = self.cursor[rank]  # each other for ever
            self.wake(("batch", rank))

    def has_posted_recv(self, value: TensorRef, rank: int, peer: int) -> bool:
        """Tell whether a receive of the value is in the batch that the peer has come to."""
        row = self.rows[peer]
        for word in row[self.cursor[peer] :]:
            match word:
                case Recv(expected, source) if expected == value and source == rank:
                    return True
                case Send() | Recv() | Recompute():
                    continue
                case _:
                    return False
        return False


def format_locations(rows: Sequence[Instructions], locations: Mapping[int, int], note: str, max_ranks: int = 8) -> str:
    """Write the rows around the given places, one line per rank, each place in brackets."""
    lines = []
    for rank, at in list(locations.items())[:max_ranks]:
        words = [format_instruction(word) for word in rows[rank][max(0, at - 2) : at + 3]]
        here = min(at, 2)
        if here < len(words):
            words[here] = f"[{words[here]}]"
        lines.append(f"  rank {rank}: {' '.join(words)} <- {note}")
    if len(locations) > max_ranks:
        lines.append(f"  and {len(locations) - max_ranks} more ranks")
    return "\n".join(lines)


def rule_violation(rows: Sequence[Instructions], location: tuple[int, int], rule: int, fact: str) -> ProgramError:
    """Return what to raise where a word breaks a law."""
    rank, index = location
    text = format_instruction(rows[rank][index])
    return ProgramError(f"rank {rank}, {text}: {fact}\n{format_locations(rows, {rank: index}, 'here')}", rule)


def matching(
    rows: Sequence[Instructions], wanted: Callable[[Instruction], bool]
) -> Iterator[tuple[int, int, Instruction]]:
    """Yield ``(rank, index, word)`` of every wanted word."""
    for rank, row in enumerate(rows):
        for index, word in enumerate(row):
            if wanted(word):
                yield rank, index, word
