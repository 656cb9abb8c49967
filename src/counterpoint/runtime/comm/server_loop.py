"""Loop of the parameter server of the strategy ``server(n)``: apply pushes as they arrive, reply when allowed.

This server is a rank of a program: its workers are fixed, and messages are neither lost nor repeated, so that no push
is a duplicate. The servers of :class:`ElasticTrainer <counterpoint.training.elastic_trainer.ElasticTrainer>` and
KVStore, whose workers come and go, are in :mod:`counterpoint.ps`. Both decide by the same
:class:`ConsistencyTracker <counterpoint.ps.consistency.ConsistencyTracker>` which pushes may be applied and who may
have weights; here it has a clock for every worker of a unit.

A push is labelled with its instruction, so that pushes of a later step may arrive before others of the current one. A
worker gets its reply with the weights when it is at most ``staleness`` pushes ahead of the slowest worker (SSP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from counterpoint.fabric.fabric import Fabric
from counterpoint.model.spec import Unit
from counterpoint.program.instruction import ApplyPushes, Push, weight
from counterpoint.program.text import format_tensor_ref, format_unit, parse_instruction
from counterpoint.ps.consistency import Asp, ConsistencyTracker, Ssp
from counterpoint.runtime.comm.rank_communication import add_grad
from counterpoint.runtime.params.param_store import ParamStore
from counterpoint.runtime.rank_state import PushRecord


def format_push_label(instruction: Push) -> str:
    """Return the label of a push: ``push(grad3)``, ``push_no_reply:int8(grad3)``."""
    return f"{instruction.op_name}({format_tensor_ref(instruction.tensor)})"


def parse_push_label(label: str) -> Push:
    """Return the push instruction of a label, without its receiver."""
    instruction = parse_instruction(f"{label}>0")
    assert isinstance(instruction, Push), "workers send servers nothing else"
    return instruction


@dataclass(slots=True)
class UnitPushes:
    """Pushes of one unit.

    Attributes:
        tracker: versions of the unit, and clocks of the workers.
        read_versions: the version that each worker was sent last.
        waiting: workers without a reply yet, in order of arrival.
    """

    tracker: ConsistencyTracker
    read_versions: dict[int, int]
    waiting: list[int] = field(default_factory=list)

    def restart(self) -> None:
        """Set all clocks to zero and drop pending replies."""
        self.tracker.restart_clocks()
        self.read_versions = dict.fromkeys(self.read_versions, self.tracker.version)
        self.waiting.clear()


class ParameterServerLoop:
    """Applies the workers' pushes to the weights of one server.

    Args:
        store: the weights.
        fabric: the server's connection to the workers.
        push_log: records every push, in the order in which they are applied.
    """

    def __init__(self, store: ParamStore, fabric: Fabric, push_log: list[PushRecord]) -> None:
        self.store = store
        self.fabric = fabric
        self.push_log = push_log
        self.pushes: dict[Unit, UnitPushes] = {}

    def clear(self) -> None:
        """Restart all clocks and drop pending replies; all workers begin the next step together."""
        for pushes in self.pushes.values():
            pushes.restart()

    def apply_and_reply(self, instructions: Sequence[ApplyPushes]) -> None:
        """Apply as many pushes as the instructions name, in order of arrival; reply to workers that may continue.

        Raises:
            ProtocolError: a worker has pushed before it was allowed to continue.
        """
        instruction_of = {unit: instruction for instruction in instructions for unit in instruction.units}
        workers = sorted({worker for instruction in instructions for worker in instruction.workers})
        for _ in range(sum(len(instruction.units) * len(instruction.workers) for instruction in instructions)):
            worker, label, tensors = self.fabric.recv_any(workers)
            push = parse_push_label(label)
            unit = push.tensor.blocks
            if instruction_of[unit].applies_gradients:
                self.apply_push(instruction_of[unit], worker, push, tensors)
            else:
                self.elastic_average(instruction_of[unit], worker, unit, tensors)

    def elastic_average(self, instruction: ApplyPushes, worker: int, unit: Unit, tensors: Sequence[Tensor]) -> None:
        """Move a worker's weights and the server's towards each other (EASGD), and reply with the worker's."""
        replies = []
        for flat_params, worker_weights in zip(self.store.units[unit].flat_params, tensors, strict=True):
            step = (worker_weights - flat_params.weights.detach()) * float(instruction.alpha)
            flat_params.weights.data.add_(step)
            replies.append(worker_weights - step)
        pushes = self.pushes.get(unit) or self._start_unit(instruction, unit)
        self._record(pushes.tracker, unit, worker, is_applied=True)
        self.fabric.send(worker, format_tensor_ref(weight(unit)), replies)

    def apply_push(self, instruction: ApplyPushes, worker: int, push: Push, tensors: Sequence[Tensor]) -> None:
        """Apply a pushed gradient, and send the weights to every waiting worker that may continue now."""
        unit = push.tensor.blocks
        pushes = self.pushes.get(unit) or self._start_unit(instruction, unit)
        tracker = pushes.tracker
        tracker.check_push(worker_name(worker), pushes.read_versions[worker])
        if tensors:
            add_grad(self.store.units[unit], tensors, push.codec)
            self.store.update((unit,))
        self._record(tracker, unit, worker, is_applied=bool(tensors))
        waiting = [*pushes.waiting, *([worker] if push.op == "push" else [])]
        pushes.waiting = [rank for rank in waiting if not tracker.can_read(worker_name(rank))]
        for rank in waiting:
            if rank not in pushes.waiting:
                pushes.read_versions[rank] = tracker.version
                all_flat_params = self.store.units[unit].flat_params
                weights = [flat_params.weights.detach() for flat_params in all_flat_params]
                self.fabric.send(rank, format_tensor_ref(weight(unit)), weights)

    def _start_unit(self, instruction: ApplyPushes, unit: Unit) -> UnitPushes:
        consistency = Asp() if instruction.staleness is None else Ssp(instruction.staleness)
        tracker = ConsistencyTracker(consistency, f"unit {format_unit(unit)}")
        for worker in instruction.workers:
            tracker.join_clock(worker_name(worker))
        self.pushes[unit] = UnitPushes(tracker, dict.fromkeys(instruction.workers, 0))
        return self.pushes[unit]

    def _record(self, tracker: ConsistencyTracker, unit: Unit, worker: int, *, is_applied: bool) -> None:
        tracker.record(worker_name(worker), is_counted=is_applied)
        self.push_log.append(PushRecord(unit, worker, tracker.version))


def worker_name(rank: int) -> str:
    """Return the name of a worker in clocks and errors."""
    return f"rank {rank}"
