"""The rank programs of a pipeline with a flush: actions of the schedule, messages between stages, update.

A slot is the index of a stage replica, counted over the replicas of all stages in order: with replicas 2 and 1, the
slots 0 and 1 are the first stage, and 2 is the second.

A send may block until its receive is posted (rendezvous). A receive right before the action that needs it costs no
waiting, but with several chunks per stage two stages send to each other, and both sends may then block. Such a receive
is placed earlier: where its stage is at the time of the send, if all actions take the time in :data:`UNIT_COST`, so
that it does not delay that stage. Consecutive messages are posted together::

    deadlock                                        the receive of a1 is placed earlier
    stage 0: F0 send(a0) F1 send(a1) recv(b0) ...   stage 0: F0 send(a0) F1 send(a1) recv(b0) ...
    stage 1: recv(a0) F0 send(b0) B7 recv(a1) ...   stage 1: recv(a0) F0 send(b0) recv(a1) B7 ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from counterpoint.model.spec import ModelSpec
from counterpoint.program.instruction import (
    Backward,
    Collective,
    Commit,
    Forward,
    Instruction,
    Recv,
    Send,
    TensorRef,
    Update,
    grad,
)
from counterpoint.program.program import Instructions, Program, RankProgram
from counterpoint.program.rewrite import shift_ranks
from counterpoint.strategies.pipeline.chunks import Chunks, StageEdges
from counterpoint.strategies.pipeline.schedules.schedule import PipelineAction, PipelineSchedule, StageReplica
from counterpoint.strategies.replica_groups import updated_units
from counterpoint.strategies.strategy import RankCost, tp_allreduce_bytes

Item: TypeAlias = PipelineAction | Send | Recv
"""An action or a message of a stage replica; the peer of a message is a slot."""

Transfer: TypeAlias = tuple[TensorRef, int]
"""A tensor that is sent or received, and the peer's slot."""

_P2PMessage: TypeAlias = tuple[TensorRef, int, int]
"""A tensor, the sender's slot and the receiver's slot."""

UNIT_COST = {"F": 1, "B": 2, "Bi": 1, "Bw": 1}
"""Duration of actions, in the unit by which receives are placed."""


class P2PNeeds(NamedTuple):
    """What an action receives from other slots, and what it sends to them.

    Args:
        inputs: for a slot and an action the transfers that it needs first.
        outputs: for a slot and an action the transfers that it makes possible.
    """

    inputs: Callable[[int, PipelineAction], Sequence[Transfer]]
    outputs: Callable[[int, PipelineAction], Sequence[Transfer]]


def place_messages(actions: Sequence[Sequence[PipelineAction]], needs: P2PNeeds) -> list[list[Item]]:
    """Return for every slot its actions with the messages between them.

    A tensor is sent right after the action that produces it. Messages from one slot to another are received in the
    order in which they are sent, and blocking sends do not deadlock.

    Args:
        actions: the actions of each slot, in order.
        needs: the transfers before and after each action.
    """
    items = _place_receives_late(actions, needs)
    simulation = _BlockingSendSim(items)
    while True:
        simulation.advance_all()
        sender = simulation.first_blocked()
        if sender is None:
            return items
        simulation.post_receive_earlier(sender)


def _place_receives_late(actions: Sequence[Sequence[PipelineAction]], needs: P2PNeeds) -> list[list[Item]]:
    """Place receives right before the actions that need them, after those of earlier messages of the same sender."""
    sent: defaultdict[tuple[int, int], list[TensorRef]] = defaultdict(list)
    for slot, slot_actions in enumerate(actions):
        for tensor, peer in (transfer for action in slot_actions for transfer in needs.outputs(slot, action)):
            sent[slot, peer].append(tensor)
    items_of_slots: list[list[Item]] = []
    for slot, slot_actions in enumerate(actions):
        pending = {sender: list(reversed(tensors)) for (sender, to), tensors in sent.items() if to == slot}
        items: list[Item] = []
        received: set[Transfer] = set()
        for action in slot_actions:
            for needed in needs.inputs(slot, action):
                sender = needed[1]
                while needed not in received:
                    tensor = pending[sender].pop()
                    items.append(Recv(tensor, sender))
                    received.add((tensor, sender))
            items.append(action)
            items += (Send(*output) for output in needs.outputs(slot, action))
        items_of_slots.append(items)
    return items_of_slots


