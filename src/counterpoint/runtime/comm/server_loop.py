"""Loop of the parameter server of the strategy ``server(n)``: apply pushes as they arrive, reply when allowed.

There are two parameter servers. This one is a rank of a program: its workers are fixed, messages are neither lost nor
repeated, and so nothing is counted. The one in :mod:`counterpoint.ps`, which :class:`ElasticTrainer
<counterpoint.training.elastic_trainer.ElasticTrainer>` and KVStore use, has workers that come and go, and counts every
push once.

A push is labelled with its instruction, so that pushes of a later step may arrive before others of the current one. A
worker gets its reply with the weights when it is at most ``staleness`` pushes ahead of the slowest worker (SSP).
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
from counterpoint.runtime.rank_state import PushRecord


def format_push_label(instruction: Push) -> str:
    """Return the label of a push: ``push(grad3)``, ``push_no_reply:int8(grad3)``."""
    return f"{instruction.op_name}({format_tensor_ref(instruction.tensor)})"


def parse_push_label(label: str) -> Push:
    """Return the push instruction of a label, without its receiver."""
    instruction = parse_instruction(f"{label}>0")
    assert isinstance(instruction, Push), "workers send servers nothing else"
    return instruction


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
        self.versions: dict[Unit, int] = {}
        self.clocks: dict[Unit, dict[int, int]] = {}  # pushes of a unit by each worker
        self.waiting: dict[Unit, list[int]] = {}  # workers without a reply yet, in order of arrival

    def clear(self) -> None:
        """Drop all clocks and pending replies; all workers begin the next step together."""
        self.clocks.clear()
        self.waiting.clear()

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
        self.versions[unit] = self.versions.get(unit, 0) + 1
        self.push_log.append(PushRecord(unit, worker, self.versions[unit]))
        self.fabric.send(worker, format_tensor_ref(weight(unit)), replies)

    def apply_push(self, instruction: ApplyPushes, worker: int, push: Push, tensors: Sequence[Tensor]) -> None:
        """Apply a pushed gradient, and send the weights to every waiting worker that may continue now."""
        unit = push.tensor.blocks
        clocks = self.clocks.setdefault(unit, dict.fromkeys(instruction.workers, 0))
        require_within_staleness(instruction, (unit, worker), clocks)
        if tensors:
            add_grad(self.store.units[unit], tensors, push.codec)
            self.store.update((unit,))
        self.versions[unit] = self.versions.get(unit, 0) + bool(tensors)
        self.push_log.append(PushRecord(unit, worker, self.versions[unit]))
        clocks[worker] += 1
        waiting = [*self.waiting.get(unit, ()), *([worker] if push.op == "push" else [])]
        self.waiting[unit] = [
            waiting_worker for waiting_worker in waiting if not within_staleness(instruction, waiting_worker, clocks)
        ]
        for waiting_worker in waiting:
            if waiting_worker not in self.waiting[unit]:
                all_flat_params = self.store.units[unit].flat_params
                self.fabric.send(
                    waiting_worker,
                    format_tensor_ref(weight(unit)),
                    [flat_params.weights.detach() for flat_params in all_flat_params],
                )


def within_staleness(instruction: ApplyPushes, worker: int, clocks: Mapping[int, int]) -> bool:
    """Return whether a worker is not too far ahead of the slowest to be sent weights."""
    return instruction.staleness is None or clocks[worker] - min(clocks.values()) <= instruction.staleness


def require_within_staleness(
    instruction: ApplyPushes, unit_and_worker: tuple[Unit, int], clocks: Mapping[int, int]
) -> None:
    """Raise if a gradient's worker was too far ahead to have been sent weights.

    Raises:
        ProtocolError: the worker is further ahead of the slowest than the instruction allows.
    """
    unit, worker = unit_and_worker
    if not within_staleness(instruction, worker, clocks):
        slowest = min(clocks, key=lambda other: clocks[other])
        raise ProtocolError(
            f"staleness: rank {worker} sent push {clocks[worker] + 1} of unit {format_unit(unit)}, but rank {slowest} "
            f"has pushed it {clocks[slowest]} times; a worker may be at most {instruction.staleness} pushes ahead of "
            "the slowest when it is sent weights"
        )
