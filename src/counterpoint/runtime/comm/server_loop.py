"""What a server does with pushes: it applies each as it comes, and answers when its worker may go on.

What a push is says its label, the word that sent it, so that those of later steps may come before others of this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from counterpoint.errors import ProtocolError
from counterpoint.fabric.fabric import Fabric
from counterpoint.model.spec import Unit
from counterpoint.program.instruction import ApplyPushes, Push, weight
from counterpoint.program.text import format_tensor_ref, format_unit, parse_instruction
from counterpoint.runtime.comm.rank_communication import add_grad
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.step_commit import PushRecord


def format_push_label(instruction: Push) -> str:
    """Return what a push is called on its way: ``push(grad3)``, ``push_no_reply:int8(grad3)``."""
    return f"{instruction.op_name}({format_tensor_ref(instruction.tensor)})"


def parse_push_label(label: str) -> Push:
    """Return the word that a push came from, to no rank in particular."""
    word = parse_instruction(f"{label}>0")
    assert isinstance(word, Push), "nothing else is sent to a server that does not wait"
    return word


class ParameterServerLoop:
    """Where workers bring gradients and get weights.

    Args:
        store: the weights.
        fabric: the way to the workers.
        journal: where every push is noted, in the order in which they are applied.
    """

    def __init__(self, store: ParamStore, fabric: Fabric, push_log: list[PushRecord]) -> None:
        self.store = store
        self.fabric = fabric
        self.push_log = push_log
        self.versions: dict[Unit, int] = {}
        self.clocks: dict[Unit, dict[int, int]] = {}  # how often each worker has pushed a unit
        self.waiting: dict[Unit, list[int]] = {}  # for their answers, in the order in which they came

    def clear(self) -> None:
        """Nobody waits for an answer, and all workers begin the next step together."""
        self.clocks.clear()
        self.waiting.clear()

    def apply_and_reply(self, instructions: Sequence[ApplyPushes]) -> None:
        """Take as many pushes as the words say, in the order they come; answer those whose workers may go on.

        Raises:
            ProtocolError: a worker has pushed that was not to go on yet.
        """
        word_of = {unit: word for word in instructions for unit in word.units}
        workers = sorted({worker for word in instructions for worker in word.workers})
        for _ in range(sum(len(word.units) * len(word.workers) for word in instructions)):
            worker, label, tensors = self.fabric.recv_any(workers)
            push = parse_push_label(label)
            unit = push.tensor.blocks
            if word_of[unit].applies_gradients:
                self.apply_push(word_of[unit], worker, push, tensors)
            else:
                self.elastic_average(word_of[unit], worker, unit, tensors)

    def elastic_average(self, instruction: ApplyPushes, worker: int, unit: Unit, tensors: Sequence[Tensor]) -> None:
        """Draw a worker's weights and those here together, and give its own back."""
        back = []
        for arena, theirs in zip(self.store.units[unit].flat_params, tensors, strict=True):
            step = (theirs - arena.weights.detach()) * float(instruction.alpha)
            arena.weights.data.add_(step)
            back.append(theirs - step)
        self.versions[unit] = self.versions.get(unit, 0) + 1
        self.push_log.append(PushRecord(unit, worker, self.versions[unit]))
        self.fabric.send(worker, format_tensor_ref(weight(unit)), back)

    def apply_push(self, instruction: ApplyPushes, worker: int, push: Push, tensors: Sequence[Tensor]) -> None:
        """Apply a gradient that a worker has pushed, and answer whoever has asked for it and may go on then."""
        unit = push.tensor.blocks
        clocks = self.clocks.setdefault(unit, dict.fromkeys(instruction.workers, 0))
        require_within_staleness(instruction, (unit, worker), clocks)
        if tensors:
            add_grad(self.store.units[unit], tensors, push.codec)
            self.store.update((unit,))
        self.versions[unit] = self.versions.get(unit, 0) + bool(tensors)
        self.push_log.append(PushRecord(unit, worker, self.versions[unit]))
        clocks[worker] += 1
        asking = [*self.waiting.get(unit, ()), *([worker] if push.op == "push" else [])]
        self.waiting[unit] = [one for one in asking if not within_staleness(instruction, one, clocks)]
        for one in asking:
            if one not in self.waiting[unit]:
                arenas = self.store.units[unit].flat_params
                self.fabric.send(one, format_tensor_ref(weight(unit)), [arena.weights.detach() for arena in arenas])


def within_staleness(instruction: ApplyPushes, worker: int, clocks: Mapping[int, int]) -> bool:
    """Tell whether a worker is not too far ahead of the slowest to be given weights."""
    return instruction.staleness is None or clocks[worker] - min(clocks.values()) <= instruction.staleness


def require_within_staleness(
    instruction: ApplyPushes, unit_and_worker: tuple[Unit, int], clocks: Mapping[int, int]
) -> None:
    """Check before a gradient is applied that its worker was given weights in time.

    Raises:
        ProtocolError: the worker is further ahead of the slowest than the word says.
    """
    unit, worker = unit_and_worker
    if not within_staleness(instruction, worker, clocks):
        slowest = min(clocks, key=lambda one: clocks[one])
        raise ProtocolError(
            f"staleness: push {clocks[worker] + 1} of unit {format_unit(unit)} has come from rank {worker}, while rank "
            f"{slowest} has pushed it {clocks[slowest]} times; a worker that is given weights may be at most "
            f"{instruction.staleness} pushes ahead of it"
        )