class _BlockingSendSim:
    """The progress of every slot with blocking sends, and the times of sends and actions without blocking.

    Args:
        items: actions and messages of each slot; receives are moved in place.
    """

    def __init__(self, items: list[list[Item]]) -> None:
        self.items = items
        self.cursor = [0] * len(items)
        self.posted: set[_P2PMessage] = set()
        self.sent_at, self.starts = _compute_times(items)

    def advance_all(self) -> None:
        """Advance every slot until it blocks."""
        advanced = True
        while advanced:
            advanced = False
            for slot, items in enumerate(self.items):
                while self.cursor[slot] < len(items) and self.can_advance(slot, items[self.cursor[slot]]):
                    self.cursor[slot] += 1
                    advanced = True

    def can_advance(self, slot: int, item: Item) -> bool:
        """Tell whether a slot can execute its next item; a send that can is marked as posted."""
        match item:
            case Send(tensor, peer):
                index = self.cursor[peer]
                if Recv(tensor, slot) not in self.items[peer][index : self.end_of_messages(peer, index)]:
                    return False
                self.posted.add((tensor, slot, peer))
                return True
            case Recv(tensor, peer):
                return (tensor, peer, slot) in self.posted
            case PipelineAction():
                return True

    def end_of_messages(self, slot: int, index: int) -> int:
        """Return the end of the consecutive messages from an index on, which are posted together."""
        items = self.items[slot]
        while index < len(items) and not isinstance(items[index], PipelineAction):
            index += 1
        return index

    def first_blocked(self) -> int | None:
        """Return the slot with the earliest send among those that block; None if all slots have finished."""
        blocked = []
        for slot, items in enumerate(self.items):
            item = items[self.cursor[slot]] if self.cursor[slot] < len(items) else None
            if isinstance(item, Send):
                blocked.append((self.sent_at[item.tensor, slot, item.peer], slot))
        return min(blocked)[1] if blocked else None

    def post_receive_earlier(self, sender: int) -> None:
        """Move the receive of the send that blocks a slot to where its peer is at that time."""
        send = self.items[sender][self.cursor[sender]]
        assert isinstance(send, Send), "only sends block"
        recv = Recv(send.tensor, sender)
        items, starts = self.items[send.peer], self.starts[send.peer]
        index = self.end_of_messages(send.peer, self.cursor[send.peer])
        while starts[items[index]] < self.sent_at[send.tensor, sender, send.peer]:
            index = self.end_of_messages(send.peer, index + 1)
        items.remove(recv)
        items.insert(index, recv)


def _compute_times(items: Sequence[Sequence[Item]]) -> tuple[dict[_P2PMessage, int], list[dict[Item, int]]]:
    """Return when tensors are sent and when actions start, if only actions take time and sends never block."""
    now, cursor = [0] * len(items), [0] * len(items)
    sent_at: dict[_P2PMessage, int] = {}
    starts: list[dict[Item, int]] = [{} for _ in items]
    advanced = True
    while advanced:
        advanced = False
        for slot, slot_items in enumerate(items):
            while cursor[slot] < len(slot_items):
                match slot_items[cursor[slot]]:
                    case Recv(tensor, peer):
                        if (tensor, peer, slot) not in sent_at:
                            break
                        now[slot] = max(now[slot], sent_at[tensor, peer, slot])
                    case Send(tensor, peer):
                        sent_at[tensor, slot, peer] = now[slot]
                    case PipelineAction() as action:
                        starts[slot][action] = now[slot]
                        now[slot] += UNIT_COST[action.kind]
                cursor[slot] += 1
                advanced = True
    return sent_at, starts


ComputeGroups: TypeAlias = Mapping[tuple[type[Instruction], int, int], Instructions]
"""For the forward or backward of a block and a microbatch: itself and the collectives that follow it."""

BACKWARD_PARTS: dict[str, Literal["", "input", "weight"]] = {"B": "", "Bi": "input", "Bw": "weight"}
"""The part of a backward that an action computes."""


