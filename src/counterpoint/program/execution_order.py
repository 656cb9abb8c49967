"""One valid global order of a program's instructions, or the reason why there is none.

Following this order makes distributed behaviour an ordinary loop: symbolic execution, the simulator and tests iterate
over it. A send never blocks, a receive waits for its send, a collective waits until all members have reached it, the
start of an asynchronous collective never blocks, and its wait passes once every member has started.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from counterpoint.errors import ProgramError
from counterpoint.program.instruction import (
    ApplyPushes,
    Backward,
    Collective,
    Commit,
    Fetch,
    Forward,
    Free,
    Group,
    Instruction,
    Offload,
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


def execution_order(rank_instructions: Sequence[Instructions]) -> Iterator[tuple[int, int]]:
    """Yield ``(rank, index)`` of all instructions so that none comes before what it waits for.

    The order is deterministic: each rank runs until it blocks, then the next one that can run. The members of a
    collective follow each other in rank order.

    Args:
        rank_instructions: unrolled instructions per rank, from :meth:`counterpoint.program.program.Program.unroll`.

    Raises:
        ProgramError: all unfinished ranks wait for each other (rule 2), or the members of a group do not call the same
            collectives in the same order (rule 3).
    """
    return _EagerExecution(rank_instructions).run()


def check_rendezvous_sends(rank_instructions: Sequence[Instructions], recv_buffer_depth: int = 0) -> None:
    """Check that the program also runs if a send blocks until its receive is posted (rule 2).

    Adjacent sends and receives of a rank are posted together as one batch, even across a recomputation, which is placed
    between them so that messages arrive during it.

    Args:
        rank_instructions: unrolled instructions, per rank.
        recv_buffer_depth: number of messages per peer that a rank buffers before it posts their receives.

    Raises:
        ProgramError: the program only runs if more messages are buffered.
    """
    for _ in _RendezvousExecution(rank_instructions, recv_buffer_depth).run():
        pass


_LOCAL_INSTRUCTIONS = (Forward, Recompute, Backward, Update, SwapGradBuffers, Free, Fetch, Offload)
"""Instructions that never block and that no other rank waits for."""


class GroupInterner:
    """Small integers for groups: equal groups get equal numbers, and a large group is hashed only once.

    Programs share their groups as objects, so that after the first time a lookup by identity is enough.
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
            self.by_identity[id(group)] = found = (
                group,
                number,
            )  # the group is kept, so that no other object gets its id
        return found[1]


