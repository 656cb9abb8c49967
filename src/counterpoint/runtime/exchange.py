"""What travels between ranks and how it is called there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.model.spec import Unit
from counterpoint.program.codes import find_code
from counterpoint.program.instruction import FORWARDS, OF_UNITS, Collective, Value
from counterpoint.program.strands import strand_of
from counterpoint.program.text import format_value
from counterpoint.runtime.arena import Arena
from counterpoint.runtime.buckets import Range
from counterpoint.runtime.coded import coded_message, coded_sum, read_message
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.early import Early
from counterpoint.runtime.layout import Span
from counterpoint.runtime.model import Kept
from counterpoint.runtime.store import Store, UnitStore
from counterpoint.runtime.strewn import Several
from counterpoint.strategies.buckets import Buckets

_Begun: TypeAlias = tuple[Arena | None, Work, Collective]
"""The arena a collective works on, if any, the work, and the word."""

CARRIES, ABSENT = 1, 2
"""What a message says of a value: a gradient can come back for it; it is not there."""


class Exchange:
    """The communication words of one rank.

    Args:
        fabric: the rank's way to its peers.
        compute: where activations and their gradients lie.
        store: where parameters and their gradients lie.
        brought: for a group and a unit that it sums in a code the microbatches that each member brings.
        sizes: of the buckets in which sums begin early.
    """

    def __init__(
        self,
        fabric: Fabric,
        compute: Compute,
        store: Store,
        brought: Mapping[tuple[Group, Unit], Sequence[Sequence[int]]],
        sizes: Buckets,
    ) -> None:
        self.fabric = fabric
        self.compute = compute
        self.store = store
        self.brought = brought
        self.started: dict[Value, list[_Begun]] = {}
        self.over: list[tuple[Arena | None, Collective]] = []  # what was started and waited for in this step
        self.early = Early(self, sizes)

    def drop(self) -> None:
        """Forget what is under way, and what a group has agreed on, of which some members may not have heard."""
        self.started.clear()
        self.over.clear()
        self.early.drop()

    def send(self, value: Value, peer: int, code: str = "") -> None:
        """Send values, their gradients, a gradient of parameters, be it in a code, or parameters."""
        label = format_value(value)
        if value.micro is not None:
            if self.compute.is_empty(value.micro):
                return
            self.fabric.send(peer, label, self.packed(value, value.micro))
            return
        unit = self.store.units[value.blocks]
        if value.name == "weight":
            self.fabric.send(peer, label, [arena.weights for arena in unit.arenas])
        else:
            self.fabric.send(peer, label, self.gradient_message(unit, peer, code))
            unit.clear()

    def gradient_message(self, unit: UnitStore, peer: int, code: str) -> list[Tensor]:
        """Return a unit's gradient as tensors to be sent to a peer; :func:`add_gradient` is its opposite."""
        if not code:
            return [tensor for arena in unit.arenas for tensor in arena.message()]
        way = way_to(peer, self.fabric.rank)
        return [tensor for arena in unit.arenas for tensor in coded_message(arena, way, find_code(code))]

    def recv(self, value: Value, peer: int, code: str = "") -> None:
        """Receive what the peer's :meth:`send` of the same value sent."""
        label = format_value(value)
        if value.micro is not None:
            if self.compute.is_empty(value.micro):
                return
            self.unpack(value, value.micro, peer, self.fabric.recv(peer, label))
            return
        unit = self.store.units[value.blocks]
        tensors = list(self.fabric.recv(peer, label))
        if value.name == "weight":
            put_weights(unit, tensors)
        else:
            add_gradient(unit, tensors, code)

    def packed(self, value: Value, micro: int) -> list[Tensor]:
        """Return the message that a strand or its gradient is: a mask, then the tensors.

        The mask of a strand says for which values a gradient can come back (``CARRIES``), and which are not there
        because no other rank reads them in evaluation (``ABSENT``); that of a gradient says for which there is one.
        """
        compute, places = self.compute, self.compute.model.strands[strand_of(value)]
        if value.name in FORWARDS:
            kept = [compute.values.get((at, micro)) for at in places]
            if value.name == "x":  # nobody here reads it
                self.forget(value, micro)
            mask = _mask(ABSENT if one is None else int(one.carries) for one in kept)
            return [mask, *(one.value for one in kept if one is not None)]
        gradients = [compute.gradients.pop((at, micro), None) for at in places]
        there = [gradient for gradient in gradients if gradient is not None]
        return [_mask(int(gradient is not None) for gradient in gradients), *compute.loss_behind(micro), *there]

    def unpack(self, value: Value, micro: int, peer: int, message: Sequence[Tensor]) -> None:
        """Put a message of a strand or its gradient where it belongs."""
        compute, places = self.compute, self.compute.model.strands[strand_of(value)]
        mask, *tensors = message
        flags: list[int] = mask.tolist()
        if value.name in FORWARDS:
            came = iter(tensors)
            for at, flag in zip(places, flags, strict=True):
                if flag != ABSENT:
                    compute.values[at, micro] = Kept(next(came), flag == CARRIES)
            return
        left = iter(compute.take_loss(micro, peer, tensors))
        for at, has_gradient in zip(places, flags, strict=True):
            if has_gradient:
                compute.add_gradient(at, micro, next(left))

    def collect(self, words: Sequence[Collective]) -> None:
        """Do blocking collectives of one verb and group, side by side."""
        works = [work for word in words for work in self.begin(word)]
        for arena, work, word in works:
            work.wait()
            self.finish(arena, word)

    def start(self, word: Collective) -> None:
        """Start a collective that a later word waits for, or what is left of it to be started."""
        site = self.early.active.get(word.value)
        self.started[word.value] = self.begin(word) if site is None else list(site.start(word))

    def wait(self, word: Collective) -> None:
        """Wait for a started collective."""
        self.early.wait(word)
        for arena, work, begun in self.started.pop(word.value):
            work.wait()
            self.over.append((arena, begun))
            self.finish(arena, begun)

    def begin(self, word: Collective) -> list[_Begun]:
        """Start one collective on every tensor of its value."""
        value, group = word.value, word.group
        label = format_value(value)
        if value.micro is not None:
            block = value.blocks[0]
            find = self.compute.partial_output if value.name == "y" else self.compute.partial_gradient
            tensor = find(block, value.micro)
            return [] if tensor is None else [(None, self.fabric.all_reduce(label, tensor, group), word)]
        begun: list[_Begun] = []
        for index, arena in enumerate(self.store.units[value.blocks].arenas):
            name = f"{label}[{index}]" if index else label
            begun.append((arena, self.begin_arena(word, arena, name), word))
        return begun

    def begin_arena(self, word: Collective, arena: Arena, label: str) -> Work:
        """Start one collective on one arena."""
        group = word.group
        if arena.commons is not None and word.verb in {"reduce_scatter", "all_gather"}:
            if word.verb == "reduce_scatter":
                arena.announce()
            return self.fabric.meet(label, group)
        if word.verb == "all_reduce_mean":
            return self.fabric.all_reduce(label, arena.weights.data, group, "mean")
        if word.value.name == "delayed_grad":
            return self.fabric.all_reduce(label, arena.set_aside(), group)
        if word.verb == "broadcast":
            return self.fabric.broadcast(label, arena.weights.data, group, group[0])
        if word.verb == "all_gather":
            arena.restore_weights()
            return self.fabric.all_gather(label, arena.weights.data, arena.layout.bounds(len(group)), group)
        if word.code:
            return self.begin_code(word, arena, label)
        span = self.store.units[word.value.blocks].role.span
        return self.begin_sum(word, arena, label, span if word.verb == "all_reduce" else None)

    def begin_sum(self, word: Collective, arena: Arena, label: str, span: Span | None) -> Work:
        """Start to add up one arena's gradient, or this rank's share of it, range by range between rows of tables.

        Args:
            word: the share or sum.
            arena: whose gradient.
            label: what it is called.
            span: the share that is added up where there is one already; None for the whole gradient.
        """
        group = word.group
        flat = arena.fold() if span is None else arena.sum_of(span)
        has_share = arena.part is not None and word.verb == "all_reduce"
        low = arena.layout.range_of(span)[0] if has_share and span is not None else 0
        strewn = arena.strewn
        if strewn.slots:
            strewn.gather(self.fabric, group, label, has_share=word.verb == "all_reduce" and bool(strewn.rows))
        works = self.begin_ranges(word, arena, label, strewn.dense_ranges(low, low + len(flat)), flat, low)
        return works[0] if len(works) == 1 else Several(works)

    def begin_ranges(
        self, word: Collective, arena: Arena, label: str, ranges: Iterable[Range], flat: Tensor, low: int = 0
    ) -> list[Work]:
        """Start to add up ranges of an arena's gradient, or of this rank's share of it.

        Args:
            word: the share or sum.
            arena: whose gradient.
            label: what it is called.
            ranges: elements of the arena.
            flat: the gradient or share.
            low: where in the arena it begins.
        """
        bounds, works = arena.layout.bounds(len(word.group)), []
        for start, stop in ranges:
            part = flat[start - low : stop - low]
            if word.verb == "reduce_scatter":
                inside = [min(max(bound, start), stop) - start for bound in bounds]
                works.append(self.fabric.reduce_scatter(label, part, inside, word.group))
            else:
                works.append(self.fabric.all_reduce(label, part, word.group))
        return works

    def begin_code(self, word: Collective, arena: Arena, label: str) -> Work:
        """Start to add up one arena's gradient in a code; rows of tables with sparse gradients travel as they are."""
        if arena.strewn.slots:
            arena.gather()
            arena.strewn.gather(self.fabric, word.group, label, has_share=bool(arena.strewn.rows))
        return coded_sum(self.fabric, label, arena, word.group, find_code(word.code), self.parts_of(word))

    def parts_of(self, word: Collective) -> list[float]:
        """Return for each member of a coded sum which part of the mean over all samples its gradient is."""
        brought = self.brought[word.group, word.value.blocks]
        return [sum(self.compute.shares.weights[micro] for micro in micros) for micros in brought]

    def finish(self, arena: Arena | None, word: Collective) -> None:
        """Put the result of a collective where it belongs."""
        if arena is not None and arena.commons is not None:
            if word.verb == "reduce_scatter":
                arena.show(self.fabric, word.group, format_value(word.value))
        elif arena is not None and word.verb == "reduce_scatter":
            bounds = arena.layout.bounds(len(word.group))
            at = word.group.index(self.fabric.rank)
            arena.add_part(bounds[at], bounds[at + 1])

    def release(self, value: Value) -> None:
        """Free what was gathered, or a gradient that has been used."""
        if value.name in OF_UNITS:
            for arena in self.store.units[value.blocks].arenas:
                if value.name == "weight":
                    arena.release_weights()
                elif value.name == "delayed_grad":
                    arena.late = None
                else:
                    arena.drop_gradient()
        elif value.micro is not None:
            self.forget(value, value.micro)

    def forget(self, value: Value, micro: int) -> None:
        """Free values that belong to a microbatch."""
        for at in self.compute.model.strands.get(strand_of(value), ()) if value.name in FORWARDS else ():
            self.compute.values.pop((at, micro), None)


def _mask(flags: Iterable[int]) -> Tensor:
    return torch.tensor(list(flags), dtype=torch.uint8)


def put_weights(unit: UnitStore, tensors: Sequence[Tensor]) -> None:
    """Replace a unit's weights by received ones."""
    for arena, tensor in zip(unit.arenas, tensors, strict=True):
        arena.weights.data.copy_(tensor)


def add_gradient(unit: UnitStore, tensors: Sequence[Tensor], code: str = "") -> None:
    """Add a received gradient to a unit's."""
    left = iter(tensors)
    for arena in unit.arenas:
        if code:
            arena.receive(iter(read_message(arena, left, find_code(code))))
        else:
            arena.receive(left)


def way_to(peer: int, rank: int) -> Group:
    """Return the two ends of a way, as what a code keeps for it is named by."""
    return (min(peer, rank), max(peer, rank))