@dataclass(frozen=True, slots=True)
class StageGrid:
    """All stage replicas of a pipeline. Each has a *slot*, its index over all replicas of all stages.

    Args:
        chunks: the blocks of each stage.
        edges: the edges between stages.
        replicas: number of replicas of each stage.
        schedule: the order in which a replica runs its microbatches.
    """

    chunks: Chunks
    edges: StageEdges
    replicas: tuple[int, ...]
    schedule: PipelineSchedule

    def slot(self, stage: int, replica: int) -> int:
        """Return the slot of a stage's replica."""
        return sum(self.replicas[:stage]) + replica

    def stage_and_replica(self, slot: int) -> tuple[int, int]:
        """Return the stage and the replica of a slot."""
        stage = 0
        while slot >= self.replicas[stage]:
            slot -= self.replicas[stage]
            stage += 1
        return stage, slot

    @property
    def num_slots(self) -> int:
        """Number of stage replicas."""
        return sum(self.replicas)

    def build_items(self, micros: Sequence[int]) -> list[list[Item]]:
        """Return the actions and messages of every slot, for the microbatches that enter the pipeline."""
        index_of = {micro: index for index, micro in enumerate(micros)}
        actions = []
        for stage, count in enumerate(self.replicas):
            for replica in range(count):
                own = StageReplica(stage, self.replicas, tuple(micros[replica::count]), self.chunks.count(stage))
                actions.append(list(self.schedule.actions(own)))

        def to_slots(transfers: Sequence[tuple[TensorRef, int]], action: PipelineAction) -> list[Transfer]:
            index = index_of[action.micro]
            return [(tensor, self.slot(stage, index % self.replicas[stage])) for tensor, stage in transfers]

        def inputs(slot: int, action: PipelineAction) -> list[Transfer]:
            if action.kind == "Bw":
                return []
            find = self.edges.recv_forward if action.kind == "F" else self.edges.recv_backward
            return to_slots(find(self.blocks_of(slot, action), action.micro), action)

        def outputs(slot: int, action: PipelineAction) -> list[Transfer]:
            if action.kind == "Bw":
                return []
            find = self.edges.send_forward if action.kind == "F" else self.edges.send_backward
            return to_slots(find(self.blocks_of(slot, action), action.micro), action)

        return place_messages(actions, P2PNeeds(inputs, outputs))

    def blocks_of(self, slot: int, action: PipelineAction) -> range:
        """Return the blocks that an action computes."""
        stage, _ = self.stage_and_replica(slot)
        return self.chunks.block_ranges[self.chunks.global_index(stage, action.chunk)]


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Builds the rank program of one stage replica for one inner rank.

    Args:
        grid: all stage replicas.
        slot: the stage replica.
        inner: the inner rank.
        num_inner: number of inner ranks.
    """

    grid: StageGrid
    slot: int
    inner: int
    num_inner: int

    def instructions(self, body: Instructions, groups: ComputeGroups, items: Sequence[Item]) -> Iterator[Instruction]:
        """Yield the instructions of this slot.

        Args:
            body: of the inner rank, which runs all blocks.
            groups: the same by block and microbatch.
            items: actions and messages of the slot.
        """
        for item in items:
            match item:
                case PipelineAction():
                    yield from self._action_instructions(item, groups)
                case Send(tensor, slot):
                    yield Send(tensor, self._rank_of(slot))
                case Recv(tensor, slot):
                    yield Recv(tensor, self._rank_of(slot))
        yield from self._commit_and_update(body)

    def _rank_of(self, slot: int) -> int:
        """Return the rank of a slot for the same inner rank."""
        return slot * self.num_inner + self.inner

    def _action_instructions(self, action: PipelineAction, groups: ComputeGroups) -> Iterator[Instruction]:
        blocks = self.grid.blocks_of(self.slot, action)
        shift = self.slot * self.num_inner
        if action.kind == "F":
            for block in blocks:
                yield from (shift_ranks(one, shift) for one in groups[Forward, block, action.micro])
            return
        part = BACKWARD_PARTS[action.kind]
        for block in reversed(blocks):
            backward, *collectives = groups[Backward, block, action.micro]
            assert isinstance(backward, Backward), "the group of a backward begins with it"
            yield replace(backward, part=part) if part else backward
            yield from (shift_ranks(collective, shift) for collective in collectives if part != "weight")

    def _commit_and_update(self, body: Instructions) -> Iterator[Instruction]:
        grid = self.grid
        own_blocks = set(grid.chunks.blocks_of(grid.stage_and_replica(self.slot)[0]))
        units = [unit for unit in updated_units(body) if set(unit) & own_blocks]
        for unit in sorted(units, reverse=True):
            holders = tuple(
                self._rank_of(slot)
                for slot in range(grid.num_slots)
                if set(unit) & set(grid.chunks.blocks_of(grid.stage_and_replica(slot)[0]))
            )
            if len(holders) > 1:
                yield Collective("all_reduce", grad(unit), holders)
        yield Commit(tuple(range(self.num_inner * grid.num_slots)))
        yield from (Update(unit) for unit in units)


def build_stage_programs(grid: StageGrid, program: Program, slots: Iterable[int]) -> dict[int, tuple[RankProgram, ...]]:
    """Return the rank programs of some slots, one for each inner rank; an empty one stays empty."""
    micros = sorted(
        {one.micro for rank_program in program.rank_programs for one in rank_program.body if isinstance(one, Forward)}
    )
    items = grid.build_items(micros)
    groups_of_ranks = [group_by_compute(rank_program.body) for rank_program in program.rank_programs]
    stage_programs: dict[int, tuple[RankProgram, ...]] = {}
    for slot in slots:
        builders = [StageProgram(grid, slot, rank, program.num_ranks) for rank in range(program.num_ranks)]
        stage_programs[slot] = tuple(
            replace(inner, body=tuple(builder.instructions(inner.body, groups, items[slot]))) if inner.body else inner
            for builder, inner, groups in zip(builders, program.rank_programs, groups_of_ranks, strict=True)
        )
    return stage_programs


def group_by_compute(body: Instructions) -> ComputeGroups:
    """Group each forward and backward with the collectives right after it, which belong to it."""
    groups: dict[tuple[type[Instruction], int, int], Instructions] = {}
    key = None
    for instruction in body:
        match instruction:
            case Forward(block, micro) | Backward(block, micro):
                key = (type(instruction), block, micro)
                groups[key] = (instruction,)
            case Collective() if key is not None:
                groups[key] += (instruction,)
            case _:
                key = None
    return groups


def stage_tp_bytes(rank: RankCost, blocks: Sequence[int], model: ModelSpec) -> Fraction:
    """Return the part of an inner rank's sent bytes, all of which are tensor-parallel all-reduces, of some blocks."""
    total = tp_allreduce_bytes(model, rank.blocks)
    return rank.other_bytes * Fraction(tp_allreduce_bytes(model, blocks), total) if total else Fraction(0)