class _EagerExecution:
    """Progress of all ranks if sends never block."""

    def __init__(self, rank_instructions: Sequence[Instructions]) -> None:
        self.rank_instructions = rank_instructions
        self.cursor = [0] * len(rank_instructions)
        self.num_sent: Counter[tuple[TensorRef, int, int]] = Counter()
        self.num_pushed: Counter[tuple[TensorRef, int, int]] = Counter()
        self.num_replied: Counter[tuple[TensorRef, int, int]] = Counter()
        self.groups = GroupInterner()
        self.collective_order: defaultdict[int, list[tuple[str, TensorRef | None]]] = defaultdict(list)
        self.num_called: Counter[tuple[int, int]] = Counter()
        self.num_arrived: Counter[tuple[int, int]] = Counter()
        self.started: dict[tuple[int, int, str, TensorRef], int] = {}
        self.arrived: defaultdict[int, list[int]] = defaultdict(list)
        self.queue = deque(range(len(rank_instructions)))
        self.waiters: defaultdict[object, list[int]] = defaultdict(list)

    def run(self) -> Iterator[tuple[int, int]]:
        """Yield ``(rank, index)`` of all instructions in a valid order."""
        while self.queue:
            rank = self.queue.popleft()
            yield from self.advance_rank(rank)
        blocked = [
            rank for rank, instructions in enumerate(self.rank_instructions) if self.cursor[rank] < len(instructions)
        ]
        if blocked:
            raise ProgramError(self.describe_deadlock(blocked), rule=2)

    def advance_rank(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the instructions that a rank can execute now, and those of the ranks that it meets in a collective."""
        instructions = self.rank_instructions[rank]
        while self.cursor[rank] < len(instructions):
            instruction = instructions[self.cursor[rank]]
            match instruction:
                case _ if type(instruction) in _LOCAL_INSTRUCTIONS:
                    yield rank, self.cursor[rank]
                    self.cursor[rank] += 1
                case Collective(phase="") | Commit():
                    members = self.join_collective(rank, instruction)
                    if members is None:
                        return
                    for member in members:
                        yield member, self.cursor[member]
                        self.cursor[member] += 1
                    self.queue.extend(member for member in members if member != rank)
                case _:
                    blocker = self.blocked_on(rank, instruction)
                    if blocker is not None:
                        self.waiters[blocker].append(rank)
                        return
                    yield rank, self.cursor[rank]
                    self.cursor[rank] += 1

    def wake(self, key: object) -> None:
        """Make the ranks that wait for this key runnable."""
        self.queue.extend(self.waiters.pop(key, ()))

    def blocked_on(self, rank: int, instruction: Instruction) -> object | None:
        """Execute an instruction and return None, or return the key of what it waits for."""
        match instruction:
            case Send(tensor, peer):
                self.num_sent[tensor, rank, peer] += 1
                self.wake((tensor, rank, peer))
            case Recv(tensor, peer):
                return self.consume(self.num_sent, (tensor, peer, rank))
            case Collective(phase="start"):
                self.start_collective(rank, instruction)
            case Collective(phase="wait"):
                return self.wait_collective(rank, instruction)
            case Push(tensor, peer):
                self.num_pushed[tensor, rank, peer] += 1
                self.wake(("server", peer))
            case Pull(tensor, peer):
                return self.consume(self.num_replied, (tensor, peer, rank))
            case ApplyPushes():
                return self.apply_pushes(rank, instruction)
            case _:
                pass
        return None

    def consume(self, counts: Counter[tuple[TensorRef, int, int]], key: tuple[TensorRef, int, int]) -> object | None:
        """Consume one message and return None, or return its key if there is none."""
        if counts[key] == 0:
            return key
        counts[key] -= 1
        return None

    def apply_pushes(self, rank: int, instruction: ApplyPushes) -> object | None:
        """Consume one push of each unit from each worker and reply, or return the key of what is missing."""
        name: Literal["grad", "weight"] = "grad" if instruction.applies_gradients else "weight"
        pushes = [(TensorRef(name, unit), worker, rank) for worker in instruction.workers for unit in instruction.units]
        if any(self.num_pushed[key] == 0 for key in pushes):
            return "server", rank
        self.num_pushed.subtract(pushes)
        for worker in instruction.workers if instruction.replies else ():
            for unit in instruction.units:
                key = (TensorRef("weight", unit), rank, worker)
                self.num_replied[key] += 1
                self.wake(key)
        return None

    def record_call(self, rank: int, instruction: Collective | Commit) -> tuple[int, int]:
        """Check a rank's next collective against those of its group; return the numbers of the group and the call."""
        name = (
            ("commit", None) if isinstance(instruction, Commit) else (format_operation(instruction), instruction.tensor)
        )
        group = self.groups.intern(instruction.group)
        number = self.num_called[group, rank]
        calls = self.collective_order[group]
        if rank not in self.groups.members[group]:
            text = format_instruction(instruction)
            raise ProgramError(
                f"rank {rank} calls {text}, but is not a member of its group\n{self.format_progress([rank])}", rule=3
            )
        if number == len(calls):
            calls.append(name)
        elif calls[number] != name:
            other = next(member for member in instruction.group if self.num_called[group, member] > number)
            raise ProgramError(self.describe_mismatch(rank, other, instruction, number), rule=3)
        self.num_called[group, rank] += 1
        self.num_arrived[group, number] += 1
        return group, number

    def join_collective(self, rank: int, instruction: Collective | Commit) -> Sequence[int] | None:
        """Return the members of a collective in rank order if this was the last one to arrive, else None."""
        group, number = self.record_call(rank, instruction)
        self.arrived[group].append(rank)
        if self.num_arrived[group, number] < len(instruction.group):
            return None
        self.wake((group, number))
        return sorted(self.arrived.pop(group))

    def start_collective(self, rank: int, instruction: Collective) -> None:
        """Record that a rank has started a collective."""
        group, number = self.record_call(rank, instruction)
        self.started[rank, group, instruction.op_name, instruction.tensor] = number
        if self.num_arrived[group, number] == len(instruction.group):
            self.wake((group, number))

    def wait_collective(self, rank: int, instruction: Collective) -> object | None:
        """Return None if all members have started the collective, else the key to wait for.

        Raises:
            ProgramError: this rank has not started it (rule 3).
        """
        group = self.groups.intern(instruction.group)
        key = (rank, group, instruction.op_name, instruction.tensor)
        if key not in self.started:
            text = format_instruction(instruction)
            raise ProgramError(
                f"rank {rank} waits with {text} for a collective that it has not started\n"
                f"{self.format_progress([rank])}",
                rule=3,
            )
        if self.num_arrived[group, self.started[key]] < len(instruction.group):
            return group, self.started[key]
        del self.started[key]
        return None

    def describe_mismatch(self, rank: int, other: int, instruction: Collective | Commit, number: int) -> str:
        op, tensor = self.collective_order[self.groups.intern(instruction.group)][number]
        first = op if tensor is None else f"{op}({format_tensor_ref(tensor)})"
        return (
            f"rank {rank} calls {format_instruction(instruction)} where rank {other} of the same group called "
            f"{first}; all "
            f"members of a group call the same collectives in the same order\n{self.format_progress([rank])}"
        )

    def describe_deadlock(self, blocked: Sequence[int]) -> str:
        summary = f"deadlock: {len(blocked)} of {len(self.rank_instructions)} ranks wait for each other"
        return f"{summary}\n{self.format_progress(blocked)}"

    def format_progress(self, ranks: Sequence[int]) -> str:
        return format_locations(self.rank_instructions, {rank: self.cursor[rank] for rank in ranks}, "waits here")


class _RendezvousExecution(_EagerExecution):
    """Progress of all ranks if a send blocks until its receive is posted or the peer has a free buffer."""

    def __init__(self, rank_instructions: Sequence[Instructions], recv_buffer_depth: int) -> None:
        super().__init__(rank_instructions)
        self.notified_cursor = [0] * len(rank_instructions)
        self.recv_buffer_depth = recv_buffer_depth
        self.num_unreceived: Counter[tuple[int, int]] = Counter()

    def blocked_on(self, rank: int, instruction: Instruction) -> object | None:
        match instruction:
            case Send(tensor, peer):
                if self.num_unreceived[rank, peer] >= self.recv_buffer_depth and not self.has_posted_recv(
                    tensor, rank, peer
                ):
                    return "batch", peer
                self.num_unreceived[rank, peer] += 1
            case Recv(tensor, peer) if self.num_sent[tensor, peer, rank]:
                self.num_unreceived[peer, rank] -= 1
            case _:
                pass
        return super().blocked_on(rank, instruction)

    def advance_rank(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the instructions that a rank can execute now, then wake the ranks that wait for its next batch."""
        yield from super().advance_rank(rank)
        # Without progress there is no new batch, and two ranks would wake each other forever.
        if self.notified_cursor[rank] != self.cursor[rank]:
            self.notified_cursor[rank] = self.cursor[rank]
            self.wake(("batch", rank))

    def has_posted_recv(self, tensor: TensorRef, rank: int, peer: int) -> bool:
        """Return whether the batch that the peer has reached receives the tensor."""
        instructions = self.rank_instructions[peer]
        for instruction in instructions[self.cursor[peer] :]:
            match instruction:
                case Recv(expected, source) if expected == tensor and source == rank:
                    return True
                case Send() | Recv() | Recompute():
                    continue
                case _:
                    return False
        return False


def format_locations(
    rank_instructions: Sequence[Instructions], locations: Mapping[int, int], note: str, max_ranks: int = 8
) -> str:
    """Format the instructions around the given locations, one line per rank, each location in brackets."""
    lines = []
    for rank, index in list(locations.items())[:max_ranks]:
        instructions = [
            format_instruction(instruction) for instruction in rank_instructions[rank][max(0, index - 2) : index + 3]
        ]
        here = min(index, 2)
        if here < len(instructions):
            instructions[here] = f"[{instructions[here]}]"
        lines.append(f"  rank {rank}: {' '.join(instructions)} <- {note}")
    if len(locations) > max_ranks:
        lines.append(f"  and {len(locations) - max_ranks} more ranks")
    return "\n".join(lines)


def rule_violation(
    rank_instructions: Sequence[Instructions], location: tuple[int, int], rule: int, fact: str
) -> ProgramError:
    """Return the error for an instruction that violates a rule."""
    rank, index = location
    text = format_instruction(rank_instructions[rank][index])
    return ProgramError(
        f"rank {rank}, {text}: {fact}\n{format_locations(rank_instructions, {rank: index}, 'here')}", rule
    )
