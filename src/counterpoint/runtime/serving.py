"""What a server does with pushes: it applies each as it comes, and answers when its worker may go on.

What a push is says its label, the word that sent it, so that those of later steps may come before others of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.fabric.fabric import Fabric
from counterpoint.model.spec import Unit
from counterpoint.program.instruction import Push, Serve, weight
from counterpoint.program.text import format_unit, format_value, parse_instruction
from counterpoint.runtime.exchange import add_gradient
from counterpoint.runtime.records import Served
from counterpoint.runtime.store import Store


def push_label(word: Push) -> str:
    """Return what a push is called on its way: ``push(grad3)``, ``push_no_reply:int8(grad3)``."""
    return f"{word.name}({format_value(word.value)})"


def parse_label(label: str) -> Push:
    """Return the word that a push came from, to no rank in particular."""
    word = parse_instruction(f"{label}>0")
    assert isinstance(word, Push), "nothing else is sent to a server that does not wait"
    return word


class Counter:
    """Where workers bring gradients and get weights.

    Args:
        store: the weights.
        fabric: the way to the workers.
        journal: where every push is noted, in the order in which they are applied.
    """

    def __init__(self, store: Store, fabric: Fabric, journal: list[Served]) -> None:
        self.store = store
        self.fabric = fabric
        self.journal = journal
        self.versions: dict[Unit, int] = {}
        self.clocks: dict[Unit, dict[int, int]] = {}  # how often each worker has pushed a unit
        self.waiting: dict[Unit, list[int]] = {}  # for their answers, in the order in which they came

    def drop(self) -> None:
        """Nobody waits for an answer, and all workers begin the next step together."""
        self.clocks.clear()
        self.waiting.clear()

    def serve(self, words: Sequence[Serve]) -> None:
        """Take as many pushes as the words say, in the order they come; answer those whose workers may go on.

        Raises:
            ProtocolError: a worker has pushed that was not to go on yet.
        """
        word_of = {unit: word for word in words for unit in word.units}
        workers = sorted({worker for word in words for worker in word.workers})
        for _ in range(sum(len(word.units) * len(word.workers) for word in words)):
            worker, label, tensors = self.fabric.recv_any(workers)
            push = parse_label(label)
            unit = push.value.blocks
            if word_of[unit].updates:
                self.take(word_of[unit], worker, push, tensors)
            else:
                self.draw(word_of[unit], worker, unit, tensors)

    def draw(self, word: Serve, worker: int, unit: Unit, tensors: Sequence[Tensor]) -> None:
        """Draw a worker's weights and those here together, and give its own back."""
        back = []
        for arena, theirs in zip(self.store.units[unit].arenas, tensors, strict=True):
            step = (theirs - arena.weights.detach()) * float(word.part)
            arena.weights.data.add_(step)
            back.append(theirs - step)
        self.versions[unit] = self.versions.get(unit, 0) + 1
        self.journal.append(Served(unit, worker, self.versions[unit]))
        self.fabric.send(worker, format_value(weight(unit)), back)

    def take(self, word: Serve, worker: int, push: Push, tensors: Sequence[Tensor]) -> None:
        """Apply a gradient that a worker has pushed, and answer whoever has asked for it and may go on then."""
        unit = push.value.blocks
        clocks = self.clocks.setdefault(unit, dict.fromkeys(word.workers, 0))
        require_fresh(word, (unit, worker), clocks)
        if tensors:
            add_gradient(self.store.units[unit], tensors, push.code)
            self.store.update((unit,))
        self.versions[unit] = self.versions.get(unit, 0) + bool(tensors)
        self.journal.append(Served(unit, worker, self.versions[unit]))
        clocks[worker] += 1
        asking = [*self.waiting.get(unit, ()), *([worker] if push.verb == "push" else [])]
        self.waiting[unit] = [one for one in asking if not may_go_on(word, one, clocks)]
        for one in asking:
            if one not in self.waiting[unit]:
                arenas = self.store.units[unit].arenas
                self.fabric.send(one, format_value(weight(unit)), [arena.weights.detach() for arena in arenas])


def may_go_on(word: Serve, worker: int, clocks: Mapping[int, int]) -> bool:
    """Tell whether a worker is not too far ahead of the slowest to be given weights."""
    return word.staleness is None or clocks[worker] - min(clocks.values()) <= word.staleness


def require_fresh(word: Serve, place: tuple[Unit, int], clocks: Mapping[int, int]) -> None:
    """Check before a gradient is applied that its worker was given weights in time.

    Raises:
        ProtocolError: the worker is further ahead of the slowest than the word says.
    """
    unit, worker = place
    if not may_go_on(word, worker, clocks):
        slowest = min(clocks, key=lambda one: clocks[one])
        raise ProtocolError(
            f"staleness: push {clocks[worker] + 1} of unit {format_unit(unit)} has come from rank {worker}, while rank "
            f"{slowest} has pushed it {clocks[slowest]} times; a worker that is given weights may be at most "
            f"{word.staleness} pushes ahead of it"
        )
